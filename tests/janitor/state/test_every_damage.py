"""States of every kind: a damaged value is an error with its name, and is not replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from janitor.report import HELD, Entry, Report
from janitor.rules.policy import Rule
from janitor.state import ids, ledger, runs
from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.state.records import (
    ClockAnchor,
    CounterKey,
    Evidence,
    FrontierRecord,
    OpenIdRecord,
    ProvenBoundary,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
)
from janitor.state.sqlite.state import SqliteState
from tests.janitor.state.entries import TOPIC, entry
from tests.janitor.test_report import report
from tms_core.errors import StateError

FRONTIER = FrontierRecord(1, 500, ClockAnchor(1_000, 10, "boot"), 400)
COUNT = TopicCount(1, 2, 3, 4, 5)
ONE = CounterKey("rows_deleted_total", (("table", "message"),))

#: The function that reads each value, and the one that reads and changes it.
VALUES: dict[str, tuple[Callable[[State], Any], Callable[[State], Any] | None]] = {
    "store": (State.store, lambda state: state.save_store(StoreRecord("other", "there"))),
    "anchor": (State.anchor, None),
    "frontiers": (State.frontiers, lambda state: state.save_frontiers({TOPIC: FRONTIER})),
    "evidence": (State.evidence, None),
    "claim": (State.boundary, None),
    "full_pass": (State.last_full_pass_ms, None),
    "created": (State.created_ms, lambda state: state.save_created_ms(2)),
    "pauses": (State.pauses, lambda state: state.pause("a:*", 2)),
    "strikes": (State.strikes, lambda state: state.save_strikes({TOPIC: None})),
    "counts": (State.counts, lambda state: state.save_counts({TOPIC: None})),
    "counters": (State.counters, lambda state: state.add_counters({ONE: 1})),
    "runs": (State.unfinished_runs, lambda state: state.begin_run(RunRecord("three", "apply", 3))),
    "ledger": (State.ledger_since_ms, lambda state: state.add_ledger([entry()])),
    "ids.open": (State.open_ids, lambda state: state.save_open_ids([OpenIdRecord(9, 1)])),
    "ids.closed": (lambda state: state.known_ids(1, 1), lambda state: state.save_open_ids([OpenIdRecord(9, 1, 2, 3)])),
    "note.overdue": (HELD.read, lambda state: HELD.save(state, [])),
}
#: The function that reads each kind of row.
ROWS: dict[bytes, Callable[[State], Any]] = {
    runs.RUN: lambda state: state.runs(9),
    runs.REPORT: lambda state: state.report("one", Report),
    ledger.PAGE: lambda state: state.ledger(9),
    ledger.BY_TOPIC: lambda state: state.ledger(9, topic=TOPIC),
}
LOOSE: dict[bytes, Callable[[State], Any]] = {
    runs.BEAT: State.unfinished_runs,
    runs.INTENT: State.intents,
    runs.BOOKED: lambda state: state.running_counters("two"),
}


@pytest.fixture
def full(state: State) -> State:
    """Return a state with values and rows of every kind."""
    state.save_store(StoreRecord("mark", "leveldb:/data", 5, 6, 7))
    state.save_anchor(FRONTIER.at)
    state.save_frontiers({TOPIC: FRONTIER})
    state.replace_evidence([Evidence(b"a", None, 1, 2, 3, "one")])
    state.save_boundary(ProvenBoundary(1, 2, "one"))
    state.save_last_full_pass_ms(1)
    state.save_created_ms(1)
    state.pause("*:*", 1)
    state.save_strikes({TOPIC: Strikes(1, 2, "broken")})
    state.save_counts({TOPIC: COUNT})
    state.add_counters({ONE: 1})
    state.add_ledger([entry()])
    state.save_open_ids([OpenIdRecord(5, 1), OpenIdRecord(7, 1, 2, 3)])
    HELD.save(state, [Entry(TOPIC, 1, "message", Rule.EXPIRED, None, 1)])
    for run_id in ("one", "two"):
        state.begin_run(RunRecord(run_id, "apply", 1))
    state.finish_run(RunRecord("one", "apply", 1, 2, "done"), report())
    state.save_heartbeat("two", 2)
    state.save_running_counters("two", {ONE: 1})
    state.intend(entry(run_id="two"))
    return state


def value(state: State, name: str) -> bytes | None:
    with state.driver.present() as view:
        return view.value(name)


def fails(state: State, work: Callable[[State], Any], part: str) -> None:
    with pytest.raises(StateError) as caught:
        work(state)
    assert part in caught.value.message
    assert caught.value.code == "TMS-STATE"
    assert "adopt" in caught.value.hint or work is State.intents


# A value of more than 256 bytes is not part of HBase's root row, which is one JSON document.
@pytest.mark.parametrize("content", [b'"' + b"odd" * 100, b'{"odd":"odd"}'])
@pytest.mark.parametrize("name", VALUES)
def test_read_of_a_damaged_value_names_it_and_no_change_replaces_it(full: State, name: str, content: bytes) -> None:
    with full.driver.transaction() as changes:
        changes.values[name] = content
    read, change = VALUES[name]
    for work in (read, change or read):
        fails(full, work, f"value {name} is damaged")
    assert value(full, name) == content
    others = [read for other, (read, _) in VALUES.items() if other.partition(".")[0] != name.partition(".")[0]]
    for work in others if name != "runs" else ():
        work(full)


@pytest.mark.parametrize("content", [b"odd", b'{"odd":[]}', b'[["odd"]]'])
@pytest.mark.parametrize("letter", [*ROWS, *LOOSE])
def test_read_of_a_damaged_row_names_its_key_and_loses_no_other(full: State, letter: bytes, content: bytes) -> None:
    rows = full.driver.loose if letter in LOOSE else full.driver.history
    [(key, before)] = rows.scan(letter, stop_of(letter))
    put(full, key, content, loose=letter in LOOSE)
    fails(full, (ROWS | LOOSE)[letter], f"row {key.hex()} is damaged")
    for other, read in (ROWS | LOOSE).items():
        if other != letter and (letter, other) != (runs.BEAT, runs.RUN):
            assert read(full)
    put(full, key, before, loose=letter in LOOSE)
    assert (ROWS | LOOSE)[letter](full)


def stop_of(letter: bytes) -> bytes:
    """Return the stop key of a kind of row. The key of HBase's root row starts like that of a run."""
    return letter + (b"one\x00" if letter == runs.RUN else b"\xff")


def put(state: State, key: bytes, content: bytes, *, loose: bool) -> None:
    if loose:
        state.driver.loose.put([(key, content)])
        return
    with state.driver.transaction() as changes:
        changes.rows[key] = content


@pytest.mark.parametrize("letter", ROWS)
def test_read_of_a_row_that_cannot_be_decompressed_names_its_key(full: State, letter: bytes) -> None:
    [(key, _)] = full.driver.history.scan(letter, stop_of(letter))
    if isinstance(full, HBaseState):
        full.driver.table.put([(key, b"x odd")])
    if isinstance(full, SqliteState):
        full.driver.connection.execute("UPDATE history SET value = ? WHERE key = ?", [b"x odd", key])
    fails(full, ROWS[letter], f"row {key.hex()} is damaged")


@pytest.mark.parametrize("content", [b"odd", b"x\x9c\x03\x00\x00\x00\x00\x01"[:5], b""])
@pytest.mark.parametrize("leaves", [ids._OPEN, ids._CLOSED_IDS])
def test_read_of_a_damaged_leaf_of_ids_names_it(full: State, leaves: str, content: bytes) -> None:
    with full.driver.present() as view:
        [name] = [name for name in view.names() if name.startswith(f"{leaves}.")]
    with full.driver.transaction() as changes:
        changes.values[name] = content
    fails(full, State.open_ids, f"value {name} is damaged")
