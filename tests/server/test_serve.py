"""``tms serve`` as a process: output, crashes, rejections and exits."""

from __future__ import annotations

import json
import signal
import socket
import ssl
import subprocess
import threading
from contextlib import closing, suppress
from http.client import HTTPSConnection
from pathlib import Path

import pytest
import yaml

from tests.kit.avro import POLL_ALL, decoded, publish_body
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import TMS, Serve, configure
from tests.support import require_tool, wait_until
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.store import LevelDBStore

JANITOR = TMS.with_name("janitor")
FOLDERS = {"system.tms.meta", "system.tms.message", "system.tms.payload"}


def run_rejected(*arguments: str | Path) -> tuple[int, str]:
    done = subprocess.run([TMS, "serve", *arguments], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr


def test_serve_on_an_empty_folder_survives_a_restart(tmp_path: Path) -> None:
    config = configure(tmp_path, system_topics=["system:audit", "default:events"])
    for generation in range(2):
        with Serve(config) as server, Client(server.port) as client:
            assert server.url == f"http://127.0.0.1:{server.port}"
            assert client.ask("GET", "/v1/namespaces/system/topics").json == ["audit"]
            events = TopicClient(client, "events")
            assert events.poll() == ["a"] * generation
            events.publish("a")
            server.end()
    assert {path.name for path in (tmp_path / "messaging").iterdir()} == FOLDERS
    assert not list((tmp_path / "messaging").glob("*/*.ldb"))
    with LevelDBStore(tmp_path / "messaging") as store:
        assert len(store.message.read(KEYS, b"", None, 10).items) == 2


def test_serve_with_the_janitor_deletes_rows_and_shows_all_metrics(tmp_path: Path) -> None:
    with Serve(configure(tmp_path), janitor=True) as server, Client(server.port) as client:
        TopicClient(client, "t").create(ttl="1").publish("a", "b")
        deleted = 'tms_janitor_rows_deleted_total{rule="expired",table="message"} 2.0'
        while deleted not in (metrics := client.ask("GET", "/metrics").text):
            assert server.process.poll() is None
        assert "tms_messages_published_total 2.0" in metrics
        server.end()
    with LevelDBStore(tmp_path / "messaging") as store:
        assert store.message.read(KEYS, b"default:t:", b"default:t;", 10).items == []


def test_serve_on_sighup_sweeps_at_once_and_continues(tmp_path: Path) -> None:
    config = configure(tmp_path)
    config.write_text(config.read_text().replace("every_seconds: 1", "every_seconds: 3600"))
    with Serve(config, janitor=True) as server, Client(server.port) as client:

        def sweeps() -> float:
            lines = client.ask("GET", "/metrics").text.splitlines()
            return sum(float(line.split()[-1]) for line in lines if line.startswith("tms_janitor_sweeps_total{"))

        wait_until(lambda: sweeps() == 1)
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: sweeps() == 2)
        command = subprocess.run(
            [JANITOR, "sweep-now", "--config", config], capture_output=True, text=True, check=False
        )
        assert (command.returncode, command.stderr) == (0, "")
        wait_until(lambda: sweeps() == 3)
        server.end()


def test_serve_without_a_janitor_ignores_sighup(tmp_path: Path) -> None:
    with Serve(configure(tmp_path)) as server, Client(server.port) as client:
        server.process.send_signal(signal.SIGHUP)
        wait_until(lambda: "SIGHUP ignored" in server.log)
        assert client.ask("GET", "/ping").status == 200
        server.end()


def test_status_after_a_topic_update_has_the_new_ttl_at_once(tmp_path: Path) -> None:
    config = configure(tmp_path)
    config.write_text(config.read_text().replace("every_seconds: 1", "every_seconds: 3600"))
    with Serve(config, janitor=True) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create(ttl="86400")
        for ttl in ("3600", "60"):
            assert client.ask("PUT", f"{topic.path}/properties", json.dumps({"ttl": ttl}).encode()).status == 200
            for words in (["status"], ["topic", "default:t"]):
                command = [str(JANITOR), *words, "--config", str(config), "--format", "json"]
                shown = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
                figures = shown["figures"] if "figures" in shown else shown["topics"][0]
                assert figures["ttl_seconds"] == int(ttl)
        server.end()


def test_serve_with_a_certificate_uses_https(tmp_path: Path) -> None:
    openssl = require_tool("openssl", "apt-get install openssl")
    certificate, key = tmp_path / "server.crt", tmp_path / "server.key"
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=localhost"
    words += f" -addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    subprocess.run([openssl, *words.split()], capture_output=True, check=True)
    with Serve(configure(tmp_path, tls={"certificate": str(certificate), "key": str(key)})) as server:
        assert server.url.startswith("https://")
        trusting = ssl.create_default_context(cafile=str(certificate))
        with closing(HTTPSConnection("127.0.0.1", server.port, context=trusting)) as connection:
            connection.request("GET", "/ping")
            assert connection.getresponse().read() == b"OK."
        server.end()


# --- rejections ------------------------------------------------------------------------------------------------------


def test_serve_on_a_port_in_use_exits_2_and_names_the_setting(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, message = run_rejected("--config", configure(tmp_path, port=port))
        assert code == 2
        assert f"server.port is {port}, which another program or another setting uses already." in message
        config = configure(tmp_path)
        config.write_text(config.read_text().replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        code, message = run_rejected("--config", config)
        assert code == 2
        assert f"transactions.thrift is 127.0.0.1:{port}" in message


def test_serve_with_one_port_for_server_and_janitor_creates_no_store(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    config = configure(tmp_path, port=port)
    settings = yaml.safe_load(config.read_text())
    settings["janitor"]["http"]["port"] = port
    config.write_text(yaml.safe_dump(settings))
    code, message = run_rejected("--config", config)
    assert code == 2
    assert f"janitor.http.port is {port}, which another program or another setting uses already." in message
    assert not (tmp_path / "messaging").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"host": "0.0.0.0"}, "without authentication"),  # noqa: S104 it is refused
        ({"ports": 5}, "server.ports"),
    ],
)
def test_wrong_setting_ends_serve_with_2_and_is_named(tmp_path: Path, setting: dict[str, object], message: str) -> None:
    code, text = run_rejected("--config", configure(tmp_path, **setting))
    assert code == 2
    assert message in text


# --- exit ------------------------------------------------------------------------------------------------------------


def stop_during_response(server: Serve, client: Client) -> None:
    """Stop the server while a consumer of 30,000 messages has not read its response."""
    topic = TopicClient(client, "t").create()
    for _ in range(6):
        topic.post("publish", publish_body(*[b"x" * 1000] * 5000), content_type=AVRO)
    topic.client.send("POST", f"{topic.path}/poll", POLL_ALL, content_type=AVRO)
    topic.client.socket.recv(1, socket.MSG_PEEK)
    server.ask_to_end()
    wait_until_refused(server.port)


def test_stop_finishes_the_response_to_a_slow_consumer(tmp_path: Path) -> None:
    config = configure(tmp_path)
    with Serve(config) as server, Client(server.port) as client:
        stop_during_response(server, client)
        assert len(decoded(client.answer().body)) == 30_000
        assert server.wait() == 0


def test_serve_with_two_stop_signals_stops_at_once_and_loses_nothing(tmp_path: Path) -> None:
    config = configure(tmp_path)
    with Serve(config) as server, Client(server.port) as client:
        stop_during_response(server, client)
        server.ask_to_end()
        assert server.wait() == 128 + 15
    with Serve(config) as server, Client(server.port) as client:
        assert len(TopicClient(client, "t").poll(limit=100_000)) == 30_000


def wait_until_refused(port: int) -> None:
    """Wait until the server accepts no connections.

    The pauses leave time for the server. A connection in the backlog of the listener is refused only after seconds.
    """
    with suppress(ConnectionError):
        while True:
            socket.create_connection(("127.0.0.1", port), timeout=60).close()
            threading.Event().wait(0.01)


def test_serve_raises_the_soft_limit_of_open_files_to_the_hard(tmp_path: Path) -> None:
    shell = ("sh", "-c", 'ulimit -S -n 128; exec "$0" "$@"', str(TMS))
    with Serve(configure(tmp_path), tms=shell) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
        [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
        soft, hard = line.split()[3:5]
        assert soft == hard != "128"
        server.end()
