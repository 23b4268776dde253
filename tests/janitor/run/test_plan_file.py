"""Plan files: contents, parsing, and the reasons for a rejection."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from janitor.report import DataTable, Entry, EntryKey
from janitor.rules.policy import Frontier, Hold, Rule
from janitor.run import plan_file as plan
from janitor.run.plan_file import PlanFile, WhatIf, checksum, describe_terms, suppose_ttls, with_supposed_ttl
from janitor.state.base import ClockAnchor, FrontierRecord
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import PlanLimits, Run, Terms, parse_or_none
from janitor.sweep.transactions import TransactionView
from tests.builders import LIFETIME, NOW_MS, prepared, topic
from tests.janitor.test_report import report
from tms_core.errors import ConfigurationError, PlanRefused
from tms_core.rowkey import LONG_MAX, Cutoff, generation_prefix, time_prefix
from tms_core.tables.base import KeyRange, Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.read_only import read_only
from tms_core.topic import TopicId, TopicMetadata

ORDERS, RETURNS, LOST = TopicId("default", "orders"), TopicId("default", "returns"), TopicId("default", "lost")
NOW = ClockAnchor(NOW_MS, 1000, "boot")
TERMS = Terms(3600, ("system:*",), LIFETIME, lifetime_known=True, snapshot_interval_seconds=60)
TTL_SECONDS = 60
DUE_MS = NOW_MS - 60_000
#: The cutoff of a held topic.
HELD_AT_MS = DUE_MS - 600_000
MARK = "ab" * 16

ORDERS_1 = generation_prefix(ORDERS.prefix, 1)
ORDERS_2 = generation_prefix(ORDERS.prefix, 2)
ORDERS_3 = generation_prefix(ORDERS.prefix, 3)
ORDERS_DUE = time_prefix(ORDERS.prefix, 3, DUE_MS)


@pytest.fixture
def store() -> MemoryStore:
    """Return a store with ``orders`` in generation 3 and ``returns`` in generation 1."""
    store = MemoryStore()
    topic(store, str(ORDERS), ttl_seconds=TTL_SECONDS, generation=3)
    topic(store, str(RETURNS), ttl_seconds=TTL_SECONDS)
    return store


def context_of(store: MemoryStore, label: Hold | None = None) -> Run:
    """Return the context of a run in which ``returns`` is held 10 minutes before its due cutoff."""
    records = {ORDERS: FrontierRecord(3, DUE_MS, NOW, NOW_MS), RETURNS: FrontierRecord(1, HELD_AT_MS, NOW, NOW_MS)}
    run = Run(store, TERMS, TransactionView(None, NOW_MS, LIFETIME.undecided_ms), records, prepared(store), label=label)
    run.load_topics()
    return run


def entry_key(
    topic_id: TopicId = ORDERS,
    generation: int = 3,
    table: DataTable = "message",
    rule: Rule = Rule.EXPIRED,
    held: Hold | None = None,
) -> EntryKey:
    return EntryKey(topic_id, generation, table, rule, held)


def write(path: Path, context: Run, *keys: EntryKey, what_if: bool = False, pointers: tuple[int, ...] = ()) -> Path:
    """Write a plan with one row for each key."""
    outcome = Outcome()
    for key in keys:
        outcome.entries.setdefault(key, Entry(*key)).add([b"key"], 10, 1, 2)
        if key.rule is Rule.INVALID_TRANSACTION:
            outcome.pointers.setdefault(key.topic, set()).update(pointers)
    plan_report = report(*outcome.entries.values(), mode="plan", id="1-ab", effective_now_ms=NOW_MS - 5)
    plan.save(path, plan.document(plan_report, outcome, context, store_id=MARK, digest="digest", what_if=what_if))
    return path


def load(path: Path) -> dict[str, Any]:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(document, dict)
    return document


def tamper(path: Path, *, seal: bool = False, **changes: Any) -> None:
    """Change a plan file; with ``seal``, write a correct checksum."""
    document = {**load(path), **changes}
    if seal:
        document["sha256"] = checksum(document)
    path.write_text(json.dumps(document), encoding="utf-8")


def test_plan_file_has_the_report_and_its_terms(store: MemoryStore, tmp_path: Path) -> None:
    document = load(write(tmp_path / "plan", context_of(store), entry_key()))
    assert (document["id"], document["mode"], document["effective_now_ms"]) == ("1-ab", "plan", NOW_MS - 5)
    assert document["totals"]["expired"] == 1
    assert document["store_id"] == MARK
    assert document["config_digest"] == "digest"
    assert document["what_if"] is False
    assert document["format"] == 1
    assert document["terms"] == {
        "hold_seconds": 3600,
        "protect": ["system:*"],
        "lifetime": [3_600_000, 3_600_000, 300_000],
        "lifetime_known": True,
        "snapshot_interval_seconds": 60,
        "consumer_hold_seconds": None,
    }
    [item] = document["topics"]
    assert (item["tms_namespace"], item["topic"], item["rows"]) == ("default", "orders", 1)
    assert item["metadata"] == {"generation": 3, "ttl_seconds": TTL_SECONDS}
    assert item["frontier"] == {
        "generation": 3,
        "cutoff_ms": DUE_MS,
        "hold": None,
        "processed": "0",
        "decided_ms": str(LONG_MAX),
    }
    assert item["ranges"] == [{"start": ORDERS_3.hex(), "stop": ORDERS_DUE.hex()}]
    assert item["pointers"] == []


def test_plan_file_of_a_topic_without_metadata_has_null_metadata(store: MemoryStore, tmp_path: Path) -> None:
    key = entry_key(LOST, 1, rule=Rule.INVALID_TRANSACTION)
    path = write(tmp_path / "plan", context_of(store), key, pointers=(9,))
    assert load(path)["topics"][0]["metadata"] is None
    assert load(path)["topics"][0]["frontier"] is None
    assert plan.read(path).topics == {}
    assert plan.read(path).limits.pointers == {LOST: {9}}


def test_plan_file_has_pointers_in_order_as_decimal_strings(store: MemoryStore, tmp_path: Path) -> None:
    keys = entry_key(), entry_key(rule=Rule.INVALID_TRANSACTION)
    expired, inverted = load(write(tmp_path / "plan", context_of(store), *keys, pointers=(2**63 - 1, 10, 9)))["topics"]
    assert inverted["pointers"] == ["9", "10", "9223372036854775807"]
    assert (expired["pointers"], inverted["ranges"]) == ([], [])


def read(path: Path, context: Run, *keys: EntryKey) -> PlanFile:
    return plan.read(write(path, context, *keys))


def applied(generation: int, cutoff_ms: int, hold: Hold | None = None) -> Frontier:
    return Frontier(NOW_MS - 5, Cutoff(cutoff_ms), Cutoff(cutoff_ms), generation, hold)


def test_plan_file_reads_back_as_written(store: MemoryStore, tmp_path: Path) -> None:
    context = context_of(store)
    keys = (entry_key(), entry_key(RETURNS, 1), entry_key(rule=Rule.INVALID_TRANSACTION))
    read_back = plan.read(write(tmp_path / "plan", context, *keys, pointers=(7, 5)))
    returns_1 = generation_prefix(RETURNS.prefix, 1)
    assert read_back == PlanFile(
        id="1-ab",
        store_id=MARK,
        effective_now_ms=NOW_MS - 5,
        terms=describe_terms(TERMS),
        topics={ORDERS: (3, TTL_SECONDS), RETURNS: (1, TTL_SECONDS)},
        limits=PlanLimits(
            {
                ("message", ORDERS): (KeyRange(ORDERS_3, ORDERS_DUE),),
                ("message", RETURNS): (KeyRange(returns_1, time_prefix(RETURNS.prefix, 1, HELD_AT_MS)),),
            },
            {ORDERS: frozenset({5, 7}), RETURNS: frozenset()},
            {ORDERS: applied(3, DUE_MS), RETURNS: applied(1, HELD_AT_MS, Hold.FRONTIER)},
        ),
    )


def test_plan_file_has_the_pointers_of_each_topic(store: MemoryStore, tmp_path: Path) -> None:
    keys = [entry_key(each, 1, rule=Rule.INVALID_TRANSACTION) for each in (ORDERS, RETURNS)]
    path = write(tmp_path / "plan", context_of(store), *keys, pointers=(5,))
    topics = load(path)["topics"]
    topics[1]["pointers"] = ["7"]
    tamper(path, seal=True, topics=topics)
    assert plan.read(path).limits.pointers == {ORDERS: {5}, RETURNS: {7}}


@pytest.mark.parametrize(
    ("key", "ranges"),
    [
        (entry_key(generation=1, rule=Rule.OLD_GENERATION), [KeyRange(ORDERS_1, ORDERS_2)]),
        (entry_key(generation=2, rule=Rule.OLD_GENERATION), [KeyRange(ORDERS_2, ORDERS_3)]),
        (entry_key(), [KeyRange(ORDERS_3, ORDERS_DUE)]),
        (entry_key(table="payload"), [KeyRange(ORDERS_3, generation_prefix(ORDERS.prefix, 4))]),
        (entry_key(table="payload", rule=Rule.PROCESSED), [KeyRange(ORDERS_3, generation_prefix(ORDERS.prefix, 4))]),
        (entry_key(generation=1, table="payload", rule=Rule.OLD_GENERATION), [KeyRange(ORDERS_1, ORDERS_2)]),
        (entry_key(LOST), []),
    ],
)
def test_plan_file_entry_allows_only_its_generation_and_rule(
    store: MemoryStore, tmp_path: Path, key: EntryKey, ranges: list[KeyRange]
) -> None:
    limits = read(tmp_path / "plan", context_of(store), key).limits
    assert list(limits.ranges(key.table, key.topic)) == ranges
    assert limits.ranges("payload" if key.table == "message" else "message", key.topic) == ()


def test_plan_file_ranges_of_a_topic_are_in_key_order(store: MemoryStore, tmp_path: Path) -> None:
    keys = entry_key(), entry_key(generation=1, rule=Rule.OLD_GENERATION)
    ranges = read(tmp_path / "plan", context_of(store), *keys).limits.ranges("message", ORDERS)
    assert ranges == (KeyRange(ORDERS_1, ORDERS_2), KeyRange(ORDERS_3, ORDERS_DUE))


@pytest.mark.parametrize("hold", [hold for hold in Hold if hold is not Hold.FIRST_CONTACT])
def test_plan_file_shows_held_rows_without_a_limit(store: MemoryStore, tmp_path: Path, hold: Hold) -> None:
    path = write(tmp_path / "plan", context_of(store), entry_key(RETURNS, 1, held=hold))
    [item] = load(path)["topics"]
    held_from, held_to = (time_prefix(RETURNS.prefix, 1, ms).hex() for ms in (HELD_AT_MS, DUE_MS))
    assert item["held"] == str(hold)
    assert item["ranges"] == [{"start": held_from, "stop": held_to}]
    assert plan.read(path).limits == PlanLimits({}, {})


def test_plan_file_of_payloads_covers_their_generation(store: MemoryStore, tmp_path: Path) -> None:
    keys = (entry_key(RETURNS, 1, "payload"), entry_key(RETURNS, 1, "payload", held=Hold.FRONTIER))
    path = write(tmp_path / "plan", context_of(store), *keys)
    first, second = load(path)["topics"]
    assert first["ranges"] == second["ranges"] != []
    assert len(plan.read(path).limits.ranges("payload", RETURNS)) == 1


def test_plan_file_before_adoption_may_delete_afterwards(store: MemoryStore, tmp_path: Path) -> None:
    context = context_of(store, Hold.FIRST_CONTACT)
    limits = read(tmp_path / "plan", context, entry_key(RETURNS, 1, held=Hold.FIRST_CONTACT)).limits
    returns_1 = generation_prefix(RETURNS.prefix, 1)
    assert limits.ranges("message", RETURNS) == (KeyRange(returns_1, time_prefix(RETURNS.prefix, 1, DUE_MS)),)


CHANGED, NO_PLAN = "was changed after it was made", "is not a plan file"


@pytest.mark.parametrize(
    ("sealed", "change", "says"),
    [
        (False, {"effective_now_ms": NOW_MS + 1}, CHANGED),
        (False, {"what_if": True}, CHANGED),
        (False, {"topics": []}, CHANGED),
        (False, {"extra": 1}, CHANGED),
        (False, {"sha256": "0" * 64}, CHANGED),
        (True, {"format": plan.FORMAT + 1}, NO_PLAN),
        (True, {"effective_now_ms": "soon"}, NO_PLAN),
        (True, {"effective_now_ms": 2**63}, NO_PLAN),
        (True, {"topics": 7}, NO_PLAN),
        (True, {"topics": ["x"]}, NO_PLAN),
        (True, {"topics": [{}]}, NO_PLAN),
        (True, {"topics": [{"held": None}]}, NO_PLAN),
        (
            True,
            {"topics": [{"held": None, "tms_namespace": "a", "topic": "b", "metadata": {}, "table": "message"}]},
            NO_PLAN,
        ),
    ],
)
def test_plan_file_that_was_changed_is_rejected(
    store: MemoryStore, tmp_path: Path, sealed: bool, change: dict[str, Any], says: str
) -> None:
    path = write(tmp_path / "plan", context_of(store), entry_key())
    tamper(path, seal=sealed, **change)
    with pytest.raises(ConfigurationError, match=says):
        plan.read(path)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize("text", [DEEP, f'{{"sha256": {DEEP}}}', '{"a": ' * 50_000 + "1" + "}" * 50_000])
def test_plan_file_with_deep_json_is_not_a_plan(tmp_path: Path, text: str) -> None:
    path = tmp_path / "plan"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=NO_PLAN):
        plan.read(path)


@pytest.mark.parametrize("value", [[], {}, None, 10**30, "x" * 10, "é", 1.5e300, float("inf"), {"a": {"b": []}}])
def test_plan_file_with_forged_values_is_rejected_or_harmless(store: MemoryStore, tmp_path: Path, value: Any) -> None:
    """Replace each value of a plan in turn and write a correct checksum."""
    path = write(tmp_path / "plan", context_of(store), entry_key())
    whole = load(path)
    for place in places(whole):
        path.write_text(json.dumps(whole))
        tamper(path, seal=True, **replace_at(whole, place, value))
        with suppress(ConfigurationError, PlanRefused):
            plan.read(path).check(MARK, TERMS, context_of(store))


def places(node: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, child in children:
        yield (*at, name)
        yield from places(child, (*at, name))


def replace_at(whole: dict[str, Any], place: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return a copy of a document with another value at a place."""
    copied: dict[str, Any] = json.loads(json.dumps(whole))
    node: Any = copied
    for name in place[:-1]:
        node = node[name]
    node[place[-1]] = value
    return copied


def test_plan_file_is_readable_by_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "plan"
    path.touch(0o644)
    for _ in range(2):
        plan.save(path, {})
        assert path.stat().st_mode & 0o777 == 0o600
        path.unlink()


def test_plan_file_may_be_a_device(capfd: pytest.CaptureFixture[str]) -> None:
    plan.save(Path("/dev/stdout"), {"a": 1})
    assert json.loads(capfd.readouterr().out) == {"a": 1}


def test_plan_file_without_an_end_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "_MAX_BYTES", 1000)
    with pytest.raises(ConfigurationError, match="/dev/zero has more than 1000 bytes"):
        plan.read(Path("/dev/zero"))


def test_plan_file_of_another_time_is_rejected(store: MemoryStore, tmp_path: Path) -> None:
    path = write(tmp_path / "plan", context_of(store), entry_key(), what_if=True)
    with pytest.raises(ConfigurationError, match="what-if") as refused:
        plan.read(path)
    assert "without --at" in refused.value.hint


@pytest.mark.parametrize("content", [b"", b"[]", b"null", b"7", b"{}", b"{", b"\xff\xfe\xfd", b'{"sha256":"x"}'])
def test_plan_file_with_other_or_changed_content_is_rejected(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "plan"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"is not a plan file|was changed"):
        plan.read(path)


def test_plan_file_that_does_not_exist_is_rejected_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="/missing: No such file"):
        plan.read(tmp_path / "missing")


@pytest.fixture
def made(store: MemoryStore, tmp_path: Path) -> PlanFile:
    """Return a plan that depends only on ``orders``."""
    return read(tmp_path / "plan", context_of(store), entry_key())


@pytest.mark.parametrize(
    ("terms", "names"),
    [
        (replace(TERMS, hold_seconds=0), "hold_seconds"),
        (replace(TERMS, protect=()), "protect"),
        (replace(TERMS, lifetime=LIFETIME._replace(allowance_ms=1)), "lifetime"),
        (replace(TERMS, lifetime_known=False), "lifetime_known"),
        (replace(TERMS, snapshot_interval_seconds=61), "snapshot_interval_seconds"),
        (replace(TERMS, consumer_hold_seconds=1), "consumer_hold_seconds"),
        (replace(TERMS, protect=(), hold_seconds=1), "hold_seconds, protect"),
    ],
)
def test_plan_by_other_terms_names_them(store: MemoryStore, made: PlanFile, terms: Terms, names: str) -> None:
    with pytest.raises(PlanRefused, match=rf": {names}\."):
        made.check(MARK, terms, context_of(store))


def test_plan_of_held_rows_alone_does_not_rest_on_the_topic(store: MemoryStore, tmp_path: Path) -> None:
    made = read(tmp_path / "plan", context_of(store), entry_key(RETURNS, 1, held=Hold.FRONTIER))
    topic(store, str(RETURNS), ttl_seconds=1)
    made.check(MARK, TERMS, context_of(store))


METADATA = TopicMetadata(TopicId("default", "orders"), 1, 60)


@pytest.mark.parametrize(
    ("text", "ttl_seconds"),
    [
        ("ttl=3d,topic=default:*", 259_200),
        ("topic=default:orders, ttl=1d12h", 129_600),
        ("ttl=90m", 5_400),
        ("ttl=1d,topic=other:*", 60),
        ("ttl=1d;ttl=2s,topic=default:orders", 2),
        ("", 60),
    ],
)
def test_what_if_ttl_applies_to_the_topics_it_names(text: str, ttl_seconds: int) -> None:
    assert with_supposed_ttl(METADATA, WhatIf.parse(text)).ttl_seconds == ttl_seconds


@pytest.mark.parametrize(
    "text", ["ttl=3", "ttl=d", "topic=default:*", "ttl=1d,ttl=2d", "ttl=1d,topics=a:b", "ttl=1d,topic=orders", "ttl=0s"]
)
def test_what_if_with_invalid_text_is_rejected(text: str) -> None:
    with pytest.raises(ConfigurationError):
        WhatIf.parse(text)


@pytest.mark.parametrize("wrap", [lambda store: store, read_only], ids=["a store", "a daemon's store"])
def test_supposed_changes_ttls_alone_and_writes_nothing(wrap: Callable[[MemoryStore], Store]) -> None:
    store = MemoryStore()
    topic(store, "default:orders", ttl_seconds=60)
    topic(store, "other:orders", ttl_seconds=60)
    store.metadata.compare_and_set(b"default:broken:", None, b"{")
    before = store.metadata.rows()
    then = suppose_ttls(wrap(store), WhatIf.parse("ttl=1d,topic=default:*"))
    ttls = {key: found.ttl_seconds for key, value in then.metadata.rows() if (found := parse_or_none(key, value))}
    assert ttls == {b"default:orders:": 86_400, b"other:orders:": 60}
    assert then.metadata.get(b"default:broken:") == b"{"
    assert then.metadata.get(b"default:orders:") == dict(then.metadata.rows())[b"default:orders:"]
    assert then.metadata.get(b"nothing:here:") is None
    assert store.metadata.rows() == before
    assert not hasattr(then.metadata, "compare_and_set")
