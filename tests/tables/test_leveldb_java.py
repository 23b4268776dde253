"""CDAP's LevelDB library and ``LevelDBStore``, used alternately on one store."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interop.java import Interop, JavaFailed
from tms_core.tables.base import CELLS, KEYS, MESSAGES, MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore, encode, release

NOW_MS = 1_700_000_000_000
EVERYTHING = (b"", None, 1_000_000)

#: A program that creates a store with tables, and dies without closing it.
WRITE_AND_DIE = """
import os, signal, sys
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.store import LevelDBStore
store = LevelDBStore(sys.argv[1], create=True)
for batch in range(60):
    store.message.put([(b"%04d-%04d" % (batch, row), MessageValue(None, os.urandom(2000))) for row in range(100)])
print("written", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def message_hashes(store: Store) -> dict[bytes, str]:
    rows = store.message.read(MESSAGES, *EVERYTHING).items
    return {key: hashlib.sha256(encode(value)).hexdigest() for key, value in rows}


@pytest.mark.parametrize("kill", [[], ["--kill"]], ids=["closed", "killed"])
def test_cdap_and_leveldb_store_alternate_on_one_folder(java: Interop, tmp_path: Path, kill: list[str]) -> None:
    path = tmp_path / "messaging"
    java.run("write", path, 7, "--now", NOW_MS, "--rows", 40_000, "--payload-bytes", 1000, *kill)
    for turn in range(3):
        with LevelDBStore(path) as store:
            keys = store.message.read(KEYS, *EVERYTHING).items
            store.message.delete(keys[turn::5])
            store.message.invert(store.message.read(CELLS, *EVERYTHING).items)
            store.message.put([(b"turn-%d" % turn, MessageValue(turn, b"ours"))])
            store.message.compact(keys[0], keys[-1])
            expected = message_hashes(store)
        assert java.raw(path, "message") == expected
    with LevelDBStore(path) as store:
        assert message_hashes(store) == expected


def test_cdap_reads_store_of_killed_writer_after_release(
    java: Interop, child: Callable[..., Any], tmp_path: Path
) -> None:
    writer = child(WRITE_AND_DIE, tmp_path)
    assert writer.output == "written"
    writer.process.wait()
    with pytest.raises(JavaFailed, match="FileNotFound"):
        java.raw(tmp_path, "message")
    release(tmp_path)
    assert len(java.raw(tmp_path, "message")) == 6000
