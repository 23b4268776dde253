"""The definition of a metric, and how it becomes a metric of prometheus-client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import Metric, Sample

#: Label values of one series, in the order of the metric's labels.
Labels = tuple[str, ...]

#: Values by label values; None is a series that is not there.
Series = Mapping[Labels, float | None]


@dataclass(frozen=True, slots=True)
class Definition:
    """One metric.

    Attributes:
        name: in full, as Prometheus shows it; a summary's without ``_sum`` and ``_count``.
        help: what it is, in a line.
        labels: the names of its labels.
        known: the series there can be, by their label values; None where these are names others chose.
    """

    name: str
    kind: Literal["counter", "gauge", "summary"]
    help: str
    labels: tuple[str, ...] = ()
    known: tuple[Labels, ...] | None = ((),)

    def label_values(self) -> dict[str, frozenset[str] | None]:
        """What each label can be; None where others chose it."""
        if self.known is None:
            return dict.fromkeys(self.labels)
        return {label: frozenset(series[at] for series in self.known) for at, label in enumerate(self.labels)}

    def family(self, parts: Mapping[str, Series]) -> Metric:
        """The metric with its values.

        Args:
            parts: values by what follows the name: ``_sum`` and ``_count`` of a summary, else nothing.
        """
        family = self.empty()
        # OpenMetrics wants a summary's count and sum next to each other.
        ordered = dict.fromkeys(labels for series in parts.values() for labels in series)
        family.samples = [
            Sample(self.name + suffix, dict(zip(self.labels, map(legible, labels), strict=True)), value)
            for labels in ordered
            for suffix, series in parts.items()
            if (value := series.get(labels)) is not None
        ]
        return family

    def empty(self) -> Metric:
        """The metric without values, as prometheus-client has it: a counter's family is named without ``_total``."""
        return Metric(self.name.removesuffix("_total"), self.help, self.kind)


def legible(value: str) -> str:
    """A label value that can be written in UTF-8; the text formats' own escapes are prometheus-client's work."""
    return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
