"""The dashboard: valid for Grafana, complete, and without overlapping panels."""

from __future__ import annotations

import re
from itertools import combinations, pairwise
from typing import Any

import pytest

from janitor.metrics.catalogue import CATALOGUE
from tools.monitoring.dashboard import COLUMNS, SCOPE, SERVERS, dashboard, expressions

#: Grafana's fields that the document uses, by their object. Grafana silently ignores a misspelt field.
FIELDS = {
    "panel": {"id", "type", "title", "description", "datasource", "fieldConfig", "options", "targets", "gridPos"},
    "row": {"id", "type", "title", "collapsed", "panels", "gridPos"},
    "target": {"refId", "datasource", "expr", "legendFormat", "instant", "range", "format"},
    "place": {"x", "y", "w", "h"},
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return dashboard()


def rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in document["panels"] if panel["type"] == "row"]


def panels(document: dict[str, Any]) -> list[dict[str, Any]]:
    inside = [panel for row in rows(document) for panel in row["panels"]]
    return [panel for panel in document["panels"] if panel["type"] != "row"] + inside


def test_every_field_is_known_to_grafana(document: dict[str, Any]) -> None:
    for row in rows(document):
        assert set(row) == FIELDS["row"]
    for panel in panels(document):
        assert set(panel) == FIELDS["panel"]
        assert set(panel["gridPos"]) == FIELDS["place"]
        assert all(set(target) <= FIELDS["target"] for target in panel["targets"])


def test_every_panel_has_a_unique_id_a_question_and_an_explanation(document: dict[str, Any]) -> None:
    everything = panels(document) + rows(document)
    assert len({panel["id"] for panel in everything}) == len(everything)
    for panel in panels(document):
        assert panel["description"].endswith(".")
        assert [target["refId"] for target in panel["targets"]] == ["A", "B", "C"][: len(panel["targets"])]
        assert panel["targets"]


def test_panels_are_on_the_grid_and_do_not_overlap(document: dict[str, Any]) -> None:
    places = [panel["gridPos"] for panel in panels(document) + rows(document)]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= COLUMNS for place in places)
    for one, other in combinations(places, 2):
        is_beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        above = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert is_beside or above, (one, other)
    assert all(first["gridPos"]["y"] < second["gridPos"]["y"] for first, second in pairwise(rows(document)))


def test_rows_precede_their_panels_or_contain_them_if_folded(document: dict[str, Any]) -> None:
    assert {row["collapsed"] for row in rows(document)} == {True, False}
    assert all(bool(row["panels"]) == row["collapsed"] for row in rows(document))


def test_every_panel_filters_by_the_selected_janitors(document: dict[str, Any]) -> None:
    assert [variable["name"] for variable in document["templating"]["list"]] == ["datasource", "namespace", "job"]
    assert all("$namespace" in scope and "$job" in scope for scope in (SCOPE, SERVERS))
    for title, expression in expressions(document):
        selectors = re.findall(r"\b(?:tms_(?!namespace)|process_)\w+(\{[^}]*\})?", expression)
        assert selectors
        assert all(SCOPE in selector or SERVERS in selector for selector in selectors), title


def test_dashboard_uses_every_metric_of_the_janitor(document: dict[str, Any]) -> None:
    shown = " ".join(expression for _, expression in expressions(document))
    assert [definition.name for definition in CATALOGUE if definition.name not in shown] == [], "add it to a panel"
