"""S1: every interval is half-open. Tests use the value before, at and after each boundary."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from janitor import boundary
from janitor.run import plan_file as plan
from janitor.state.base import Evidence, ProvenBoundary
from tests.builders import DAY, HOUR, LIFETIME, MINUTE, NOW_MS, Topic, adopted_janitor, janitor, pointer, topic
from tms_core.rowkey import MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import KEYS, MessageValue, Store

TTL_SECONDS = 3 * 3600
CUTOFF_MS = NOW_MS - TTL_SECONDS * 1000
#: The start of a transaction that can still publish after the cutoff.
STARTED_MS = CUTOFF_MS - 30 * MINUTE
WINDOW_END_MS = STARTED_MS + LIFETIME.max_ms + LIFETIME.grace_ms


def orders(store: Store) -> Topic:
    return topic(store, "default:orders", ttl_seconds=TTL_SECONDS)


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 4, 2000])
def test_messages_strictly_before_the_cutoff_are_deleted(store: Store, batch_rows: int) -> None:
    orders(store).plain(0, CUTOFF_MS - 1, CUTOFF_MS, CUTOFF_MS + 1)
    janitor(store, batch_rows=batch_rows).engine.run_once(adopt=True)
    assert orders(store).times() == [CUTOFF_MS, CUTOFF_MS + 1]


def test_invalid_messages_around_the_cutoff_are_inverted_if_they_stay(store: Store) -> None:
    invalid = pointer(STARTED_MS)
    orders(store).tx(invalid, CUTOFF_MS - 1, CUTOFF_MS, CUTOFF_MS + 1)
    adopted_janitor(store, invalid=[invalid])
    assert orders(store).pointers() == [-invalid, -invalid]


def test_extreme_sequence_ids_do_not_affect_expiry(store: Store) -> None:
    prefix = orders(store).id
    last, first = MessageKey(prefix, 1, CUTOFF_MS - 1, 65535), MessageKey(prefix, 1, CUTOFF_MS, 0)
    store.message.put([(key.pack(), MessageValue(None, b"x")) for key in (last, first)])
    janitor(store).engine.run_once(adopt=True)
    assert [key for key, _ in orders(store).messages()] == [first]


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 4, 2000])
def test_payloads_strictly_before_the_cutoff_are_deleted(store: Store, batch_rows: int) -> None:
    orders(store).stored(pointer(STARTED_MS), CUTOFF_MS - 1, CUTOFF_MS, CUTOFF_MS + 1)
    janitor(store, batch_rows=batch_rows).engine.run_once(adopt=True)
    assert orders(store).stored_times() == [CUTOFF_MS, CUTOFF_MS + 1]


@pytest.mark.parametrize(("metadata", "kept"), [(3, [3, 4]), (-3, [4]), (2, [2, 3, 4]), (-2, [3, 4])])
def test_only_rows_of_earlier_generations_are_deleted(store: Store, metadata: int, kept: list[int]) -> None:
    described = topic(store, "default:orders", ttl_seconds=TTL_SECONDS, generation=metadata)
    generations = [1, 2, 3, 4]
    for generation in generations:
        described.at(generation).plain(NOW_MS).stored(pointer(NOW_MS - 1), NOW_MS)
    janitor(store).engine.run_once(adopt=True)
    assert [generation for generation in generations if described.at(generation).times()] == kept
    assert [generation for generation in generations if described.at(generation).stored_times()] == kept


@pytest.mark.parametrize(
    ("published_ms", "kept"),
    [
        (CUTOFF_MS - 1, False),
        (CUTOFF_MS, True),
        (CUTOFF_MS + 1, True),
        (WINDOW_END_MS - 1, True),
        (WINDOW_END_MS, False),
        (WINDOW_END_MS + 1, False),
    ],
)
def test_reference_inside_its_window_keeps_the_payload(store: Store, published_ms: int, kept: bool) -> None:
    write_pointer = pointer(STARTED_MS)
    orders(store).stored(write_pointer, CUTOFF_MS - 1).ref(write_pointer, published_ms)
    janitor(store).engine.run_once(adopt=True)
    assert orders(store).stored_times() == [CUTOFF_MS - 1] * kept


def test_skewed_pointers_are_inverted_by_the_daily_full_pass(store: Store) -> None:
    orders(store)
    kit = adopted_janitor(store)
    bound = pointer(kit.clock.now_ms() - TTL_SECONDS * 1000 + LIFETIME.allowance_ms)
    for write_pointer in (bound - 1, bound, bound + 1):
        orders(store).stored(write_pointer, CUTOFF_MS - 1)
    kit.engine.run_once()
    assert len(orders(store).stored_times()) == 2
    kit.run_after(DAY)
    assert orders(store).stored_times() == []


@pytest.mark.parametrize(("table", "due"), [("message", 3), ("payload", 3)])
def test_plan_range_includes_start_and_excludes_stop(store: Store, tmp_path: Path, table: str, due: int) -> None:
    def key(offset_ms: int) -> bytes:
        if table == "message":
            return MessageKey(described.id, 1, 1000 + offset_ms, 0).pack()
        return PayloadKey(described.id, 1, pointer(1000), 1000 + offset_ms, 0).pack()

    described = orders(store)
    keys = [key(offset) for offset in range(-1, 5)]
    store.message.put([(found, MessageValue(None, b"x")) for found in keys if table == "message"])
    store.payload.put([(found, b"x") for found in keys if table == "payload"])
    kit = janitor(store)
    file = tmp_path / "plan.json"
    kit.engine.preview(out=file)
    restrict_plan(file, key(0), key(due))
    kit.engine.carry_out(file, adopt=True)
    data = store.message if table == "message" else store.payload
    assert data.read(KEYS, b"", None, 100).items == [key(-1), *(key(offset) for offset in range(due, 5))]


def restrict_plan(file: Path, start: bytes, stop: bytes) -> None:
    """Restrict the ranges of a plan file to one range."""
    document = json.loads(file.read_text())
    for item in document["topics"]:
        item["ranges"] = [{"start": start.hex(), "stop": stop.hex()}]
    document["sha256"] = plan.checksum(document)
    file.write_text(json.dumps(document))


@pytest.mark.parametrize(
    ("first_stop", "second_start", "covered"), [(b"k", b"k", True), (b"k\x00", b"k", True), (b"k", b"k\x00", False)]
)
def test_boundary_of_two_intervals_requires_adjacency(first_stop: bytes, second_start: bytes, covered: bool) -> None:
    first = Evidence(b"", first_stop, NOW_MS, pointer(NOW_MS - DAY), NOW_MS, "run")
    second = replace(first, start=second_start, stop=None)
    assert (boundary.prove([first, second], (), LIFETIME).bound is not None) == covered


@pytest.mark.parametrize(
    ("start", "stop", "covered"),
    [(b"", None, True), (b"\x00", None, False), (b"", b"\xff" * 40, False), (b"", generation_prefix(b"", 1), False)],
)
def test_boundary_of_one_interval_requires_both_ends(start: bytes, stop: bytes | None, covered: bool) -> None:
    evidence = Evidence(start, stop, NOW_MS, pointer(NOW_MS - DAY), NOW_MS, "run")
    assert (boundary.prove([evidence], (), LIFETIME).bound is not None) == covered


@pytest.mark.parametrize(("late_ms", "closed"), [(-1, False), (0, True), (1, True)])
def test_open_transaction_is_closed_only_after_its_window(store: Store, late_ms: int, closed: bool) -> None:
    topic(store, "default:orders", ttl_seconds=30 * 86400).plain(NOW_MS)
    invalid = pointer(NOW_MS - LIFETIME.max_ms - LIFETIME.grace_ms - late_ms)
    kit = adopted_janitor(store, invalid=[invalid, pointer(NOW_MS - MINUTE)])
    assert (kit.state.open_ids()[invalid].closed_ms is not None) == closed


@pytest.mark.parametrize("began_ms", [NOW_MS - 10 * HOUR, NOW_MS - LIFETIME.max_ms - LIFETIME.grace_ms])
def test_boundary_ends_one_below_the_oldest_open_transaction(store: Store, began_ms: int) -> None:
    kit = adopted_janitor(store)
    writable = pointer(NOW_MS - LIFETIME.max_ms - LIFETIME.grace_ms)
    assert kit.state.boundary() == ProvenBoundary(writable - 1, NOW_MS, kit.state.runs(1)[0].id)
    assert boundary.prove(kit.state.evidence(), [pointer(began_ms)], LIFETIME).bound == pointer(began_ms) - 1
