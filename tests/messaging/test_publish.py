"""Publishing and storing: what is written, which ids it gets, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from threading import Event

import pytest

from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Call, fail_at, pointer, watch
from tests.messaging.desk import PATIENCE_SECONDS, Desk, P, named, reader
from tms_core.errors import (
    BadRequest,
    ClockJumped,
    StoreError,
    TopicNotFound,
    TransactionEnded,
    TransactionExpired,
    Unavailable,
)
from tms_core.messaging.model import RollbackRange
from tms_core.messaging.publish.workers import Answer
from tms_core.rowkey import LONG_MAX, MessageId, MessageKey, PayloadKey
from tms_core.tables.base import KEYS, MESSAGES, PAYLOADS, MessageValue
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

Answers = list[Answer[RollbackRange | None]]


def message_key(ms: int, sequence: int = 0, name: str = "orders") -> bytes:
    return MessageKey(named(name), 1, ms, sequence).pack()


def rows(desk: Desk) -> list[tuple[MessageKey | None, MessageValue]]:
    found = desk.store.message.read(MESSAGES, b"", None, 1_000_000).items
    return [(MessageKey.parse(key), value) for key, value in found]


# --- what is written -------------------------------------------------------------------------------------------------


def test_given_messages_when_published_then_the_rows_are_those_of_cdap(desk: Desk) -> None:
    assert desk.service.publish(named("orders"), [b"a", b""]) is None
    desk.clock.advance(5)
    published = desk.service.publish(named("orders"), [b"b", b"c"], pointer=P)
    reference = desk.service.publish(named("orders"), [], pointer=P)
    assert desk.store.message.read(MESSAGES, b"", None, 10).items == [
        (message_key(NOW_MS), MessageValue(None, b"a")),
        (message_key(NOW_MS, 1), MessageValue(None, b"")),
        (message_key(NOW_MS + 5), MessageValue(P, b"b")),
        (message_key(NOW_MS + 5, 1), MessageValue(P, b"c")),
        (message_key(NOW_MS + 5, 2), MessageValue(P, None)),
    ]
    assert published == RollbackRange(P, NOW_MS + 5, 0, NOW_MS + 5, 1)
    assert reference == RollbackRange(P, NOW_MS + 5, 2, NOW_MS + 5, 2)


def test_given_payloads_when_stored_then_the_rows_are_those_of_cdap_and_nothing_is_to_be_read(desk: Desk) -> None:
    desk.put("orders", P, b"a", b"")
    desk.clock.advance(5)
    desk.put("orders", P, b"b")
    assert desk.store.payload.read(PAYLOADS, b"", None, 10).items == [
        (PayloadKey(named("orders"), 1, P, NOW_MS, 0).pack(), b"a"),
        (PayloadKey(named("orders"), 1, P, NOW_MS, 1).pack(), b""),
        (PayloadKey(named("orders"), 1, P, NOW_MS + 5, 0).pack(), b"b"),
    ]
    assert desk.fetch("orders") == []


def test_given_a_list_that_changes_after_publishing_then_what_was_published_does_not(desk: Desk) -> None:
    messages = [b"a"]
    desk.service.publish(named("orders"), messages)
    messages[0] = b"b"
    assert desk.payloads() == [b"a"]


def test_given_nothing_to_write_when_published_or_stored_then_it_is_a_bad_request(desk: Desk) -> None:
    uses: list[Callable[[], object]] = [
        lambda: desk.service.submit_publish(named("orders"), [], pointer=None),
        lambda: desk.service.submit_store(named("orders"), [], pointer=P),
    ]
    for use in uses:
        with pytest.raises(BadRequest):
            use()


@pytest.mark.parametrize("wrong", [0, -1, -P, LONG_MAX + 1])
def test_given_a_pointer_that_is_none_when_used_then_it_is_a_bad_request(desk: Desk, wrong: int) -> None:
    uses: list[Callable[[], object]] = [
        lambda: desk.publish("orders", b"a", pointer=wrong),
        lambda: desk.put("orders", wrong, b"a"),
        lambda: desk.service.rollback(named("orders"), RollbackRange(wrong, 0, 0, 1, 0)),
    ]
    for use in uses:
        with pytest.raises(BadRequest):
            use()


def test_given_no_topic_when_published_then_the_answer_says_so(desk: Desk) -> None:
    answer = desk.service.submit_publish(named("nothing"), [b"a"], pointer=None)
    with pytest.raises(TopicNotFound):
        answer.result(PATIENCE_SECONDS)


def test_given_a_closed_service_when_published_then_it_is_unavailable_and_what_was_accepted_is_there(
    desk: Desk,
) -> None:
    answers = [desk.service.submit_publish(named("orders"), [b"%d" % n], pointer=None) for n in range(50)]
    desk.service.close()
    assert all(answer.done() for answer in answers)
    assert desk.service.workers.requests == 0
    uses: list[Callable[[], object]] = [lambda: desk.publish("orders", b"late"), lambda: desk.put("orders", P, b"late")]
    for use in uses:
        with pytest.raises(Unavailable):
            use()
    assert desk.payloads() == [b"%d" % n for n in range(50)]


# --- transactions that may not write any more ------------------------------------------------------------------------


@pytest.mark.parametrize(("age_ms", "late"), [(HOUR - 1, False), (HOUR, True), (HOUR + 1, True)])
def test_given_a_transaction_of_some_age_when_it_writes_then_its_lifetime_decides(
    desk: Desk, age_ms: int, late: bool
) -> None:
    old = pointer(NOW_MS - age_ms)
    uses: list[Callable[[], object]] = [
        lambda: desk.publish("orders", b"a", pointer=old),
        lambda: desk.publish("orders", pointer=old),
        lambda: desk.put("orders", old, b"a"),
    ]
    for use in uses:
        if late:
            with pytest.raises(TransactionExpired):
                use()
        else:
            use()
    assert len(rows(desk)) == (0 if late else 2)
    assert len(desk.store.payload.read(KEYS, b"", None, 10).items) == (0 if late else 1)


def test_given_ids_ahead_of_the_clock_when_a_transaction_writes_then_the_time_of_its_rows_decides(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.clock.step(-2 * HOUR)
    with pytest.raises(TransactionExpired):
        desk.publish("orders", b"b", pointer=pointer(NOW_MS - HOUR))
    desk.publish("orders", b"b", pointer=pointer(NOW_MS - HOUR + 1))


def test_given_one_expired_transaction_in_a_batch_then_the_others_are_written(desk: Desk) -> None:
    answers = held_back(
        desk,
        lambda: [
            desk.service.submit_publish(named("orders"), [b"a"], pointer=P),
            desk.service.submit_publish(named("orders"), [b"b"], pointer=1),
            desk.service.submit_publish(named("orders"), [b"c"], pointer=P),
        ],
    )
    with pytest.raises(TransactionExpired):
        answers[1].result(PATIENCE_SECONDS)
    assert answers[0].result(PATIENCE_SECONDS) is not None
    assert answers[2].result(PATIENCE_SECONDS) is not None
    assert desk.payloads() == [b"first", b"a", b"c"]


# --- ids -------------------------------------------------------------------------------------------------------------


def test_given_a_clock_that_stands_still_or_steps_back_when_published_then_ids_go_on(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.clock.step(-HOUR)
    desk.publish("orders", b"b")
    desk.clock.advance(1)
    desk.publish("orders", b"c", b"d")
    desk.clock.advance(HOUR)
    desk.publish("orders", b"e")
    assert desk.ids() == [
        MessageId(NOW_MS, 0),
        MessageId(NOW_MS, 1),
        MessageId(NOW_MS, 2),
        MessageId(NOW_MS, 3),
        MessageId(NOW_MS + 1, 0),
    ]
    assert desk.payloads() == [b"a", b"b", b"c", b"d", b"e"]


def test_given_more_messages_than_a_millisecond_has_ids_then_they_go_on_in_the_next(desk: Desk) -> None:
    published = desk.publish("orders", *[b"x"] * 65_537, pointer=P)
    assert published == RollbackRange(P, NOW_MS, 0, NOW_MS + 1, 0)
    assert desk.publish("orders", b"y", pointer=P) == RollbackRange(P, NOW_MS + 1, 1, NOW_MS + 1, 1)
    ids = desk.ids()
    assert len(ids) == 65_538
    assert all(before < after for before, after in pairwise(ids))
    # In memory it is known where the next request begins; a restart has to find it.
    desk.restart()
    assert desk.publish("orders", b"z", pointer=P) == RollbackRange(P, NOW_MS + 1, 2, NOW_MS + 1, 2)


def test_given_requests_in_one_batch_when_ids_overflow_then_each_stays_in_one_piece(desk: Desk) -> None:
    answers = held_back(
        desk, lambda: [desk.service.submit_publish(named("orders"), [b"x"] * 43_690, pointer=P) for _ in range(3)]
    )
    assert [answer.result(PATIENCE_SECONDS) for answer in answers] == [
        RollbackRange(P, NOW_MS, 1, NOW_MS, 43_690),
        RollbackRange(P, NOW_MS, 43_691, NOW_MS + 1, 21_844),
        RollbackRange(P, NOW_MS + 1, 21_845, NOW_MS + 1, 65_534),
    ]


@pytest.mark.parametrize("step_ms", [-HOUR, 0, 1])
def test_given_a_restart_when_published_then_ids_go_on_after_the_last_row(desk: Desk, step_ms: int) -> None:
    desk.publish("orders", b"a", b"b")
    desk.clock.step(step_ms)
    desk.restart()
    desk.publish("orders", b"c")
    after = MessageId(NOW_MS + 1, 0) if step_ms > 0 else MessageId(NOW_MS, 2)
    assert desk.ids() == [MessageId(NOW_MS, 0), MessageId(NOW_MS, 1), after]


def test_given_stored_payloads_and_a_restart_when_more_are_stored_then_none_is_overwritten(desk: Desk) -> None:
    desk.put("orders", P, b"a", b"b")
    desk.put("orders", P + 1, b"other")
    desk.clock.step(-MINUTE)
    desk.restart()
    desk.put("orders", P, b"c")
    desk.put("orders", P + 2, b"d")
    desk.publish("orders", pointer=P)
    assert desk.payloads() == [b"a", b"b", b"c"]


def test_given_a_topic_made_again_when_published_then_its_ids_begin_with_the_clock(desk: Desk) -> None:
    desk.publish("orders", b"a", b"b")
    desk.service.delete_topic(named("orders"))
    desk.create("orders")
    desk.clock.advance(5)
    desk.publish("orders", b"c")
    assert desk.ids() == [MessageId(NOW_MS + 5, 0)]


@pytest.mark.parametrize("step_ms", [5, MINUTE, 10 * HOUR])
def test_given_readers_when_the_clock_steps_back_then_what_is_published_is_seen_at_once_and_for_its_whole_ttl(
    desk: Desk, step_ms: int
) -> None:
    desk.create("short", ttl="60")
    assert desk.payloads("short") == []
    desk.clock.step(-step_ms)
    desk.publish("short", b"a")
    desk.publish("short", b"b", ttl=3)
    assert desk.payloads("short") == [b"a", b"b"]
    desk.clock.advance(step_ms + 3_000)
    assert desk.payloads("short") == [b"a", b"b"]
    desk.clock.advance(1)
    assert desk.payloads("short") == [b"a"]
    desk.clock.advance(57_000)
    assert desk.payloads("short") == []


def test_given_a_row_at_the_end_of_time_when_published_then_it_is_unavailable(desk: Desk) -> None:
    desk.store.message.put([(message_key(LONG_MAX, 65_535), MessageValue(None, b"poison"))])
    with pytest.raises(Unavailable, match="no later id is left"):
        desk.publish("orders", b"a")


# --- a clock that jumps ----------------------------------------------------------------------------------------------


def test_given_a_clock_that_jumped_when_published_or_stored_then_it_is_refused_until_the_clock_is_right(
    desk: Desk,
) -> None:
    desk.clock.step(5 * MINUTE)
    desk.publish("orders", b"within the allowance")
    desk.clock.step(1)
    uses: list[Callable[[], object]] = [
        lambda: desk.publish("orders", b"a"),
        lambda: desk.publish("orders", b"a", pointer=P),
        lambda: desk.put("orders", P, b"a"),
    ]
    for use in uses:
        with pytest.raises(ClockJumped, match="restart"):
            use()
    desk.clock.step(-5 * MINUTE)
    desk.publish("orders", b"b")
    assert desk.payloads() == [b"within the allowance", b"b"]


def test_given_a_clock_that_is_right_after_all_when_restarted_then_it_is_followed(desk: Desk) -> None:
    desk.clock.step(HOUR)
    desk.restart()
    desk.publish("orders", b"a")
    assert desk.ids() == [MessageId(NOW_MS + HOUR, 0)]


def test_given_a_clock_that_jumped_when_fetched_then_nothing_looks_old(desk: Desk) -> None:
    desk.create("short", ttl="3600")
    desk.publish("short", b"a")
    desk.clock.step(30 * HOUR)
    assert desk.payloads("short") == [b"a"]
    desk.clock.advance(HOUR - 5 * MINUTE)
    assert desk.payloads("short") == [b"a"]
    desk.clock.advance(1)
    assert desk.payloads("short") == []


# --- a store that fails ----------------------------------------------------------------------------------------------


class Outage:
    """Makes calls of a store fail; ``done`` says how much of a batch is written all the same."""

    def __init__(self, desk: Desk, *names: str, done: int = 0) -> None:
        self.names = set(names)
        self._desk = desk
        self._done = done
        watch(desk.store, before=self)

    def __call__(self, call: Call) -> None:
        if call.name not in self.names:
            return
        table = getattr(self._desk.store, call.name.partition(".")[0])
        if call.name.endswith(".put") and self._done:
            table.put(call.arguments[0][: self._done])
        raise StoreError("The disk is gone.")


def test_given_a_batch_that_fails_half_way_when_answered_then_its_transactional_rows_are_rolled_back(
    desk: Desk,
) -> None:
    outage = Outage(desk, "message.put", done=2)
    with pytest.raises(StoreError):
        desk.publish("orders", b"a", b"b", b"c", pointer=P)
    outage.names.clear()
    desk.publish("orders", b"d", pointer=P)
    assert [value.pointer for _, value in rows(desk)] == [-P, -P, P]
    assert desk.payloads(transaction=reader()) == [b"d"]
    assert desk.payloads() == [b"a", b"b", b"d"]
    ids = desk.ids()
    assert ids[-1] == MessageId(NOW_MS, 3)


def test_given_a_store_of_payloads_that_fails_half_way_when_answered_then_its_rows_are_gone(desk: Desk) -> None:
    outage = Outage(desk, "payload.put", done=2)
    with pytest.raises(StoreError):
        desk.put("orders", P, b"a", b"b", b"c")
    outage.names.clear()
    desk.put("orders", P, b"d")
    desk.publish("orders", pointer=P)
    assert desk.payloads() == [b"d"]


def test_given_a_batch_that_fails_and_cannot_be_taken_back_when_answered_then_the_first_error_is(desk: Desk) -> None:
    outage = Outage(desk, "message.put", "message.invert", "payload.put", "payload.delete")
    with pytest.raises(StoreError):
        desk.publish("orders", b"a", b"b", pointer=P)
    with pytest.raises(StoreError):
        desk.put("orders", P, b"a")
    outage.names.clear()
    desk.publish("orders", b"c")
    assert desk.payloads() == [b"c"]


def test_given_last_rows_that_cannot_be_read_when_published_then_it_fails_until_they_can(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.restart()
    outage = Outage(desk, "message.keys")
    uses: list[Callable[[], object]] = [lambda: desk.publish("orders", b"b"), lambda: desk.fetch("orders")]
    for use in uses:
        with pytest.raises(StoreError):
            use()
    outage.names.clear()
    desk.publish("orders", b"b")
    assert desk.ids() == [MessageId(NOW_MS, 0), MessageId(NOW_MS, 1)]


def test_given_a_bug_in_a_store_when_published_then_nobody_waits_for_ever(desk: Desk) -> None:
    watch(desk.store, before=fail_at("message.put", KeyError("a bug")))
    with pytest.raises(KeyError):
        desk.service.submit_publish(named("orders"), [b"a"], pointer=None).result(PATIENCE_SECONDS)


def held_back(desk: Desk, submit: Callable[[], Answers]) -> Answers:
    """Submit while a first batch is being written, so that all of it is in the next one."""
    writing, go = Event(), Event()

    def wait(call: Call) -> None:
        if call.name == "message.put" and not writing.is_set():
            writing.set()
            assert go.wait(PATIENCE_SECONDS)

    watch(desk.store, before=wait)
    first = desk.service.submit_publish(named("orders"), [b"first"], pointer=None)
    assert writing.wait(PATIENCE_SECONDS)
    submitted = submit()
    go.set()
    first.result(PATIENCE_SECONDS)
    return submitted


def test_given_a_topic_deleted_and_made_again_while_messages_are_queued_then_they_go_to_the_new_one(desk: Desk) -> None:
    def submit() -> Answers:
        queued = desk.service.submit_publish(named("orders"), [b"new"], pointer=None)
        desk.service.delete_topic(named("orders"))
        desk.create("orders")
        return [queued]

    [queued] = held_back(desk, submit)
    queued.result(PATIENCE_SECONDS)
    assert desk.payloads() == [b"new"]


def test_given_a_pointer_above_all_that_were_issued_when_published_or_stored_then_it_is_refused(desk: Desk) -> None:
    manager = TransactionManager(MemoryStorage(), desk.clock)
    desk.restart(transactions=manager)
    issued = manager.start_long().write_pointer
    for made_up in (issued + 1, 2**62, LONG_MAX):
        with pytest.raises(TransactionEnded, match=f"Transaction {made_up} is not in progress"):
            desk.service.publish(named("orders"), [b"a"], pointer=made_up)
        with pytest.raises(TransactionEnded, match=f"Transaction {made_up} is not in progress"):
            desk.service.store(named("orders"), [b"a"], pointer=made_up)
    desk.service.publish(named("orders"), [b"b"], pointer=issued)
    desk.service.publish(named("orders"), [b"c"], pointer=manager.start_long().write_pointer)
    manager.close()
    assert desk.payloads("orders") == [b"b", b"c"]


# --- transactions, as the topic wants them ---------------------------------------------------------------------------


def test_given_a_topic_that_requires_or_forbids_transactions_when_published_then_what_does_not_fit_is_refused(
    desk: Desk,
) -> None:
    desk.create("inside", transactions="required")
    desk.create("outside", transactions="forbidden")
    desk.create("either", transactions="optional")
    with pytest.raises(BadRequest, match="in transactions only"):
        desk.publish("inside", b"a")
    with pytest.raises(BadRequest, match="no messages in transactions"):
        desk.publish("outside", b"a", pointer=P)
    with pytest.raises(BadRequest, match="no messages in transactions"):
        desk.put("outside", P, b"a")
    desk.put("inside", P, b"b")
    desk.publish("inside", pointer=P)
    desk.publish("outside", b"c")
    desk.publish("either", b"d")
    desk.publish("either", b"e", pointer=P)
    assert [desk.payloads(name) for name in ("inside", "outside", "either")] == [[b"b"], [b"c"], [b"d", b"e"]]
    desk.service.update_topic(named("inside"), {"transactions": "optional"})
    desk.publish("inside", b"f")
    assert desk.service.topic(named("inside"))["transactions"] == "optional"


def test_given_a_batch_in_which_one_does_not_fit_when_written_then_the_others_are(desk: Desk) -> None:
    desk.create("outside", transactions="forbidden")
    answers = [
        desk.service.submit_publish(named("outside"), [b"%d" % n], pointer=P if n == 1 else None) for n in range(3)
    ]
    with pytest.raises(BadRequest):
        answers[1].result()
    assert [answers[n].result() for n in (0, 2)] == [None, None]
    assert desk.payloads("outside") == [b"0", b"2"]


def test_given_a_word_that_is_none_for_transactions_when_created_then_it_is_a_bad_request(desk: Desk) -> None:
    for word in ("", "Required", "yes"):
        with pytest.raises(BadRequest, match="required, forbidden or optional"):
            desk.create("other", transactions=word)


# --- what is stored, and then published with messages ----------------------------------------------------------------


def test_given_stored_payloads_when_messages_are_published_instead_then_it_is_refused_with_what_to_do(
    desk: Desk,
) -> None:
    desk.put("orders", P, b"a", b"b")
    with pytest.raises(BadRequest, match="Publish them first, with a publish that has no messages"):
        desk.publish("orders", b"c", pointer=P)
    desk.publish("orders", b"x", pointer=P + 1)
    desk.publish("orders", b"y")
    desk.publish("orders", pointer=P)
    desk.publish("orders", b"c", pointer=P)
    assert desk.payloads("orders") == [b"x", b"y", b"a", b"b", b"c"]
    desk.put("orders", P, b"d")
    with pytest.raises(BadRequest, match="are not published"):
        desk.publish("orders", b"e", pointer=P)


def test_given_stored_payloads_and_a_restart_when_messages_are_published_instead_then_it_is_refused_all_the_same(
    desk: Desk,
) -> None:
    desk.put("orders", P, b"a")
    desk.put("orders", P + 1, b"b")
    desk.publish("orders", pointer=P + 1)
    desk.publish("orders", b"c", pointer=P + 2)
    # Not a reference to what is stored, though it is of the same transaction.
    desk.create("others")
    desk.publish("others", b"d", pointer=P)
    desk.restart()
    for _ in range(2):
        with pytest.raises(BadRequest, match="Publish them first, with a publish that has no messages"):
            desk.publish("orders", b"x", pointer=P)
    desk.publish("others", b"e", pointer=P)
    desk.publish("orders", b"f", pointer=P + 1)
    desk.publish("orders", b"g", pointer=P + 2)
    desk.publish("orders", pointer=P)
    desk.publish("orders", b"h", pointer=P)
    assert desk.payloads("orders") == [b"b", b"c", b"f", b"g", b"a", b"h"]


def test_given_stored_payloads_of_another_server_when_it_leads_no_more_then_they_are_known(desk: Desk) -> None:
    desk.publish("orders", b"a", pointer=P)
    other = desk.serve()
    other.store(named("orders"), [b"b"], pointer=P)
    other.close()
    desk.service.forget()
    with pytest.raises(BadRequest, match="are not published"):
        desk.publish("orders", b"c", pointer=P)


def test_given_transactions_that_begin_after_the_server_when_published_then_the_store_is_not_asked_for_what_they_stored(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.publish("orders", b"a", pointer=P)
    desk.clock.advance(HOUR)
    new = pointer(desk.clock.now_ms())
    monkeypatch.setattr(type(desk.store.payload), "first", lambda *_: pytest.fail("it was asked"))
    desk.publish("orders", b"b", pointer=new + 1)
    monkeypatch.undo()
    # One that was forgotten is looked up.
    monkeypatch.setattr("tms_core.messaging.publish.open_topics._KNOWN_POINTERS", 2)
    for stored in range(3):
        desk.put("orders", new + 2 + stored, b"c")
    with pytest.raises(BadRequest, match="are not published"):
        desk.publish("orders", b"d", pointer=new + 2)


def test_given_a_ttl_with_the_publish_that_shows_stored_payloads_when_it_is_over_then_they_are_gone(desk: Desk) -> None:
    desk.put("orders", P, b"a", b"b")
    desk.publish("orders", pointer=P, ttl=60)
    desk.clock.advance(60_000)
    assert desk.payloads("orders") == [b"a", b"b"]
    desk.clock.advance(1)
    assert desk.payloads("orders") == []


# --- all of a transaction taken back ---------------------------------------------------------------------------------


def test_given_a_write_pointer_when_rolled_back_then_all_of_it_in_the_topic_is_gone_and_nothing_else(
    desk: Desk,
) -> None:
    desk.publish("orders", b"1", pointer=P)
    desk.publish("orders", b"2", pointer=P + 1)
    desk.publish("orders", b"3")
    desk.clock.advance(MINUTE)
    desk.publish("orders", b"4", b"5", pointer=P)
    desk.create("others")
    desk.publish("others", b"6", pointer=P)
    for _ in range(2):
        desk.service.rollback(named("orders"), P)
        assert desk.payloads("orders", transaction=reader()) == [b"2", b"3"]
        desk.restart()
    assert desk.payloads("others", transaction=reader()) == [b"6"]
    for pointer_ in (0, -P, 2**63):
        with pytest.raises(BadRequest, match="is no write pointer"):
            desk.service.rollback(named("orders"), pointer_)


@pytest.mark.parametrize(("ahead_ms", "warns"), [(5 * MINUTE, False), (5 * MINUTE + 1, True), (400 * DAY, True)])
def test_publish_after_a_message_dated_ahead_warns_once_and_names_the_way_out(
    desk: Desk, caplog: pytest.LogCaptureFixture, ahead_ms: int, warns: bool
) -> None:
    desk.clock.step(ahead_ms)
    desk.restart()
    desk.publish("orders", b"from a clock that was ahead")
    desk.clock.step(-ahead_ms)
    desk.restart()
    desk.publish("orders", b"a")
    desk.publish("orders", b"b")
    said = [record.getMessage() for record in caplog.records if "ahead of the clock" in record.getMessage()]
    assert len(said) == warns
    assert all("default:orders" in line and "tms topic delete" in line for line in said)
