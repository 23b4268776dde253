"""Listing and restoring archived rows: selection, target, repetition and messages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from janitor.archive import index as archived
from janitor.archive import parquet
from janitor.archive.index import Selection
from janitor.archive.restore import Request, RestoreResult, restore
from janitor.rules.policy import Rule
from janitor.state.values import pack
from janitor.sweep.transactions import TransactionView
from tests.archives import Undo, keys_of
from tests.builders import DAY, HOUR, NOW_MS, SECOND, Call, Topic, pointer, topic, visibility, watch
from tms_core.clock import ManualClock
from tms_core.errors import ArchiveError, Refused, StoreError, TmsError
from tms_core.messaging.ids import position
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.messaging.producers.rows import ProducerName
from tms_core.rowkey import MessageKey, PayloadKey, generation_prefix
from tms_core.tables.base import KEYS, MessageValue, Store
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import VisibilityState

STARTED_MS = NOW_MS - 2 * HOUR
COMMITTED = pointer(STARTED_MS, 1)
SNAPSHOT = visibility(NOW_MS - SECOND)
OLD_MS = NOW_MS - 3 * HOUR


@pytest.fixture
def undo(store: MemoryStore, tmp_path: Path) -> Undo:
    return Undo(store, tmp_path / "archive")


@pytest.fixture
def orders(store: MemoryStore, undo: Undo) -> Topic:
    """Return a paused topic with a TTL of one day."""
    undo.state.pause("default:orders", NOW_MS)
    return topic(store, "default:orders", ttl_seconds=86_400)


@pytest.fixture
def found(store: MemoryStore) -> Topic:
    """Return another topic to restore to."""
    return topic(store, "default:found", ttl_seconds=86_400, generation=5)


def counts_of(done: RestoreResult) -> tuple[int, int, int, int]:
    return done.restored, done.negated, done.already_there, done.skipped


def test_list_of_several_runs_has_a_line_per_topic_day_and_run(undo: Undo, orders: Topic, found: Topic) -> None:
    orders.plain(OLD_MS, OLD_MS + 10).stored(COMMITTED, OLD_MS - 5)
    undo.sweep(orders, run_id="run-1")
    undo.sweep(orders.at(2).plain(OLD_MS + 20), run_id="run-1", rule=Rule.OLD_GENERATION)
    undo.sweep(orders.plain(OLD_MS + 30), run_id="run-2")
    undo.clock.advance(DAY)
    undo.sweep(orders.plain(OLD_MS + 40), run_id="run-2")
    undo.sweep(found.plain(OLD_MS), run_id="run-1")
    files = archived.find(undo.folder).files
    shown = json.loads(json.dumps(pack(archived.groups(files, archived.ANY))))
    assert sum(line.pop("size_bytes") for line in shown) == sum(file.path.stat().st_size for file in files)
    assert {line.pop("tms_namespace") for line in shown} == {"default"}
    columns = (
        "topic",
        "day",
        "run_id",
        "generations",
        "rules",
        "messages",
        "payloads",
        "files",
        "oldest_ms",
        "newest_ms",
    )
    assert all(line.keys() == set(columns) for line in shown)
    assert [tuple(line[name] for name in columns) for line in shown] == [
        ("found", "2023-11-15", "run-1", [5], ["expired"], 1, 0, 1, OLD_MS, OLD_MS),
        ("orders", "2023-11-14", "run-1", [1, 2], ["expired", "old_generation"], 3, 1, 3, OLD_MS - 5, OLD_MS + 20),
        ("orders", "2023-11-14", "run-2", [1], ["expired"], 1, 0, 1, OLD_MS + 30, OLD_MS + 30),
        ("orders", "2023-11-15", "run-2", [1], ["expired"], 1, 0, 1, OLD_MS + 40, OLD_MS + 40),
    ]


@pytest.mark.parametrize(
    ("selection", "runs"),
    [
        (Selection(), ["run-1", "run-2"]),
        (Selection(run_id="run-2"), ["run-2"]),
        (Selection(run_id="run-3"), []),
        (Selection(since_ms=OLD_MS + 1), ["run-1", "run-2"]),
        (Selection(since_ms=OLD_MS + 2), ["run-2"]),
        (Selection(until_ms=OLD_MS + 10), ["run-1"]),
        (Selection(until_ms=OLD_MS + 11), ["run-1", "run-2"]),
        (Selection(until_ms=OLD_MS), []),
        (Selection(since_ms=OLD_MS + 2, until_ms=OLD_MS + 10), []),
    ],
)
def test_list_by_a_selection_shows_its_runs(undo: Undo, orders: Topic, selection: Selection, runs: list[str]) -> None:
    undo.sweep(orders.plain(OLD_MS, OLD_MS + 1), run_id="run-1")
    undo.sweep(orders.plain(OLD_MS + 10), run_id="run-2")
    assert [group.run_id for group in archived.groups(archived.find(undo.folder).files, selection)] == runs


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    if how == "cut short":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "text":
        path.write_text("not a Parquet file at all")
    elif how == "foreign":
        pq.write_table(pa.table({"key": [b"default:orders:"], "payload": [b"x"]}), path)
    elif how == "other columns":
        with pq.ParquetFile(path) as file:
            table, metadata = file.read(), file.metadata.metadata
        pq.write_table(table.drop_columns("verdict").replace_schema_metadata(metadata), path)
    else:
        with pq.ParquetFile(path) as file:
            table = file.read()
        metadata = {**table.schema.metadata, b"tms_janitor.layout": b"2"} if how == "newer" else {}
        pq.write_table(table.replace_schema_metadata(metadata), path)


DAMAGES = ["cut short", "empty", "text", "foreign", "other columns", "newer", "nameless"]


def test_restore_of_a_topic_that_is_not_archived_says_so(undo: Undo, orders: Topic) -> None:
    with pytest.raises(ArchiveError, match=r"default:orders\. .*janitor archive list"):
        undo.restore(orders)


@pytest.mark.parametrize("how", DAMAGES)
def test_restore_of_a_damaged_file_writes_nothing(undo: Undo, orders: Topic, found: Topic, how: str) -> None:
    [broken] = undo.sweep(orders.plain(OLD_MS), run_id="run-1")
    undo.sweep(orders.plain(OLD_MS + 1), run_id="run-2")
    [other] = undo.sweep(found.plain(OLD_MS))
    assert broken.path is not None
    assert other.path is not None
    damage(broken.path, how)
    damage(other.path, how)
    with pytest.raises(ArchiveError, match=broken.path.name) as refused:
        undo.restore(orders)
    assert ("newer janitor" if how == "newer" else "cannot be read") in refused.value.message
    assert archived.find(undo.folder, ("default:none",)) == ([], [])
    assert orders.times() == []
    broken.path.unlink()
    assert undo.restore(orders).restored == 1


def bomb(path: Path, how: str) -> None:
    """Replace a file of the archive by a small file with the right columns, whose rows take gigabytes."""
    table = pq.read_table(path)
    body, times = b"x" * (2 << 20), 1000 if how == "dictionary" else 1
    row = table.slice(0, 1).to_pylist()[0] | {"payload": body}
    if how == "neither":
        row, times = row | {"payload": None, "write_pointer": None}, 1
    columns = {
        name: pa.DictionaryArray.from_arrays(pa.repeat(pa.scalar(0), times), pa.array([body]))
        if (how, name) == ("dictionary", "payload")
        else pa.repeat(pa.scalar(value, table.schema.field(name).type), times)
        for name, value in row.items()
    }
    schema = pa.schema([field.with_type(columns[field.name].type) for field in table.schema])
    with pq.ParquetWriter(
        path, schema, compression="zstd", use_dictionary=how == "dictionary", store_schema=False
    ) as writer:
        writer.write_table(pa.table(columns, schema=schema))
        writer.add_key_value_metadata({**table.schema.metadata, b"tms_janitor.references": b"0"})


@pytest.mark.parametrize("how", ["dictionary", "large", "neither"])
def test_restore_of_a_decompression_bomb_writes_nothing(
    undo: Undo, orders: Topic, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "large":
        monkeypatch.setattr(parquet, "_GROUP_BYTES", 1 << 20)
    [saved] = undo.sweep(orders.plain(OLD_MS))
    assert saved.path is not None
    bomb(saved.path, how)
    assert saved.path.stat().st_size < 1 << 20
    reason = {"large": "has more than 1 MB", "dictionary": "dictionary", "neither": "neither a payload"}[how]
    with pytest.raises(ArchiveError, match=f"{saved.path.name}.*{reason}"):
        undo.restore(orders)
    assert orders.times() == []


def test_restore_of_a_file_with_any_changed_byte_is_an_error_or_right(undo: Undo, orders: Topic) -> None:
    [saved] = undo.sweep(orders.plain(OLD_MS, OLD_MS + 1))
    assert saved.path is not None
    data = saved.path.read_bytes()
    refused = 0
    for at in range(0, len(data), 31):
        saved.path.write_bytes(data[:at] + bytes([data[at] ^ 0xFF]) + data[at + 1 :])
        try:
            undo.restore(orders, dry_run=True)
        except TmsError:
            refused += 1
    assert refused > 20


def test_restore_of_corrupt_rows_writes_nothing(undo: Undo, orders: Topic) -> None:
    [saved] = undo.sweep(orders.plain(OLD_MS, body=b"0123456789"))
    assert saved.path is not None
    data = saved.path.read_bytes()
    assert data.count(b"0123456789") == 1, "stored once, without compression"
    saved.path.write_bytes(data.replace(b"0123456789", b"0123456780"))
    with pytest.raises(ArchiveError, match=r"(?i)crc"):
        undo.restore(orders)
    assert orders.times() == []


def test_archive_is_readable_by_its_owner_only(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.plain(OLD_MS))
    modes = {path.stat().st_mode & 0o777 for path in undo.folder.rglob("*") if path.is_dir()}
    assert modes | {undo.folder.stat().st_mode & 0o777} == {0o700}
    assert {path.stat().st_mode & 0o777 for path in undo.folder.rglob("*.parquet")} == {0o600}


def test_restore_of_a_file_with_another_topic_writes_nothing(undo: Undo, orders: Topic, found: Topic) -> None:
    [saved] = undo.sweep(orders.plain(OLD_MS))
    assert saved.path is not None
    with pq.ParquetFile(saved.path) as file:
        table = file.read()
    schema = table.schema.with_metadata({**table.schema.metadata, b"tms_janitor.topic": b"default:found"})
    # Like the janitor's files: files with dictionaries are rejected before their rows are read.
    pq.write_table(pa.Table.from_batches(table.to_batches()).cast(schema), saved.path, use_dictionary=False)
    files = archived.find(undo.folder).files
    known = TransactionView(None, NOW_MS, HOUR)
    with pytest.raises(ArchiveError, match="default:found"):
        restore(undo.store, undo.state, known, files, Request(found.id, orders.id), NOW_MS, lambda _: None)
    assert (orders.times(), found.times()) == ([], [])


@pytest.mark.parametrize(
    ("window", "back"),
    [
        ((None, None), [0, 1, 2]),
        ((OLD_MS, None), [0, 1, 2]),
        ((OLD_MS + 1, None), [1, 2]),
        ((OLD_MS + 2, None), [2]),
        ((None, OLD_MS + 3), [0, 1, 2]),
        ((None, OLD_MS + 2), [0, 1]),
        ((None, OLD_MS), []),
        ((OLD_MS + 1, OLD_MS + 2), [1]),
        ((OLD_MS + 1, OLD_MS + 1), []),
    ],
)
def test_restore_of_a_time_range_restores_only_its_rows(
    undo: Undo, orders: Topic, window: tuple[int | None, int | None], back: list[int]
) -> None:
    undo.sweep(orders.plain(OLD_MS, OLD_MS + 1, OLD_MS + 2))
    done = undo.restore(orders, since_ms=window[0], until_ms=window[1])
    assert orders.times() == [OLD_MS + number for number in back]
    assert counts_of(done) == (len(back), 0, 0, 3 - len(back))


def test_restore_of_a_message_restores_its_payloads_of_any_time_and_run(undo: Undo, orders: Topic) -> None:
    other = COMMITTED + 1
    undo.sweep(
        orders.stored(COMMITTED, STARTED_MS, STARTED_MS + 1).stored(other, STARTED_MS),
        run_id="run-0",
        snapshot=SNAPSHOT,
    )
    undo.sweep(orders.ref(COMMITTED, STARTED_MS + HOUR).ref(other, STARTED_MS + 1), run_id="run-1", snapshot=SNAPSHOT)
    done = undo.restore(orders, snapshot=SNAPSHOT, run_id="run-1", since_ms=STARTED_MS + HOUR)
    assert (done.messages, done.payloads, done.skipped) == (1, 2, 2)
    assert orders.pointers() == [COMMITTED]
    assert orders.stored_times() == [STARTED_MS, STARTED_MS + 1]


def test_restore_of_a_negated_message_restores_its_payloads(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.stored(COMMITTED, STARTED_MS).ref(-COMMITTED, STARTED_MS + HOUR), snapshot=SNAPSHOT)
    undo.restore(orders, since_ms=STARTED_MS + HOUR)
    assert orders.stored_times() == [STARTED_MS]


def test_restore_without_its_payloads_warns(undo: Undo, orders: Topic, found: Topic) -> None:
    orders.stored(COMMITTED, STARTED_MS)
    undo.state.pause("default:*", NOW_MS)
    keys = orders.store.payload.read(KEYS, b"", None, 9).items
    [_, stored] = undo.archive(orders.ref(COMMITTED, STARTED_MS), snapshot=SNAPSHOT)
    stored.discard()
    message = "payloads that are neither archived nor in default:found"
    assert any(message in warning for warning in undo.restore(orders, found, snapshot=SNAPSHOT).warnings)
    assert undo.restore(orders, snapshot=SNAPSHOT).warnings == []
    undo.store.payload.delete(keys)
    assert any("1 transactions" in warning for warning in undo.restore(orders, snapshot=SNAPSHOT).warnings)


def test_restore_of_old_generations_writes_rows_of_the_current_generation(undo: Undo, orders: Topic) -> None:
    for generation in (1, 2):
        orders.at(generation).plain(OLD_MS + generation).stored(COMMITTED, OLD_MS + generation)
        undo.sweep(orders.at(generation))
    orders.describe(ttl_seconds=86_400, generation=3)
    assert undo.restore(orders).generation == 3
    assert orders.at(3).times() == [OLD_MS + 1, OLD_MS + 2]
    assert orders.at(3).stored_times() == [OLD_MS + 1, OLD_MS + 2]
    assert (orders.at(1).times(), orders.at(2).times()) == ([], [])


def test_restore_to_another_topic_needs_no_pause(undo: Undo, orders: Topic, found: Topic) -> None:
    undo.state.resume("default:orders")
    orders.plain(OLD_MS, body=b"a").tx(COMMITTED, OLD_MS + 1, body=b"b")
    undo.sweep(orders, snapshot=SNAPSHOT)
    done = undo.restore(orders, found, snapshot=SNAPSHOT)
    assert found.messages() == [
        (MessageKey(found.id, 5, OLD_MS, 0), MessageValue(None, b"a")),
        (MessageKey(found.id, 5, OLD_MS + 1, 1), MessageValue(COMMITTED, b"b")),
    ]
    assert (orders.times(), str(done.target), done.generation) == ([], "default:found", 5)


def test_restore_of_existing_rows_leaves_them_unchanged(undo: Undo, orders: Topic) -> None:
    undo.archive(orders.plain(OLD_MS).tx(COMMITTED, OLD_MS + 1).stored(COMMITTED, OLD_MS), snapshot=SNAPSHOT)
    [_, there] = undo.store.message.read(KEYS, b"", None, 9).items
    undo.store.message.put([(there, MessageValue(-COMMITTED, b"body"))])
    assert counts_of(undo.restore(orders, snapshot=SNAPSHOT)) == (0, 0, 3, 0)
    assert orders.pointers() == [None, -COMMITTED]


def test_restore_repeated_changes_nothing(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.plain(*range(OLD_MS, OLD_MS + 100)).stored(COMMITTED, OLD_MS))
    first = undo.restore(orders)
    before = orders.messages()
    again = undo.restore(orders)
    assert (first.restored, counts_of(again)) == (101, (0, 0, 101, 0))
    assert (orders.messages(), again.warnings) == (before, first.warnings)


def test_restore_dry_run_reports_the_same_and_writes_nothing(undo: Undo, orders: Topic) -> None:
    undo.archive(orders.tx(COMMITTED, OLD_MS, OLD_MS + 1).plain(NOW_MS - 2 * DAY).stored(COMMITTED, OLD_MS))
    undo.sweep(orders, run_id="run-2")
    made = record_puts(undo.store)
    result = undo.restore(orders, dry_run=True).to_json()
    assert made == []
    assert {**result, "dry_run": False} == undo.restore(orders).to_json()
    assert (result["restored"], result["already_there"], result["expired"]) == (4, 4, 1)


def test_restore_over_other_rows_is_rejected_with_their_number(undo: Undo, orders: Topic, found: Topic) -> None:
    undo.sweep(orders.plain(OLD_MS, OLD_MS + 1, OLD_MS + 2).stored(COMMITTED, OLD_MS))
    message = MessageKey(found.id, 5, OLD_MS, 0).pack()
    undo.store.message.put([(message, MessageValue(7, b"body"))])
    undo.store.payload.put([(PayloadKey(found.id, 5, COMMITTED, OLD_MS, 3).pack(), b"present")])
    made = record_puts(undo.store)
    for dry_run in (True, False):
        with pytest.raises(Refused, match=f"default:found: 2 .*{message.hex()}"):
            undo.restore(orders, found, dry_run=dry_run)
    assert made == []
    assert counts_of(undo.restore(orders, found, since_ms=OLD_MS + 1)) == (2, 0, 0, 2)


@pytest.mark.parametrize("archived_too", ["nothing", "its payload", "both"])
def test_restore_of_a_shared_transaction_is_rejected(
    undo: Undo, orders: Topic, found: Topic, archived_too: str
) -> None:
    orders.ref(COMMITTED, OLD_MS + 5).stored(COMMITTED, OLD_MS + 1, body=b"A1")
    found.ref(COMMITTED, OLD_MS + 4).stored(COMMITTED, OLD_MS, body=b"B0")
    undo.sweep(orders, snapshot=SNAPSHOT)
    if archived_too != "nothing":
        # A message without its payloads must not refer to other payloads.
        undo.store.payload.delete(keys_of(found, undo.store.payload))
    if archived_too == "both":
        undo.store.message.delete(keys_of(found, undo.store.message))
        assert undo.restore(orders, found, snapshot=SNAPSHOT).restored == 2
        assert undo.restore(orders, found, snapshot=SNAPSHOT).already_there == 2
        return
    with pytest.raises(Refused, match=f"have other payloads in the topic .*: {COMMITTED}"):
        undo.restore(orders, found, snapshot=SNAPSHOT)
    assert len(keys_of(found, undo.store.payload)) == (1 if archived_too == "nothing" else 0)
    orders.plain(OLD_MS + 9)
    undo.sweep(orders, run_id="run-2")
    assert undo.restore(orders, found, run_id="run-2").restored == 1


@pytest.mark.parametrize("snapshot", [visibility(NOW_MS, in_progress=[COMMITTED]), visibility(STARTED_MS), None])
def test_restore_elsewhere_of_an_open_transaction_is_rejected(
    undo: Undo, orders: Topic, found: Topic, snapshot: VisibilityState | None
) -> None:
    undo.sweep(orders.ref(COMMITTED, OLD_MS + 5).stored(COMMITTED, OLD_MS), snapshot=snapshot)
    if snapshot is None:
        undo.clock = ManualClock(STARTED_MS + HOUR - 1)
    with pytest.raises(Refused, match=f"are in progress .*: {COMMITTED}"):
        undo.restore(orders, found, snapshot=snapshot)
    assert undo.restore(orders, snapshot=snapshot).restored == 2


def test_restore_with_live_inline_messages_has_no_conflict(undo: Undo, orders: Topic, found: Topic) -> None:
    undo.sweep(orders.ref(COMMITTED, OLD_MS + 5).stored(COMMITTED, OLD_MS), snapshot=SNAPSHOT)
    found.tx(COMMITTED, OLD_MS + 4, body=b"B")
    assert undo.restore(orders, found, snapshot=SNAPSHOT).restored == 2


def test_restore_with_a_live_payload_keeps_both(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.ref(COMMITTED, OLD_MS + 5).stored(COMMITTED, OLD_MS), snapshot=SNAPSHOT)
    orders.stored(COMMITTED, OLD_MS + 1)
    assert undo.restore(orders, snapshot=SNAPSHOT).restored == 2
    assert orders.stored_times() == [OLD_MS, OLD_MS + 1]


@pytest.mark.parametrize("generation", [2, 3])
def test_restore_of_two_generations_to_one_is_rejected(undo: Undo, orders: Topic, generation: int) -> None:
    for life in (1, 2):
        orders.at(life).ref(COMMITTED, OLD_MS + life).stored(COMMITTED, OLD_MS + 2 * life)
    undo.sweep(orders.at(1), snapshot=SNAPSHOT)
    if generation == 3:
        undo.sweep(orders.at(2), run_id="run-2", snapshot=SNAPSHOT)
    orders.describe(ttl_seconds=86_400, generation=generation)
    with pytest.raises(Refused, match=f"have other payloads in the topic .*: {COMMITTED}"):
        undo.restore(orders, snapshot=SNAPSHOT)
    assert undo.restore(orders, snapshot=SNAPSHOT, since_ms=NOW_MS).restored == 0


def test_restore_of_rows_archived_twice_writes_them_once(undo: Undo, orders: Topic) -> None:
    undo.sweep(orders.ref(COMMITTED, OLD_MS).stored(COMMITTED, OLD_MS).plain(OLD_MS), snapshot=SNAPSHOT)
    orders.describe(ttl_seconds=86_400, generation=2)
    assert undo.restore(orders, snapshot=SNAPSHOT).restored == 3
    undo.clock.advance(1)
    undo.sweep(orders.at(2), run_id="run-2", rule=Rule.OLD_GENERATION, snapshot=SNAPSHOT)
    orders.describe(ttl_seconds=86_400, generation=3)
    assert counts_of(undo.restore(orders, snapshot=SNAPSHOT)) == (3, 0, 3, 0)
    assert len(orders.at(3).messages()) == 2


def test_restore_of_a_row_archived_twice_takes_the_later_file(undo: Undo, orders: Topic) -> None:
    undo.archive(orders.tx(COMMITTED, OLD_MS), run_id="run-1")
    undo.clock.advance(1)
    undo.sweep(orders, run_id="run-2", snapshot=SNAPSHOT)
    assert counts_of(undo.restore(orders, snapshot=SNAPSHOT)) == (1, 0, 1, 0)
    assert orders.pointers() == [COMMITTED]


def test_restore_of_one_id_in_two_generations_is_rejected(undo: Undo, orders: Topic) -> None:
    for life in (1, 2):
        key = MessageKey(orders.id, life, OLD_MS, 0).pack()
        undo.store.message.put([(key, MessageValue(None, b"of %d" % life))])
        undo.sweep(orders.at(life), run_id=f"run-{life}")
    orders.describe(ttl_seconds=86_400, generation=3)
    with pytest.raises(Refused, match="1 of"):
        undo.restore(orders)
    assert undo.restore(orders, run_id="run-1").restored == 1


def record_puts(store: Store) -> list[tuple[str, int]]:
    """Return a list of later writes: the table and the number of rows."""
    made: list[tuple[str, int]] = []

    def note(call: Call) -> None:
        if call.name.endswith(".put"):
            made.append((call.name, len(call.arguments[0])))

    watch(store, after=note)
    return made


def test_restore_writes_payloads_before_messages(undo: Undo, orders: Topic) -> None:
    for number in range(2):
        orders.ref(COMMITTED + number, OLD_MS).stored(COMMITTED + number, OLD_MS)
        undo.sweep(orders, run_id=f"run-{number}", snapshot=SNAPSHOT)
    made = record_puts(undo.store)
    undo.restore(orders, snapshot=SNAPSHOT)
    assert made == [("payload.put", 1), ("payload.put", 1), ("message.put", 1), ("message.put", 1)]


def call_after_puts(store: Store, number: int, action: Callable[[], object]) -> None:
    """Call a function after the given number of written batches."""
    written: list[Call] = []

    def count(call: Call) -> None:
        if call.name.endswith(".put"):
            written.append(call)
            if len(written) == number:
                action()

    watch(store, after=count)


@pytest.mark.parametrize(
    ("change", "message"),
    [("resumed", "janitor pause default:orders"), ("deleted", "is deleted"), ("recreated", "created again")],
)
def test_restore_to_a_topic_that_changes_stops_writing(undo: Undo, orders: Topic, change: str, message: str) -> None:
    def happen() -> None:
        if change == "resumed":
            undo.state.resume("default:orders")
        else:
            orders.describe(ttl_seconds=86_400, generation=-1 if change == "deleted" else 2)

    for number in range(3):
        undo.sweep(orders.plain(OLD_MS + number), run_id=f"run-{number}")
    call_after_puts(undo.store, 1, happen)
    with pytest.raises(Refused, match=message):
        undo.restore(orders)
    assert len(orders.at(1).times()) == 1
    assert orders.at(2).times() == []


@pytest.mark.parametrize(("age_seconds", "expired"), [(86_400, 0), (86_401, 1)])
def test_restore_of_expired_rows_names_their_new_ttl(undo: Undo, orders: Topic, age_seconds: int, expired: int) -> None:
    undo.sweep(orders.plain(NOW_MS - age_seconds * 1000, NOW_MS))
    done = undo.restore(orders, snapshot=SNAPSHOT)
    assert (done.restored, done.expired) == (2, expired)
    if not expired:
        assert (done.warnings, done.ttl_seconds) == ([], None)
        return
    # The age of the oldest row plus one day, in whole days.
    assert done.ttl_seconds == 3 * 86_400
    [warning] = done.warnings
    assert "first set the ttl of the topic to 3d" in warning
    assert "resumed" in warning
    kept = TopicMetadata(TopicId("default", "orders"), 1, done.ttl_seconds)
    assert NOW_MS + DAY - kept.ttl_seconds * 1000 <= min(orders.times())


def test_restore_of_expired_rows_elsewhere_without_a_snapshot_warns(undo: Undo, orders: Topic, found: Topic) -> None:
    undo.sweep(orders.plain(0))
    done = json.loads(json.dumps(undo.restore(orders, found).to_json()))
    assert (done["source"], done["target"], done["restored"]) == ("default:orders", "default:found", 1)
    snapshot, expired = done["warnings"]
    assert "no usable transaction snapshot" in snapshot
    assert "paused" in expired


POOLS = {name: [pointer(STARTED_MS, 10 * at + number) for number in range(3)] for at, name in enumerate("cioz")}
COMMITTED_POOL, INVALID_POOL, OPEN_POOL, LATER_POOL = POOLS.values()
NEGATIVE_POOL = [-value for value in COMMITTED_POOL + INVALID_POOL]
ANY_SNAPSHOT = visibility(NOW_MS, invalid=INVALID_POOL, in_progress=OPEN_POOL, newest=OPEN_POOL[-1])

pointers = st.sampled_from([None, *COMMITTED_POOL, *INVALID_POOL, *OPEN_POOL, *LATER_POOL, *NEGATIVE_POOL])
messages = st.lists(
    st.tuples(st.integers(1, 3), st.integers(0, 5), st.integers(0, 65535), pointers, st.none() | st.binary()),
    unique_by=lambda row: row[1:3],
)


@given(messages, st.lists(st.integers(0, 3)), st.booleans())
def test_restore_of_any_rows_keeps_only_committed_rows_visible(
    rows: list[tuple[int, int, int, int | None, bytes | None]], runs: list[int], fresh: bool
) -> None:
    store = MemoryStore()
    orders, found = topic(store, "default:orders", ttl_seconds=60), topic(store, "default:found", ttl_seconds=60)
    snapshot = ANY_SNAPSHOT if fresh else None
    expected = {}
    with TemporaryDirectory() as folder:
        undo = Undo(store, Path(folder))
        for number, (generation, ms, sequence, stored, body) in enumerate(rows):
            payload = body or b"" if stored is None else body
            key = MessageKey(orders.id, generation, ms, sequence)
            store.message.put([(key.pack(), MessageValue(stored, payload))])
            back = stored if stored in (None, *COMMITTED_POOL[: 3 * fresh]) else -abs(stored or 0)
            expected[MessageKey(found.id, 1, ms, sequence)] = MessageValue(back, payload)
            if number in runs:
                undo.sweep(orders.at(generation), run_id=f"run-{number}", snapshot=snapshot)
        for generation in (1, 2, 3):
            undo.sweep(orders.at(generation), run_id="last", snapshot=snapshot)
        if rows:
            # By now all transactions are decided.
            undo.restore(orders, found, snapshot=visibility(NOW_MS + DAY) if fresh else None)
            assert not undo.restore(orders, found).restored
    assert dict(found.messages()) == expected


def test_restore_under_a_delete_mark_fails_and_can_be_repeated(undo: Undo, store: MemoryStore, orders: Topic) -> None:
    """HBase rejects it under a delete mark from the future."""
    orders.plain(OLD_MS, OLD_MS + 1)
    _, second = store.message.read(KEYS, b"", None, 10).items
    undo.sweep(orders)
    put = store.message.put
    store.message.put = lambda rows: put([row for row in rows if row[0] != second])  # type: ignore[method-assign]
    with pytest.raises(StoreError, match=second.hex()):
        undo.restore(orders)
    assert undo.restore(orders, dry_run=True).restored == 1
    store.message.put = put  # type: ignore[method-assign]
    assert counts_of(undo.restore(orders)) == (1, 0, 1, 0)
    assert orders.times() == [OLD_MS, OLD_MS + 1]


def test_restore_among_announced_requests_of_a_producer_is_rejected(undo: Undo, orders: Topic, found: Topic) -> None:
    side, prefix = MemorySide(), generation_prefix(found.id.prefix, 5)
    undo.sweep(orders.plain(OLD_MS), run_id="run-1")
    files, known = archived.find_topic(undo.folder, orders.id), TransactionView(SNAPSHOT, NOW_MS, 0)
    request = ProducerName(found.id, 5, "importer").request_key(prefix)

    def restored() -> int:
        restore_request = Request(orders.id, found.id)
        return restore(undo.store, undo.state, known, files, restore_request, NOW_MS, lambda _: None, side).restored

    for first_ms, until_ms in ((OLD_MS - 10, OLD_MS + 240), (OLD_MS - 250, OLD_MS + 1)):
        side.put([(request, LastRequest(1, 1, position(first_ms), 1, position(until_ms)).pack())])
        with pytest.raises(Refused, match=r"1 rows .*producer"):
            restored()
    # Requests that ended before the row, and the announcement itself, have no effect.
    side.put([(request, LastRequest(1, 1, position(OLD_MS - 250), 1, position(OLD_MS)).pack())])
    side.put([(request + b"2", LastRequest(1, 1, position(OLD_MS - 10), 1).pack())])
    assert restored() == 1
