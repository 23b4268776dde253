"""The assembly of ``tms serve`` in this process: stores, companions, settings, signals and ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from select import select
from types import ModuleType

import pytest
import yaml
from prometheus_client import Gauge
from starlette.types import Receive, Scope, Send

from tests.builders import NOW_MS
from tests.server.client import JSON, Client, TopicClient
from tests.server.process import configure, port_of
from tests.support import PATIENCE_SECONDS
from tms_core.cli import serve as command
from tms_core.cli.entry import handle_signals
from tms_core.cli.main import execute
from tms_core.clock import Clock, ManualClock
from tms_core.errors import ConfigurationError, TmsError
from tms_core.server import companions
from tms_core.server.auth.tokens import new_token, token_line
from tms_core.server.companions import CompanionContext
from tms_core.server.ha import member as standing
from tms_core.server.serving import serving
from tms_core.settings.models import HBaseSettings
from tms_core.tables.memory import MemoryStore
from tms_core.tables.side import MemorySide
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.web.listener import Listener


@dataclass
class FakeCompanion:
    """A companion that records its starts and stops."""

    context: CompanionContext | None = None
    seen: list[str] = field(default_factory=list)
    refuses: bool = False
    hold_seconds: int | None = 7200

    def start(self, context: CompanionContext) -> FakeCompanion:
        if self.refuses:
            raise TmsError("There is no room.")
        self.context = context
        self.seen.append("started")
        return self

    def stop(self) -> None:
        assert self.context is not None
        # The service, the store and the transactions are still open.
        assert self.context.service.topics("default") is not None
        assert self.context.store.metadata.rows() is not None
        manager = self.context.transactions
        assert not isinstance(manager, TransactionManager) or manager.is_running
        self.seen.append("stopped")


@pytest.fixture
def companion(monkeypatch: pytest.MonkeyPatch) -> FakeCompanion:
    found = FakeCompanion()
    module = ModuleType("companion_of_a_test")
    module.start = found.start  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    install(monkeypatch, f"{module.__name__}:start")
    return found


def install(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    entry = EntryPoint("janitor", value, companions.GROUP)
    monkeypatch.setattr(companions, "find_entry_points", lambda: [entry])


def memory(folder: Path, transactions: dict[str, str] | None = None, **server: object) -> Path:
    path = folder / "tms.yaml"
    given = {"thrift": "127.0.0.1:0", **(transactions or {})}
    path.write_text(
        yaml.safe_dump({"storage": {"kind": "memory"}, "transactions": given, "server": {"port": 0, **server}})
    )
    return path


# --- companions ------------------------------------------------------------------------------------------------------


def test_companion_gets_the_context_and_stops_before_the_server(companion: FakeCompanion, tmp_path: Path) -> None:
    config, clock = configure(tmp_path), ManualClock(NOW_MS)
    environ = {"TMS_SERVER__DEFAULT_TTL_SECONDS": "60"}
    for created in (True, False):
        with serving(config, environ, {"leveldb": None}, clock=clock) as started:
            context = companion.context
            assert context is not None
            assert (context.config, context.environ, context.flags) == (config, environ, {"leveldb": None})
            assert (context.created, context.clock) == (created, clock)
            assert context.transactions is not None
            assert context.transactions.latest().snapshot.timestamp_ms == NOW_MS
            Gauge("guests", "Companions.", registry=context.registry).set(1)
            with Client(port_of(started.url)) as client:
                assert "guests 1.0" in client.ask("GET", "/metrics").text
                if created:
                    TopicClient(client, "t").create()
                assert client.ask("GET", "/v1/namespaces/default/topics/t").json["ttl"] == "60"
    assert companion.seen == ["started", "stopped"] * 2


def test_new_store_is_closed_to_other_users(tmp_path: Path) -> None:
    free_ports = {"TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0"}
    with serving(None, free_ports, {"leveldb": str(tmp_path / "shop")}, janitor=False):
        pass
    folders = [path for path in tmp_path.rglob("*") if path.is_dir()]
    assert {path.name for path in folders} >= {"shop", "shop.tx", "system.tms.message"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in folders} == {0o700}


def test_publish_with_an_unissued_pointer_is_rejected(tmp_path: Path) -> None:
    clock = ManualClock(NOW_MS)
    with (
        serving(memory(tmp_path), {}, {}, janitor=False, clock=clock) as started,
        Client(port_of(started.url)) as client,
    ):
        topic = TopicClient(client, "t").create()
        answer = topic.post("publish", {"messages": ["a"], "transactionWritePointer": str(2**62)})
        assert (answer.status, "is not in progress" in answer.text) == (409, True)
        assert started.transactions is not None
        with TransactionClient(started.transactions) as service:
            issued = {"messages": ["a"], "transactionWritePointer": str(service.start_short().write_pointer)}
            assert topic.post("publish", issued).status == 200


def test_companion_with_an_error_ends_the_start(companion: FakeCompanion, tmp_path: Path) -> None:
    companion.refuses = True
    with pytest.raises(TmsError, match="There is no room"), serving(configure(tmp_path), {}, {}):
        pass
    companion.refuses = False
    with serving(configure(tmp_path), {}, {}):
        assert companion.seen == ["started"]


@pytest.mark.parametrize("value", ["no_such_module_anywhere:start", "json:no_such_name"])
def test_unloadable_companion_is_an_error_with_a_hint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str
) -> None:
    install(monkeypatch, value)
    config = configure(tmp_path)
    with pytest.raises(ConfigurationError, match=r"tms serve --no-janitor"), serving(config, {}, {}):
        pass
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.parametrize(
    ("section", "setting", "value", "message"),
    [
        ("server", "port", "TAKEN", "server.port is"),
        ("server", "tls", {"certificate": "nowhere.crt", "key": "nowhere.key"}, "nowhere.crt"),
        ("transactions", "thrift", "127.0.0.1:TAKEN", "transactions.thrift is"),
        ("transactions", "thrift", "0.0.0.0:0", "transactions.allow_without_token"),
        ("transactions", "tls", {"certificate": "nowhere.crt", "key": "nowhere.key"}, "nowhere.crt"),
        ("transactions", "token_file", "nowhere.token", "nowhere.token"),
        ("transactions", "directory", "hdfs://name/tx", "is hdfs://name/tx"),
        ("janitor", "http", {"port": "TAKEN"}, "janitor.http.port is"),
        ("janitor", "hold_second", 1, "janitor.hold_second is not a setting"),
    ],
)
def test_rejected_start_leaves_no_files(
    tmp_path: Path, section: str, setting: str, value: object, message: str
) -> None:
    config = configure(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        settings = yaml.safe_load(config.read_text())
        settings[section][setting] = value
        config.write_text(json.dumps(settings).replace('"TAKEN"', str(port)).replace("TAKEN", str(port)))
        with pytest.raises(ConfigurationError, match=message), serving(config, {}, {}, janitor=section == "janitor"):
            pass
    assert list(tmp_path.iterdir()) == [config]


# --- stores and transactions -----------------------------------------------------------------------------------------


def test_memory_store_works_and_leaves_no_files(tmp_path: Path) -> None:
    config = memory(tmp_path, system_topics=["system:audit"])
    with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        topic = TopicClient(client, "t").create()
        topic.publish("a", ttlSeconds=60)
        assert topic.poll() == ["a"]
        assert client.ask("GET", "/v1/namespaces/system/topics").json == ["audit"]
        assert started.transactions is not None
    assert list(tmp_path.iterdir()) == [config]


def test_system_topics_are_created_once_over_restarts(tmp_path: Path) -> None:
    config = configure(tmp_path, system_topics=["audit", "status:3", "default:events:1"])
    started_before = False
    for generation in (1, 1, 2):
        with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
            names = client.ask("GET", "/v1/namespaces/system/topics").json
            assert names == ["audit", "status0", "status1", "status2"]
            assert client.ask("GET", "/v1/namespaces/default/topics").json == ["events0"]
            made = client.ask("GET", "/v1/namespaces/system/topics/status1").json
            assert made == {"generation": str(generation), "ttl": "604800"}
            if started_before:
                client.ask("DELETE", "/v1/namespaces/system/topics/status1")
            started_before = True


class FakeHBase(MemoryStore):
    """A reachable HBase, simulated in memory."""

    def __init__(self, wanted: HBaseSettings, _: Clock) -> None:
        assert wanted == HBaseSettings()
        super().__init__()

    def check_buckets(self) -> None:
        """Accept the buckets."""


@pytest.fixture
def hbase(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr("tms_core.tables.hbase.store.HBaseStore", FakeHBase)
    monkeypatch.setattr("tms_core.tables.hbase.side.HBaseSide", lambda *_, **__: MemorySide())
    monkeypatch.setattr(standing, "HBaseSide", lambda *_, **__: MemorySide())
    config = memory(tmp_path)
    config.write_text(config.read_text().replace("kind: memory", "kind: hbase") + "\n")
    return config


NO_TRANSACTIONS = {"TMS_TRANSACTIONS__SOURCE": "none"}


@pytest.mark.parametrize(
    "more", [{}, {"TMS_SERVER__LEADER__ADVERTISE": "http://127.0.0.1:0"}], ids=["single", "several"]
)
def test_server_on_hbase_leads_and_accepts_a_message_ttl(hbase: Path, more: dict[str, str]) -> None:
    with serving(hbase, NO_TRANSACTIONS | more, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        assert started.transactions is None
        topic = TopicClient(client, "t")
        while (answer := client.ask("PUT", topic.path, b"{}")).status != 200:
            assert answer.status == 503  # with several servers, each listens before it leads
        while (answer := topic.post("publish", {"messages": ["a"], "ttlSeconds": 60})).status != 200:
            assert answer.status == 503
        assert topic.poll() == ["a"]
        assert "tms_server_is_leader 1.0\n" in client.ask("GET", "/metrics").text


def test_publish_outside_transactions_works_without_the_service(companion: FakeCompanion, tmp_path: Path) -> None:
    with serving(configure(tmp_path), {}, {}) as started, Client(port_of(started.url)) as client:
        assert companion.context is not None
        assert companion.context.transactions is not None
        companion.context.transactions.close()
        companion.context = replace(companion.context, transactions=None)
        topic = TopicClient(client, "t").create()
        topic.publish("a")
        assert topic.poll() == ["a"]


def test_url_as_transactions_directory_is_rejected(tmp_path: Path) -> None:
    environ = {"TMS_TRANSACTIONS__DIRECTORY": "webhdfs://namenode/tx"}
    with pytest.raises(ConfigurationError, match=r"transactions\.directory"), serving(configure(tmp_path), environ, {}):
        pass


def test_server_with_authentication_rejects_unknown_clients(tmp_path: Path) -> None:
    token = new_token()
    (tmp_path / "tokens").write_text(token_line("ada", token))
    rules = [{"principal": "ada", "topics": ["default:*"], "can": ["admin"]}]
    config = memory(tmp_path, auth={"kind": "tokens", "tokens_file": "tokens", "rules": rules})
    with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        assert client.ask("GET", "/v1/namespaces/default/topics").status == 401
        known = {"authorization": f"Bearer {token}"}
        assert client.ask("PUT", "/v1/namespaces/default/topics/t", b"", **known).status == 200
        assert client.ask("PUT", "/v1/namespaces/other/topics/t", b"", **known).status == 403


@pytest.mark.parametrize("known", [True, False])
def test_polls_that_wait_are_limited_for_each_principal(tmp_path: Path, known: bool) -> None:
    ada, ben = new_token(), new_token()
    (tmp_path / "tokens").write_text(f"{token_line('ada', ada)}\n{token_line('ben', ben)}\n")
    rules = [{"principal": "*", "topics": ["*:*"], "can": ["admin", "publish", "consume"]}]
    auth = {"kind": "tokens", "tokens_file": "tokens", "rules": rules} if known else {}
    config = memory(tmp_path, auth=auth, max_connections=7)
    path = "/v1/namespaces/default/topics/t"
    of_ada, of_ben = ({"authorization": f"Bearer {token}", "content_type": JSON} for token in (ada, ben))
    with serving(config, {}, {}, janitor=False) as started, ExitStack() as stack:
        clients = [stack.enter_context(Client(port_of(started.url))) for _ in range(7)]
        assert clients[0].ask("PUT", path, b"", **of_ada).status == 200

        def find_refused(waiting: list[Client], principal: str) -> Client:
            [refused], _, _ = select([one.socket for one in waiting], [], [], PATIENCE_SECONDS)
            [late] = [one for one in waiting if one.socket is refused]
            answer = late.answer()
            assert (answer.status, answer.headers["retry-after"]) == (503, "1")
            assert f"polls of {principal}" in answer.text
            return late

        for client in clients[:4]:
            client.send("POST", f"{path}/poll", b'{"waitSeconds": 60}', **of_ada)
        if known:
            # Polls of ada may wait on three of seven connections; the server rejects any of the four.
            late = find_refused(clients[:4], "ada")
            # The server responds to polls that need not wait, and to the repeated poll.
            assert late.ask("POST", f"{path}/poll", b"{}", **of_ada).json == []
            assert late.ask("POST", f"{path}/poll", b'{"waitSeconds": 60}', **of_ada).status == 503
            late.send("POST", f"{path}/poll", b'{"waitSeconds": 60}', **of_ben)
        for client in clients[4:6]:
            client.send("POST", f"{path}/poll", b'{"waitSeconds": 60}', **of_ben)
        waiting = clients[:6]
        if known:
            # Polls of ben may wait on half of the four remaining connections.
            waiting.remove(find_refused([late, *clients[4:6]], "ben"))
        assert clients[6].ask("POST", f"{path}/publish", b'{"messages": ["a"]}', **of_ben).status == 200
        for client in waiting:
            [message] = client.answer().json
        # A connection is free again.
        after_message = {"startFrom": {"id": message["id"]}, "inclusive": False, "waitSeconds": 1}
        assert clients[0].ask("POST", f"{path}/poll", json.dumps(after_message).encode(), **of_ada).json == []


@pytest.mark.parametrize("access_log", [False, True], ids=["known heads", "parsed"])
def test_principal_with_all_connections_leaves_one_to_others(tmp_path: Path, *, access_log: bool) -> None:
    ada, ben = new_token(), new_token()
    (tmp_path / "tokens").write_text(f"{token_line('ada', ada)}\n{token_line('ben', ben)}\n")
    rules = [{"principal": "*", "topics": ["*:*"], "can": ["admin", "publish"]}]
    auth = {"kind": "tokens", "tokens_file": "tokens", "rules": rules}
    config = memory(tmp_path, auth=auth, max_connections=4, access_log=access_log)
    path, body = "/v1/namespaces/default/topics/t", b'{"messages": ["a"]}'
    of_ada, of_ben = ({"authorization": f"Bearer {token}", "content_type": JSON} for token in (ada, ben))
    with serving(config, {}, {}, janitor=False) as started, ExitStack() as stack:
        port = port_of(started.url)
        clients = [stack.enter_context(Client(port)) for _ in range(4)]
        assert clients[0].ask("PUT", path, b"", **of_ada).status == 200
        for client in clients:
            assert client.ask("POST", f"{path}/publish", body, **of_ada).status == 200
        for headers, status in ((of_ada, 503), ({}, 503), (of_ben, 200)):
            with Client(port) as late:
                assert late.ask("POST", f"{path}/publish", body, **headers).status == status


def test_access_log_has_a_line_for_each_publish(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "tms_core.access")
    config = memory(tmp_path, access_log=True)
    with serving(config, {}, {}, janitor=False) as started, Client(port_of(started.url)) as client:
        topic = TopicClient(client, "t").create()
        for _ in range(3):
            topic.publish("a")
    assert caplog.text.count("/t/publish 200") == 3


def test_key_file_that_is_missing_ends_the_start(tmp_path: Path) -> None:
    config = configure(tmp_path, auth={"kind": "jwt", "key_file": "issuer.pem"})
    with pytest.raises(ConfigurationError, match=r"server\.auth\.key_file .*issuer\.pem"), serving(config, {}, {}):
        pass
    assert list(tmp_path.iterdir()) == [config]


def test_authentication_without_rules_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "tokens").write_text(token_line("ada", new_token()))
    config = memory(tmp_path, auth={"kind": "tokens", "tokens_file": "tokens"})
    with serving(config, {}, {}, janitor=False):
        assert "server.auth.rules is empty" in caplog.text


# --- the command -----------------------------------------------------------------------------------------------------


def test_serve_prints_its_addresses_and_stops_on_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class ObservedEvent(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            return True

    monkeypatch.setattr(command, "Event", ObservedEvent)
    assert execute(["serve", "--config", str(memory(tmp_path)), "--no-janitor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["transactions", "REST"]
    config = memory(tmp_path)
    config.write_text(config.read_text() + "\n")
    monkeypatch.setenv("TMS_TRANSACTIONS__SOURCE", "none")
    assert execute(["serve", "--config", str(config), "--no-janitor", "--log-format", "json"]) == 0
    streams = capsys.readouterr()
    assert [line.partition(": ")[0] for line in streams.out.splitlines()] == ["REST"]
    logged = [json.loads(line) for line in streams.err.splitlines()]
    assert logged
    assert all("time" in line for line in logged)


def test_second_signal_stops_the_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    requested, ended = threading.Event(), list[int]()
    monkeypatch.setattr(os, "_exit", ended.append)
    before = signal.getsignal(signal.SIGTERM)
    with handle_signals(requested.set):
        signal.raise_signal(signal.SIGTERM)
        assert requested.wait(60)
        assert ended == []
        signal.raise_signal(signal.SIGTERM)
    assert ended == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before
    assert "finishing accepted work" in capfd.readouterr().err


def test_signal_in_another_thread_requests_a_stop() -> None:
    requested = threading.Event()
    with handle_signals(requested.set):
        other = threading.Timer(0.2, lambda: signal.pthread_kill(threading.get_ident(), signal.SIGTERM))
        other.start()
        assert requested.wait(60)
        other.join()


WAITING = """
import threading
from tms_core.cli.entry import handle_signals
requested = threading.Event()
with handle_signals(requested.set):
    print("ready", flush=True)
    requested.wait()
"""


@pytest.mark.parametrize("why", ["its reader is gone", "its disk is full", "its reader does not read"])
def test_signal_with_a_blocked_standard_error_ends_the_process(why: str) -> None:
    reading, writing = os.pipe()
    try:
        if why == "its reader is gone":
            os.close(reading)
        elif why == "its disk is full":
            os.dup2(full := os.open("/dev/full", os.O_WRONLY), writing)
            os.close(full)
        else:
            os.set_blocking(writing, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, b"x")
            os.set_blocking(writing, True)
        command = [sys.executable, "-c", WAITING]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=writing) as process:
            try:
                assert process.stdout is not None
                assert process.stdout.readline() == b"ready\n"
                process.send_signal(signal.SIGTERM)
                assert process.wait(PATIENCE_SECONDS) == 0
            finally:
                process.kill()
    finally:
        os.close(writing)
        if why != "its reader is gone":
            os.close(reading)


def test_handle_signals_in_another_thread_keeps_the_handlers() -> None:
    seen = []

    def wait_elsewhere() -> None:
        with handle_signals(lambda: None):
            seen.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=wait_elsewhere)
    thread.start()
    thread.join()
    assert seen == [before]


# --- listening -------------------------------------------------------------------------------------------------------


async def nobody(scope: Scope, receive: Receive, send: Send) -> None:
    """Respond to no request."""


def test_listener_on_a_foreign_address_names_the_setting() -> None:
    with pytest.raises(ConfigurationError, match=r"server\.host is 192\.0\.2\.1"):
        Listener(nobody, "192.0.2.1", 0).start()


def test_port_in_use_names_the_setting() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"server.port is {port}"):
            Listener(nobody, "127.0.0.1", port).start()


def test_server_that_gives_up_at_the_start_names_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    async def give_up(*_: object, **__: object) -> None:
        raise SystemExit(3)

    monkeypatch.setattr("uvicorn.Server.startup", give_up)
    with pytest.raises(ConfigurationError, match="The log has the reason"):
        Listener(nobody, "127.0.0.1", 0).start()


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://localhost:5"), ("::1", "http://[::1]:5"), ("", "http://localhost:5")],  # noqa: S104
)
def test_url_of_any_host_can_be_used_by_a_local_client(host: str, url: str) -> None:
    assert Listener(nobody, host, 5).url == url


def test_token_of_transactions_is_demanded_of_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(f"{'secret' * 6}\n")
    config = memory(tmp_path, {"token_file": str(tmp_path / "token")})
    with serving(config, {}, {}, janitor=False) as started:
        assert started.transactions is not None
        assert execute(["tx", "list", "--tx-server", started.transactions]) == 1
        assert "[TMS-TRANSACTION-TOKEN-REQUIRED]" in capsys.readouterr().err
        assert execute(["tx", "list", "--config", str(config), "--tx-server", started.transactions]) == 0
    (tmp_path / "token").unlink()
    with pytest.raises(TmsError, match="cannot be read"), serving(config, {}, {}, janitor=False):
        pass


@pytest.mark.parametrize(
    ("token", "mode", "message"),
    [("x" * 31, 0o600, "fewer than 32 bytes"), ("x" * 32, 0o644, "can be read or written by other users")],
)
def test_weak_or_readable_token_of_transactions_is_rejected(
    tmp_path: Path, token: str, mode: int, message: str
) -> None:
    file = tmp_path / "token"
    file.write_text(token)
    file.chmod(mode)
    config = memory(tmp_path, {"token_file": str(file)})
    with pytest.raises(TmsError, match=message), serving(config, {}, {}, janitor=False):
        raise AssertionError
