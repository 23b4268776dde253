"""The janitor's metrics, for Prometheus.

``Metrics`` gets a status (``janitor.status.status``) at intervals and prepares the response to scrapes from it.
Therefore a scrape reads no table and no state, and costs only its text. ``docs/reference/metrics.md`` explains each
metric.
"""

from __future__ import annotations

from janitor.metrics.exposition import Metrics

__all__ = ["Metrics"]
