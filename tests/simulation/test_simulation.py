"""Random histories of a whole world hold every invariant, and a failing one is told shortly.

``TMS_TEST_SEEDS`` says how many seeds are played (300 unless it is set), ``TMS_TEST_FIRST_SEED`` where they begin.
"""

from __future__ import annotations

from collections import Counter

import pytest

from janitor.sweep import sweep
from tests.simulation.commands import Adopt, BackUp, Restore, Run, Trouble, Truncate
from tests.simulation.history import Failed, History, play, play_seed
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
from tests.simulation.shrink import failure_of, shortest, tell
from tests.simulation.world import World
from tests.support import seeds
from tms_core.tables.base import MESSAGES
from tms_core.transaction.model import TX_PER_MS

SEEDS = seeds(300)
#: Seeds per test, so that tests can be spread over processes and none takes long.
TOGETHER = 25
#: What the first hundred histories have to have, each at least once.
EVENTS = (
    "deleted",
    "inverted",
    "held",
    "proven",
    "truncated",
    "fed back",
    "published while invalid",
    "applied",
    "refused",
    "stopped",
    "crashed",
    "recovered",
    "failed",
    "ended",
    "paused",
    "quarantined",
    "brought back",
    "brought back hidden",
    "refused to mix",
    "boundary refuted",
    "read another system's snapshot",
    "log refused",
    "log opened",
)


@pytest.mark.seeded
@pytest.mark.parametrize("first", SEEDS[::TOGETHER])
def test_every_history_keeps_what_the_law_keeps(first: int) -> None:
    for seed in range(first, min(first + TOGETHER, SEEDS.stop)):
        failed = failure_of(seed)
        if failed is not None:
            again = f"TMS_TEST_FIRST_SEED={seed} TMS_TEST_SEEDS=1 make test PYTEST_ARGS=tests/simulation"
            pytest.fail(f"seed {seed}: {tell(shortest(failed))}\nagain: {again}", pytrace=False)


def test_histories_reach_what_they_are_about() -> None:
    reached: Counter[str] = Counter()
    for seed in range(100):
        if all(reached[event] for event in EVENTS):
            return
        try:
            reached += play_seed(seed)
        except Failed:
            continue  # the test above tells it

    for event in EVENTS:
        assert reached[event] > 0, f"no history had anything {event}"


def test_a_seed_is_one_history() -> None:
    assert play_seed(1) == play_seed(1)


# --- told in full ----------------------------------------------------------------------------------------------------


def follow(world: World, *operations: Operation) -> None:
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


def test_publish_after_its_transaction_was_scanned_is_inverted_later(world: World) -> None:
    # Given an adopted store, and a transaction that was committed long before,
    follow(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"), Commit(1), Wait(LIFETIME_MS + GRACE_MS))
    # and one that times out, is seen invalid, and is scanned,
    follow(world, Start(2, timeout_ms=30_000), PublishIn(2, "a"), Wait(MINUTE_MS), Run())
    failed = world.clients[2].id
    assert pointers(world) == [world.clients[1].id, -failed]

    # when its client goes on publishing, a moment later and at the very end of its lifetime,
    follow(world, PublishIn(2, "a"), Wait(LIFETIME_MS - MINUTE_MS - 1), PublishIn(2, "a"))
    assert pointers(world) == [world.clients[1].id, -failed, failed, failed]

    # then a later pass inverts that too, and claims nothing up to it,
    follow(world, Wait(MINUTE_MS), Run())
    assert pointers(world) == [world.clients[1].id, -failed, -failed, -failed]
    assert 0 < dict(world.boundaries)["the boundary"] < failed

    # until nothing of it can arrive any more: then the claim covers it, and the id can go.
    follow(world, Wait(DAY_MS), Run())
    assert dict(world.boundaries)["the boundary"] == failed
    follow(world, Truncate())
    assert not world.manager.invalid


def test_transactional_reader_after_truncation_sees_what_was_committed() -> None:
    play(
        [
            *(Create("a", 864_000), Adopt()),
            *(Start(1), PublishIn(1, "a"), Commit(1)),
            *(Start(2, timeout_ms=30_000), PublishIn(2, "a", 3), Wait(4 * HOUR_MS), Run(), Truncate()),
            *(Start(3), PublishIn(3, "a"), Commit(3)),
        ]
    )


def test_payloads_of_a_slow_transaction_go_with_its_message(world: World) -> None:
    payloads = {"payload"}
    follow(world, Create("a", 600), Adopt(), Start(1), Store(1, "a", 2), Wait(HOUR_MS), Run())
    assert {row.table for row in world.rows.values()} == payloads

    follow(world, PublishIn(1, "a", refers=True), Commit(1), Wait(10 * MINUTE_MS), Run())
    assert {row.table for row in world.rows.values()} == {"message", "payload"}

    follow(world, Wait(1), Run())
    assert not world.rows


# --- each invariant is alive: the model's own rows are tampered with, and it speaks -----------------------------------


def tampered(world: World, *, pointer: int | None) -> None:
    """Change the only message row's pointer in the store behind everybody's back."""
    ((key, value),) = world.store.message.read(MESSAGES, b"", None, 2).items
    world.store.message.put([(key, value._replace(pointer=pointer))])


def test_a_row_that_comes_back_is_a_zombie(world: World) -> None:
    follow(world, Create("a", 600), Adopt(), Publish("a"), BackUp(1), Wait(HOUR_MS), Run(), SetTtl("a", 864_000))
    assert not world.rows

    world.store.message.put(world.backups[1].store.message.read(MESSAGES, b"", None, 1).items)

    with pytest.raises(Violation, match="zombie"):
        Run().on(world)


def test_a_row_whose_pointer_is_another_is_a_zombie(world: World) -> None:
    follow(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"))
    tampered(world, pointer=START_MS * TX_PER_MS + 77)

    with pytest.raises(Violation, match="zombie"):
        Run().on(world)


def test_a_committed_message_that_is_negated_is_hidden(world: World) -> None:
    follow(world, Create("a", 864_000), Adopt(), Start(1), PublishIn(1, "a"), Commit(1))
    tampered(world, pointer=-world.clients[1].id)

    with pytest.raises(Violation, match="committed message hidden"):
        Run().on(world)


def test_a_row_that_vanishes_before_its_time_is_lost(world: World) -> None:
    follow(world, Create("a", 600), Adopt(), Publish("a"), Wait(10 * MINUTE_MS))
    world.store.message.delete([key for _, key in world.rows])

    with pytest.raises(Violation, match="live row lost"):
        Run().on(world)


def test_a_row_that_vanishes_while_it_is_held_is_an_overrun(world: World) -> None:
    follow(world, Create("a", 864_000), Adopt(), Publish("a"), Wait(HOUR_MS), Delete("a"))
    world.store.message.delete([key for _, key in world.rows])

    with pytest.raises(Violation, match="frontier overrun"):
        Run().on(world)


# --- the shrinker -----------------------------------------------------------------------------------------------------


def test_a_failing_history_is_cut_down_to_what_matters(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given a janitor that holds nothing, and a long history in which a ttl is shortened by mistake,
    monkeypatch.setattr("janitor.rules.policy._is_jump", lambda *_: False)
    history: History = [
        *(Create("a", 864_000), Create("b", 600), Adopt(), Publish("b", 2), Start(1), PublishIn(1, "b"), Commit(1)),
        *(Publish("a", 3), Wait(2 * HOUR_MS), Run(batch_rows=5), BackUp(1), SetTtl("a", 3600), Wait(MINUTE_MS), Run()),
        *(Truncate(), Restore(1, in_place=True), Run()),
    ]

    # when it is played and made shorter,
    with pytest.raises(Failed) as caught:
        play(history)
    short = shortest(caught.value)

    # then only what matters is left, and the text of it can be played again.
    assert list(short.history) == [
        Create("a", 864_000),
        Adopt(),
        Publish("a"),
        Wait(2 * HOUR_MS),
        SetTtl("a", 3600),
        Run(),
    ]
    text = tell(short)
    assert "SetTtl(topic='a', ttl_seconds=3600)" in text
    replayed = eval(text[text.index("[\n") :])  # noqa: S307
    assert replayed == list(short.history)


def test_an_operation_is_shown_as_it_is_written() -> None:
    assert repr(Run()) == "Run()"
    assert repr(Run(at_call=3, meanwhile=Trouble.CRASH)) == "Run(at_call=3, meanwhile=Trouble.CRASH)"
    assert repr(Run(at_call=3, meanwhile=Commit(1))) == "Run(at_call=3, meanwhile=Commit(tx=1))"


def test_an_error_that_nobody_expected_is_told_like_a_violation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sweep._STEPS, "message", lambda *_: 1 // 0)

    with pytest.raises(Failed, match="ZeroDivisionError"):
        play([Create("a", 600), Adopt(), Publish("a"), Run()])
