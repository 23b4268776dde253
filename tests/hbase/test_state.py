"""Behavior of the state in HBase that a file does not have: conflicts, and crashes between two calls."""

from __future__ import annotations

import json
import re
import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import happybase
import pytest

from janitor.state.hbase.commit import BLOCK, HBaseDocuments
from janitor.state.hbase.root import INLINE_BYTES
from janitor.state.hbase.state import HBaseState
from janitor.state.records import (
    ClockAnchor,
    CounterKey,
    Evidence,
    FrontierRecord,
    OpenIdRecord,
    Pause,
    ProvenBoundary,
    RunRecord,
    StoreRecord,
    Strikes,
    TopicCount,
)
from janitor.state.sqlite.state import SqliteDocuments
from tests.builders import DAY, LIFETIME, ProcessKilled, janitor
from tests.hbase.server import HBaseServer
from tests.janitor.state.entries import TOPIC, entry
from tests.support import each_raises, raising
from tms_core.clock import ManualClock
from tms_core.errors import StateBusy, StateError, StateUnavailable
from tms_core.tables.hbase.thrift import Call, ConnectionLost, ThriftConnection, ThriftTimeout
from tms_core.tables.lease import Lease
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicId

AT = ClockAnchor(1, 1, "boot")
#: More topics than fit into the root.
NINE = [TopicId("default", f"topic-{number}") for number in range(9)]
ONE = CounterKey("one")
#: More calls than the end of a run makes.
CALLS = 60

Open = Callable[[], HBaseState]


lose_connection = raising(ConnectionLost("the connection broke."))


@pytest.fixture
def open_state(hbase: HBaseServer) -> Iterator[Open]:
    """Return a function that opens the same state again."""
    hbase.require_thrift2()
    prefix, settings = secrets.token_bytes(4), hbase.settings("janitor_test", admin=True)
    with ExitStack() as opened:
        yield lambda: opened.enter_context(HBaseState(settings, prefix=prefix))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[str], None] | None]]:
    """Return two slots for callbacks before and after each call to HBase."""
    around: list[Callable[[str], None] | None] = [None, None]
    make = ThriftConnection.calls

    def watched(connection: ThriftConnection, calls: Sequence[Call]) -> list[Any]:
        for name, _ in calls:
            if (before := around[0]) is not None:
                before(name)
        answers = make(connection, calls)
        for name, _ in calls:
            if (after := around[1]) is not None:
                after(name)
        return answers

    monkeypatch.setattr(ThriftConnection, "calls", watched)
    yield around
    around[:] = [None, None]


def once(name: str, action: Callable[[], object]) -> Callable[[str], None]:
    """Return a callback that runs an action at the first call of a name."""
    actions = [action]

    def callback(called: str) -> None:
        if called == name and actions:
            actions.pop()()

    return callback


def frontier(cutoff_ms: int) -> dict[TopicId, FrontierRecord]:
    return {TOPIC: FrontierRecord(1, cutoff_ms, AT, 1)}


def rows_of(state: HBaseState) -> list[bytes]:
    return [key for key, _ in state.driver.table.scan(b"", b"\xff", keys_only=True)]


def end_of_run(state: HBaseState, run_id: str, number: int) -> None:
    """Write the data of the end of a run: values in the root and in blocks, and the history."""
    with state.transaction():
        state.save_boundary(ProvenBoundary(number, 1, run_id))
        state.save_frontiers(dict.fromkeys(NINE, FrontierRecord(1, number, AT, 1)))
        state.save_open_ids([OpenIdRecord(5, 1, number), OpenIdRecord(7, 1, number, number)])
        state.finish_run(RunRecord(run_id, "apply", 1, number, "done"), {"topics": []})
        state.add_ledger([entry(run_id=run_id), entry(run_id=run_id, topic=TopicId("default", "other"))])
        state.add_counters({ONE: 1})
        state.prune_ledger(0, 3)


def test_conflicting_transaction_writes_nothing(open_state: Open) -> None:
    one, two = open_state(), open_state()
    one.save_frontiers(frontier(1))
    one.begin_run(RunRecord("run", "apply", 1))
    before = rows_of(one)

    def lose() -> None:
        with one.transaction():
            one.add_ledger([entry()])
            one.save_counts(
                {TopicId("default", f"topic-{each}"): TopicCount(1, 1, None, None, 1) for each in range(20)}
            )
            one.save_boundary(ProvenBoundary(one.frontiers()[TOPIC].cutoff_ms, 1, "run"))
            two.save_frontiers(frontier(2))

    with pytest.raises(StateBusy) as caught:
        lose()
    assert caught.value.hint
    assert (two.boundary(), two.counts(), two.ledger(9), two.frontiers()) == (None, {}, [], frontier(2))
    assert rows_of(two) == before


def test_run_end_concurrent_with_pause_keeps_both(open_state: Open) -> None:
    daemon, operator = open_state(), open_state()
    daemon.begin_run(RunRecord("run", "apply", 1))
    with daemon.transaction():
        end_of_run(daemon, "run", 2)
        operator.pause("default:*", 5)
    assert (operator.boundary(), operator.pauses()) == (ProvenBoundary(2, 1, "run"), [Pause("default:*", 5)])
    assert len(operator.ledger(9)) == 2


def test_conflicting_change_is_retried(open_state: Open, calls: list[Callable[[str], None] | None]) -> None:
    one, two = open_state(), open_state()
    calls[0] = once("checkAndPut", lambda: two.add_counters({ONE: 2}))
    one.add_counters({ONE: 1})
    assert two.counters() == {ONE: 3}


def test_reader_retries_after_blocks_are_replaced(open_state: Open, calls: list[Callable[[str], None] | None]) -> None:
    writer, reader = open_state(), open_state()
    many = dict.fromkeys(NINE, FrontierRecord(1, 1, AT, 1))
    writer.save_frontiers(many)
    calls[0] = once("getRowsWithColumns", lambda: writer.save_frontiers(frontier(2)))
    assert reader.frontiers() == {**many, **frontier(2)}


def test_previous_lease_holder_can_only_finish_its_run(open_state: Open) -> None:
    one, two = open_state(), open_state()
    clock = ManualClock(1_000)
    first, second = Lease(one, "a", 60, clock), Lease(two, "b", 60, clock)
    first.acquire()
    one.begin_run(RunRecord("run", "apply", 1))
    one.save_boundary(ProvenBoundary(1, 1, "run"))
    second.acquire(sole=True)
    each_raises(
        StateBusy,
        lambda: one.save_boundary(ProvenBoundary(2, 1, "run")),
        lambda: one.save_frontiers(frontier(2)),
        lambda: one.save_open_ids([OpenIdRecord(1, 1)]),
        lambda: end_of_run(one, "run", 2),
        match=r"^b |: b ",
    )
    one.finish_run(RunRecord("run", "apply", 1, 2, "interrupted"))
    assert (two.boundary(), two.frontiers(), two.open_ids(), two.ledger(1)) == (ProvenBoundary(1, 1, "run"), {}, {}, [])
    assert two.runs(1)[0].result == "interrupted"
    two.save_boundary(ProvenBoundary(3, 1, "next"))
    open_state().save_frontiers(frontier(4))


def test_transaction_with_lease_taken_over_is_rejected(open_state: Open) -> None:
    one, two = open_state(), open_state()
    clock = ManualClock(1_000)
    Lease(one, "a", 60, clock).acquire()

    def late() -> None:
        with one.transaction():
            one.save_boundary(ProvenBoundary(2, 1, "run"))
            Lease(two, "b", 60, clock).acquire(sole=True)

    with pytest.raises(StateBusy, match=r"^b |: b "):
        late()
    assert two.boundary() is None


def test_transaction_with_renewed_or_released_lease_is_written(open_state: Open) -> None:
    state = open_state()
    lease = Lease(state, "a", 60, ManualClock(1_000))
    lease.acquire()
    for number, change_lease in enumerate((lease.renew, lease.release)):
        with state.transaction():
            state.save_boundary(ProvenBoundary(number, 1, "run"))
            thread = threading.Thread(target=change_lease)
            thread.start()
            thread.join()
        assert state.boundary() == ProvenBoundary(number, 1, "run")


@pytest.mark.parametrize("after", [0, 1], ids=["before", "after"])
def test_crash_at_any_call_keeps_transactions_atomic(
    open_state: Open, calls: list[Callable[[str], None] | None], after: int
) -> None:
    outcomes = set()
    for at_call in range(1, CALLS):
        run_id = f"run-{at_call}"
        state = open_state()
        with state.transaction():
            state.begin_run(RunRecord(run_id, "apply", at_call))
            state.save_frontiers(frontier(at_call))
        before, pages = state.boundary(), len(state.ledger(99, run_id=run_id))
        made: list[str] = []

        def crash(name: str, made: list[str] = made, at_call: int = at_call) -> None:
            made.append(name)
            if len(made) == at_call:
                raise ProcessKilled

        calls[after] = crash
        with suppress(ProcessKilled):
            end_of_run(state, run_id, at_call)
        calls[after] = None
        ended = len(made) < at_call
        survivor = open_state()
        happened = survivor.boundary() == ProvenBoundary(at_call, 1, run_id)
        assert happened or survivor.boundary() == before
        run = survivor.run(run_id)
        assert run is not None
        assert (run.result == "done") == happened
        assert (survivor.open_ids().get(5) == OpenIdRecord(5, 1, at_call)) == happened
        assert sum(record.cutoff_ms == at_call for record in survivor.frontiers().values()) == (10 if happened else 1)
        if happened:
            assert len(survivor.ledger(99, run_id=run_id)) == 2, "a run has no effect without its history"
        outcomes.add(happened)
        survivor.finish_run(RunRecord(run_id, "apply", 1, at_call, "lost"))
        blocks = {key.hex() for key in rows_of(survivor) if key.startswith(BLOCK)}
        assert blocks == survivor.driver.root().named(), "blocks of the crashed transaction are deleted"
        survivor.prune_ledger(2**62, 0)
        if ended:
            break
    assert ended
    assert outcomes == {True, False}
    assert pages == 0


def test_lost_response_does_not_write_twice(open_state: Open, calls: list[Callable[[str], None] | None]) -> None:
    state = open_state()
    for number in (1, 2):
        calls[1] = once("checkAndPut", lose_connection)
        state.add_counters({ONE: 1})
        assert state.counters() == {ONE: number}
    calls[1] = once("checkAndPut", lose_connection)
    assert state.swap_lease(None, b"mine")
    assert not state.swap_lease(None, b"mine")


def test_failed_block_removal_is_repeated_by_next_write(
    open_state: Open, calls: list[Callable[[str], None] | None]
) -> None:
    state = open_state()
    for number in range(3):
        state.save_frontiers(
            {TopicId("default", f"topic-{each}"): FrontierRecord(1, number, AT, 1) for each in range(9)}
        )

    def fail_after_root(name: str) -> None:
        if name == "checkAndPut":
            calls[0] = once("mutateRowsTs", raising(StateError("the disk is full.")))

    calls[1] = fail_after_root
    state.save_frontiers(frontier(9))
    assert state.frontiers()[TOPIC].cutoff_ms == 9
    assert len([key for key in rows_of(state) if key.startswith(BLOCK)]) == 2
    calls[:] = [None, None]
    state.save_note("one", 1)
    assert len([key for key in rows_of(state) if key.startswith(BLOCK)]) == 1


def test_lost_response_with_many_other_writes_is_an_error(
    open_state: Open, calls: list[Callable[[str], None] | None]
) -> None:
    state, other = open_state(), open_state()

    def write_and_lose_connection() -> None:
        for number in range(17):
            other.save_note("number", number)
        lose_connection()

    calls[1] = once("checkAndPut", write_and_lose_connection)
    with pytest.raises(StateError, match="other processes have written since"):
        state.add_counters({ONE: 1})
    assert other.counters() == {ONE: 1}


def test_timed_out_write_is_not_retried(open_state: Open, calls: list[Callable[[str], None] | None]) -> None:
    state = open_state()
    calls[1] = once("checkAndPut", raising(ThriftTimeout("no response.")))
    with pytest.raises(StateUnavailable):
        state.add_counters({ONE: 1})
    state.add_counters({ONE: 1})
    assert state.counters() == {ONE: 2}


def test_missing_state_table_hints_at_create_command(hbase: HBaseServer) -> None:
    with pytest.raises(StateError, match=r"nowhere:tms\.janitor") as caught:
        HBaseState(hbase.settings("nowhere"))
    assert "create 'nowhere:tms.janitor', {NAME => 'd'" in caught.value.hint


def test_root_of_unknown_layout_is_rejected_unchanged(open_state: Open) -> None:
    state = open_state()
    for root, message in (
        (b'{"layout":6}', "newer janitor"),
        (b'{"layout":4}', "no released janitor"),
        (b"[]", "cannot be read"),
        (b"\xff", "cannot be read"),
    ):
        assert state.driver.table.swap(b"root", state.driver.table.get(b"root") or b"", root)[0]
        with pytest.raises(StateError, match=message):
            open_state()
        assert state.driver.table.get(b"root") == root


def test_large_value_is_split_into_rows(open_state: Open) -> None:
    text = secrets.token_hex(1_500_000)
    state = open_state()
    state.save_note("large", text)
    assert len(state.driver.root().blocks["note.large"]) > 1
    assert (open_state().note("large"), state.note("large")) == (text, text)


def count_calls(state: HBaseState, action: Callable[[], object]) -> dict[str, int]:
    state.pool.calls.clear()
    action()
    return dict(state.pool.calls)


def test_operations_of_each_batch_take_few_calls(open_state: Open) -> None:
    state = open_state()
    state.pause("default:*", 1)
    state.begin_run(RunRecord("run", "apply", 1))
    assert count_calls(state, state.pauses) == {"getRowWithColumns": 1}
    assert count_calls(state, state.lease) == {"getRowWithColumns": 1}
    assert count_calls(state, lambda: state.intend(entry())) == {"mutateRowsTs": 1}
    assert count_calls(state, lambda: state.save_heartbeat("run", 2)) == {"getRowWithColumns": 1, "mutateRowsTs": 1}
    assert count_calls(state, lambda: state.swap_lease(None, b"mine")) == {"getRowWithColumns": 1, "checkAndPut": 1}


def test_run_end_with_many_topics_takes_few_calls(open_state: Open) -> None:
    numbers = []
    for topics in (10, 1_000):
        state = open_state()
        names = [TopicId("default", f"topic-{number}") for number in range(topics)]

        def end(state: HBaseState = state, names: list[TopicId] = names) -> None:
            with state.transaction():
                state.save_frontiers(dict.fromkeys(names, FrontierRecord(1, 1, AT, 1)))
                state.add_ledger(entry(topic=name) for name in names)
                state.add_counters({ONE: 1})

        numbers.append(sum(count_calls(state, end).values()))
    assert numbers[0] <= 8
    assert numbers[1] <= numbers[0] + 3, "a second batch of rows, and the read and delete of the replaced block"


def test_state_page_documents_each_value_and_row(open_state: Open) -> None:
    section = (Path(__file__).parents[2] / "docs/reference/formats/state.md").read_text(encoding="utf-8")

    def named(head: str) -> list[str]:
        rows = section.partition(f"\n| {head} |")[2].partition("\n\n")[0].splitlines()[2:]
        return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]

    state = open_state()
    Lease(state, "a", 60, ManualClock(1)).acquire()
    state.begin_run(RunRecord("run", "apply", 1))
    state.intend(entry())
    state.save_running_counters("run", {ONE: 1.0})
    state.save_heartbeat("run", 2)
    fill(state)
    end_of_run(state, "other", 2)
    packed = state.driver.table.get(b"root")
    assert packed is not None
    assert {f"`{name}`" for name in json.loads(packed)} <= set(section.partition("`root` is a JSON object:")[2].split())
    values = {
        re.sub(r"^(note|ids\.open|ids\.closed)\..*", r"\1", name) for name in state._read(lambda view: view.names())
    }
    assert values == {name.partition(".<")[0] for name in named("value")}
    assert {key[:1].decode() for key in rows_of(state) if key != b"root"} == set(named("row") + named("HBase's row"))
    assert f"`{state.driver.name.partition(':')[2]}`" in section
    assert f"{HBaseDocuments.leaf_ids:,}" in section
    assert f"{SqliteDocuments.leaf_ids:,}" in section
    assert f"{INLINE_BYTES} bytes" in section


def fill(state: HBaseState) -> None:
    """Write every value that the end of a run does not write."""
    state.begin_run(RunRecord("other", "apply", 1))
    state.save_store(StoreRecord("mark", "hbase:cluster:cdap_system"))
    state.save_anchor(AT)
    state.replace_evidence([Evidence(b"", None, 1, 1, 1, "run")])
    state.save_last_full_pass_ms(1)
    state.save_created_ms(1)
    state.save_strikes({TOPIC: Strikes(1, 1, "broken")})
    state.save_counts({TOPIC: TopicCount(1, 1, None, None, 1)})
    state.pause("default:*", 1)
    state.save_note("one", 1)


def test_clock_ms_is_the_clock_of_hbase_servers(open_state: Open, witness: happybase.Connection) -> None:
    state, rows = open_state(), witness.table(b"janitor_test:tms.janitor")

    def stamp() -> int:
        rows.put(b"witness", {b"d:v": secrets.token_bytes(8)})
        [(_, stamped)] = rows.cells(b"witness", b"d:v", include_timestamp=True)
        return stamped

    times = [stamp(), state.clock_ms(), stamp(), open_state().clock_ms(), stamp()]
    assert None not in times
    assert times == sorted(filter(None, times))


def test_clock_ms_after_cell_with_future_timestamp_is_none(open_state: Open, witness: happybase.Connection) -> None:
    state = open_state()
    now_ms = state.clock_ms()
    assert now_ms is not None
    row = state.driver.table._prefix + b"clock"
    witness.table(b"janitor_test:tms.janitor").put(row, {b"d:v": b"later"}, timestamp=now_ms + 86_400_000)
    assert state.clock_ms() is None


@pytest.mark.parametrize(("ahead_ms", "blocked"), [(0, False), (6 * DAY, True)])
def test_machine_clock_ahead_of_hbase_blocks_a_run(open_state: Open, ahead_ms: int, blocked: bool) -> None:
    state = open_state()
    now_ms = state.clock_ms()
    assert now_ms is not None
    kit = janitor(MemoryStore(), state=state, now_ms=now_ms + LIFETIME.allowance_ms + ahead_ms)
    report = kit.engine.run_once(adopt=True)
    assert [(note.guard, note.tripped) for note in report.guards if note.tripped] == [("clock", True)] * blocked
