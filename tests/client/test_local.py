"""A client on a local store: one process, which opens and closes everything."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import tms_core.client
from tests.kit.client import ORDERS
from tms_core.client import Client
from tms_core.errors import StoreBusy

#: Another program on the same folder.
OTHER = "import sys, tms_core.client; tms_core.client.open(sys.argv[1])"


def test_open_of_a_folder_keeps_messages_and_groups(tmp_path: Path) -> None:
    with tms_core.client.open(tmp_path / "data") as client:
        client.create_topic(ORDERS)
        with client.transaction() as tx:
            tx.publish(ORDERS, [b"one", b"two"])
    with tms_core.client.open(str(tmp_path / "data")) as client:
        with client.transaction() as tx:
            assert [message.payload for message in tx.consume(ORDERS, "billing", limit=1)] == [b"one"]
        with client.transaction() as tx:
            assert [message.payload for message in tx.consume(ORDERS, "billing")] == [b"two"]


def test_open_of_a_folder_runs_the_janitor_until_closed(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    client = tms_core.client.open(tmp_path)
    assert "janitor" in {thread.name for thread in threading.enumerate()}
    client.close()
    client.close()
    assert not [thread for thread in set(threading.enumerate()) - before if not thread.daemon]
    command = [sys.executable, "-m", "janitor", "status", "--format", "json", "--leveldb", str(tmp_path / "messaging")]
    typed = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(typed.stdout)["adopted_ms"] is not None


def test_open_of_a_folder_of_another_process_names_that_process(tmp_path: Path) -> None:
    with tms_core.client.open(tmp_path) as client:
        client.create_topic(ORDERS)
        other = subprocess.run(
            [sys.executable, "-c", OTHER, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert other.returncode != 0
        assert f"process {os.getpid()}" in other.stderr
        with pytest.raises(StoreBusy, match="already open in this process"):
            tms_core.client.open(tmp_path)
        assert client.topics() != []


def test_program_without_close_loses_no_message(tmp_path: Path) -> None:
    code = f"{OTHER}.create_topic('{ORDERS}'); raise SystemExit(3)"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (3, "")
    with tms_core.client.open(tmp_path) as client:
        assert [str(topic) for topic in client.topics()] == [ORDERS]


def test_import_of_the_client_does_not_import_the_server() -> None:
    code = "import sys, tms_core.client; print('tms_core.server' in sys.modules, 'janitor' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_open_logs_only_warnings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), tms_core.client.open(tmp_path) as client:
        client.create_topic(ORDERS, ttl="7d")
        client.publish(ORDERS, [b"one"])
        with Client(client.server.url, transactions="127.0.0.1:1") as other:
            other.ping()
        logging.getLogger("uvicorn.error").info("the program's own server")
    libraries = [
        record for record in caplog.records if record.name.split(".")[0] in {"uvicorn", "apscheduler", "httpx2"}
    ]
    assert [record.getMessage() for record in libraries] == ["the program's own server"]
