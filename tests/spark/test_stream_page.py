"""The example of ``docs/how-to/spark.md`` and errors of streams, on Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from janitor.spark.session import translated
from janitor.spark.source.source import register
from janitor.spark.stream.feed import Feed
from janitor.spark.stream.stream import STREAM_SCHEMA
from tests.server.conftest import serving
from tests.spark.streams import retry_if_busy
from tests.transaction.managers import served
from tms_core.client import Client
from tms_core.client.sync import DEFAULT_TRANSACTIONS, DEFAULT_URL
from tms_core.clock import SystemClock
from tms_core.errors import ConfigurationError, TopicNotFound
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

PAGE = (Path(__file__).parents[2] / "docs/how-to/spark.md").read_text(encoding="utf-8")
SECTION = PAGE[PAGE.index("## Stream a topic with Spark") :]


@pytest.fixture
def addresses() -> Iterator[tuple[str, str]]:
    with serving() as server, TransactionManager(MemoryStorage(), SystemClock()) as manager, served(manager) as service:
        yield f"http://127.0.0.1:{server.port}", service.address


@pytest.mark.parametrize("properties", [{}, {"partitions": "2"}], ids=["ordinary", "partitions"])
def test_example_of_the_page_runs(
    properties: dict[str, str], spark: SparkSession, addresses: tuple[str, str], tmp_path: Path
) -> None:
    url, transactions = addresses
    [code] = re.findall(r"^```python\n(.*?)^```", SECTION, flags=re.MULTILINE | re.DOTALL)
    for stated, real in (
        (DEFAULT_URL, url),
        (DEFAULT_TRANSACTIONS, transactions),
        ("data/bills", str(tmp_path / "bills[1]")),
    ):
        assert stated in code
        code = code.replace(stated, real)
    with Client(url, transactions=transactions) as client:
        client.create_topic("default:orders", properties=properties)
        client.create_topic("default:bills")
        for order in (b"one", b"two"):
            client.publish("default:orders", [order])
        example = compile(code, "docs/how-to/spark.md", "exec")
        retry_if_busy(lambda: exec(example, {"spark": spark}))  # noqa: S102 the test runs the example
        with client.transaction() as transaction:
            found = [message.payload for message in transaction.poll("default:bills")]
    assert sorted(found) == [b"bill of one", b"bill of two"]


def test_stream_query_of_missing_topic_raises_topic_not_found(
    spark: SparkSession, addresses: tuple[str, str], tmp_path: Path
) -> None:
    url, transactions = addresses
    register(spark)
    stream = spark.readStream.format("tms").options(url=url, topic="default:none", transactions=transactions).load()
    assert stream.schema == STREAM_SCHEMA
    query = stream.writeStream.format("noop").option("checkpointLocation", str(tmp_path))

    def run() -> None:
        with translated():
            query.trigger(availableNow=True).start().awaitTermination()

    with pytest.raises(TopicNotFound, match="default:none"):
        retry_if_busy(run)
    with pytest.raises(ConfigurationError, match=r"\burl\b"), translated():
        spark.readStream.format("tms").option("topic", "default:none").load()


def test_page_documents_every_option_and_column() -> None:
    table = {name for cell in re.findall(r"^\| (`.+?) \|", SECTION, flags=re.MULTILINE) for name in cell.split(", ")}
    with pytest.raises(ConfigurationError) as caught:
        Feed.parse({"wrong": ""})
    options = caught.value.hint.removeprefix("Use one of ").rstrip(".").split(", ")
    assert {name.strip("`") for name in table} == {*options, *STREAM_SCHEMA.names}
