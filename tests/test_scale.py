"""The page on scaling: its results follow from its inputs by the model of the benchmark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.p16_producers import CASES, COMMITTED_BAR, IN_A_ROW_BAR, SYNC_BARS
from benchmarks.p20_slots import BATCH, SETTINGS, Rates, model, render_page

PAGE = Path(__file__).parents[1] / "docs/explanation/scale.md"


def result_lines() -> list[str]:
    """Return the lines of the benchmark on the page."""
    return [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith('{"id": "P20"')]


def test_page_shows_values_that_follow_from_its_figures() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert render_page(page, result_lines()) == page
    ratio, *modelled = map(json.loads, result_lines())
    assert ratio["value"] == pytest.approx(ratio["two"] / ratio["one"], abs=0.01)
    assert [one["nodes"] for one in modelled] == [1, 10, 100]
    for one in modelled:
        assert one["value"] == model(one["nodes"], Rates(one["node_rate"], one["tx_rate"]), one["batch"])


def test_page_names_the_server_settings_of_the_measured_ratio() -> None:
    ratio = json.loads(result_lines()[0])
    assert {name: ratio[name] for name in SETTINGS} == SETTINGS | {"best_of": 5}
    sentence = "Each server has one connection to HBase (`storage.hbase.connections`, 4 by default)"
    assert sentence in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_figure_changed_by_hand_is_found() -> None:
    page = PAGE.read_text(encoding="utf-8")
    node = json.loads(result_lines()[1])["node_rate"]
    forged = page.replace(f'"node_rate": {node}', f'"node_rate": {node + 1}')
    assert render_page(forged, [line for line in forged.splitlines() if line.startswith('{"id"')]) != forged


@pytest.mark.parametrize(
    ("nodes", "tx_rate", "events"), [(1, 1000, 10_000), (10, 1000, 100_000), (100, 1000, 250_000), (10, 100, 25_000)]
)
def test_model_adds_nodes_up_to_the_transaction_rate(nodes: int, tx_rate: int, events: int) -> None:
    assert model(nodes, Rates(10_000, tx_rate), BATCH) == events


def test_bars_of_the_page_match_the_benchmark() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| P1")]
    bars = [f"≥ {bar:g}" for bar in (*(bar for *_, bar in CASES), COMMITTED_BAR)] + ["none"]
    syncs = [IN_A_ROW_BAR, *(bar for _, bar in SYNC_BARS)]
    assert [row[-1].removesuffix(" |") for row in rows] == bars + [f"≤ {bar:g}" for bar in syncs]
