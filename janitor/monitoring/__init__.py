"""Alerts, the dashboard, and what is told of them: one source, of which every file is made.

An alert on a metric that was renamed never fires, and nobody notices. So rules, panels and the table in the operations
guide are written once, here, beside the metrics they are about; ``python -m charts.generate`` writes the files that
Prometheus, Grafana and the chart read, and tests compare those with this source, run each rule, and ask every panel's
question of a real Prometheus.
"""

from __future__ import annotations

from janitor.monitoring.dashboard import dashboard
from janitor.monitoring.rules import ALERTS, RUNBOOK, THRESHOLDS, rules, thresholds

__all__ = ["ALERTS", "RUNBOOK", "THRESHOLDS", "dashboard", "rules", "thresholds"]
