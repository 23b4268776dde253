from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tables.conftest import HOLD
from tms_core.errors import StoreBusy, StoreError
from tms_core.tables.leveldb.library import plyvel
from tms_core.tables.leveldb.lock import hold_lock
from tms_core.tables.leveldb.store import LevelDBStore

LOCK_SHARED = """
import sys
from pathlib import Path
from tms_core.tables.leveldb.lock import hold_lock
with hold_lock(Path(sys.argv[1]), shared=True):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    plyvel.DB(str(tmp_path / "database"), create_if_missing=True).close()
    return tmp_path / "database"


@pytest.fixture
def hold_as(folder: Path) -> Iterator[Callable[..., int]]:
    """Return a function that opens the folder in a process with the name of another program."""
    started: list[subprocess.Popen[str]] = []

    def start(program: str, *arguments: str) -> int:
        process = subprocess.Popen(
            [program, "-c", HOLD, str(folder), *arguments],
            executable=sys.executable,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline().strip() == "open"
        return process.pid

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("program", "arguments", "named", "advice"),
    [
        ("java", ["co.cask.cdap.StandaloneMain"], "CDAP, java", "stop CDAP first"),
        ("/usr/bin/tms", ["serve"], "tms", "server"),
        ("/usr/bin/janitor", ["run", "--leveldb", "/opt/cdap/messaging"], "janitor", "process"),
        ("java", ["org.example.Main"], "java", "process"),
    ],
)
def test_lock_of_locked_folder_names_the_holder(
    folder: Path, hold_as: Callable[..., int], program: str, arguments: list[str], named: str, advice: str
) -> None:
    pid = hold_as(program, *arguments)
    with pytest.raises(StoreBusy) as caught, hold_lock(folder):
        pass
    assert f"{folder} " in caught.value.message
    assert f"process {pid} ({named})" in caught.value.message
    assert advice in caught.value.hint


def test_lock_excludes_other_processes_until_released(folder: Path, hold: Callable[[Path], Any]) -> None:
    with hold_lock(folder):
        assert hold(folder).output.startswith("failed")
    with hold_lock(folder, shared=True):
        assert hold(folder).output.startswith("failed")
    assert hold(folder).output == "open"


def test_shared_lock_admits_readers_and_excludes_writers(folder: Path, child: Callable[..., Any]) -> None:
    assert child(LOCK_SHARED, folder).output == "locked"
    with hold_lock(folder, shared=True):
        pass
    with pytest.raises(StoreBusy), hold_lock(folder):
        pass


def test_lock_of_folder_open_in_this_process_keeps_library_lock(folder: Path, hold: Callable[[Path], Any]) -> None:
    database = plyvel.DB(str(folder))
    for shared in (False, True):
        with pytest.raises(StoreBusy, match="in this process"), hold_lock(folder, shared=shared):
            pass
    assert hold(folder).output.startswith("failed")
    database.close()


def test_lock_file_is_created_only_by_a_writer(folder: Path) -> None:
    (folder / "LOCK").unlink()
    with hold_lock(folder, shared=True):
        assert not (folder / "LOCK").exists()
    with hold_lock(folder):
        assert (folder / "LOCK").exists()


def test_unusable_lock_file_raises_store_error(folder: Path) -> None:
    (folder / "LOCK").unlink()
    (folder / "LOCK").mkdir()
    with pytest.raises(StoreError, match="directory"), hold_lock(folder):
        pass


def test_store_below_a_file_names_path_and_reason_once(tmp_path: Path) -> None:
    place = tmp_path / "file" / "store"
    place.parent.write_bytes(b"")
    with pytest.raises(StoreError) as caught:
        LevelDBStore(place, create=True)
    assert caught.value.message == f"{place}: Not a directory."
