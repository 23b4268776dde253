"""The janitor's metrics, for Prometheus.

``Metrics`` receives a status (``janitor.status.status``) at intervals and prepares the response to scrapes from it.
Therefore a scrape reads no table and no state. ``docs/reference/metrics.md`` explains each metric.
"""

from __future__ import annotations

from janitor.metrics.exposition import Metrics

__all__ = ["Metrics"]
