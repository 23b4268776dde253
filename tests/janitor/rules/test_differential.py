"""The sweep by ranges has the same verdict as ``decide`` for every row.

The engine sweeps random stores, page by page and range by range, and the rules judge each row. The stores have extreme
values: names that are prefixes of one another, generations and times at the ends of their types, truncated or too long
keys, a clock in 1970, pointers of no transaction, and values with tags that CDAP never writes and reads as references.
Two verdicts are correct in one case only: a message after the window of its transaction may keep its payload or not.
"""

from __future__ import annotations

import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.report import Report
from janitor.rules.policy import (
    Delete,
    Frontier,
    Hold,
    Invert,
    Keep,
    Reason,
    Row,
    Rule,
    Verdict,
    advance,
    decide,
    freeze,
)
from janitor.rules.ranges import Lifetime, message_spans, search_range, timeless_range
from janitor.state.base import ClockAnchor, FrontierRecord, StoreRecord
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Terms
from janitor.sweep.transactions import TransactionView
from tests.builders import FileEngine, every
from tests.salted import SaltedStore
from tms_core.clock import ManualClock
from tms_core.consumers.positions import Position, Positions
from tms_core.errors import MetadataError
from tms_core.rowkey import Cutoff, MessageId, MessageKey, PayloadKey, generation_prefix, java_abs
from tms_core.tables.base import MESSAGES, PAYLOADS, MessageValue, Page, Projection, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryMessageTable, MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId, TopicMetadata, encode_properties
from tms_core.transaction.model import InProgress, InProgressType, VisibilityState
from tms_core.transaction.source.source import Loaded

T = TypeVar("T")

LIFETIME = Lifetime(max_ms=90_000_000, grace_ms=86_400_000, allowance_ms=300_000)
TERMS = Terms(hold_seconds=3600, protect=("b:*",), lifetime=LIFETIME, lifetime_known=True, snapshot_interval_seconds=60)

NAMES = [TopicId("a", "t1"), TopicId("a", "t10"), TopicId("a", "t1-x"), TopicId("a", "t"), TopicId("b", "t1")]
UNKNOWN = TopicId("a", "t1_")
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)
LONG_MAX, LONG_MIN = 2**63 - 1, -(2**63)

NOWS = [0, 1, 3_600_000, 86_400_000, 1_700_000_000_000, 2_147_483_647_000, 2**53]
TTLS = ["1", "60", "3600", "604800", str(INT_MAX)]
BAD_TTLS = ["0", "-1", "2147483648", "1.5", ""]
GENERATIONS = [1, 2, 3, 5, INT_MAX]
DATA_GENERATIONS = [1, 1, 2, 2, 3, 3, 4, 5, 6, 0, -1, -3, INT_MAX, INT_MIN]


@dataclass
class Scene:
    """A random store, its transactions, frontiers and consumers."""

    now_ms: int
    metadata: dict[bytes, bytes] = field(default_factory=dict)
    messages: dict[bytes, MessageValue] = field(default_factory=dict)
    #: Values in LevelDB that CDAP would encode differently, by the keys of their messages.
    odd: dict[bytes, bytes] = field(default_factory=dict)
    payloads: dict[bytes, bytes] = field(default_factory=dict)
    snapshot: VisibilityState | None = None
    records: dict[TopicId, FrontierRecord] = field(default_factory=dict)
    #: The positions of consumers.
    bases: dict[TopicId, list[MessageId]] = field(default_factory=dict)

    @property
    def now(self) -> ClockAnchor:
        return ClockAnchor(self.now_ms, 0, "manual")

    def fill(self, store: Store) -> None:
        for key, value in self.metadata.items():
            store.metadata.compare_and_set(key, None, value)
        store.message.put(list(self.messages.items()))
        store.payload.put(list(self.payloads.items()))
        if isinstance(store, LevelDBStore) and self.odd:
            store._databases["message"].put(self.odd.items())

    def side(self) -> MemorySide:
        side = MemorySide()
        for topic, bases in self.bases.items():
            parsed = TopicMetadata.parse(topic.prefix, self.metadata[topic.prefix])
            for number, base in enumerate(bases):
                Positions(side).put(parsed, Position(f"c{number}", base, 0, 0))
        return side

    def processed(self, topic: TopicMetadata, frontier: Frontier) -> int:
        """Return the first position that rule L7 keeps, without claims."""
        bases = self.bases.get(topic.topic, [])
        if self.snapshot is None or not bases or topic.deleted or topic.properties.get("retention") != "consumed":
            return 0
        start_times = [entry.write_pointer // 10**6 for entry in self.snapshot.in_progress]
        oldest_ms = max(0, min(self.now_ms - 3_600_000, self.snapshot.timestamp_ms, *start_times))
        next_positions = [
            (one.publish_ms << 16) + one.sequence + (not one.payload_ms and one > (0, 0, 0, 0)) for one in bases
        ]
        found = min(oldest_ms << 16, *next_positions)
        return found if found > frontier.due.ms << 16 else 0

    def topic(self, topic: TopicId) -> tuple[TopicMetadata, Frontier] | tuple[None, None]:
        try:
            parsed = TopicMetadata.parse(topic.prefix, self.metadata.get(topic.prefix, b""))
        except MetadataError:
            return None, None
        record = self.records.get(topic)
        if TERMS.protects(topic):
            freeze(record, self.now)
            frontier = Frontier.closed(self.now_ms, parsed, Hold.PROTECTED)
        else:
            frontier, _ = advance(record, parsed, self.now, hold_seconds=3600, allowance_ms=LIFETIME.allowance_ms)
        if parsed.properties.get("hold") == "transaction" and not parsed.deleted:
            # Without an earlier run, all transactions that started before their maximum lifetime are decided.
            decided_ms = max(0, self.now_ms - LIFETIME.max_ms - LIFETIME.allowance_ms - 300_000)
            frontier = replace(frontier, decided_ms=decided_ms)
            if decided_ms < frontier.cutoff.ms:
                frontier = replace(frontier, cutoff=Cutoff(decided_ms), hold=frontier.hold or Hold.TRANSACTION)
        return parsed, replace(frontier, processed=self.processed(parsed, frontier))


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    now_ms = draw(st.sampled_from(NOWS))
    scene = Scene(now_ms)
    ttls = {}
    for name in NAMES:
        ttl = draw(st.sampled_from(TTLS * 3 + BAD_TTLS))
        generation = draw(st.sampled_from(GENERATIONS)) * draw(st.sampled_from([1, 1, -1]))
        if draw(st.integers(0, 9)) == 0:
            generation = draw(st.sampled_from([0, INT_MIN]))
        retention = draw(st.sampled_from([{}, {"retention": "consumed"}]))
        retention |= draw(st.sampled_from([{}, {}, {"hold": "transaction"}]))
        scene.metadata[name.prefix] = encode_properties({"generation": str(generation), "ttl": ttl, **retention})
        ttls[name] = int(ttl) if ttl in TTLS else 60
        if ttl in TTLS and generation not in (0, INT_MIN):
            scene.bases[name] = draw(st.lists(bases(now_ms, ttls[name]), max_size=2))
        if draw(st.booleans()):
            scene.records[name] = draw(records(scene, generation, ttls[name]))
    ttls[UNKNOWN] = 60
    pointers = st.sampled_from(_pointers(now_ms, list(ttls.values())))
    scene.snapshot = draw(st.none() | snapshots(now_ms, pointers))
    for _ in range(draw(st.integers(0, 40))):
        draw(rows(scene, ttls, pointers))
    return scene


@st.composite
def records(draw: st.DrawFn, scene: Scene, generation: int, ttl_seconds: int) -> FrontierRecord:
    """Draw a frontier of an earlier run: at the due cutoff, before it, after it, or in another generation."""
    law_ms = max(0, scene.now_ms - ttl_seconds * 1000)
    cutoff_ms = max(0, law_ms - draw(st.sampled_from([0, 0, 1000, 299_999, 300_001, 10**9, -1000])))
    applied = draw(st.sampled_from([generation, generation, abs(generation), 0, 1, 2, -2, -1]))
    approved = draw(st.sampled_from([None, None, (generation, ttl_seconds, False)]))
    consumed = draw(st.sampled_from([True, True, False]))
    return FrontierRecord(max(applied, -INT_MAX), cutoff_ms, scene.now, scene.now_ms, None, approved, consumed)


@st.composite
def bases(draw: st.DrawFn, now_ms: int, ttl_seconds: int) -> MessageId:
    """Draw a consumer's position: at a possible row, inside its payloads, or before all rows."""
    ms = draw(st.sampled_from([ms for ms in _times(now_ms, ttl_seconds) if ms >= 0]))
    return MessageId(ms, draw(st.sampled_from([0, 1, 32768, 65535])), draw(st.sampled_from([0, 0, 1])), 0)


@st.composite
def snapshots(draw: st.DrawFn, now_ms: int, pointers: st.SearchStrategy[int]) -> VisibilityState:
    issued = pointers.filter(lambda pointer: pointer > 0)
    invalid = draw(st.lists(issued, max_size=4))
    open_pointers = draw(st.lists(issued, max_size=2, unique=True))
    in_progress = tuple(InProgress(p, now_ms, p - 1, InProgressType.SHORT) for p in open_pointers if p not in invalid)
    drawn = draw(st.sampled_from([min(now_ms * 10**6, LONG_MAX), LONG_MAX, 0]))
    write_pointer = max(drawn, *invalid, *open_pointers, 0)
    return VisibilityState(now_ms, write_pointer, write_pointer, array("q", invalid), in_progress)


@st.composite
def processed_scenes(draw: st.DrawFn) -> Scene:
    """Draw a topic without a hold, and consumers at some of its rows."""
    scene, name = Scene(1_700_000_000_000), NAMES[0]
    scene.metadata[name.prefix] = encode_properties({"generation": "1", "ttl": "604800", "retention": "consumed"})
    scene.records[name] = FrontierRecord(1, scene.now_ms - 604_800_000, scene.now, scene.now_ms, consumed=True)
    pointers = st.sampled_from(_pointers(scene.now_ms, [3600, 604_800]))
    scene.snapshot = draw(snapshots(scene.now_ms, pointers))
    for _ in range(draw(st.integers(5, 25))):
        draw(rows(scene, {name: 604_800}, pointers, generations=[1]))
    there = [key for key in map(MessageKey.parse, scene.messages) if key is not None and key.publish_ms >= 0]
    ends = [MessageId(key.publish_ms, key.sequence, inside) for key in there for inside in (0, 1)]
    scene.bases[name] = draw(st.lists(st.sampled_from(ends or [MessageId(scene.now_ms, 0)]), min_size=1, max_size=2))
    return scene


@st.composite
def rows(
    draw: st.DrawFn,
    scene: Scene,
    ttls: dict[TopicId, int],
    pointers: st.SearchStrategy[int],
    generations: list[int] = DATA_GENERATIONS,
) -> None:
    topic = draw(st.sampled_from(sorted(ttls)))
    generation = draw(st.sampled_from(generations))
    times = st.sampled_from(_times(scene.now_ms, ttls[topic]))
    sequence = draw(st.sampled_from([0, 1, 32768, 65535]))
    if draw(st.booleans()):
        key = MessageKey(topic, generation, draw(times), sequence).pack()
        key = draw(mangled(key))
        scene.messages[key] = value = draw(
            st.sampled_from([MessageValue(None, b"x"), MessageValue(None, b"")])
            | st.builds(MessageValue, pointers, st.sampled_from([b"x", b"", None]))
        )
        scene.odd.pop(key, None)
        if value.pointer is not None and value.payload is None:
            scene.odd[key] = draw(odd_references(value.pointer))
    else:
        key = PayloadKey(topic, generation, draw(pointers), draw(times), sequence).pack()
        scene.payloads[draw(mangled(key))] = b"y"


@st.composite
def odd_references(draw: st.DrawFn, pointer: int) -> bytes:
    """Draw a reference that CDAP reads but never writes."""
    whole = pointer.to_bytes(8, "big", signed=True)
    pointer_bytes = draw(st.sampled_from([whole, whole + b"more", whole.rstrip(b"\x00")]))
    return bytes([draw(st.sampled_from([2, 3, 0x7F, 0x80, 0xFF]))]) + pointer_bytes


@st.composite
def mangled(draw: st.DrawFn, key: bytes) -> bytes:
    """Draw the key, or sometimes a similar invalid key."""
    kind = draw(st.integers(0, 15))
    if kind == 0:
        return key[: draw(st.integers(1, len(key) - 1))]
    if kind == 1:
        return key + draw(st.sampled_from([b"\x00", b"\xff", b"ab:"]))
    if kind == 2:
        return draw(st.sampled_from([b"x", b":", b"::" + key, b"a." + key, b"\xff" * 30, key[1:]]))
    return key


def _times(now_ms: int, ttl_seconds: int) -> list[int]:
    cutoff = now_ms - ttl_seconds * 1000
    near = [cutoff - 1, cutoff, cutoff + 1, cutoff - 300_001, cutoff + 1000, now_ms, now_ms + 1, 0, 1]
    near += [now_ms - 3_600_000 + offset for offset in (-1000, -1, 0, 1)]
    return [max(LONG_MIN, min(LONG_MAX, time)) for time in [*near, *near, -1, LONG_MAX, LONG_MIN]]


def _pointers(now_ms: int, ttls: list[int]) -> list[int]:
    cutoffs = [max(0, now_ms - ttl * 1000) for ttl in ttls]
    usual = [(time + offset) * 10**6 + 7 for time in [now_ms, *cutoffs] for offset in (-1000, 0, 1000)]
    odd = [0, 1, -1, -5, LONG_MAX, LONG_MIN, -(now_ms * 10**6) - 7]
    return [pointer for pointer in [*usual, *odd] if LONG_MIN <= pointer <= LONG_MAX]


class FixedSource:
    """A source that always has the same snapshot."""

    def __init__(self, snapshot: VisibilityState) -> None:
        self._snapshot = snapshot

    def latest(self) -> Loaded:
        return Loaded(self._snapshot, "fixed")


def judge(scene: Scene, *, tells: bool = True) -> tuple[dict[bytes, Verdict], dict[bytes, Verdict], set[bytes]]:
    """Judge each row by the rules; return the verdicts by table, and the payloads with two correct verdicts.

    Args:
        tells: whether the store's cells have the flag of references; otherwise every row may be a reference.
    """
    view = TransactionView(scene.snapshot, scene.now_ms, LIFETIME.undecided_ms)
    messages: dict[bytes, Verdict] = {}
    references: dict[bytes, int] = {}
    for key, value in scene.messages.items():
        parsed = MessageKey.parse(key)
        topic, frontier = scene.topic(parsed.topic) if parsed else (None, None)
        messages[key] = decide(Row("message", parsed, value.pointer), topic, frontier, view, False, None)
        refers = value.payload is None or not tells
        if refers and value.pointer is not None and not isinstance(messages[key], Delete):
            # A row with a too long key stays, too, and a reader may read it as a message.
            references[key] = java_abs(value.pointer)
    payloads: dict[bytes, Verdict] = {}
    either = set()
    for key in scene.payloads:
        row = PayloadKey.parse(key)
        topic, frontier = scene.topic(row.topic) if row else (None, None)
        found = []
        if row:
            prefix = generation_prefix(row.topic.prefix, row.generation)
            found = [ref for ref, to in references.items() if to == row.write_pointer and ref.startswith(prefix)]
        if found and row and frontier:
            since_ms, processed = frontier.cutoff.ms, frontier.processed_now
            window = search_range(row.topic, row.generation, since_ms, [row], LIFETIME, processed)
            windows = (window, timeless_range(row.topic, row.generation))
            inside = [ref for ref in found if any(window.holds(ref) for window in windows)]
            without = decide(Row("payload", row), topic, frontier, view, False, None)
            if not inside and isinstance(without, Delete):
                either.add(key)
            found = inside
        payloads[key] = decide(Row("payload", row), topic, frontier, view, bool(found), None)
    return messages, payloads, either


class SilentCells(MemoryMessageTable):
    """Messages in memory whose cells have no flag of references, like HBase's."""

    def read(self, want: Projection[T], start: bytes, stop: bytes | None, limit: int) -> Page[T]:
        page: Page[Any] = super().read(want, start, stop, limit)
        if want.part == "cells":
            return page._replace(items=[cell._replace(refers=True) for cell in page.items])
        return page


@contextmanager
def memory_store() -> Iterator[Store]:
    yield MemoryStore()


@contextmanager
def leveldb_store() -> Iterator[Store]:
    with tempfile.TemporaryDirectory() as folder, LevelDBStore(Path(folder) / "messaging", create=True) as store:
        yield store


def engine_of(scene: Scene, store: Store, clock: ManualClock | None = None, **options: Any) -> FileEngine:
    """Return an engine with the scene's state, snapshot and consumers, by default at the scene's time."""
    state = SqliteState.in_memory()
    state.save_store(StoreRecord("mark", store.identity(), adopted_ms=0))
    state.save_frontiers(scene.records)
    source = FixedSource(scene.snapshot) if scene.snapshot else None
    clock = clock or ManualClock(scene.now_ms)
    return FileEngine(store, state, source, clock, TERMS, token_hex=lambda n: "0" * n, side=scene.side(), **options)


def sweep(scene: Scene, store: Store, batch_rows: int, workers: int = 1) -> tuple[Report, Report]:
    """Plan and sweep the scene's store."""
    scene.fill(store)
    engine = engine_of(scene, store, batch_rows=batch_rows, workers=workers)
    return engine.preview(), engine.run_once()


def check(scene: Scene, store: Store, batch_rows: int, workers: int = 1, *, tells: bool = True) -> None:
    planned, report = sweep(scene, store, batch_rows, workers)
    messages, payloads, either = judge(scene, tells=tells)
    left_messages = dict(every(store.message, MESSAGES))
    left_payloads = dict(every(store.payload, PAYLOADS))

    expected: dict[bytes, MessageValue] = {}
    for key, verdict in messages.items():
        value = scene.messages[key]
        if isinstance(verdict, Keep):
            expected[key] = value
        elif isinstance(verdict, Invert):
            assert value.pointer is not None
            expected[key] = value._replace(pointer=-value.pointer)
    assert left_messages == expected

    kept = {key for key, verdict in payloads.items() if isinstance(verdict, Keep)}
    assert kept - either <= set(left_payloads) <= kept | either
    check_figures(report, messages, payloads, either)
    assert not report.errors
    assert {rule: planned.total(rule) for rule in Rule} == {rule: report.total(rule) for rule in Rule}
    assert (planned.held_rows(), planned.totals.kept) == (report.held_rows(), report.totals.kept)


def check_figures(
    report: Report, messages: dict[bytes, Verdict], payloads: dict[bytes, Verdict], either: set[bytes]
) -> None:
    """Check the numbers of a report against the verdicts."""
    verdicts = [*messages.values(), *payloads.values()]
    deleted = Counter(verdict.rule for verdict in verdicts if isinstance(verdict, Delete))
    reasons = Counter(verdict.reason for verdict in verdicts if isinstance(verdict, Keep | Invert))
    if not either:
        assert report.total(Rule.EXPIRED) == deleted[Rule.EXPIRED]
        assert report.total(Rule.PROCESSED) == deleted[Rule.PROCESSED]
        assert report.total(Rule.OLD_GENERATION) == deleted[Rule.OLD_GENERATION]
        assert report.totals.kept[Reason.REFERENCED] == reasons[Reason.REFERENCED]
    assert report.total(Rule.INVALID_TRANSACTION) == sum(isinstance(verdict, Invert) for verdict in verdicts)
    assert report.held_rows() == reasons[Reason.HELD]
    assert report.totals.kept[Reason.UNDECIDED] == reasons[Reason.UNDECIDED]
    assert report.totals.kept[Reason.UNKNOWN_TOPIC] == reasons[Reason.UNKNOWN_TOPIC]
    assert report.totals.kept[Reason.NEWER_GENERATION] == reasons[Reason.NEWER_GENERATION]
    # A sweep does not visit unrecognized keys among live rows.
    assert report.totals.kept[Reason.UNRECOGNIZED] <= reasons[Reason.UNRECOGNIZED]


@given(scenes(), st.integers(1, 7))
def test_sweep_of_a_random_store_in_memory_follows_the_rules(scene: Scene, batch_rows: int) -> None:
    with memory_store() as store:
        check(scene, store, batch_rows)


@given(processed_scenes(), st.integers(1, 7))
def test_sweep_with_consumers_follows_the_rules(scene: Scene, batch_rows: int) -> None:
    with memory_store() as store:
        check(scene, store, batch_rows)


def test_sweep_keeps_the_payload_of_a_reference_with_a_too_long_key() -> None:
    topic, now_ms = NAMES[0], NOWS[4]
    scene, pointer = Scene(now_ms), (now_ms - 1000) * 10**6
    scene.metadata[topic.prefix] = encode_properties({"generation": "1", "ttl": "60"})
    scene.messages[MessageKey(topic, 1, now_ms, 0).pack() + b"\x00"] = MessageValue(pointer, None)
    scene.payloads[PayloadKey(topic, 1, pointer, now_ms - 61_000, 0).pack()] = b"y"
    with memory_store() as store:
        check(scene, store, 1)
        assert len(list(every(store.payload, PAYLOADS))) == 1


def test_sweep_of_cells_without_references_counts_all_as_references() -> None:
    topic, now_ms = NAMES[0], NOWS[4]
    scene, pointer = Scene(now_ms), (now_ms - 1000) * 10**6
    scene.snapshot = VisibilityState(now_ms, now_ms * 10**6, now_ms * 10**6, array("q"))
    anchor = ClockAnchor(now_ms, 0, "manual")
    scene.records[topic] = FrontierRecord(1, now_ms - 60_000, anchor, first_seen_ms=now_ms)
    scene.metadata[topic.prefix] = encode_properties({"generation": "1", "ttl": "60"})
    scene.messages[MessageKey(topic, 1, now_ms, 0).pack()] = MessageValue(pointer, b"x")
    scene.payloads[PayloadKey(topic, 1, pointer, now_ms - 61_000, 0).pack()] = b"y"
    for tells, left in ((True, 0), (False, 1)):
        with memory_store() as store:
            if not tells:
                store.message = SilentCells(store.calls)
            check(scene, store, 1, tells=tells)
            assert len(list(every(store.payload, PAYLOADS))) == left


@given(scenes() | processed_scenes(), st.integers(1, 7))
def test_sweep_of_random_cells_without_references_follows_the_rules(scene: Scene, batch_rows: int) -> None:
    with memory_store() as store:
        store.message = SilentCells(store.calls)
        check(scene, store, batch_rows, tells=False)


@given(scenes(), st.integers(1, 7))
def test_sweep_of_a_random_store_on_leveldb_follows_the_rules(scene: Scene, batch_rows: int) -> None:
    with leveldb_store() as store:
        check(scene, store, batch_rows)


@given(scenes(), st.integers(1, 7) | st.just(50), st.sampled_from([1, 2, 4]))
def test_sweep_by_threads_follows_the_rules(scene: Scene, batch_rows: int, workers: int) -> None:
    check(scene, SaltedStore(), batch_rows, workers)


@given(scenes())
def test_second_sweep_at_the_same_time_finds_nothing(scene: Scene) -> None:
    with memory_store() as store:
        sweep(scene, store, 5)
        again = engine_of(scene, store).run_once()
        assert [again.total(rule) for rule in Rule] == [0] * len(Rule)


@given(scenes() | processed_scenes(), st.integers(1, 7), st.integers(0, 10**9))
def test_apply_at_a_later_time_never_exceeds_the_plan(scene: Scene, batch_rows: int, later_ms: int) -> None:
    with memory_store() as store, memory_store() as twin, tempfile.TemporaryDirectory() as folder:
        sweep(scene, twin, batch_rows)
        scene.fill(store)
        clock = ManualClock(scene.now_ms)
        engine = engine_of(scene, store, clock, batch_rows=batch_rows)
        planned = engine.preview(out=Path(folder) / "plan.json")
        # Rows that came due since the plan are not in it.
        clock.advance(min(later_ms, 100_000))
        applied = engine.carry_out(Path(folder) / "plan.json")
        assert store.message.read(MESSAGES, b"", None, 10_000) == twin.message.read(MESSAGES, b"", None, 10_000)
        payloads, others = (dict(every(one.payload, PAYLOADS)) for one in (store, twin))
        # Some payloads have two correct verdicts, but a run never exceeds its plan.
        _, _, either = judge(scene)
        assert payloads.items() >= others.items()
        assert (kept := payloads.keys() - others.keys()) <= either
        differ = {rule: planned.total(rule) - applied.total(rule) for rule in Rule}
        assert min(differ.values()) >= 0
        assert sum(differ.values()) == len(kept)


@pytest.mark.parametrize("generation", [1, 3, -3, INT_MAX, -INT_MAX])
def test_spans_of_an_open_frontier_are_contiguous(generation: int) -> None:
    topic = TopicMetadata(NAMES[0], generation, 60)
    spans = message_spans(topic, Frontier.open(1_700_000_000_000, topic))
    assert all(first.stop == second.start for first, second in pairwise(spans))
    assert not any(span.held for span in spans)
