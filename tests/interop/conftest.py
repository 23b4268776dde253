"""Fixtures of the Java program of interoperability tests, and of its stores."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.interop.java import Interop, Resident
from tests.support import require_or_skip, unpack_archive

VECTORS = Path(__file__).parents[1] / "vectors" / "cdap-leveldb"


@pytest.fixture(scope="session")
def java() -> Iterator[Interop]:
    interop = Resident()
    if reason := interop.available():
        require_or_skip(reason)
    interop.build()
    yield interop
    interop.close()


@dataclass(frozen=True)
class Vector:
    """An unpacked store of CDAP, and the manifest of its rows."""

    directory: Path
    snapshot: Path
    now_ms: int
    rows: list[dict[str, Any]]

    def table(self, name: str) -> list[dict[str, Any]]:
        """Return the rows of ``meta``, ``message`` or ``payload``."""
        return [row for row in self.rows if row["table"] == name]


@pytest.fixture(params=["sample", "edge"])
def vector(request: pytest.FixtureRequest, tmp_path: Path) -> Vector:
    """Return each of the two stores, in a folder of the test."""
    return unpack(request.param, tmp_path)


@pytest.fixture
def sample(tmp_path: Path) -> Vector:
    return unpack("sample", tmp_path)


def unpack(name: str, into: Path) -> Vector:
    """Unpack ``name.tar.xz`` and read its manifest."""
    unpack_archive(VECTORS / f"{name}.tar.xz", into)
    # The manifests use an earlier name of this reason.
    manifest = (into / "manifest.jsonl").read_text().replace('"foreign"', '"unrecognized"')
    head, *rows = [json.loads(line) for line in manifest.splitlines()]
    return Vector(into / "messaging", into / "tx.snapshot" / head["snapshot"], head["now"], rows)
