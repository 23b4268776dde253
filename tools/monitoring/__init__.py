"""Alerts, the dashboard and their documentation: one source, from which every file is made.

An alert on a metric that was renamed never fires, and that goes unnoticed. So rules, panels and the table in the
page of alerts are written once, here, beside the metrics they are about; ``python -m charts.generate`` writes the
files that Prometheus, Grafana and the chart read, and tests compare those with this source, run each rule, and ask
every panel's question of a real Prometheus.
"""
