"""Alerts, the dashboard and their documentation, generated from one source.

An alert on a renamed metric never fires, and nobody notices. Therefore rules, panels and the table in the page of
alerts are defined once, next to the metrics. ``python -m charts.generate`` writes the files for Prometheus, Grafana and
the chart. Tests compare these files with the source, run each rule, and run every panel's query in a real Prometheus.
"""
