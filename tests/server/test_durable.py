"""A response of 200 follows a sync of the disk, and syncs are not much more frequent."""

from __future__ import annotations

import subprocess
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.client import Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import require_tool
from tms_core.transaction.rpc.client import TransactionClient

BATCHES = 40


@pytest.fixture
def counter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a file that counts the syncs of every process started from now on."""
    compiler = require_tool("cc", "apt-get install gcc libc6-dev")
    library, counted = tmp_path / "syncs.so", tmp_path / "syncs"
    source = Path(__file__).with_name("syncs.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True)
    counted.write_bytes(bytes(8))
    monkeypatch.setenv("TMS_SYNCS", str(counted))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return counted


def syncs(counter: Path) -> int:
    return int.from_bytes(counter.read_bytes(), "little")


@pytest.mark.parametrize("transactional", [False, True], ids=["plain", "in a transaction"])
def test_acknowledged_batches_were_each_synced(tmp_path: Path, counter: Path, transactional: bool) -> None:
    with Serve(configure(tmp_path)) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        fields = {}
        if transactional:
            with TransactionClient(server.transactions) as transactions:
                fields = {"transactionWritePointer": str(transactions.start_short(300).write_pointer)}
        topic.publish("first", **fields)
        seen = [syncs(counter)]
        for number in range(BATCHES):
            topic.publish(*[f"{number}"] * 10, **fields)
            seen.append(syncs(counter))
        server.end()
    assert all(after > before for before, after in pairwise(seen))
    # The expiry job and a new log of LevelDB also sync.
    assert seen[-1] - seen[0] <= 2 * BATCHES
