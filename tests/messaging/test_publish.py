"""Publishing and storing: written rows, assigned ids, and rejections."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Call, fail_at, hold_call, pointer, watch
from tests.kit.messaging import Kit, P, named, reader
from tests.support import PATIENCE_SECONDS, each_raises
from tms_core.errors import (
    BadRequest,
    ClockJumped,
    StoreError,
    TooLarge,
    TransactionEnded,
    TransactionExpired,
    Unavailable,
)
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.rowkey import LONG_MAX, MessageId, MessageKey, PayloadKey
from tms_core.tables.base import KEYS, MESSAGES, PAYLOADS, MessageValue
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

Answers = list[PublishFuture[RollbackRange | None]]


def message_key(ms: int, sequence: int = 0) -> bytes:
    return MessageKey(named("orders"), 1, ms, sequence).pack()


def rows(kit: Kit) -> list[tuple[MessageKey | None, MessageValue]]:
    found = kit.store.message.read(MESSAGES, b"", None, 1_000_000).items
    return [(MessageKey.parse(key), value) for key, value in found]


# --- written rows ----------------------------------------------------------------------------------------------------


def test_publish_writes_the_rows_of_cdap(kit: Kit) -> None:
    assert kit.service.publish(named("orders"), [b"a", b""]) is None
    kit.clock.advance(5)
    published = kit.service.publish(named("orders"), [b"b", b"c"], pointer=P)
    reference = kit.service.publish(named("orders"), [], pointer=P)
    assert kit.store.message.read(MESSAGES, b"", None, 10).items == [
        (message_key(NOW_MS), MessageValue(None, b"a")),
        (message_key(NOW_MS, 1), MessageValue(None, b"")),
        (message_key(NOW_MS + 5), MessageValue(P, b"b")),
        (message_key(NOW_MS + 5, 1), MessageValue(P, b"c")),
        (message_key(NOW_MS + 5, 2), MessageValue(P, None)),
    ]
    assert published == RollbackRange(P, NOW_MS + 5, 0, NOW_MS + 5, 1)
    assert reference == RollbackRange(P, NOW_MS + 5, 2, NOW_MS + 5, 2)


def test_publish_of_a_list_that_changes_later_keeps_its_messages(kit: Kit) -> None:
    messages = [b"a"]
    kit.service.publish(named("orders"), messages)
    messages[0] = b"b"
    assert kit.payloads() == [b"a"]


def test_store_writes_the_rows_of_cdap_and_shows_nothing(kit: Kit) -> None:
    kit.put("orders", P, b"a", b"")
    kit.clock.advance(5)
    kit.put("orders", P, b"b")
    assert kit.store.payload.read(PAYLOADS, b"", None, 10).items == [
        (PayloadKey(named("orders"), 1, P, NOW_MS, 0).pack(), b"a"),
        (PayloadKey(named("orders"), 1, P, NOW_MS, 1).pack(), b""),
        (PayloadKey(named("orders"), 1, P, NOW_MS + 5, 0).pack(), b"b"),
    ]
    assert kit.fetch("orders") == []


@pytest.mark.parametrize("wrong", [0, -1, -P, LONG_MAX + 1])
def test_invalid_write_pointer_is_rejected(kit: Kit, wrong: int) -> None:
    each_raises(
        BadRequest,
        lambda: kit.publish("orders", b"a", pointer=wrong),
        lambda: kit.put("orders", wrong, b"a"),
        lambda: kit.service.rollback(named("orders"), RollbackRange(wrong, 0, 0, 1, 0)),
    )


def test_publish_to_a_closed_service_is_unavailable(kit: Kit) -> None:
    answers = [kit.service.submit_publish(named("orders"), [b"%d" % n], pointer=None) for n in range(50)]
    kit.service.close()
    assert all(answer.done() for answer in answers)
    assert kit.service.workers.requests == 0
    each_raises(Unavailable, lambda: kit.publish("orders", b"late"), lambda: kit.put("orders", P, b"late"))
    assert kit.payloads() == [b"%d" % n for n in range(50)]


# --- transactions that must not write --------------------------------------------------------------------------------


@pytest.mark.parametrize(("age_ms", "late"), [(HOUR - 1, False), (HOUR, True), (HOUR + 1, True)])
def test_write_in_an_old_transaction_is_judged_by_the_lifetime(kit: Kit, age_ms: int, late: bool) -> None:
    old = pointer(NOW_MS - age_ms)
    uses: list[Callable[[], object]] = [
        lambda: kit.publish("orders", b"a", pointer=old),
        lambda: kit.publish("orders", pointer=old),
        lambda: kit.put("orders", old, b"a"),
    ]
    for use in uses:
        if late:
            with pytest.raises(TransactionExpired):
                use()
        else:
            use()
    assert len(rows(kit)) == (0 if late else 2)
    assert len(kit.store.payload.read(KEYS, b"", None, 10).items) == (0 if late else 1)


def test_publish_with_ids_ahead_of_the_clock_checks_the_lifetime_by_rows(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.clock.step(-2 * HOUR)
    with pytest.raises(TransactionExpired):
        kit.publish("orders", b"b", pointer=pointer(NOW_MS - HOUR))
    kit.publish("orders", b"b", pointer=pointer(NOW_MS - HOUR + 1))


def test_publish_of_a_batch_with_an_expired_transaction_writes_the_others(kit: Kit) -> None:
    answers = submit_in_one_batch(
        kit,
        lambda: [
            kit.service.submit_publish(named("orders"), [b"a"], pointer=P),
            kit.service.submit_publish(named("orders"), [b"b"], pointer=1),
            kit.service.submit_publish(named("orders"), [b"c"], pointer=P),
        ],
    )
    with pytest.raises(TransactionExpired):
        answers[1].result(PATIENCE_SECONDS)
    assert answers[0].result(PATIENCE_SECONDS) is not None
    assert answers[2].result(PATIENCE_SECONDS) is not None
    assert kit.payloads() == [b"first", b"a", b"c"]
    assert kit.ids() == [MessageId(NOW_MS, number) for number in range(3)]


def test_publish_after_a_clock_stands_still_or_steps_back_increases_ids(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.clock.step(-HOUR)
    kit.publish("orders", b"b")
    kit.clock.advance(1)
    kit.publish("orders", b"c", b"d")
    kit.clock.advance(HOUR)
    kit.publish("orders", b"e")
    assert kit.ids() == [*(MessageId(NOW_MS, number) for number in range(4)), MessageId(NOW_MS + 1, 0)]
    assert kit.payloads() == [b"a", b"b", b"c", b"d", b"e"]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_publish_beyond_the_ids_of_a_millisecond_uses_the_next(kit: Kit) -> None:
    assert kit.publish("orders", *[b"x"] * 65_537, pointer=P) == RollbackRange(P, NOW_MS, 0, NOW_MS + 1, 0)
    assert kit.publish("orders", b"y", pointer=P) == RollbackRange(P, NOW_MS + 1, 1, NOW_MS + 1, 1)
    ids = kit.ids()
    assert len(ids) == 65_538
    assert all(before < after for before, after in pairwise(ids))
    # The service knows the next id; after a restart, it must find the next id in the store.
    kit.restart()
    assert kit.publish("orders", b"z", pointer=P) == RollbackRange(P, NOW_MS + 1, 2, NOW_MS + 1, 2)


def test_publish_of_a_batch_beyond_a_millisecond_keeps_requests_contiguous(kit: Kit) -> None:
    answers = submit_in_one_batch(
        kit, lambda: [kit.service.submit_publish(named("orders"), [b"x"] * 43_690, pointer=P) for _ in range(3)]
    )
    assert [answer.result(PATIENCE_SECONDS) for answer in answers] == [
        RollbackRange(P, NOW_MS, 1, NOW_MS, 43_690),
        RollbackRange(P, NOW_MS, 43_691, NOW_MS + 1, 21_844),
        RollbackRange(P, NOW_MS + 1, 21_845, NOW_MS + 1, 65_534),
    ]


@pytest.mark.parametrize("step_ms", [-HOUR, 0, 1])
def test_publish_after_a_restart_continues_after_the_last_row(kit: Kit, step_ms: int) -> None:
    kit.publish("orders", b"a", b"b")
    kit.clock.step(step_ms)
    kit.restart()
    kit.publish("orders", b"c")
    after = MessageId(NOW_MS + 1, 0) if step_ms > 0 else MessageId(NOW_MS, 2)
    assert kit.ids() == [MessageId(NOW_MS, 0), MessageId(NOW_MS, 1), after]


def test_store_after_a_restart_overwrites_nothing(kit: Kit) -> None:
    kit.put("orders", P, b"a", b"b")
    kit.put("orders", P + 1, b"other")
    kit.clock.step(-MINUTE)
    kit.restart()
    kit.put("orders", P, b"c")
    kit.put("orders", P + 2, b"d")
    kit.publish("orders", pointer=P)
    assert kit.payloads() == [b"a", b"b", b"c"]


def test_publish_to_a_recreated_topic_gives_ids_from_the_clock_on(kit: Kit) -> None:
    kit.publish("orders", b"a", b"b")
    kit.service.delete_topic(named("orders"))
    kit.create("orders")
    kit.publish("orders", b"c")
    assert kit.ids() == [MessageId(NOW_MS, 0)]


@pytest.mark.parametrize("step_ms", [5, MINUTE, 10 * HOUR])
def test_publish_after_the_clock_stepped_back_is_seen_for_its_whole_ttl(kit: Kit, step_ms: int) -> None:
    kit.create("short", ttl="60")
    assert kit.payloads("short") == []
    kit.clock.step(-step_ms)
    kit.publish("short", b"a")
    kit.publish("short", b"b", ttl=3)
    assert kit.payloads("short") == [b"a", b"b"]
    kit.clock.advance(step_ms + 3_000)
    assert kit.payloads("short") == [b"a", b"b"]
    kit.clock.advance(1)
    assert kit.payloads("short") == [b"a"]
    kit.clock.advance(57_000)
    assert kit.payloads("short") == []


def test_publish_after_a_row_with_the_highest_id_is_rejected_for_good(kit: Kit) -> None:
    kit.store.message.put([(message_key(LONG_MAX, 65_535), MessageValue(None, b"poison"))])
    with pytest.raises(BadRequest, match="higher"):
        kit.publish("orders", b"a")


# --- clock steps -----------------------------------------------------------------------------------------------------


def test_publish_after_a_clock_jump_is_rejected_until_it_is_right(kit: Kit) -> None:
    kit.clock.step(5 * MINUTE)
    kit.publish("orders", b"within the allowance")
    kit.clock.step(1)
    each_raises(
        ClockJumped,
        lambda: kit.publish("orders", b"a"),
        lambda: kit.publish("orders", b"a", pointer=P),
        lambda: kit.put("orders", P, b"a"),
        match="restart",
    )
    kit.clock.step(-5 * MINUTE)
    kit.publish("orders", b"b")
    assert kit.payloads() == [b"within the allowance", b"b"]


def test_publish_after_a_restart_follows_a_jumped_clock(kit: Kit) -> None:
    kit.clock.step(HOUR)
    kit.restart()
    kit.publish("orders", b"a")
    assert kit.ids() == [MessageId(NOW_MS + HOUR, 0)]


def test_fetch_after_a_clock_jump_expires_no_message_early(kit: Kit) -> None:
    kit.create("short", ttl="3600")
    kit.publish("short", b"a")
    kit.clock.step(30 * HOUR)
    assert kit.payloads("short") == [b"a"]
    kit.clock.advance(HOUR - 5 * MINUTE)
    assert kit.payloads("short") == [b"a"]
    kit.clock.advance(1)
    assert kit.payloads("short") == []


# --- store failures --------------------------------------------------------------------------------------------------


class Outage:
    """Failing calls of a store, which write only the first rows of a batch.

    Args:
        names: the names of the calls.
        done: the number of written rows.
    """

    def __init__(self, kit: Kit, *names: str, done: int = 0) -> None:
        self.names = set(names)
        self._kit = kit
        self._done = done
        watch(kit.store, before=self)

    def __call__(self, call: Call) -> None:
        if call.name not in self.names:
            return
        table = getattr(self._kit.store, call.name.partition(".")[0])
        if call.name.endswith(".put") and self._done:
            table.put(call.arguments[0][: self._done])
        raise StoreError("The disk is gone.")


def test_publish_that_fails_half_way_rolls_back_its_transaction(kit: Kit) -> None:
    outage = Outage(kit, "message.put", done=2)
    with pytest.raises(StoreError):
        kit.publish("orders", b"a", b"b", b"c", pointer=P)
    outage.names.clear()
    kit.publish("orders", b"d", pointer=P)
    assert [value.pointer for _, value in rows(kit)] == [-P, -P, P]
    assert kit.payloads(transaction=reader()) == [b"d"]
    assert kit.payloads() == [b"a", b"b", b"d"]
    assert kit.ids()[-1] == MessageId(NOW_MS, 3)


def test_store_that_fails_half_way_leaves_no_rows(kit: Kit) -> None:
    outage = Outage(kit, "payload.put", done=2)
    with pytest.raises(StoreError):
        kit.put("orders", P, b"a", b"b", b"c")
    outage.names.clear()
    kit.put("orders", P, b"d")
    kit.publish("orders", pointer=P)
    assert kit.payloads() == [b"d"]


def test_publish_with_a_failing_rollback_raises_the_first_error(kit: Kit) -> None:
    outage = Outage(kit, "message.put", "message.invert", "payload.put", "payload.delete")
    with pytest.raises(StoreError):
        kit.publish("orders", b"a", b"b", pointer=P)
    with pytest.raises(StoreError):
        kit.put("orders", P, b"a")
    outage.names.clear()
    kit.publish("orders", b"c")
    assert kit.payloads() == [b"c"]


def test_publish_fails_while_the_last_rows_cannot_be_read(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.restart()
    outage = Outage(kit, "message.keys")
    each_raises(StoreError, lambda: kit.publish("orders", b"b"), lambda: kit.fetch("orders"))
    outage.names.clear()
    kit.publish("orders", b"b")
    assert kit.ids() == [MessageId(NOW_MS, 0), MessageId(NOW_MS, 1)]


@pytest.mark.parametrize("error", [KeyError("a bug"), TooLarge("It is too large.", "Send less.")])
def test_publish_with_a_bug_in_the_store_raises_it(kit: Kit, error: Exception) -> None:
    watch(kit.store, before=fail_at("message.put", error))
    with pytest.raises(type(error)):
        kit.service.submit_publish(named("orders"), [b"a"], pointer=None).result(PATIENCE_SECONDS)


def submit_in_one_batch(kit: Kit, submit: Callable[[], Answers]) -> Answers:
    """Submit while a first batch is being written, so that the next batch contains all requests."""
    with hold_call(kit.store) as writing:
        first = kit.service.submit_publish(named("orders"), [b"first"], pointer=None)
        assert writing.wait(PATIENCE_SECONDS)
        submitted = submit()
    first.result(PATIENCE_SECONDS)
    return submitted


def test_publish_queued_for_a_recreated_topic_uses_the_new_topic(kit: Kit) -> None:
    def submit() -> Answers:
        queued = kit.service.submit_publish(named("orders"), [b"new"], pointer=None)
        kit.service.delete_topic(named("orders"))
        kit.create("orders")
        return [queued]

    [queued] = submit_in_one_batch(kit, submit)
    queued.result(PATIENCE_SECONDS)
    assert kit.payloads() == [b"new"]


def test_publish_with_a_pointer_never_issued_is_rejected(kit: Kit) -> None:
    manager = TransactionManager(MemoryStorage(), kit.clock)
    kit.restart(transactions=manager)
    issued = manager.start_long().write_pointer
    for made_up in (issued + 1, 2**62, LONG_MAX):
        with pytest.raises(TransactionEnded, match=str(made_up)):
            kit.service.publish(named("orders"), [b"a"], pointer=made_up)
        with pytest.raises(TransactionEnded, match=str(made_up)):
            kit.service.store(named("orders"), [b"a"], pointer=made_up)
    kit.service.publish(named("orders"), [b"b"], pointer=issued)
    kit.service.publish(named("orders"), [b"c"], pointer=manager.start_long().write_pointer)
    manager.close()
    assert kit.payloads("orders") == [b"b", b"c"]


def test_publish_that_fails_keeps_the_error_of_a_rejected_request(kit: Kit) -> None:
    def submit() -> Answers:
        Outage(kit, "message.put")
        return [kit.service.submit_publish(named("orders"), [b"a"], pointer=pointer) for pointer in (1, P)]

    rejected, failed = submit_in_one_batch(kit, submit)
    with pytest.raises(TransactionExpired):
        rejected.result(PATIENCE_SECONDS)
    with pytest.raises(StoreError):
        failed.result(PATIENCE_SECONDS)


# --- transactions as the topic requires ------------------------------------------------------------------------------


def test_publish_against_the_transaction_rule_of_a_topic_is_rejected(kit: Kit) -> None:
    kit.create("inside", transactions="required")
    kit.create("outside", transactions="forbidden")
    kit.create("either", transactions="optional")
    with pytest.raises(BadRequest, match=r"default:inside .*transactions"):
        kit.publish("inside", b"a")
    with pytest.raises(BadRequest, match=r"default:outside .*transactions"):
        kit.publish("outside", b"a", pointer=P)
    with pytest.raises(BadRequest, match=r"default:outside .*transactions"):
        kit.put("outside", P, b"a")
    kit.put("inside", P, b"b")
    kit.publish("inside", pointer=P)
    kit.publish("outside", b"c")
    kit.publish("either", b"d")
    kit.publish("either", b"e", pointer=P)
    assert [kit.payloads(name) for name in ("inside", "outside", "either")] == [[b"b"], [b"c"], [b"d", b"e"]]
    kit.service.update_topic(named("inside"), {"transactions": "optional"})
    kit.publish("inside", b"f")
    assert kit.service.topic(named("inside"))["transactions"] == "optional"


def test_batch_with_a_rejected_request_writes_the_others(kit: Kit) -> None:
    kit.create("outside", transactions="forbidden")
    answers = [
        kit.service.submit_publish(named("outside"), [b"%d" % n], pointer=P if n == 1 else None) for n in range(3)
    ]
    with pytest.raises(BadRequest):
        answers[1].result()
    assert [answers[n].result() for n in (0, 2)] == [None, None]
    assert kit.payloads("outside") == [b"0", b"2"]


def test_create_with_a_bad_transaction_rule_is_rejected(kit: Kit) -> None:
    for word in ("", "Required", "yes"):
        with pytest.raises(BadRequest, match=r"required.*forbidden.*optional"):
            kit.create("other", transactions=word)


# --- stored payloads -------------------------------------------------------------------------------------------------


def test_publish_with_pending_stored_payloads_is_rejected(kit: Kit) -> None:
    kit.put("orders", P, b"a", b"b")
    with pytest.raises(BadRequest, match=f"{P} .*default:orders"):
        kit.publish("orders", b"c", pointer=P)
    kit.publish("orders", b"x", pointer=P + 1)
    kit.publish("orders", b"y")
    kit.publish("orders", pointer=P)
    kit.publish("orders", b"c", pointer=P)
    assert kit.payloads("orders") == [b"x", b"y", b"a", b"b", b"c"]
    kit.put("orders", P, b"d")
    with pytest.raises(BadRequest, match=f"{P} .*default:orders"):
        kit.publish("orders", b"e", pointer=P)


def test_publish_with_pending_payloads_after_a_restart_is_rejected(kit: Kit) -> None:
    kit.put("orders", P, b"a")
    kit.put("orders", P + 1, b"b")
    kit.publish("orders", pointer=P + 1)
    kit.publish("orders", b"c", pointer=P + 2)
    # This message does not refer to the stored payloads of its transaction.
    kit.create("others")
    kit.publish("others", b"d", pointer=P)
    kit.restart()
    for _ in range(2):
        with pytest.raises(BadRequest, match=f"{P} .*default:orders"):
            kit.publish("orders", b"x", pointer=P)
    kit.publish("others", b"e", pointer=P)
    kit.publish("orders", b"f", pointer=P + 1)
    kit.publish("orders", b"g", pointer=P + 2)
    kit.publish("orders", pointer=P)
    kit.publish("orders", b"h", pointer=P)
    assert kit.payloads("orders") == [b"b", b"c", b"f", b"g", b"a", b"h"]


def test_publish_with_pending_payloads_of_another_server_is_rejected(kit: Kit) -> None:
    kit.publish("orders", b"a", pointer=P)
    other = kit.serve()
    other.store(named("orders"), [b"b"], pointer=P)
    other.close()
    kit.service.invalidate()
    with pytest.raises(BadRequest, match=f"{P} .*default:orders"):
        kit.publish("orders", b"c", pointer=P)


def test_publish_in_a_transaction_after_the_start_asks_no_payloads(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.publish("orders", b"a", pointer=P)
    kit.clock.advance(HOUR)
    new = pointer(kit.clock.now_ms())
    monkeypatch.setattr(type(kit.store.payload), "first", lambda *_: pytest.fail("it was asked"))
    kit.publish("orders", b"b", pointer=new + 1)
    monkeypatch.undo()
    # The service searches for a forgotten transaction.
    monkeypatch.setattr("tms_core.messaging.publish.open_topics._KNOWN_POINTERS", 2)
    for stored in range(3):
        kit.put("orders", new + 2 + stored, b"c")
    with pytest.raises(BadRequest, match=f"{new + 2} .*default:orders"):
        kit.publish("orders", b"d", pointer=new + 2)


# --- rollback of a whole transaction ---------------------------------------------------------------------------------


def test_rollback_of_a_pointer_covers_all_its_messages_in_the_topic(kit: Kit) -> None:
    kit.publish("orders", b"1", pointer=P)
    kit.publish("orders", b"2", pointer=P + 1)
    kit.publish("orders", b"3")
    kit.clock.advance(MINUTE)
    kit.publish("orders", b"4", b"5", pointer=P)
    kit.create("others")
    kit.publish("others", b"6", pointer=P)
    for _ in range(2):
        kit.service.rollback(named("orders"), P)
        assert kit.payloads("orders", transaction=reader()) == [b"2", b"3"]
        kit.restart()
    assert kit.payloads("others", transaction=reader()) == [b"6"]
    for pointer_ in (0, -P, 2**63):
        with pytest.raises(BadRequest, match=f"^{pointer_} "):
            kit.service.rollback(named("orders"), pointer_)


@pytest.mark.parametrize(("ahead_ms", "warns"), [(5 * MINUTE, False), (5 * MINUTE + 1, True), (400 * DAY, True)])
def test_publish_after_a_message_dated_ahead_warns_once_and_names_the_way_out(
    kit: Kit, caplog: pytest.LogCaptureFixture, ahead_ms: int, warns: bool
) -> None:
    kit.clock.step(ahead_ms)
    kit.restart()
    kit.publish("orders", b"from a clock that was ahead")
    kit.clock.step(-ahead_ms)
    kit.restart()
    kit.publish("orders", b"a")
    kit.publish("orders", b"b")
    warnings = [record.getMessage() for record in caplog.records if "ahead of the clock" in record.getMessage()]
    assert len(warnings) == warns
    assert all("default:orders" in line and "tms topic delete" in line for line in warnings)
