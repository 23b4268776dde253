"""Random histories hold every invariant, and a failing history is shrunk.

``TMS_TEST_SEEDS`` sets the number of seeds (default 300), ``TMS_TEST_FIRST_SEED`` the first one.
"""

from __future__ import annotations

from collections import Counter

import pytest

from janitor.sweep import sweep
from tests.simulation.commands import Adopt, BackUp, Interruption, Restore, Run, Truncate
from tests.simulation.history import History, HistoryFailed, play, play_seed
from tests.simulation.invariants import Violation
from tests.simulation.model import DAY_MS, GRACE_MS, HOUR_MS, LIFETIME_MS, MINUTE_MS, START_MS
from tests.simulation.operations import (
    Commit,
    Create,
    Delete,
    Operation,
    Publish,
    PublishIn,
    SetTtl,
    Start,
    Store,
    Wait,
)
from tests.simulation.shrink import find_failure, format_failure, shrink
from tests.simulation.world import World
from tests.support import seeds
from tms_core.tables.base import MESSAGES
from tms_core.transaction.model import TX_PER_MS

SEEDS = seeds(300)
#: Small enough to spread the tests over processes.
SEEDS_PER_TEST = 25
#: Events that the first 100 histories must have.
EVENTS = (
    "rows deleted",
    "rows inverted",
    "rows held",
    "boundary proven",
    "ids truncated",
    "ids truncated by the janitor",
    "publish in an invalid transaction",
    "plan applied",
    "plan rejected",
    "run blocked",
    "run crashed",
    "run recovered",
    "run failed",
    "run interrupted",
    "topic paused",
    "topic quarantined",
    "rows restored",
    "rows restored and hidden",
    "restore rejected",
    "boundary refuted",
    "snapshot of another system read",
    "damaged log rejected",
    "damaged log opened",
)


@pytest.mark.seeded
@pytest.mark.parametrize("first", SEEDS[::SEEDS_PER_TEST])
def test_random_history_holds_every_invariant(first: int) -> None:
    for seed in range(first, min(first + SEEDS_PER_TEST, SEEDS.stop)):
        failed = find_failure(seed)
        if failed is not None:
            again = f"TMS_TEST_FIRST_SEED={seed} TMS_TEST_SEEDS=1 make test PYTEST_ARGS=tests/simulation"
            pytest.fail(f"seed {seed}: {format_failure(shrink(failed))}\nagain: {again}", pytrace=False)


def test_random_histories_have_every_event() -> None:
    event_counts: Counter[str] = Counter()
    for seed in range(100):
        if all(event_counts[event] for event in EVENTS):
            return
        try:
            event_counts += play_seed(seed)
        except HistoryFailed:
            continue  # the test above reports it

    for event in EVENTS:
        assert event_counts[event] > 0, f"no history has the event: {event}"


def test_history_of_one_seed_is_reproducible() -> None:
    assert play_seed(1) == play_seed(1)


# --- written histories ------------------------------------------------------------------------------------------------


def perform(world: World, *operations: Operation) -> None:
    for operation in operations:
        operation.on(world)


def pointers(world: World) -> list[int]:
    return [
        -row.pointer if row.negated else row.pointer
        for row in world.rows.values()
        if row.table == "message" and row.pointer is not None
    ]


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("world"))


def test_publish_after_scan_is_inverted_by_a_later_pass(world: World) -> None:
    # An old committed transaction in an adopted store.
    perform(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"), Commit(1), Wait(LIFETIME_MS + GRACE_MS))
    # A run scans for a transaction after its timeout.
    perform(world, Start(2, timeout_ms=30_000), PublishIn(2, "a"), Wait(MINUTE_MS), Run())
    failed = world.clients[2].id
    assert pointers(world) == [world.clients[1].id, -failed]

    # Its client publishes right after the scan and at the end of the lifetime.
    perform(world, PublishIn(2, "a"), Wait(LIFETIME_MS - MINUTE_MS - 1), PublishIn(2, "a"))
    assert pointers(world) == [world.clients[1].id, -failed, failed, failed]

    # A later pass inverts these rows and keeps the boundary below them.
    perform(world, Wait(MINUTE_MS), Run())
    assert pointers(world) == [world.clients[1].id, -failed, -failed, -failed]
    assert 0 < dict(world.boundaries)["the boundary"] < failed

    # After the last possible write the boundary covers the id, which is then truncated.
    perform(world, Wait(DAY_MS), Run())
    assert dict(world.boundaries)["the boundary"] == failed
    perform(world, Truncate())
    assert not world.manager.invalid


def test_reader_after_truncation_sees_committed_messages() -> None:
    play(
        [
            *(Create("a", 864_000), Adopt()),
            *(Start(1), PublishIn(1, "a"), Commit(1)),
            *(Start(2, timeout_ms=30_000), PublishIn(2, "a", 3), Wait(4 * HOUR_MS), Run(), Truncate()),
            *(Start(3), PublishIn(3, "a"), Commit(3)),
        ]
    )


def test_payloads_of_slow_transaction_expire_with_its_message(world: World) -> None:
    payloads = {"payload"}
    perform(world, Create("a", 600), Adopt(), Start(1), Store(1, "a", 2), Wait(HOUR_MS), Run())
    assert {row.table for row in world.rows.values()} == payloads

    perform(world, PublishIn(1, "a", refers=True), Commit(1), Wait(10 * MINUTE_MS), Run())
    assert {row.table for row in world.rows.values()} == {"message", "payload"}

    perform(world, Wait(1), Run())
    assert not world.rows


# --- each invariant detects a change of the store --------------------------------------------------------------------


def tamper_with_pointer(world: World, *, pointer: int | None) -> None:
    """Replace the pointer of the only message row in the store."""
    ((key, value),) = world.store.message.read(MESSAGES, b"", None, 2).items
    world.store.message.put([(key, value._replace(pointer=pointer))])


def test_invariant_restored_row_is_unexpected(world: World) -> None:
    perform(world, Create("a", 600), Adopt(), Publish("a"), BackUp(1), Wait(HOUR_MS), Run(), SetTtl("a", 864_000))
    assert not world.rows

    world.store.message.put(world.backups[1].store.message.read(MESSAGES, b"", None, 1).items)

    with pytest.raises(Violation, match="unexpected row"):
        Run().on(world)


def test_invariant_row_with_changed_pointer_is_unexpected(world: World) -> None:
    perform(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"))
    tamper_with_pointer(world, pointer=START_MS * TX_PER_MS + 77)

    with pytest.raises(Violation, match="unexpected row"):
        Run().on(world)


def test_invariant_negated_committed_message_is_hidden(world: World) -> None:
    perform(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"), Commit(1))
    tamper_with_pointer(world, pointer=-world.clients[1].id)

    with pytest.raises(Violation, match="committed message hidden"):
        Run().on(world)


def test_invariant_row_missing_before_expiry_is_lost(world: World) -> None:
    perform(world, Create("a", 600), Adopt(), Publish("a"), Wait(10 * MINUTE_MS))
    world.store.message.delete([key for _, key in world.rows])

    with pytest.raises(Violation, match="live row lost"):
        Run().on(world)


def test_invariant_row_missing_under_a_hold_is_overrun(world: World) -> None:
    perform(world, Create("a", 864_000), Adopt(), Publish("a"), Wait(HOUR_MS), Delete("a"))
    world.store.message.delete([key for _, key in world.rows])

    with pytest.raises(Violation, match="frontier overrun"):
        Run().on(world)


# --- the shrinker -----------------------------------------------------------------------------------------------------


def test_shrink_failing_history_keeps_required_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    # The janitor holds nothing, and a long history shortens a ttl by mistake.
    monkeypatch.setattr("janitor.rules.policy._is_jump", lambda *_: False)
    history: History = [
        *(Create("a", 864_000), Create("b", 600), Adopt(), Publish("b", 2), Start(1), PublishIn(1, "b"), Commit(1)),
        *(Publish("a", 3), Wait(2 * HOUR_MS), Run(batch_rows=5), BackUp(1), SetTtl("a", 3600), Wait(MINUTE_MS), Run()),
        *(Truncate(), Restore(1, in_place=True), Run()),
    ]

    with pytest.raises(HistoryFailed) as caught:
        play(history)
    short = shrink(caught.value)

    # The formatted history can be replayed.
    assert list(short.history) == [
        Create("a", 864_000),
        Adopt(),
        Publish("a"),
        Wait(2 * HOUR_MS),
        SetTtl("a", 3600),
        Run(),
    ]
    text = format_failure(short)
    assert "SetTtl(topic='a', ttl_seconds=3600)" in text
    replayed = eval(text[text.index("[\n") :])  # noqa: S307
    assert replayed == list(short.history)


def test_operation_repr_omits_defaults() -> None:
    assert repr(Run()) == "Run()"
    assert repr(Run(at_call=3, concurrent=Interruption.CRASH)) == "Run(at_call=3, concurrent=Interruption.CRASH)"
    assert repr(Run(at_call=3, concurrent=Commit(1))) == "Run(at_call=3, concurrent=Commit(tx=1))"


def test_play_unexpected_error_fails_as_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep._STEPS, "message", lambda *_: 1 // 0)

    with pytest.raises(HistoryFailed, match="ZeroDivisionError"):
        play([Create("a", 600), Adopt(), Publish("a"), Run()])
