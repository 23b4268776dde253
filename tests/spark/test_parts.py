"""Pieces: each selected row is in one piece, and no piece has three times the median."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.settings import load
from janitor.spark.access import Access
from janitor.spark.source import pages
from janitor.spark.source.pages import RowFields
from janitor.spark.source.parts import PIECE_ROWS, Piece, between, cut_by_counts, cut_evenly, pieces
from janitor.spark.source.selection import RowSelection
from janitor.spark.sweep.engine import cutter
from janitor.state.base import TopicCount
from janitor.sweep.run import Run
from tests.builders import NOW_MS, topic
from tests.salted import BUCKETS, SaltedStore
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import ALL_KEYS, KEYS, KeyRange, MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, TopicMetadata

Body = Callable[[], bytes]
Parts = Sequence[tuple[int | None, Store]]

HUGE_ROWS, TINY, TINY_ROWS = 9000, 50, 20
TINIES = [f"default:tiny{number:02}" for number in range(TINY)]


def fill(store: Store, name: str, rows: int, body: Body) -> None:
    made = topic(store, name, ttl_seconds=3600)
    for first in range(0, rows, 5000):
        times = range(NOW_MS + first, NOW_MS + min(rows, first + 5000))
        store.message.put([(MessageKey(made.id, 1, ms, 0).pack(), MessageValue(None, body())) for ms in times])
        store.payload.put([(PayloadKey(made.id, 1, ms * 10**6, ms, 0).pack(), body()) for ms in times])


def fill_unevenly(store: Store) -> None:
    """Fill a store with one topic that has nine tenths of all rows, and fifty small topics."""
    bodies = random.Random(7)
    for name, rows in [("default:huge", HUGE_ROWS), *((name, TINY_ROWS) for name in TINIES)]:
        fill(store, name, rows, lambda: bodies.randbytes(150))


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the path of a skewed store in LevelDB."""
    place = tmp_path_factory.mktemp("uneven") / "messaging"
    with LevelDBStore(place, create=True) as store:
        fill_unevenly(store)
    return place


@pytest.fixture(scope="module")
def in_salts() -> SaltedStore:
    """Return a skewed store of four salts."""
    store = SaltedStore()
    fill_unevenly(store)
    return store


def salts(store: Store) -> Parts:
    return list(enumerate(store.parts()))


def rows_of(parts: Parts, piece: Piece, wanted: RowSelection) -> list[bytes]:
    [part] = [part for salt, part in parts if salt == piece.salt]
    found: list[bytes] = []
    table = part.message if wanted.table == "message" else part.payload
    wanted = piece.of(wanted)
    for page in pages.scan(table, piece, wanted, RowFields()):
        found += [key for key in page.keys if selects(wanted, key)]
    return found


def selects(wanted: RowSelection, key: bytes) -> bool:
    parsed = MessageKey.parse(key) if wanted.table == "message" else PayloadKey.parse(key)
    if parsed is None:
        return not wanted.is_recognized_only
    since, until = wanted.from_ms or 0, 2**63 if wanted.to_ms is None else wanted.to_ms
    return wanted.wants(parsed.topic) and since <= parsed.time_ms < until


def check_even(parts: Parts, wanted: RowSelection, number: int, rows: int) -> None:
    """Check that the pieces have each row once and no piece has three times the median."""
    cut = pieces(parts, wanted, number)
    found = [rows_of(parts, piece, wanted) for piece in cut]
    keys = [key for some in found for key in some]
    assert len(keys) == len(set(keys)) == rows
    assert len(cut) == number
    counts = [len(some) for some in found]
    assert max(counts) <= 3 * statistics.median(counts), counts


#: Selections of rows of an uneven store, and the number of selected rows.
SELECTIONS = {
    "everything": (RowSelection("message"), HUGE_ROWS + TINY * TINY_ROWS),
    "payloads": (RowSelection("payload"), HUGE_ROWS + TINY * TINY_ROWS),
    "one topic": (RowSelection("message", ("default:huge",)), HUGE_ROWS),
    "all topics by name": (RowSelection("message", ("default:huge", *TINIES)), HUGE_ROWS + TINY * TINY_ROWS),
    "all topics by pattern": (RowSelection("message", ("*:huge", "*:tiny*")), HUGE_ROWS + TINY * TINY_ROWS),
    "huge and some tiny topics": (RowSelection("payload", ("*:huge", "*:tiny1*")), HUGE_ROWS + 10 * TINY_ROWS),
    "last rows": (RowSelection("message", from_ms=NOW_MS + HUGE_ROWS - 2100), 2100),
    "first rows": (RowSelection("message", to_ms=NOW_MS + 2100), 2100 + TINY * TINY_ROWS),
    "between two times": (RowSelection("message", ("*:huge",), from_ms=NOW_MS + 3000, to_ms=NOW_MS + 5100), 2100),
}


@pytest.mark.no_cover
@pytest.mark.parametrize("selection", SELECTIONS)
def test_pieces_of_skewed_leveldb_are_even(selection: str, on_disk: Path) -> None:
    wanted, rows = SELECTIONS[selection]
    with LevelDBStore(on_disk) as store:
        check_even([(None, store)], wanted, 5, rows)


@pytest.mark.no_cover
@pytest.mark.parametrize("selection", SELECTIONS)
def test_pieces_of_skewed_salts_are_even(selection: str, in_salts: SaltedStore) -> None:
    wanted, rows = SELECTIONS[selection]
    check_even(salts(in_salts), wanted, BUCKETS, rows)


def test_salts_between_two_times_are_cut_by_time(in_salts: SaltedStore) -> None:
    wanted, rows = SELECTIONS["between two times"]
    check_even(salts(in_salts), wanted, 3 * BUCKETS, rows)
    first, last = NOW_MS + 3000, NOW_MS + 5100
    times = [piece.times_ms for piece in pieces(salts(in_salts), wanted, 3 * BUCKETS)]
    assert times == [(first, first + 700), (first + 700, first + 1400), (first + 1400, last)] * BUCKETS


@pytest.mark.parametrize(
    "wanted",
    [
        RowSelection("message"),
        RowSelection("message", from_ms=NOW_MS),
        RowSelection("message", to_ms=NOW_MS),
        RowSelection("message", from_ms=NOW_MS, to_ms=NOW_MS + 2),
        RowSelection("message", from_ms=NOW_MS, to_ms=NOW_MS - 9),
        RowSelection("payload", from_ms=NOW_MS, to_ms=NOW_MS + 9000),
    ],
)
def test_salts_without_two_times_are_not_cut(wanted: RowSelection, in_salts: SaltedStore) -> None:
    assert [piece[::2] for piece in pieces(salts(in_salts), wanted, 3 * BUCKETS)] == [(salt, None) for salt in range(4)]


def test_each_salt_is_one_piece_without_a_higher_number(in_salts: SaltedStore) -> None:
    wanted = RowSelection("message", ("default:huge", *TINIES))
    for number in (None, 1, BUCKETS):
        assert [piece.salt for piece in pieces(salts(in_salts), wanted, number)] == [0, 1, 2, 3]
    narrow = RowSelection("message", salts=frozenset({2}))
    assert [piece.salt for piece in pieces(salts(in_salts), narrow, None)] == [2]
    assert pieces(salts(in_salts), RowSelection("message", salts=frozenset({9})), None) == []


def test_each_salt_of_an_empty_store_is_one_piece() -> None:
    assert len(pieces(salts(SaltedStore()), RowSelection("message"), 40)) == BUCKETS


def test_pieces_of_rows_larger_than_a_cut_are_even(place: Path) -> None:
    bodies = random.Random(7)
    with LevelDBStore(place, create=True) as store:
        fill(store, "default:heavy", 40, lambda: bodies.randbytes(100_000))
    with LevelDBStore(place) as store:
        check_even([(None, store)], RowSelection("payload"), 4, 40)


def test_pieces_without_a_number_depend_on_bytes(on_disk: Path) -> None:
    with LevelDBStore(on_disk) as store:
        assert pieces([(None, store)], RowSelection("message"), None) == [Piece(None, (ALL_KEYS,))]
        ranges = cut_evenly(store.message, ALL_KEYS, 4)
    assert len(ranges) == 4
    assert (ranges[0].start, ranges[-1].stop) == (b"", None)
    assert all(before.stop == after.start for before, after in pairwise(ranges))


def test_str_of_piece_names_its_salt_and_key_ends() -> None:
    assert str(Piece(7, (KeyRange(b"a:", b"b:"),))) == "salt 7, keys 613a to 623a"
    assert str(Piece(7, (KeyRange(b"a:", b"b:"),), (5, 9))) == "salt 7, keys 613a to 623a, from 5 until 9 ms"
    assert (
        str(Piece(None, (KeyRange(b"", b"b"), KeyRange(b"c", None)))) == "keys from the first to the last, in 2 ranges"
    )


def counted(store: Store) -> tuple[dict[TopicId, TopicCount], list[TopicMetadata]]:
    topics = [TopicMetadata.parse(*row) for row in store.metadata.rows()]
    rows = {one.topic: HUGE_ROWS if one.topic.topic == "huge" else TINY_ROWS for one in topics}
    return {one: TopicCount(number, 0, NOW_MS, NOW_MS + number - 1, 0) for one, number in rows.items()}, topics


def test_pieces_cut_by_counts_have_at_most_the_wanted_size(in_salts: SaltedStore) -> None:
    cuts = cut_by_counts(*counted(in_salts), BUCKETS, 4 * BUCKETS)
    ranges = [within for [within] in between([ALL_KEYS], cuts)]
    for table in (in_salts.message, in_salts.payload):
        sizes = [len(table.read(KEYS, *within, 100_000).items) for within in ranges]
        assert sum(sizes) == HUGE_ROWS + TINY * TINY_ROWS
        assert max(sizes) < 1.1 * sum(sizes) / 4, sizes


def test_cut_by_counts_without_a_number_depends_on_counted_messages(in_salts: SaltedStore) -> None:
    counts, topics = counted(in_salts)
    many = {one: replace(count, messages=PIECE_ROWS) for one, count in counts.items()}
    assert len(cut_by_counts(many, topics, TINY + 1, None)) == 0
    assert len(cut_by_counts(many, topics, TINY, None)) == 2
    assert cut_by_counts(many, topics, BUCKETS, BUCKETS + 1) == []
    assert cut_by_counts({}, topics, BUCKETS, 100) == cut_by_counts(many, [], BUCKETS, None) == []


def test_spans_of_cut_salts_are_contiguous(in_salts: SaltedStore) -> None:
    counts, topics = counted(in_salts)
    access = Access(load(None, {}, {"hbase": "127.0.0.1:9090"}).settings)
    run = SimpleNamespace(store=in_salts, topics={one.topic.prefix: SimpleNamespace(topic=one) for one in topics})
    spans = [share.span for _, share in cutter(access, 3 * BUCKETS, lambda: counts)(cast(Run, run))]
    assert len(spans) == 5 * BUCKETS
    assert (spans[0].start, spans[-1].stop) == (b"\x00", bytes([BUCKETS]))
    assert all(before.stop == after.start for before, after in pairwise(spans))


EDGES = [bytes([byte]) for byte in range(1, 12)]


@pytest.mark.no_cover
@given(st.sets(st.sampled_from(EDGES)), st.sets(st.sampled_from(EDGES)), st.booleans())
def test_between_assigns_each_key_to_one_piece(edges: set[bytes], cuts: set[bytes], endless: bool) -> None:
    ends = sorted(edges)
    ranges = [KeyRange(start, stop) for start, stop in zip(ends[::2], ends[1::2], strict=False)]
    if endless and len(ends) % 2:
        ranges.append(KeyRange(ends[-1], None))
    places = sorted(cuts)
    dealt = list(between(ranges, places))
    assert len(dealt) == len(places) + 1

    def holds(some: Sequence[KeyRange], key: bytes) -> int:
        return sum(reach.holds(key) for reach in some)

    for key in [edge + end for edge in [b"\x00", *EDGES] for end in (b"", b"x")]:
        at = sum(place <= key for place in places)
        assert [holds(some, key) for some in dealt] == [holds(ranges, key) * (at == one) for one in range(len(dealt))]


def test_stretches_contain_each_selected_row(on_disk: Path) -> None:
    wanted = RowSelection("message", ("*:tiny0*",), from_ms=NOW_MS + 5, to_ms=NOW_MS + 15)
    with LevelDBStore(on_disk) as store:
        found = wanted.stretches(store.message)
        rows = [store.message.read(KEYS, *reach, 100).items for reach in found]
    assert [len(keys) for keys in rows] == [10] * 10
    assert {key.topic for keys in rows for key in map(MessageKey.parse, keys) if key} == {
        TopicId("default", f"tiny0{number}") for number in range(10)
    }
