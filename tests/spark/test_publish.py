"""Publishing batches: each is published once, whole and in order, despite killed drivers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark import TaskContext, cloudpickle
from pyspark.errors import AnalysisException
from pyspark.sql.types import BinaryType, LongType, StringType, StructField, StructType

from janitor.spark.stream import publish as publishing
from janitor.spark.stream.publish import BatchPublisher, publish_batches
from tests.builders import NOW_MS, ProcessKilled
from tests.client.faults import SOON, Faults, FaultyTransport, faulty_service, no_pause
from tests.spark.streams import StreamKit, scene, texts
from tests.support import raising
from tms_core.client import Client, Limits, TransactionClient
from tms_core.client.contexts import TransactionContext
from tms_core.client.producer import Producer
from tms_core.client.protocol.wire import run
from tms_core.errors import ConfigurationError, NotInProgress, ProducerFenced, Refused, TmsError, TopicNotFound

BILLS = "default:bills"
#: The time after which the server may forget an idle query, in milliseconds.
IDLE_MS = 7 * 86_400_000
#: A small limit, so that a publisher sends most of a batch before the commit.
SMALL = Limits(transaction_bytes=6)


class Session:
    """A reader of a checkpoint's files like Spark; it plans a batch at :data:`NOW_MS` unless a test has planned it."""

    @property
    def read(self) -> Session:
        return self

    def text(self, path: str) -> Session:
        self.path = Path(path)
        if self.path.parent.name == "offsets" and not self.path.exists():
            plan(self.path.parents[1], int(self.path.name), NOW_MS)
        return self

    def collect(self) -> list[tuple[str]]:
        if not self.path.is_file():
            raise AnalysisException(errorClass="PATH_NOT_FOUND", messageParameters={"path": str(self.path)})
        return [(line,) for line in self.path.read_text().splitlines()]


def plan(checkpoint: Path, batch_id: int, now_ms: int) -> None:
    """Write the files of a planned batch as Spark does."""
    file = checkpoint / "offsets" / str(batch_id)
    file.parent.mkdir(exist_ok=True)
    file.write_text(f'v1\n{{"batchWatermarkMs":0,"batchTimestampMs":{now_ms},"conf":{{}}}}\n{{"at":"end"}}\n')


class Value:
    def cast(self, kind: str) -> str:
        assert kind == "binary"
        return "as bytes"


class Batch:
    """A DataFrame with a column ``payload`` in two partitions.

    Args:
        payloads: the rows.
        kind: the type of the column.
        concurrent_action: a function that is called after the tasks and before the batch is published.
        attempts: the number of attempts of each task; the last one returns the result.
    """

    sparkSession = Session()  # noqa: N815

    def __init__(
        self,
        payloads: Sequence[bytes | None],
        kind: Any = None,
        concurrent_action: Callable[[], object] = int,
        attempts: int = 1,
    ):
        self.schema = StructType([StructField("n", LongType()), StructField("payload", kind or BinaryType())])
        self._payloads = payloads
        self._concurrent_action = concurrent_action
        self._attempts = attempts
        self._found: list[tuple[int, int]] = []
        self.task: Callable[[], list[Any]] = list

    def __getitem__(self, name: str) -> Value:
        assert name == "payload"
        return Value()

    def select(self, column: object) -> Batch:
        assert column == "as bytes"
        return self

    def mapInArrow(self, function: Any, schema: str) -> Batch:  # noqa: N802
        assert schema == "at long, pointer long"
        sent = _DUMPS(function)
        half = len(self._payloads) // 2
        for at, part in enumerate((self._payloads[:half], self._payloads[half:])):
            self.task = partial(_attempt, sent, at, part)
            answers = [self.task() for _ in range(self._attempts)]
            # The tasks finish in reverse order.
            self._found[:0] = [(row["at"], row["pointer"]) for row in answers[-1]]
        return self

    def collect(self) -> list[tuple[int, int]]:
        self._concurrent_action()
        return self._found


def _attempt(sent: bytes, at: int, part: Sequence[bytes | None]) -> list[dict[str, int]]:
    """Run one attempt of a task from its serialized function."""
    context = TaskContext()
    context._partitionId = at
    TaskContext._taskContext = context
    try:
        rows = pa.RecordBatch.from_arrays([pa.array(part, pa.binary())], ["payload"])
        return [row for answer in cloudpickle.loads(sent)([rows]) for row in answer.to_pylist()]
    finally:
        TaskContext._taskContext = None


@dataclass
class PublishKit:
    streams: StreamKit
    checkpoint: Path
    patch: pytest.MonkeyPatch

    def publisher(self, **options: Any) -> BatchPublisher:
        """Return the publisher of a new driver."""
        made = publish_batches("http://in.process", BILLS, str(self.checkpoint), **options)
        found: BatchPublisher = cloudpickle.loads(_DUMPS(made))
        return found

    def publish(self, batch_id: int, *payloads: str | int, **options: Any) -> None:
        """Publish a batch as a new driver."""
        publish(self.publisher(**options), batch_id, *payloads)

    def publish_batch(self, batch: Any) -> None:
        self.publisher()(batch, 0)

    def served_by(self, faults: Faults) -> None:
        """Apply the faults to all later calls of publishers."""
        self.patch.setattr(publishing, "service_at", lambda *_: faulty_service(self.streams.server, faults))
        self.patch.setattr(publishing, "connect", lambda _, service, *__: self._client(faults, service))

    def _client(self, faults: Faults, service: TransactionClient | str) -> Client:
        transport = FaultyTransport(faults, self.streams.server)
        if isinstance(service, str):
            service = self.streams.server.transactions()
        return self.streams.server.client(
            transport=transport, transactions=service, retry=SOON, pause=no_pause, limits=SMALL
        )

    @property
    def bills(self) -> list[bytes]:
        return self.streams.committed(BILLS)


def publish(publisher: BatchPublisher, batch_id: int, *payloads: str | int) -> None:
    batch: Any = Batch(texts(*payloads))
    publisher(batch, batch_id)


_DUMPS: Callable[[object], bytes] = cloudpickle.dumps


@pytest.fixture
def kit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PublishKit]:
    (tmp_path / "metadata").write_text(json.dumps({"id": "query-1"}))
    with scene(monkeypatch) as streams:
        made = PublishKit(streams, tmp_path, monkeypatch)
        made.served_by(Faults())
        yield made


def test_publish_keeps_batches_in_order_with_one_producer(kit: PublishKit) -> None:
    publisher = kit.publisher()
    for number in range(4):
        publish(publisher, number, *range(number * 10, number * 10 + 10))
    assert kit.bills == texts(*range(40))
    assert [(known.name, known.open) for known in kit.streams.client.producers(BILLS)] == [("query-1", {})]


def test_unfinished_batch_is_not_visible(kit: PublishKit) -> None:
    def check() -> None:
        assert not list(kit.streams.client.poll(BILLS))

    kit.publish_batch(Batch(texts(1, 2), concurrent_action=check))
    assert kit.bills == texts(1, 2)


@pytest.mark.parametrize("attempts", [1, 2, 3])
def test_publish_of_repeated_tasks_keeps_the_last_attempt(attempts: int, kit: PublishKit) -> None:
    late: list[Any] = []
    batch: Any = Batch(texts(*range(7)), attempts=attempts, concurrent_action=lambda: late.append(batch.task()))
    kit.publish_batch(batch)
    assert kit.bills == texts(*range(7))
    with pytest.raises(TmsError):
        batch.task()
    kit.publish(1, 7)
    assert late
    assert kit.bills == texts(*range(8))


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", ["store", "checkpoint"])
def test_retried_task_publishes_each_row_once(
    step: str, when: Any, kit: PublishKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publishing, "_CHUNK_ROWS", 2)
    faults, own = Faults(), _attempt

    def twice(*task: Any) -> list[dict[str, int]]:
        faults.at(step, when)
        with pytest.raises(TmsError):
            own(*task)
        faults.heal()
        return own(*task)

    monkeypatch.setattr(sys.modules[__name__], "_attempt", twice)
    kit.served_by(faults)
    kit.publish(0, *range(9))
    assert kit.bills == texts(*range(9))


def test_publish_ttl_applies_only_to_messages_of_the_batch(kit: PublishKit) -> None:
    kit.publish(0, "short", ttl_seconds=60)
    kit.publish(1, "long")
    kit.streams.clock.advance(60_000)
    assert kit.bills == [b"short", b"long"]
    kit.streams.clock.advance(1)
    assert kit.bills == [b"long"]
    # The batch counts as published, although its message has expired.
    kit.publish(2, "short", ttl_seconds=60)
    kit.streams.clock.advance(60_001)
    kit.publish(2, "short", ttl_seconds=60)
    assert kit.bills == [b"long"]


@pytest.mark.parametrize("ttl_seconds", [0, -1])
def test_publisher_with_ttl_below_one_is_rejected(kit: PublishKit, ttl_seconds: int) -> None:
    with pytest.raises(ConfigurationError, match="1 or more"):
        kit.publisher(ttl_seconds=ttl_seconds)


def test_repeated_batch_is_published_once(kit: PublishKit) -> None:
    publisher = kit.publisher()
    publish(publisher, 0, 1, 2)
    publish(publisher, 0, 1, 2)
    kit.publish(0, 1, 2)
    kit.publish(1, 3)
    kit.publish(1, 3)
    assert kit.bills == texts(1, 2, 3)


def test_publish_with_a_new_checkpoint_is_a_new_query(kit: PublishKit) -> None:
    publisher = kit.publisher()
    publish(publisher, 0, 1)
    publish(publisher, 1, 2)
    (kit.checkpoint / "metadata").write_text('{"id": "query-2"}')
    publish(publisher, 0, 3)
    publish(publisher, 1, 4)
    assert kit.bills == texts(1, 2, 3, 4)


def test_empty_batch_counts_as_published(kit: PublishKit) -> None:
    kit.publish(0)
    kit.publish(1)
    kit.publish(1)
    kit.publish(2, "first")
    assert kit.bills == texts("first")


class KillingFaults(Faults):
    """A kill of the driver before the call with a number, or after it if ``done``."""

    def __init__(self, at: int, *, done: bool) -> None:
        super().__init__()
        self._at = at
        self._done = done
        self._calls = -1

    def next_fault(self, step: str) -> Any:
        self._calls += 1
        if self._calls > self._at or (self._calls == self._at and not self._done):
            raise ProcessKilled
        return "after" if self._calls == self._at else None


@pytest.mark.no_cover
@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_batch_of_driver_killed_at_any_call_is_published_once(kit: PublishKit, done: bool, known: bool) -> None:
    kit.patch.setattr(publishing, "_CHUNK_ROWS", 2)
    expected = texts("zero")
    kit.publish(0, "zero")
    for batch_id in count(1):
        killing = KillingFaults(batch_id - 1, done=done)
        rows = [f"{batch_id}{part}" for part in "abcdef"]
        publisher = kit.publisher()
        if known:
            publish(publisher, batch_id - 1, "not again")
        kit.served_by(killing)
        survived = False
        with suppress(ProcessKilled):
            publish(publisher, batch_id, *rows)
            survived = True
        kit.served_by(Faults())
        kit.publish(batch_id, *rows)
        kit.publish(batch_id, *rows)
        expected += texts(*rows)
        assert kit.bills == expected, f"killed at call {batch_id - 1}"
        if survived:
            break
    assert batch_id > 8, "the number of calls of a batch"


@pytest.mark.no_cover
@pytest.mark.parametrize("when", ["before", "after", "late"])
@pytest.mark.parametrize("step", ["publish", "store", "poll", "start", "canCommit", "commit", "abort"])
def test_publish_with_failed_or_late_call_is_once(step: str, when: Any, kit: PublishKit) -> None:
    kit.publish(0, "zero")
    faults = Faults()
    kit.served_by(faults)
    faults.at(step, when, 1)
    publisher = kit.publisher()
    try:
        publish(publisher, 1, "one", "two", "three")
    except TmsError:
        publish(publisher, 1, "one", "two", "three")
    for late in faults.late:
        with suppress(TmsError):
            late()
    kit.publish(1, "one", "two", "three")
    kit.publish(2, "four")
    assert kit.bills == texts("zero", "one", "two", "three", "four")


def leave_open(kit: PublishKit, batch_id: int, *payloads: str | int) -> int:
    """Leave the data of a driver killed before its commit and return the transaction id."""
    with kit.streams.client.producer(BILLS, "query-1") as producer:
        return start_batch(producer, batch_id, *payloads).transaction.transaction_id


def start_batch(producer: Producer, batch_id: int, *payloads: str | int) -> TransactionContext:
    transaction = producer.transaction(f"{batch_id} {NOW_MS}").__enter__()
    transaction.publish(BILLS, texts(*payloads))
    run(transaction._work._prepare())
    return transaction


def test_publish_after_killed_driver_invalidates_its_transaction(kit: PublishKit) -> None:
    kit.publish(0, 0)
    abandoned = leave_open(kit, 1, 1, 2)
    kit.publish(1, 1, 2)
    assert kit.bills == texts(0, 1, 2)
    assert list(kit.streams.server.manager.visibility().invalid) == [abandoned]
    with pytest.raises(NotInProgress):
        kit.streams.server.manager.commit(abandoned)


def test_publish_of_previous_driver_is_fenced(kit: PublishKit) -> None:
    kit.publish(0, 0)
    batch: Any = Batch(texts(1), concurrent_action=lambda: kit.publish(1, 1))
    with pytest.raises(ProducerFenced):
        kit.publisher()(batch, 1)
    kit.publish(1, 1)
    assert kit.bills == texts(0, 1)


def test_rolled_back_batch_is_published_on_retry(kit: PublishKit) -> None:
    kit.publish(0, 0)
    batch: Any = Batch(texts(1), concurrent_action=raising(LookupError))
    with pytest.raises(LookupError):
        kit.publisher()(batch, 1)
    with kit.streams.client.producer(BILLS, "query-1") as producer:
        start_batch(producer, 1, "rolled back").__exit__(None, LookupError(), None)
    kit.publish(1, 1)
    assert kit.bills == texts(0, 1)


def test_publish_to_recreated_topic_requires_first_batch(kit: PublishKit) -> None:
    kit.publish(0, 0)
    kit.streams.client.delete_topic(BILLS)
    with pytest.raises(TopicNotFound):
        kit.publish(1, 1)
    kit.streams.client.create_topic(BILLS)
    with pytest.raises(Refused, match="or the topic was created again"):
        kit.publish(1, 1)
    kit.publish(1, 1, first_batch=1)
    assert kit.bills == texts(1)


def test_each_query_counts_its_own_batches(kit: PublishKit) -> None:
    kit.publish(0, 0)
    other = kit.checkpoint / "other"
    other.mkdir()
    (other / "metadata").write_text(json.dumps({"id": "query-2"}))
    publish(publish_batches("http://in.process", BILLS, f"{other}/"), 0, "other")
    kit.publish(0, 0)
    kit.publish(1, 1)
    assert kit.bills == texts(0, "other", 1)


def test_publish_of_forgotten_query_requires_first_batch(kit: PublishKit) -> None:
    kit.publish(0, 0)
    kit.publish(1, 1)
    kit.streams.clock.advance(IDLE_MS + 1)
    kit.streams.client.delete_producer(BILLS, "query-1")
    for _ in range(2):
        with pytest.raises(Refused, match=r"batch 1 .*query-1 .*first_batch=1; .*=2"):
            kit.publish(1, 1)
    kit.publish(2, 2, first_batch=2)
    kit.publish(2, 2)
    assert kit.bills == texts(2)


def test_publish_skips_batches_before_first_batch(kit: PublishKit) -> None:
    kit.publish(7, "skipped", first_batch=8)
    kit.publish(8, "first", first_batch=8)
    kit.publish(8, "first", first_batch=8)
    kit.publish(9, "next")
    assert kit.bills == texts("first", "next")


def test_publish_of_old_batch_after_restore_is_rejected(kit: PublishKit) -> None:
    for number in range(3):
        kit.publish(number, number)
    with pytest.raises(Refused, match=r"batch 2 \(.* batch 1 \(planned 2023"):
        kit.publish(1, 1)


def test_publish_of_different_batch_with_same_number_is_rejected(kit: PublishKit) -> None:
    plan(kit.checkpoint, 1, NOW_MS)
    kit.publish(0, 0)
    kit.publish(1, 1)
    plan(kit.checkpoint, 1, NOW_MS + 60_000)
    expected = (
        r"published batch 1 \(planned 2023-11-14 22:13:20 UTC\) .* batch 1 \(planned 2023-11-14 22:14:20 UTC\): .*copy"
    )
    with pytest.raises(Refused, match=expected):
        kit.publish(1, 1, "later message")
    plan(kit.checkpoint, 1, NOW_MS)
    kit.publish(1, 1)
    assert kit.bills == texts(0, 1)


def test_publish_of_late_first_batch_requires_first_batch(kit: PublishKit) -> None:
    kit.streams.clock.advance(IDLE_MS + 1)
    with pytest.raises(Refused, match=r"batch 0 .*query-1 .*first_batch=0; .*=1"):
        kit.publish(0, 0)
    kit.publish(0, 0, first_batch=1)
    assert kit.bills == []
    kit.publish(0, "confirmed", first_batch=0)
    assert kit.bills == texts("confirmed")
    (kit.checkpoint / "metadata").write_text('{"id": "query-2"}')
    plan(kit.checkpoint, 0, kit.streams.clock.now_ms())
    kit.publish(0, 0)
    assert kit.bills == texts("confirmed", 0)


def test_publish_past_the_timeout_names_the_batch_limit(kit: PublishKit) -> None:
    def late() -> None:
        kit.streams.clock.advance(6_000)
        kit.streams.server.manager.expire()

    batch: Any = Batch(texts(1), concurrent_action=late)
    publisher = kit.publisher(timeout_seconds=5)
    with pytest.raises(NotInProgress, match=r"Batch 0 .* 5 s.*maxMessagesPerBatch"):
        publisher(batch, 0)
    publish(publisher, 0, 1)
    assert kit.bills == texts(1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "body"}, "body is not a column of the batch. Set column to one of n, payload"),
        ({"column": "n"}, r"Column n is of type bigint.*to_json"),
    ],
)
def test_publish_of_wrong_column_names_it(options: dict[str, Any], message: str, kit: PublishKit) -> None:
    with pytest.raises(ConfigurationError, match=message):
        kit.publish(0, 1, **options)


def test_publish_with_null_payload_publishes_nothing(kit: PublishKit) -> None:
    with pytest.raises(ConfigurationError, match=r"payload .*null"):
        kit.publish_batch(Batch([b"1", None]))
    assert kit.bills == []


def test_publish_accepts_text(kit: PublishKit) -> None:
    kit.publish_batch(Batch(texts("text"), StringType()))
    assert kit.bills == texts("text")


def test_publish_of_many_rows_keeps_their_order(kit: PublishKit) -> None:
    rows = [b"%d" % number for number in range(2500)] + [b"x" * 600_000, b"y" * 600_000, b"z"]
    kit.publish_batch(Batch(rows))
    assert kit.bills == rows


def test_publish_with_missing_checkpoint_names_it(kit: PublishKit) -> None:
    (kit.checkpoint / "metadata").unlink()
    with pytest.raises(ConfigurationError, match=r"/metadata.*checkpointLocation"):
        kit.publish(0, 1)


@pytest.mark.parametrize(
    ("properties", "named"),
    [({"partitions": "2"}, "default:visits-0"), ({"routes": '{"users": 2, "pages": 3}'}, "default:visits-users-0")],
)
def test_publisher_of_partitioned_topic_names_a_partition(
    properties: dict[str, str], named: str, kit: PublishKit
) -> None:
    kit.streams.client.create_topic("default:visits", properties=properties)
    arguments: dict[str, Any] = {"url": "http://in.process", "checkpoint": str(kit.checkpoint)}
    with pytest.raises(ConfigurationError, match=f"default:visits .*{named}"):
        publish_batches(topic="default:visits", **arguments)
    publish(publish_batches(topic=named, **arguments), 0, 1, 2)
    assert [message.payload for message in kit.streams.client.poll(named)] == texts(1, 2)


@pytest.mark.parametrize("topic", [BILLS, "default:created-later"])
def test_publisher_without_server_or_topic_waits_for_a_batch(topic: str, kit: PublishKit) -> None:
    faults = Faults()
    kit.served_by(faults)
    if topic == BILLS:
        faults.at("GET bills", "before")
    made = publish_batches("http://in.process", topic, str(kit.checkpoint))
    faults.heal()
    if topic != BILLS:
        kit.streams.client.create_topic(topic)
    publish(made, 0, 1)
    assert [message.payload for message in kit.streams.client.poll(topic)] == texts(1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"topic": "bills"}, "topic is bills"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0"),
        ({"url": "nowhere"}, "'nowhere' .*URL"),
        ({"transactions": "nowhere"}, "'nowhere'.*HOST:PORT"),
    ],
)
def test_publish_batches_with_wrong_argument_names_it(arguments: dict[str, Any], message: str) -> None:
    given = {"url": "http://127.0.0.1:1", "topic": BILLS, "checkpoint": "checkpoints", **arguments}
    with pytest.raises(ConfigurationError, match=message):
        publish_batches(**given)
