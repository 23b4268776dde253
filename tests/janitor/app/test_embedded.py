"""The janitor inside the server: its store, its transactions, and the order of shutdown."""

from __future__ import annotations

import logging
import time
from contextlib import ExitStack
from pathlib import Path
from typing import cast
from urllib.parse import urlsplit

import httpx2
import pytest
from click.testing import CliRunner
from prometheus_client import CollectorRegistry, generate_latest

from janitor.app import embedded, serve
from janitor.app.embedded import GENTLE_BATCH_ROWS, Embedded, EmbeddedSession, start
from janitor.cli.main import cli
from tests.builders import DAY, HOUR, Call, topic, watch
from tests.server.client import Client, TopicClient
from tests.server.process import port_of
from tests.support import raising, wait_until
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import ConfigurationError, StateUnavailable, StoreError, StoreUnavailable, TmsError
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.service import MessagingService
from tms_core.rowkey import MessageKey
from tms_core.server.companions import CompanionContext
from tms_core.server.serving import serving
from tms_core.tables.base import CELLS, KEYS, MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

ORDERS = TopicId.parse("default:orders")
SETTINGS = """
storage: {{kind: {kind}, leveldb: {{path: messaging}}}}
transactions: {{directory: tx}}
janitor: {{every_seconds: 1, state: state, http: {{port: 0}}, history_days: 30}}
"""


class Server:
    """The parts of ``tms serve`` that an embedded janitor uses.

    Args:
        folder: a folder for its files.
        kind: the kind of the store.
        created: whether the server has just created the store.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, kind: str = "leveldb", created: bool = True) -> None:
        self.config = folder / "tms.yaml"
        self.config.write_text(SETTINGS.format(kind=kind))
        self.store: Store = MemoryStore() if kind == "memory" else LevelDBStore(folder / "messaging", create=True)
        stack.enter_context(self.store)
        clock = SystemClock()
        self.manager = stack.enter_context(TransactionManager(MemoryStorage(), clock))
        self.service = stack.enter_context(MessagingService(self.store, clock, side=MemorySide()))
        self.registry = CollectorRegistry()
        self.host = CompanionContext(
            self.config, {}, {}, self.store, created, self.service, self.manager, self.registry, clock
        )
        self._stack = stack

    def start(self) -> Embedded:
        companion = start(self.host)
        self._stack.callback(companion.stop)
        return companion

    def pointers(self) -> list[int]:
        return [cell.pointer for cell in self.store.message.read(CELLS, b"", None, 1000).items]

    def rows(self) -> int:
        return len(self.store.message.read(KEYS, b"", None, 1000).items)

    def has_swept(self) -> bool:
        return (self.registry.get_sample_value("tms_janitor_sweeps_total", {"result": "done"}) or 0) > 0

    def metric(self, line: str) -> bool:
        return line in generate_latest(self.registry).decode().splitlines()


@pytest.mark.parametrize("kind", ["leveldb", "memory"])
def test_embedded_janitor_on_a_new_store_deletes_and_inverts(tmp_path: Path, stack: ExitStack, kind: str) -> None:
    server = Server(tmp_path, stack, kind=kind)
    server.service.create_topic(ORDERS, {"ttl": "1"})
    late = TopicId.parse("default:late")
    server.service.create_topic(late, {"ttl": "86400"})
    transaction = server.manager.start_short()
    server.service.publish(late, [b"invalid"], pointer=transaction.write_pointer)
    server.manager.invalidate(transaction.transaction_id)
    server.service.publish(ORDERS, [b"a", b"b"], pointer=None)
    server.start()
    wait_until(lambda: server.pointers() == [-transaction.write_pointer])
    wait_until(lambda: server.rows() == 1)
    wait_until(lambda: server.metric("tms_janitor_invalid_transactions 1.0"))
    [[message]] = server.service.fetch(late, FetchRequest())
    assert message.payload == b"invalid"
    reader = server.manager.start_short()
    assert list(server.service.fetch(late, FetchRequest(transaction=reader))) == []


@pytest.mark.parametrize(("error", "failed_runs"), [(StoreUnavailable, 0), (StateUnavailable, 0), (StoreError, 1)])
def test_failed_start_records_a_failed_run_unless_hbase_is_down(
    tmp_path: Path,
    stack: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[TmsError],
    failed_runs: int,
) -> None:
    server = Server(tmp_path, stack)
    start(server.host).stop()
    monkeypatch.setattr(embedded, "open_daemon", raising(error("It is away.")))
    caplog.clear()
    with pytest.raises(error):
        start(server.host)
    with EmbeddedSession(server.host, stack).place.state() as state:
        assert [run.result for run in state.runs(100)].count("failed") == failed_runs
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_start_after_a_failed_attempt_shows_each_metric_once(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(tmp_path, stack)
    with monkeypatch.context() as patch:
        patch.setattr(serve, "_open_servers", raising(StoreError("It is away.")))
        with pytest.raises(StoreError):
            start(server.host)
    server.start()
    wait_until(server.has_swept)
    names = [line for line in generate_latest(server.registry).decode().splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("participants", ["messaging", "messaging, datasets"])
def test_feedback_in_the_server_empties_its_invalid_list(tmp_path: Path, stack: ExitStack, participants: str) -> None:
    server = Server(tmp_path, stack)
    limits = "transactions: {directory: tx, max_lifetime_seconds: 1, grace_seconds: 0}"
    settings_text = (
        f"clock_allowance_seconds: 0, boundary: {{feedback: on, participants: [{participants}]}}, history_days"
    )
    text = (
        SETTINGS.format(kind="leveldb")
        .replace("transactions: {directory: tx}", limits)
        .replace("history_days", settings_text)
    )
    server.config.write_text(text)
    server.service.create_topic(ORDERS, {"ttl": "86400"})
    transaction = server.manager.start_short()
    server.service.publish(ORDERS, [b"invalid"], pointer=transaction.write_pointer)
    server.manager.invalidate(transaction.transaction_id)
    # The first run is full, and closes the transaction because its client can no longer publish.
    over_ms = server.host.clock.now_ms() + 1500
    wait_until(lambda: server.host.clock.now_ms() > over_ms)
    companion = server.start()
    wait_until(lambda: server.metric('tms_janitor_sweeps_total{result="done"} 1.0'))
    assert server.manager.invalid_size() == int(participants != "messaging")
    assert server.pointers() == [-transaction.write_pointer]
    assert companion.daemon.status().boundary.bound == str(transaction.write_pointer)
    reader = server.manager.start_short()
    assert list(server.service.fetch(ORDERS, FetchRequest(transaction=reader))) == []


def test_embedded_janitor_waits_for_adoption_of_an_old_store(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack, created=False)
    server.service.create_topic(ORDERS, {"ttl": "1"})
    server.service.publish(ORDERS, [b"a"], pointer=None)
    server.start()
    wait_until(lambda: server.metric('tms_janitor_sweeps_total{result="blocked"} 1.0'))
    assert server.rows() == 1
    done = CliRunner().invoke(cli, ["adopt", "--config", str(server.config)])
    assert done.exit_code == 0, done.output
    wait_until(lambda: server.rows() == 0)


def test_server_with_a_wrong_janitor_setting_names_it(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    server.config.write_text("janitor: {every_seconds: 0}\n")
    with pytest.raises(ConfigurationError, match="every_seconds"):
        server.start()


@pytest.mark.parametrize(("apply", "hold_seconds"), [("true", 3600), ("false", None)])
def test_embedded_shows_hold_seconds(tmp_path: Path, stack: ExitStack, apply: str, hold_seconds: int | None) -> None:
    server = Server(tmp_path, stack, kind="memory")
    server.config.write_text(server.config.read_text().replace("janitor: {", f"janitor: {{apply: {apply}, "))
    assert server.start().hold_seconds == hold_seconds


def test_embedded_janitor_stopped_releases_lease_and_socket(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    start(server.host).stop()
    server.service.create_topic(ORDERS, {"ttl": "1"})
    server.service.publish(ORDERS, [b"a"], pointer=None)
    assert server.rows() == 1
    # The next janitor can take the lease and the socket.
    server.registry = CollectorRegistry()
    server.host = CompanionContext(**{**vars(server.host), "registry": server.registry})
    server.start()
    wait_until(lambda: server.rows() == 0)


def test_embedded_sweep_deletes_in_small_batches(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack, kind="memory")
    orders = topic(server.store, "default:orders", ttl_seconds=1)
    long_ago_ms = time.time_ns() // 1_000_000 - HOUR
    orders.plain(*range(long_ago_ms, long_ago_ms + 3 * GENTLE_BATCH_ROWS))
    batches: list[int] = []

    def note(call: Call) -> None:
        if call.name == "message.delete":
            batches.append(len(call.arguments[0]))

    watch(server.store, before=note)
    server.start()
    wait_until(lambda: server.rows() == 0)
    assert max(batches) == GENTLE_BATCH_ROWS


def test_topic_created_while_the_janitor_runs_is_not_held(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    server.start()
    wait_until(server.has_swept)
    server.service.create_topic(ORDERS, {"ttl": "1"})
    server.service.publish(ORDERS, [b"a"], pointer=None)
    wait_until(lambda: server.rows() == 0)
    assert server.metric('tms_janitor_held_topics{reason="frontier"} 0.0')


def test_topic_created_over_existing_rows_or_created_again_is_held(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    server.start()
    wait_until(server.has_swept)
    long_ago_ms = time.time_ns() // 1_000_000 - HOUR
    # The rows are older than their topic, as after a loss of the metadata table.
    server.store.message.put([(MessageKey(ORDERS, 1, long_ago_ms, 0).pack(), MessageValue(None, b"a"))])
    server.service.create_topic(ORDERS, {"ttl": "1"})
    again = TopicId.parse("default:again")
    for _ in range(2):
        server.service.create_topic(again, {"ttl": "86400"})
        server.service.publish(again, [b"a"], pointer=None)
        server.service.delete_topic(again)
    wait_until(lambda: server.metric('tms_janitor_held_topics{reason="frontier"} 2.0'))
    assert server.rows() == 3


def test_fetch_after_a_restore_shows_the_restored_rows(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    archive = "janitor: {archive: {enabled: true, path: archive}, "
    server.config.write_text(server.config.read_text().replace("janitor: {", archive))
    server.start()
    server.service.create_topic(ORDERS, {"ttl": "1"})
    server.service.publish(ORDERS, [b"a", b"b"], pointer=None)
    wait_until(lambda: server.rows() == 0)
    found = TopicId.parse("default:found")
    server.service.create_topic(found, {"ttl": "86400"})
    # The server now has the empty topic in its cache.
    assert list(server.service.fetch(found, FetchRequest())) == []
    command = ["archive", "restore", "default:orders", "--to", "default:found", "--config", str(server.config)]
    done = CliRunner().invoke(cli, command)
    assert done.exit_code == 0, done.output
    [page] = server.service.fetch(found, FetchRequest())
    assert [message.payload for message in page] == [b"a", b"b"]


def test_page_after_a_topic_was_changed_shows_it_at_the_next_read(tmp_path: Path, stack: ExitStack) -> None:
    server = Server(tmp_path, stack)
    server.config.write_text(server.config.read_text().replace("every_seconds: 1,", "every_seconds: 3600,"))
    server.service.create_topic(ORDERS, {"ttl": "60"})
    companion = server.start()

    def ttls() -> list[int]:
        found = httpx2.get(f"{companion.url}api/status", trust_env=False).json()["topics"]
        return [one["ttl_seconds"] for one in found]

    wait_until(lambda: ttls() == [60] and server.has_swept())
    server.service.update_topic(ORDERS, {"ttl": "90"})
    assert ttls() == [90]


# --- a server with a wrong clock -------------------------------------------------------------------------------------

SERVER_SETTINGS = """
storage: {kind: leveldb, leveldb: {path: messaging}}
transactions: {source: none}
server: {port: 0}
janitor: {state: state, http: {port: 0}}
"""


@pytest.mark.parametrize("started_ms", [None, DAY], ids=["30 days slow", "in 1970"])
def test_server_with_a_slow_clock_publishes_after_its_correction(tmp_path: Path, started_ms: int | None) -> None:
    config = tmp_path / "tms.yaml"
    config.write_text(SERVER_SETTINGS, encoding="utf-8")
    right_ms = SystemClock().now_ms()
    with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        TopicClient(client, "orders").create().publish("a")
    clock = ManualClock(right_ms - 30 * DAY if started_ms is None else started_ms, monotonic_ms=DAY)
    with serving(config, {}, {}, clock=clock) as started, Client(port_of(started.url)) as client:
        page = urlsplit(cast(Embedded, started.companions["janitor"]).url).port
        orders = TopicClient(client, "orders")

        def attempt() -> tuple[int, int, str]:
            with Client(page or 0) as prober:
                ready = prober.ask("GET", "/readyz")
            return orders.post("publish", {"messages": ["a"]}).status, ready.status, ready.text

        if started_ms is None:
            assert attempt()[:2] == (200, 200)
        # The clock is still wrong after half of the correction.
        clock.step((right_ms - clock.now_ms()) // 2)
        published, ready, message = attempt()
        assert (published, ready) == (503, 503)
        assert "nothing can be published: The clock is" in message
        clock.step(right_ms + DAY - clock.now_ms())
        assert attempt()[:2] == (200, 200)
