"""HBase tables of CDAP and of ``tms admin create-tables``: each side reads the other's rows."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from janitor.rules.policy import Rule
from janitor.sweep.transactions import TransactionView
from tests.builders import SECOND, every
from tests.hbase.conftest import hbase, hbase_tables
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import Tables
from tests.interop.deletion_rules import empty_invalid_list, kept_rows
from tests.interop.java import Interop
from tests.interop.program import Program, Refused
from tests.interop.test_sweep import LIFETIME, sweep_store
from tests.kit.messaging import Kit, named
from tms_core.cli.main import execute
from tms_core.clock import ManualClock, SystemClock
from tms_core.tables.base import MESSAGES, PAYLOADS, TableName
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.schema import attributes_of, table_name
from tms_core.tables.hbase.side import HBaseSide
from tms_core.transaction.source.source import DirectorySource

__all__ = ["hbase", "hbase_tables"]

#: The number of salts of CDAP's tables by default, and of the tables that the tests create.
CDAP_BUCKETS, CREATED_BUCKETS = 16, 3
TABLES: tuple[TableName, ...] = ("metadata", "message", "payload")

Line = dict[str, Any]


@pytest.fixture
def prefix() -> str:
    return f"cdap{secrets.token_hex(4)}"


@pytest.fixture
def place(hbase: HBaseServer, prefix: str) -> str:
    return f"hbase:{hbase.zookeeper}:{prefix}"


@pytest.fixture
def created_tables(hbase_tables: Tables, prefix: str) -> str:
    """Return the namespace of tables created by ``tms admin create-tables``."""
    namespace = f"{prefix}_system"
    words = ["--namespace", namespace, "--buckets", str(CREATED_BUCKETS), "--compression", "none"]
    assert execute(["admin", "create-tables", "--thrift2", str(hbase_tables.server.thrift2), *words]) == 0
    return namespace


@pytest.fixture
def start(java: Interop, created_tables: str, hbase: HBaseServer) -> Callable[[], Program]:
    """Return a function that starts CDAP's messaging service on created tables."""
    return lambda: Program(java, f"hbase:{hbase.zookeeper}:{created_tables.removesuffix('_system')}")


@pytest.fixture
def kit(hbase_tables: Tables, created_tables: str) -> Iterator[Kit]:
    clock = ManualClock(SystemClock().now_ms(), monotonic_ms=SECOND)
    pool = HBasePool([hbase_tables.server.thrift], connections=2, timeout_seconds=PATIENCE_SECONDS)
    made = Kit(hbase_tables.open(created_tables, buckets=CREATED_BUCKETS), HBaseSide(pool, created_tables), clock)
    yield made
    made.close()


# --- tables of CDAP --------------------------------------------------------------------------------------------------


def test_sweep_of_cdap_tables_on_hbase_keeps_live_messages(
    java: Interop, hbase_tables: Tables, place: str, prefix: str, tmp_path: Path
) -> None:
    # Given
    *_, written = java.run("write", place, 1, "--rows", 1000, "--snapshots", tmp_path)
    now_ms, snapshot = written["now_ms"], Path(written["snapshot"])
    before, served = java.run("dump", place), served_by(java, place, snapshot)
    with hbase_tables.open(f"{prefix}_system", buckets=CDAP_BUCKETS) as store:
        view = TransactionView(DirectorySource(tmp_path).latest().snapshot, now_ms, LIFETIME.undecided_ms)
        messages, payloads = kept_rows(store, view, now_ms)
        # When
        report = sweep_store(store, tmp_path, now_ms)
        # Then every row matches the deletion rules
        assert (report.errors, store.wrong_salts) == ([], 0)
        # CDAP records no positions of consumers.
        assert min(report.total(rule) for rule in set(Rule) - {Rule.PROCESSED}) > 0
        assert dict(every(store.message, MESSAGES)) == messages
        assert dict(every(store.payload, PAYLOADS)) == payloads
    # And CDAP finds its topics with all live messages
    assert java.run("dump", place) == [line for line in before if is_live(line, before, now_ms)]
    # And CDAP serves the same messages as before, except messages that have expired since
    again = served_by(java, place, snapshot)
    assert again
    assert [line for line in served if line in again] == again
    lifetimes = {line["topic"]: line["ttl_seconds"] * SECOND for line in before if line["kind"] == "topic"}
    over_ms = time.time() * SECOND
    assert all(published_ms(line) < over_ms - lifetimes[line["topic"]] for line in served if line not in again)
    # And messages of invalid transactions stay hidden without the list of invalid transactions
    emptied = tmp_path / "emptied"
    empty_invalid_list(snapshot, emptied)
    assert all(line in again for line in served_by(java, place, emptied))


def test_cdap_tables_have_same_attributes_as_created_tables(
    java: Interop, hbase: HBaseServer, hbase_tables: Tables, place: str, prefix: str, tmp_path: Path
) -> None:
    java.run("write", place, 1, "--rows", 1, "--topics", 1, "--snapshots", tmp_path)
    created = hbase_tables.make(buckets=CDAP_BUCKETS)
    with_prefix = {"dataset.table.prefix", "cdap.messaging.metadata.hbase.namespace"}
    admin = HBasePool([str(hbase.thrift2)], service="HbaseAdmin")
    for table in TABLES:
        of_cdap = attributes_of(admin, f"{prefix}_system", table)
        assert of_cdap.pop("cdap.version").startswith("5.1.2")
        assert of_cdap.pop("cdap.hbase.version") == "1.1"
        assert of_cdap.pop("dataset.table.prefix") == prefix
        made = attributes_of(admin, created, table)
        assert {name: value for name, value in of_cdap.items() if name not in with_prefix} == {
            name: value for name, value in made.items() if name not in with_prefix
        }
        names = [table_name(namespace, table).decode() for namespace in (f"{prefix}_system", created)]
        assert hbase.command("regions", names[0]) == hbase.command("regions", names[1])
        families = [hbase.command("describe", name).partition("}, {")[2] for name in names]
        assert families[0] == families[1] != ""
    admin.close()


# --- created tables --------------------------------------------------------------------------------------------------


def test_created_tables_are_read_and_written_by_cdap(start: Callable[[], Program], kit: Kit) -> None:
    # Given
    started_pointer = kit.clock.now_ms() * 1_000_000
    kit.create("orders", ttl="3600", owner="a & b")
    kit.publish("orders", *[b"%d" % number for number in range(200)])
    kit.put("orders", started_pointer, b"stored", b"payloads")
    kit.publish("orders", pointer=started_pointer)
    kit.publish("orders", b"in", b"transaction", pointer=started_pointer + 1)
    rolled = kit.publish("orders", b"rolled back", pointer=started_pointer + 2)
    kit.service.rollback(named("orders"), rolled)
    with start() as program:
        # Then
        assert program.call("get", "orders") == kit.service.topic(named("orders"))
        numbers = [b"%d" % number for number in range(200)]
        tms_messages = [*numbers, *b"stored payloads in transaction".split(), b"rolled back"]
        assert program.fetch("orders") == tms_messages == kit.payloads()
        assert program.ids("orders") == [message.id.hex() for message in kit.fetch("orders")]
        program.call("commit", transaction=program.call("begin"))
        assert program.fetch("orders", transaction=program.call("begin")) == tms_messages[:-1]
        # When
        writing, failing = program.call("begin"), program.call("begin")
        program.publish("orders", *[b"cdap %d" % number for number in range(200)])
        program.call("store", "orders", transaction=writing, messages=[b"kept".hex(), b"by CDAP".hex()])
        program.call("publish", "orders", transaction=writing)
        program.publish("orders", b"failed", transaction=failing)
        program.call("rollback", "orders", published=program.publish("orders", b"undone", transaction=writing))
        program.call("commit", transaction=writing)
        # Then
        cdap_messages = [*[b"cdap %d" % number for number in range(200)], b"kept", b"by CDAP", b"failed", b"undone"]
        kit.clock.advance(SystemClock().now_ms() - kit.clock.now_ms())
        kit.restart()
        assert kit.payloads() == [*tms_messages, *cdap_messages] == program.fetch("orders")
        assert [message.id.hex() for message in kit.fetch("orders")] == program.ids("orders")
        # When
        kit.publish("orders", b"last")
        assert program.fetch("orders") == [*tms_messages, *cdap_messages, b"last"]


def test_topic_changes_by_either_server_are_read_by_both(start: Callable[[], Program], kit: Kit) -> None:
    """Start another CDAP after each change, because CDAP caches topics."""

    def agree(program: Program, topic: str) -> dict[str, str]:
        kit.restart()
        known = kit.service.topic(named(topic))
        assert program.call("get", topic) == known
        return known

    kit.create("from-tms", ttl="60", note="<a> & 'b'")
    with start() as program:
        program.call("create", "from-cdap", properties={"ttl": 120, "note": '<c> = "d" \u00e9'})
        assert agree(program, "from-tms") == {"generation": "1", "ttl": "60", "note": "<a> & 'b'"}
        assert agree(program, "from-cdap") == {"generation": "1", "ttl": "120", "note": '<c> = "d" \u00e9'}
        # CDAP compares the row with its own encoding, and would retry without end if a byte differed.
        program.call("update", "from-tms", properties={"ttl": 61})
        for topic in ("from-tms", "from-cdap"):
            program.publish(topic, b"of generation 1")
    kit.service.update_topic(named("from-cdap"), {"ttl": "121"})
    with start() as program:
        assert (agree(program, "from-tms")["ttl"], agree(program, "from-cdap")["ttl"]) == ("61", "121")
        program.call("delete", "from-tms")
        kit.service.delete_topic(named("from-cdap"))
    with start() as program:
        for topic in ("from-tms", "from-cdap"):
            with pytest.raises(Refused, match="TopicNotFound"):
                program.call("get", topic)
        assert program.call("list") == []
        kit.restart()
        kit.create("from-tms", ttl="60")
        program.call("create", "from-cdap", properties={"ttl": 120})
        for topic in ("from-tms", "from-cdap"):
            assert agree(program, topic)["generation"] == "2"
            program.publish(topic, b"of generation 2")
            assert kit.payloads(topic) == program.fetch(topic) == [b"of generation 2"]
        assert sorted(program.call("list")) == kit.service.topics("default") == ["from-cdap", "from-tms"]


def served_by(java: Interop, place: str, snapshot: Path) -> list[Line]:
    """Return the messages that CDAP serves outside a transaction and in one at a snapshot."""
    lines = java.run("read-service", place, "--snapshot", snapshot, "--messages")
    return [line for line in lines if line["kind"] == "message"]


def published_ms(line: Line) -> int:
    """Return the publish time of a message from its id."""
    return int(line["id"][:16], 16)


def is_live(line: Line, lines: list[Line], now_ms: int) -> bool:
    if line["kind"] == "topic":
        return True
    [lifetime] = [
        other["ttl_seconds"] for other in lines if other["kind"] == "topic" and other["topic"] == line["topic"]
    ]
    return bool(line["publish_ms"] >= now_ms - lifetime * SECOND)
