"""The text of metrics for Prometheus, in the format that a request accepts."""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

#: The version of OpenMetrics that prometheus-client writes.
_OPENMETRICS_VERSION = "1.0.0"

_OPENMETRICS, _TEXT = "application/openmetrics-text", "text/plain"


def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Return all metrics of a registry as text, and its content type.

    Args:
        accept: the ``Accept`` header of the request; it may request OpenMetrics.
    """
    # The library fails for unexpected headers, so do not pass the header of the client.
    encode, content_type = choose_encoder(_OPENMETRICS if _wants_openmetrics(accept) else _TEXT)
    return encode(registry), content_type


def _wants_openmetrics(accept: str) -> bool:
    """Return whether an ``Accept`` header prefers OpenMetrics, in the written version, to text."""
    qualities = {_OPENMETRICS: 0.0, _TEXT: 0.0}
    for part in accept.lower().replace(" ", "").split(","):
        kind, *rest = part.split(";")
        parameters = {name: value.strip('"') for name, _, value in (text.partition("=") for text in rest)}
        if kind == _OPENMETRICS and parameters.get("version", _OPENMETRICS_VERSION) != _OPENMETRICS_VERSION:
            continue
        if kind in qualities:
            qualities[kind] = max(qualities[kind], _quality(parameters.get("q", "1")))
    return qualities[_OPENMETRICS] > 0 and qualities[_OPENMETRICS] >= qualities[_TEXT]


def _quality(text: str) -> float:
    """Return a quality value of HTTP; 1 if it is invalid."""
    return float(text) if re.fullmatch(r"[01](\.[0-9]{0,3})?", text) else 1.0
