"""The dashboard's JSON document for Grafana.

This module writes the few fields that Grafana needs without a library, so that the document in the chart does not
change with a library's version. A test reads every field of the document.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from string import Template
from typing import Any

from tools.monitoring.panels import ROWS, Panel, Row

#: The number of columns of Grafana's grid, and the height of each panel type in it.
COLUMNS, HEIGHTS = 24, {"stat": 4, "timeseries": 8, "table": 6}
#: The selector of the janitors that the dashboard's variables select.
SCOPE = 'namespace=~"$namespace",job=~"$job"'
#: The selector of these janitors and of their servers, whose Service has the suffix ``-server`` in the chart.
SERVERS = 'namespace=~"$namespace",job=~"($job)(-server)?"'
#: The version of the dashboard's JSON schema, for Grafana 10 and later.
SCHEMA_VERSION = 38

_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "uid": "tms-janitor",
        "title": "TMS janitor",
        "description": "Whether CDAP's messaging store is cleaned, what waits and why, and what is in the queues.",
        "tags": ["cdap", "tms"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": [_runs()]},
        "templating": {"list": [_chosen_source(), _chosen("namespace", ""), _chosen("job", 'namespace=~"$namespace"')]},
        "links": [],
        "panels": list(_placed()),
    }


def expressions(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield every expression of a dashboard, with the title of its panel."""
    for panel in document["panels"]:
        yield from expressions(panel) if panel.get("panels") else ()
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", ()))


def _chosen_source() -> dict[str, Any]:
    return {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "current": {}}


def _chosen(label: str, scope: str) -> dict[str, Any]:
    """Return a variable with the label's values on janitors; "All" selects these values only."""
    query = f"label_values(tms_janitor_build_info{{{scope}}}, {label})"
    return {
        "name": label,
        "label": label.capitalize(),
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": label},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }


def _runs() -> dict[str, Any]:
    """Return an annotation at the start of each process, which explains most irregularities of the charts."""
    return {
        "name": "Starts",
        "datasource": _SOURCE,
        "enable": True,
        "iconColor": "blue",
        # changes() does not work, because a replaced pod is a new series without changes.
        "expr": _scoped("time() - process_start_time_seconds{${scope}} < 120"),
        "titleFormat": "{{job}} started",
    }


def _placed() -> Iterator[dict[str, Any]]:
    """Yield the panels, numbered and placed on the grid, from left to right and from top to bottom."""
    number, top = 1, 0
    for row in ROWS:
        head = {**_row(row), "id": number, "gridPos": {"x": 0, "y": top, "w": COLUMNS, "h": 1}}
        number, top = number + 1, top + 1
        left, inside = 0, []
        for panel in row.panels:
            if left + panel.width > COLUMNS:
                left, top = 0, top + HEIGHTS[panel.kind]
            place = {"x": left, "y": top, "w": panel.width, "h": HEIGHTS[panel.kind]}
            inside.append({**_panel(panel), "id": number, "gridPos": place})
            number, left = number + 1, left + panel.width
        top += max(HEIGHTS[panel.kind] for panel in row.panels)
        yield {**head, "panels": inside if row.folded else []}
        yield from () if row.folded else inside


def _row(row: Row) -> dict[str, Any]:
    return {"type": "row", "title": row.title, "collapsed": row.folded}


def _panel(panel: Panel) -> dict[str, Any]:
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + at),
                "datasource": _SOURCE,
                "expr": _scoped(target.expression),
                "legendFormat": target.legend or "__auto",
                "instant": panel.kind != "timeseries",
                "range": panel.kind == "timeseries",
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for at, target in enumerate(panel.targets)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    found: dict[str, Any] = {"unit": panel.unit}
    if panel.kind == "stat":
        steps = [{"value": value, "color": color} for value, color in panel.steps]
        found |= {"color": {"mode": "thresholds"}, "thresholds": {"mode": "absolute", "steps": steps}}
        words = {value: {"text": text, "index": at} for at, (value, text) in enumerate(panel.words)}
        found["mappings"] = [{"type": "value", "options": words}] if words else []
    if panel.kind == "timeseries":
        found |= {"custom": {"fillOpacity": 10, "showPoints": "never"}, **({} if panel.signed else {"min": 0})}
    return found


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        return {"colorMode": "background", "graphMode": "none", "reduceOptions": {"calcs": ["lastNotNull"]}}
    if panel.kind == "timeseries":
        return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    return {"showHeader": True}


def _scoped(expression: str) -> str:
    # Grafana's own variables stay as they are.
    return Template(expression).safe_substitute(scope=SCOPE, servers=SERVERS)
