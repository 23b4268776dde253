"""The janitor's metrics, for Prometheus.

``Metrics`` is given a status (``janitor.status.status``) now and then and prepares from it what a scrape is answered
with. So a scrape reads no table and no state, and costs no more than its text. ``docs/reference/metrics.md`` explains
each
metric.
"""

from __future__ import annotations

from janitor.metrics.exposition import Metrics

__all__ = ["Metrics"]
