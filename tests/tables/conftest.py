"""Fixtures of stores written by CDAP's own classes, and of other processes that open them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.conftest import java
from tests.support import unpack_archive

__all__ = ["java"]

TESTS = Path(__file__).parent.parent


@dataclass(frozen=True)
class Vector:
    """An unpacked store of CDAP; ``rows`` are the entries of its manifest."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]

    def of(self, table: str) -> dict[bytes, dict[str, Any]]:
        return {bytes.fromhex(row["key"]): row for row in self.rows if row["table"] == table}

    def copy_to(self, target: Path) -> Path:
        return Path(shutil.copytree(self.folder / "messaging", target))


@pytest.fixture(scope="session")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vector]:
    found = {}
    for name in ("sample", "edge"):
        folder = tmp_path_factory.mktemp(name)
        unpack_archive(TESTS / "vectors" / "cdap-leveldb" / f"{name}.tar.xz", folder)
        _, *rows = map(json.loads, (folder / "manifest.jsonl").read_text().splitlines())
        found[name] = Vector(name, folder, rows)
    return found


@pytest.fixture(params=["sample", "edge"])
def vector(request: pytest.FixtureRequest, vectors: dict[str, Vector]) -> Vector:
    return vectors[request.param]


@pytest.fixture
def sample(vectors: dict[str, Vector], tmp_path: Path) -> Path:
    """Return a copy of the store whose MANIFEST has wrong sizes."""
    return vectors["sample"].copy_to(tmp_path / "messaging")


class Child:
    """A Python process that prints a line when it is ready and runs until it is stopped."""

    def __init__(self, code: str, *arguments: str | Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(TESTS.parent)},
        )
        assert self.process.stdout is not None
        self.output = self.process.stdout.readline().strip()

    @property
    def pid(self) -> int:
        return self.process.pid

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    children: list[Child] = []

    def start(code: str, *arguments: str | Path) -> Child:
        children.append(Child(code, *arguments))
        return children[-1]

    yield start
    for started in children:
        started.kill()


#: A program that opens a folder with LevelDB, prints "open" or the error, and keeps it open until it is stopped.
HOLD = """
import sys
from tms_core.tables.leveldb.library import plyvel
try:
    database = plyvel.DB(sys.argv[1])
    print("open", flush=True)
except plyvel.Error as error:
    print("failed", error, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def hold(child: Callable[..., Child]) -> Callable[[Path], Child]:
    return lambda folder: child(HOLD, folder)
