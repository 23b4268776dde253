"""The rules as ranges: the bounds of each span, and agreement with the rules for rows."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.rules.policy import Delete, Frontier, Hold, Keep, Reason, Row, Rule, Verdict, decide
from janitor.rules.ranges import (
    Span,
    intersect,
    message_spans,
    newest_expired_pointer,
    payload_spans,
    remainder,
    stop_of_spans,
    topic_stop,
)
from tms_core.rowkey import LONG_MAX, Cutoff, MessageKey, PayloadKey, generation_prefix, pointer_prefix, time_prefix
from tms_core.tables.base import ALL_KEYS, KeyRange
from tms_core.topic import INT_MAX, TopicId, TopicMetadata

TOPIC = TopicId("default", "t1")
PREFIX = TOPIC.prefix
NOW_MS = 1_700_000_000_000
DUE_MS = NOW_MS - 60_000
LONGS = st.integers(-(2**63), LONG_MAX)


def metadata(generation: int) -> TopicMetadata:
    return TopicMetadata(TOPIC, generation, 60)


def frontier(cutoff_ms: int, generation: int, *, due_ms: int = DUE_MS, hold: Hold | None = Hold.FRONTIER) -> Frontier:
    return Frontier(NOW_MS, Cutoff(due_ms), Cutoff(cutoff_ms), generation, hold)


def gen(generation: int) -> bytes:
    return generation_prefix(PREFIX, generation)


def at(generation: int, time_ms: int) -> bytes:
    return time_prefix(PREFIX, generation, time_ms)


def test_spans_at_a_cutoff_of_zero_have_no_rows() -> None:
    topic = metadata(1)
    oldest = MessageKey(TOPIC, 1, 0, 0).pack()
    assert all(span.stop <= oldest for span in message_spans(topic, Frontier.open(60_000, topic)))
    assert payload_spans(topic, Frontier.open(60_000, topic), None) == []


OLD, EXPIRED = Rule.OLD_GENERATION, Rule.EXPIRED


def test_spans_of_held_generations_go_on_by_time_in_one() -> None:
    assert message_spans(metadata(5), frontier(DUE_MS - 9, 2)) == [
        Span(gen(1), gen(2), OLD),
        Span(gen(2), at(2, DUE_MS - 9), OLD),
        Span(at(2, DUE_MS - 9), gen(3), OLD, held=True),
        Span(gen(3), gen(5), OLD, held=True),
        Span(gen(5), at(5, DUE_MS - 9), EXPIRED),
        Span(at(5, DUE_MS - 9), at(5, DUE_MS), EXPIRED, held=True),
    ]


def test_payload_spans_are_whole_if_old_and_by_row_if_current() -> None:
    topic = metadata(3)
    assert payload_spans(topic, Frontier.open(NOW_MS, topic), None) == [
        Span(gen(1), gen(3), OLD),
        Span(gen(3), gen(4), EXPIRED, by_row=True),
    ]


def test_payload_spans_end_at_the_newest_pointer_if_current() -> None:
    pointer = DUE_MS * 1_000_000
    assert payload_spans(metadata(3), frontier(DUE_MS, 1), pointer) == [
        Span(gen(1), gen(2), OLD, by_row=True),
        Span(gen(2), gen(3), OLD, held=True),
        Span(gen(3), pointer_prefix(PREFIX, 3, pointer), EXPIRED, by_row=True),
    ]


def test_payload_spans_of_a_deleted_topic_are_never_by_row() -> None:
    topic = metadata(-2)
    assert payload_spans(topic, Frontier.open(NOW_MS, topic), None) == [Span(gen(1), gen(3), OLD)]


@pytest.mark.parametrize(
    ("due_ms", "allowance_ms", "pointer"),
    [
        (0, 0, 0),
        (DUE_MS, 300_000, (DUE_MS + 300_000) * 1_000_000),
        (9_223_372_036_854, 0, 9_223_372_036_854_000_000),
        (9_223_372_036_854, 1, None),
        (LONG_MAX, 0, None),
    ],
)
def test_newest_expired_pointer_fits_or_is_none(due_ms: int, allowance_ms: int, pointer: int | None) -> None:
    assert newest_expired_pointer(frontier(0, 1, due_ms=due_ms), allowance_ms) == pointer


@dataclass(frozen=True)
class Scene:
    """A topic, its frontier, and a key's generation and time near their bounds."""

    topic: TopicMetadata
    frontier: Frontier
    generation: int
    time_ms: int


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    generations = st.sampled_from([1, 2, 3, 4, INT_MAX - 1, INT_MAX])
    signs = st.sampled_from([1, -1])
    due_ms = draw(st.sampled_from([0, 1, 100, DUE_MS, LONG_MAX]))
    cutoff_ms = draw(st.sampled_from([0, max(0, due_ms - 1), due_ms // 2, due_ms]))
    reached = draw(generations | st.just(0)) * draw(signs)
    edges = [edge + step for edge in (cutoff_ms, due_ms, 0, LONG_MAX) for step in (-1, 0, 1)]
    return Scene(
        metadata(draw(generations) * draw(signs)),
        frontier(cutoff_ms, reached, due_ms=due_ms, hold=draw(st.sampled_from([None, Hold.FRONTIER]))),
        draw(generations | st.just(5)),
        draw(st.sampled_from([edge for edge in edges if 0 <= edge <= LONG_MAX])),
    )


class NoTransactions:
    """A view without invalid and undecided transactions."""

    def is_invalid(self, pointer: int) -> bool:
        return False

    def is_undecided(self, pointer: int) -> bool:
        return False


def judge_row(row: Row, scene: Scene) -> Verdict:
    return decide(row, scene.topic, scene.frontier, NoTransactions(), False, None)


def find(spans: list[Span], key: bytes) -> Span | None:
    """Return the span of a key; check that spans are in order, not empty and disjoint."""
    ends = [end for span in spans for end in span[:2]]
    assert ends == sorted(ends)
    assert all(span.start < span.stop for span in spans)
    return next((span for span in spans if span.start <= key < span.stop), None)


def promise(span: Span | None, time_ms: int, frontier: Frontier) -> Verdict | None:
    """Return the verdict of a span for a recognized row; None if the row stays without a span."""
    if span is None:
        return None
    if not span.by_row:
        return Keep(Reason.HELD) if span.held else Delete(span.rule)
    if frontier.cutoff.expires(time_ms):
        return Delete(span.rule)
    waits = span.rule is OLD or frontier.due.expires(time_ms)
    return Keep(Reason.HELD) if waits else None


#: The verdicts of rows that stay without a span.
STAYS = (Keep(Reason.LIVE), Keep(Reason.NEWER_GENERATION))


@given(scenes(), st.sampled_from([0, 1, 65535]))
def test_message_span_of_any_key_agrees_with_its_verdict(scene: Scene, sequence: int) -> None:
    key = MessageKey(TOPIC, scene.generation, scene.time_ms, sequence)
    span = find(message_spans(scene.topic, scene.frontier), key.pack())
    verdict = judge_row(Row("message", key), scene)
    expected = promise(span, scene.time_ms, scene.frontier)
    assert verdict == expected or (expected is None and verdict in STAYS)


@given(scenes(), LONGS)
def test_payload_span_of_any_key_agrees_with_its_verdict(scene: Scene, pointer: int) -> None:
    key = PayloadKey(TOPIC, scene.generation, pointer, scene.time_ms, 0)
    span = find(payload_spans(scene.topic, scene.frontier, None), key.pack())
    verdict = judge_row(Row("payload", key), scene)
    expected = promise(span, scene.time_ms, scene.frontier)
    assert verdict == expected or (expected is None and verdict in STAYS)


@given(scenes(), st.sampled_from([0, 1, 300_000]), st.integers(-1, 1), st.sampled_from([0, 1, 999_999]))
def test_payload_above_the_newest_pointer_stays(scene: Scene, allowance_ms: int, step_ms: int, rest: int) -> None:
    pointer = (scene.time_ms + allowance_ms + step_ms) * 1_000_000 + rest
    if not 0 <= pointer <= LONG_MAX or pointer // 1_000_000 - allowance_ms > scene.time_ms:
        return
    key = PayloadKey(TOPIC, scene.generation, pointer, scene.time_ms, 0)
    newest = newest_expired_pointer(scene.frontier, allowance_ms)
    span = find(payload_spans(scene.topic, scene.frontier, newest), key.pack())
    verdict = judge_row(Row("payload", key), scene)
    assert (promise(span, scene.time_ms, scene.frontier) or verdict) == verdict
    assert span is not None or verdict in STAYS


@pytest.mark.parametrize(
    ("generation", "key"),
    [(3, gen(3) + b"\x80"), (-3, gen(4)), (INT_MAX, gen(INT_MAX) + b"\x80"), (-INT_MAX, PREFIX + b"\x80\x00\x00\x00")],
)
def test_beyond_is_negative_times_and_newer_generations(generation: int, key: bytes) -> None:
    assert stop_of_spans(metadata(generation)) == key


@given(scenes(), st.booleans())
def test_key_that_no_span_and_no_live_row_reaches_is_beyond(scene: Scene, negative: bool) -> None:
    time_ms = scene.time_ms - LONG_MAX - 1 if negative else scene.time_ms
    key = MessageKey(TOPIC, scene.generation, time_ms, 0)
    edge = stop_of_spans(scene.topic)
    assert all(span.stop <= edge for span in message_spans(scene.topic, scene.frontier))
    if scene.generation >= scene.topic.old_below:
        stays = judge_row(Row("message", key), scene) in (Keep(Reason.NEWER_GENERATION), Keep(Reason.UNRECOGNIZED))
        assert (key.pack() >= edge) == stays


def test_topic_stop_is_before_the_next_name() -> None:
    assert topic_stop(b"default:t1:") == b"default:t1;"
    assert gen(-1) + b"\xff" * 30 < topic_stop(PREFIX)


def test_topic_stop_of_a_prefix_without_successor_raises() -> None:
    with pytest.raises(ValueError, match=r"\\xff"):
        topic_stop(b"\xff")


def test_intersect_of_a_span_keeps_its_verdict_in_each_part() -> None:
    span = Span(b"b", b"h", OLD, held=True, by_row=True)
    allowed = [KeyRange(b"a", b"c"), KeyRange(b"d", b"e"), KeyRange(b"g", b"z")]
    assert intersect([span], allowed) == [
        span._replace(stop=b"c"),
        span._replace(start=b"d", stop=b"e"),
        span._replace(start=b"g"),
    ]


@pytest.mark.parametrize("allowed", [[], [KeyRange(b"a", b"b")], [KeyRange(b"h", b"z")], [KeyRange(b"c", b"c")]])
def test_intersect_without_common_keys_is_empty(allowed: list[KeyRange]) -> None:
    assert intersect([Span(b"b", b"h", OLD)], allowed) == []


def test_intersect_with_an_endless_range_keeps_the_spans_end() -> None:
    span = Span(b"b", b"h", OLD)
    assert intersect([span], [KeyRange(b"c", None)]) == [span._replace(start=b"c")]


def ranges(size: int) -> st.SearchStrategy[list[KeyRange]]:
    """Draw up to ``size`` disjoint ranges of one-byte keys, in order."""
    ends = st.lists(st.integers(0, 20), unique=True, max_size=2 * size).map(sorted)
    pairs = ends.map(lambda found: zip(found[::2], found[1::2], strict=False))
    return pairs.map(lambda found: [KeyRange(bytes([start]), bytes([stop])) for start, stop in found])


@given(ranges(3), ranges(3))
def test_intersect_of_any_ranges_is_their_common_keys(wanted: list[KeyRange], allowed: list[KeyRange]) -> None:
    def covered(found: list[KeyRange] | list[Span]) -> set[int]:
        return {key for piece in found for key in range(piece.start[0], (piece.stop or b"\xff")[0])}

    pieces = intersect([Span(piece.start, piece.stop or b"", OLD) for piece in wanted], allowed)
    assert covered(pieces) == covered(wanted) & covered(allowed)
    assert pieces == sorted(pieces)


EDGES = [bytes([byte]) for byte in range(6)]
intervals = st.builds(KeyRange, st.just(b"") | st.sampled_from(EDGES), st.none() | st.sampled_from(EDGES))


@pytest.mark.parametrize(
    ("taken", "left"),
    [
        ([], [(b"", None)]),
        ([(b"", None)], []),
        ([(b"b", b"c")], [(b"", b"b"), (b"c", None)]),
        ([(b"", b"b"), (b"b", None)], []),
        ([(b"c", None), (b"", b"b")], [(b"b", b"c")]),
        ([(b"b", b"b")], [(b"", None)]),
        ([(b"", b"c"), (b"a", b"b"), (b"b", b"d")], [(b"d", None)]),
    ],
)
def test_remainder_of_all_keys_is_the_rest_in_order(
    taken: list[tuple[bytes, bytes | None]], left: list[tuple[bytes, bytes | None]]
) -> None:
    assert remainder(ALL_KEYS, [KeyRange(*each) for each in taken]) == left


@given(intervals, st.lists(intervals, max_size=4))
def test_remainder_of_any_intervals_is_their_complement(whole: KeyRange, taken: list[KeyRange]) -> None:
    def inside(key: bytes, interval: KeyRange) -> bool:
        return interval.start <= key and (interval.stop is None or key < interval.stop)

    left = remainder(whole, taken)
    for key in [b"", *EDGES, *(edge + b"\x00" for edge in EDGES)]:
        expected = inside(key, whole) and not any(inside(key, each) for each in taken)
        assert sum(inside(key, each) for each in left) == expected
    assert left == sorted(left, key=lambda each: each.start)
