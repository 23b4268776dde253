"""``why``: the rule and time of a message's deletion, or the run that deleted it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.inspect import rows as inspect
from janitor.inspect.answer import FoundRow, Trace, Why
from janitor.inspect.why import why
from janitor.rules.policy import Hold, Reason, Rule, admit
from janitor.state.base import State
from janitor.state.records import ClockAnchor, FrontierRecord, LedgerEntry, RunRecord, Strikes
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Run, Terms
from janitor.sweep.transactions import TransactionView
from tests.builders import (
    DAY,
    HOUR,
    LIFETIME,
    MINUTE,
    NOW_MS,
    WRITES,
    Topic,
    pointer,
    prepared,
    topic,
    unknown_topic,
    visibility,
    watch,
)
from tests.janitor.state.entries import entry
from tms_core.rowkey import MessageId, MessageKey, PayloadKey, generation_prefix, time_prefix
from tms_core.tables.base import MESSAGES, MessageValue, Page, Store
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicMetadata
from tms_core.transaction.model import VisibilityState

TTL_SECONDS = 60
HOLD_SECONDS = 3600
HISTORY_DAYS = 30

#: A committed transaction, an open one and an invalid one.
COMMITTED, OPEN, INVALID = (pointer(NOW_MS - hours * HOUR) for hours in (3, 2, 1))
SNAPSHOT = visibility(NOW_MS, [INVALID], [OPEN])


@pytest.fixture
def orders(store: MemoryStore) -> Topic:
    return topic(store, "default:orders", ttl_seconds=TTL_SECONDS)


def clocks_at(now_ms: int) -> ClockAnchor:
    """Return a reading of correct clocks."""
    return ClockAnchor(now_ms, now_ms - NOW_MS + DAY, "boot")


def context(
    store: Store,
    *,
    now_ms: int = NOW_MS,
    records: Mapping[Topic, FrontierRecord] | None = None,
    snapshot: VisibilityState | None = SNAPSHOT,
    protect: tuple[str, ...] = (),
    paused: tuple[str, ...] = (),
    quarantined: tuple[Topic, ...] = (),
    label: Hold | None = None,
) -> Run:
    """Return the context of a full plan; it holds nothing unless ``records`` are given."""
    known = {topic.id: record for topic, record in (records or {}).items()}
    if records is None:
        for key, value in store.metadata.rows():
            if value.startswith(b"{"):
                parsed = TopicMetadata.parse(key, value)
                known[parsed.topic] = admit(parsed, clocks_at(now_ms))
    made = Run(
        store=store,
        ready=replace(prepared(store), now=clocks_at(now_ms), measured=clocks_at(now_ms)),
        terms=Terms(HOLD_SECONDS, protect, LIFETIME, True, 60),
        transactions=TransactionView(snapshot, now_ms, LIFETIME.undecided_ms),
        records=known,
        label=label,
        paused=paused,
        quarantined=[topic.id for topic in quarantined],
    )
    made.load_topics()
    return made


def ask(
    topic: Topic,
    publish_ms: int,
    sequence: int = 0,
    payload: tuple[int, int] = (0, 0),
    *,
    state: State | None = None,
    **given: Any,
) -> Why:
    """Return the answer of ``why`` for a message, in the context of ``given``; by default without a history."""
    if state is None:
        with SqliteState.in_memory() as empty:
            return ask(topic, publish_ms, sequence, payload, state=empty, **given)
    there: Run = given.pop("context", None) or context(topic.store, **given)
    message_id = MessageId(publish_ms, sequence, *payload)
    return why(topic.store, state, there, topic.id, message_id, there.now_ms, HISTORY_DAYS)


def only_row(answer: Why) -> FoundRow:
    assert answer.missing == ()
    [found] = answer.found
    return found


PUBLISHED_MS = NOW_MS - 5 * MINUTE
DUE_MS = PUBLISHED_MS + TTL_SECONDS * 1000 + 1


@pytest.mark.parametrize(("off_ms", "action"), [(-1, "keep"), (0, "delete"), (1, "delete")])
def test_why_of_a_message_names_the_millisecond_of_its_deletion(orders: Topic, off_ms: int, action: str) -> None:
    orders.plain(PUBLISHED_MS)
    fate = only_row(ask(orders, PUBLISHED_MS, now_ms=DUE_MS + off_ms)).fate
    assert (fate.action, fate.rule, fate.due_ms, fate.hold) == (action, Rule.EXPIRED, DUE_MS, None)
    assert fate.goes_ms == max(DUE_MS, DUE_MS + off_ms)
    assert fate.reason is (Reason.LIVE if action == "keep" else None)


def test_why_of_an_id_in_several_generations_has_a_fate_for_each_row(store: MemoryStore) -> None:
    orders = topic(store, "default:orders", ttl_seconds=TTL_SECONDS, generation=3)
    for generation in (1, 3, 4):
        store.message.put([(MessageKey(orders.id, generation, NOW_MS, 7).pack(), MessageValue(None, b""))])
    orders.at(2).plain(NOW_MS)
    found = ask(orders, NOW_MS, 7).found
    assert [(row.generation, row.fate.action, row.fate.rule, row.fate.reason) for row in found] == [
        (1, "delete", Rule.OLD_GENERATION, None),
        (3, "keep", Rule.EXPIRED, Reason.LIVE),
        (4, "keep", None, Reason.NEWER_GENERATION),
    ]
    assert (found[0].fate.due_ms, found[0].fate.goes_ms) == (None, NOW_MS)
    assert (found[2].fate.due_ms, found[2].fate.goes_ms) == (None, None)


def test_why_without_readable_metadata_says_it_stays(store: MemoryStore) -> None:
    for name, text in (("default:unknown", ""), ("default:broken", "[]")):
        odd = unknown_topic(store, name).plain(NOW_MS - DAY)
        if text:
            odd.write_metadata(text.encode())
        answer = ask(odd, NOW_MS - DAY)
        fate = only_row(answer).fate
        assert (fate.action, fate.reason, fate.rule, fate.goes_ms) == ("keep", Reason.UNKNOWN_TOPIC, None, None)
        assert bool(answer.problem) == bool(text)
        assert answer.generation is None


def test_why_of_an_unrecognized_key_is_keep(orders: Topic) -> None:
    orders.store.message.put([(MessageKey(orders.id, 1, -5, 0).pack(), MessageValue(None, b""))])
    orders.store.message.put([(MessageKey(orders.id, -1, 5, 0).pack(), MessageValue(None, b""))])
    for publish_ms in (-5, 5):
        fate = only_row(ask(orders, publish_ms)).fate
        assert (fate.action, fate.reason, fate.rule) == ("keep", Reason.UNRECOGNIZED, None)


def test_why_of_an_unreadable_value_finds_the_row(orders: Topic, monkeypatch: pytest.MonkeyPatch) -> None:
    orders.plain(PUBLISHED_MS)
    read = orders.store.message.read
    monkeypatch.setattr(
        orders.store.message, "read", lambda want, *rest: Page([], None) if want is MESSAGES else read(want, *rest)
    )
    found = only_row(ask(orders, PUBLISHED_MS))
    assert (found.transaction, found.fate.action) == ("unreadable", "delete")


@pytest.mark.parametrize(
    ("hold", "given"),
    [
        (Hold.PAUSED, {"paused": ("default:*",)}),
        (Hold.PROTECTED, {"protect": ("default:*",)}),
        (Hold.FIRST_CONTACT, {"label": Hold.FIRST_CONTACT}),
    ],
)
@pytest.mark.parametrize("due", [False, True])
def test_why_of_a_topic_on_hold_names_no_time(orders: Topic, hold: Hold, given: dict[str, Any], due: bool) -> None:
    orders.plain(PUBLISHED_MS)
    fate = only_row(ask(orders, PUBLISHED_MS, now_ms=DUE_MS - (not due), **given)).fate
    assert (fate.action, fate.rule, fate.due_ms) == ("keep", Rule.EXPIRED, DUE_MS)
    assert (fate.hold, fate.until_ms, fate.goes_ms) == (hold, None, None)
    assert fate.reason is (Reason.HELD if due else Reason.LIVE)


def test_why_of_a_paused_topic_names_the_matching_patterns(orders: Topic) -> None:
    orders.plain(PUBLISHED_MS)
    assert ask(orders, PUBLISHED_MS, paused=("*:*", "other:*", "default:orders")).resume == ("*:*", "default:orders")


def test_why_of_a_quarantined_topic_names_its_next_probe(orders: Topic, state: SqliteState) -> None:
    orders.plain(PUBLISHED_MS)
    state.save_strikes({orders.id: Strikes(3, NOW_MS, "broken", NOW_MS, NOW_MS + HOUR)})
    fate = only_row(ask(orders, PUBLISHED_MS, quarantined=(orders,), state=state)).fate
    assert (fate.hold, fate.until_ms, fate.goes_ms) == (Hold.QUARANTINED, NOW_MS + HOUR, None)


def check_deletion_time(orders: Topic, publish_ms: int, record: FrontierRecord, now_ms: int) -> int:
    """Return the deletion time of ``why``; check that a run deletes the row then, and not one millisecond earlier."""
    first = context(orders.store, now_ms=now_ms, records={orders: record})
    goes_ms = only_row(ask(orders, publish_ms, context=first)).fate.goes_ms
    assert goes_ms is not None
    records = {orders: first.topics[orders.id.prefix].record}
    for moment_ms, action in ((goes_ms - 1, "keep"), (goes_ms, "delete")):
        if moment_ms > now_ms:
            later = only_row(ask(orders, publish_ms, now_ms=moment_ms, records=records)).fate
            assert later.action == action
            assert later.goes_ms == goes_ms
    return goes_ms


def test_why_after_a_shorter_ttl_names_the_end_of_the_hold(orders: Topic) -> None:
    record = FrontierRecord(1, NOW_MS - DAY, clocks_at(NOW_MS), NOW_MS - DAY)
    orders.plain(PUBLISHED_MS)
    fate = only_row(ask(orders, PUBLISHED_MS, records={orders: record})).fate
    assert (fate.action, fate.reason, fate.hold) == ("keep", Reason.HELD, Hold.FRONTIER)
    assert fate.until_ms == fate.goes_ms == NOW_MS + HOLD_SECONDS * 1000
    assert check_deletion_time(orders, PUBLISHED_MS, record, NOW_MS) == NOW_MS + HOLD_SECONDS * 1000


def test_why_of_a_row_not_due_before_the_hold_ends_shows_no_hold(orders: Topic) -> None:
    future_ms = NOW_MS + 2 * HOUR
    orders.plain(future_ms)
    record = FrontierRecord(1, NOW_MS - DAY, clocks_at(NOW_MS), NOW_MS - DAY)
    fate = only_row(ask(orders, future_ms, records={orders: record})).fate
    assert (fate.hold, fate.until_ms) == (None, None)
    assert fate.goes_ms == fate.due_ms == future_ms + TTL_SECONDS * 1000 + 1


@given(
    ttl_seconds=st.integers(1, 7200),
    cutoff_age_ms=st.integers(0, 3 * HOUR),
    age_ms=st.integers(0, 3 * HOUR),
    generation=st.sampled_from([1, 2, -1]),
)
def test_why_names_the_time_of_deletion(ttl_seconds: int, cutoff_age_ms: int, age_ms: int, generation: int) -> None:
    store = MemoryStore()
    orders = topic(store, "default:orders", ttl_seconds=ttl_seconds, generation=generation).at(1).plain(NOW_MS - age_ms)
    record = FrontierRecord(1, NOW_MS - cutoff_age_ms, clocks_at(NOW_MS), NOW_MS - DAY)
    check_deletion_time(orders, NOW_MS - age_ms, record, NOW_MS)


def test_why_names_transaction_states_as_inspect_does(orders: Topic) -> None:
    for number in (COMMITTED, OPEN, INVALID, -COMMITTED):
        orders.tx(number, NOW_MS)
    orders.plain(NOW_MS)
    for snapshot in (SNAPSHOT, None):
        shown = inspect.messages(orders.store, snapshot, (), 99, lambda _: None).rows
        answers = [only_row(ask(orders, NOW_MS, row["sequence"], snapshot=snapshot)) for row in shown]
        assert [row["transaction"] or "" for row in shown] == [found.transaction for found in answers]
        assert [row["pointer"] for row in shown] == [found.to_json()["pointer"] for found in answers]


def test_why_of_an_invalid_row_inverts_if_live_and_deletes_if_due(orders: Topic) -> None:
    orders.tx(INVALID, NOW_MS, PUBLISHED_MS)
    live, due = only_row(ask(orders, NOW_MS)).fate, only_row(ask(orders, PUBLISHED_MS, 1)).fate
    assert (live.action, live.invert, live.rule) == ("invert", True, Rule.EXPIRED)
    assert (due.action, due.invert) == ("delete", True)


@pytest.mark.parametrize(
    ("given", "action", "hold"),
    [
        ({"paused": ("*:*",)}, "keep", Hold.PAUSED),
        ({"label": Hold.FIRST_CONTACT}, "keep", Hold.FIRST_CONTACT),
        ({"protect": ("*:*",)}, "invert", Hold.PROTECTED),
    ],
)
def test_why_of_a_held_invalid_row_inverts(orders: Topic, given: dict[str, Any], action: str, hold: Hold) -> None:
    orders.tx(INVALID, NOW_MS)
    fate = only_row(ask(orders, NOW_MS, **given)).fate
    assert (fate.action, fate.invert, fate.hold) == (action, True, hold)
    lost = unknown_topic(orders.store, "default:lost").tx(INVALID, NOW_MS)
    fate = only_row(ask(lost, NOW_MS, **given)).fate
    assert (fate.action, fate.hold) == ((action, None) if action == "invert" else (action, hold))


def test_why_of_a_negative_pointer_names_the_runs_that_inverted(orders: Topic, state: SqliteState) -> None:
    orders.tx(-INVALID, NOW_MS).tx(COMMITTED, NOW_MS)
    key = MessageKey(orders.id, 1, NOW_MS, 0).pack()
    inverted = entry(rule="invalid_transaction", start=key, stop=key + b"\xff", oldest_ms=NOW_MS, newest_ms=NOW_MS)
    state.add_ledger([inverted, entry(start=key, stop=key + b"\xff", oldest_ms=NOW_MS, newest_ms=NOW_MS)])
    [trace] = only_row(ask(orders, NOW_MS, 0, state=state)).inverted
    assert trace == Trace.of(inverted, certain=False)
    assert only_row(ask(orders, NOW_MS, 1, state=state)).inverted == ()


STORED_MS = NOW_MS - 90_000


def payload_of(answer: Why) -> FoundRow:
    [message, payload] = answer.found
    assert (message.table, message.refers, payload.table) == ("message", True, "payload")
    return payload


def store_payload(orders: Topic, write_pointer: int, publish_ms: int) -> tuple[int, int, tuple[int, int]]:
    orders.stored(write_pointer, STORED_MS).ref(write_pointer, publish_ms)
    return publish_ms, 1, (STORED_MS, 0)


def test_why_of_an_old_payload_of_a_live_message_is_keep(orders: Topic) -> None:
    answer = ask(orders, *store_payload(orders, COMMITTED, NOW_MS))
    fate = payload_of(answer).fate
    assert (fate.action, fate.reason, fate.rule) == ("keep", Reason.REFERENCED, Rule.EXPIRED)
    assert fate.due_ms == STORED_MS + TTL_SECONDS * 1000 + 1
    assert fate.goes_ms == NOW_MS + TTL_SECONDS * 1000 + 1
    assert payload_of(answer).pointer == COMMITTED
    assert payload_of(answer).transaction == "committed"


def test_why_of_the_payload_of_an_expired_message_is_delete(orders: Topic) -> None:
    stored_row = store_payload(orders, COMMITTED, STORED_MS + 1)
    assert [row.fate.action for row in ask(orders, *stored_row).found] == ["delete", "delete"]
    unadopted = ask(orders, *stored_row, label=Hold.FIRST_CONTACT).found
    assert [(row.fate.reason, row.fate.hold) for row in unadopted] == [(Reason.HELD, Hold.FIRST_CONTACT)] * 2


def test_why_finds_the_payload_of_a_negated_reference_and_of_no_other_message(orders: Topic) -> None:
    orders.stored(COMMITTED, STORED_MS).ref(-COMMITTED, NOW_MS).tx(COMMITTED, NOW_MS)
    assert payload_of(ask(orders, NOW_MS, 1, (STORED_MS, 0))).pointer == COMMITTED
    assert not only_row(ask(orders, NOW_MS, 2, (STORED_MS, 0))).refers


def test_why_of_a_payload_with_another_reference_is_keep(orders: Topic) -> None:
    stored_row = store_payload(orders, COMMITTED, STORED_MS + 1)
    orders.ref(COMMITTED, NOW_MS)
    message, payload = ask(orders, *stored_row).found
    assert (message.fate.action, payload.fate.reason) == ("delete", Reason.REFERENCED)
    assert payload.fate.goes_ms is None


def test_why_of_a_payload_of_an_open_transaction_is_undecided(orders: Topic) -> None:
    stored_row = store_payload(orders, OPEN, STORED_MS + 1)
    fate = payload_of(ask(orders, *stored_row)).fate
    assert (fate.reason, fate.goes_ms) == (Reason.UNDECIDED, None)


def test_why_of_a_payload_without_a_snapshot_waits_for_its_lifetime(orders: Topic) -> None:
    young = pointer(NOW_MS - MINUTE)
    stored_row = store_payload(orders, young, STORED_MS + 1)
    over_ms = NOW_MS - MINUTE + LIFETIME.undecided_ms
    for now_ms, action in ((over_ms - 1, "keep"), (over_ms, "delete")):
        fate = payload_of(ask(orders, *stored_row, snapshot=None, now_ms=now_ms)).fate
        assert (fate.action, fate.goes_ms) == (action, over_ms)


def test_why_of_a_lost_payload_names_runs_that_may_have_it(orders: Topic, state: SqliteState) -> None:
    orders.ref(COMMITTED, NOW_MS)
    wanted = PayloadKey(orders.id, 1, COMMITTED, STORED_MS, 4)
    wide = entry(
        table="payload",
        start=generation_prefix(orders.id.prefix, 1),
        stop=generation_prefix(orders.id.prefix, 2),
        oldest_ms=STORED_MS - 1,
        newest_ms=STORED_MS + 1,
    )
    younger = replace(wide, oldest_ms=STORED_MS + 1, newest_ms=STORED_MS + 2)
    lost = replace(wide, at_ms=wide.at_ms + 1, rows=None, oldest_ms=None, newest_ms=None, cutoff_ms=STORED_MS + 1)
    not_due = replace(lost, cutoff_ms=STORED_MS)
    state.add_ledger([wide, younger, replace(wide, table="message"), lost, not_due])
    [missing] = ask(orders, NOW_MS, 0, (STORED_MS, 4), state=state).missing
    assert (missing.table, missing.key) == ("payload", wanted.pack())
    assert list(missing.taken) == [Trace.of(lost, certain=False), Trace.of(wide, certain=False)]


def range_entry(orders: Topic, generation: int, start_ms: int, stop_ms: int, **changes: Any) -> LedgerEntry:
    """Return a ledger entry about message rows of a time range without its end."""
    prefix = orders.id.prefix
    return entry(
        generation=generation,
        start=time_prefix(prefix, generation, start_ms),
        stop=time_prefix(prefix, generation, stop_ms),
        oldest_ms=start_ms,
        newest_ms=stop_ms - 1,
        **changes,
    )


@pytest.mark.parametrize(
    ("publish_ms", "taken"),
    [(PUBLISHED_MS - 1, False), (PUBLISHED_MS, True), (PUBLISHED_MS + 9, True), (PUBLISHED_MS + 10, False)],
)
def test_why_of_a_range_names_its_run(orders: Topic, state: SqliteState, publish_ms: int, taken: bool) -> None:
    state.add_ledger([range_entry(orders, 1, PUBLISHED_MS, PUBLISHED_MS + 10)])
    [missing] = ask(orders, publish_ms, 0, state=state).missing
    assert (missing.table, missing.key) == ("message", None)
    assert [trace.certain for trace in missing.taken] == [True] * taken


def test_why_of_several_generations_names_all_newest_first(orders: Topic, state: SqliteState) -> None:
    stop_ms = PUBLISHED_MS + 10
    first = range_entry(orders, 1, PUBLISHED_MS, stop_ms, at_ms=1, rule="old_generation")
    second = range_entry(orders, 2, PUBLISHED_MS, stop_ms, at_ms=3)
    died = range_entry(orders, 1, PUBLISHED_MS, stop_ms, at_ms=2)
    died = replace(died, rows=None, oldest_ms=None, newest_ms=None, cutoff_ms=stop_ms)
    negated = range_entry(orders, 1, PUBLISHED_MS, stop_ms, at_ms=4, rule="invalid_transaction")
    elsewhere = replace(first, topic=unknown_topic(orders.store, "default:other").id)
    state.add_ledger([first, second, died, negated, elsewhere])
    [missing] = ask(orders, PUBLISHED_MS, state=state).missing
    expected = [(second, True), (died, False), (first, True)]
    assert list(missing.taken) == [Trace.of(entry, certain=certain) for entry, certain in expected]


def test_why_during_a_run_counts_its_announcements(orders: Topic, state: SqliteState) -> None:
    announced = range_entry(orders, 5, PUBLISHED_MS, PUBLISHED_MS + 10, run_id="on")
    announced = replace(announced, rows=None, oldest_ms=None, newest_ms=None, cutoff_ms=NOW_MS)
    state.intend(announced)
    state.intend(replace(announced, run_id="over"))
    assert ask(orders, PUBLISHED_MS, state=state).missing[0].taken == ()
    state.begin_run(RunRecord("on", "apply", 1))
    state.begin_run(RunRecord("over", "apply", 1))
    state.finish_run(RunRecord("over", "apply", 1, 2, "done"))
    [trace] = ask(orders, PUBLISHED_MS, state=state).missing[0].taken
    assert trace == Trace.of(announced, certain=False)


def test_why_names_the_time_since_when_the_ledger_is_complete(orders: Topic, state: SqliteState) -> None:
    assert ask(orders, 1, state=state).ledger_reach.complete_since_ms is None
    state.save_created_ms(NOW_MS - 40 * DAY)
    reach = ask(orders, 1, state=state).ledger_reach
    assert (reach.created_ms, reach.complete_since_ms) == (NOW_MS - 40 * DAY, NOW_MS - HISTORY_DAYS * DAY)
    assert ask(orders, 1, now_ms=NOW_MS - 30 * DAY, state=state).ledger_reach.complete_since_ms == NOW_MS - 40 * DAY
    state.add_ledger(entry(at_ms=NOW_MS - days * DAY) for days in (3, 2, 1))
    assert ask(orders, 1, state=state).ledger_reach.complete_since_ms == NOW_MS - HISTORY_DAYS * DAY
    state.prune_ledger(0, keep=2)
    assert ask(orders, 1, state=state).ledger_reach.complete_since_ms == NOW_MS - 2 * DAY


def test_why_is_json_with_text_ids_and_writes_nothing(orders: Topic, state: SqliteState) -> None:
    stored_row = store_payload(orders, COMMITTED, NOW_MS)
    state.add_ledger([range_entry(orders, 1, 5, 9)])
    there = context(orders.store)
    writes: list[str] = []
    watch(orders.store, lambda call: writes.append(call.name) if call.name in WRITES else None)
    before = list(state.driver.connection.iterdump())
    answers = [ask(orders, *stored_row, context=there, state=state), ask(orders, 7, context=there, state=state)]
    assert (writes, list(state.driver.connection.iterdump())) == ([], before)
    present, gone = (json.loads(json.dumps(answer.to_json())) for answer in answers)
    assert (present["found"][0]["pointer"], present["found"][0]["action"]) == (str(COMMITTED), "keep")
    assert present["message_id"] == str(MessageId(NOW_MS, 1, STORED_MS, 0))
    assert (gone["found"], gone["missing"][0]["taken"][0]["certain"]) == ([], True)
