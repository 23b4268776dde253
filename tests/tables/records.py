"""Functions that read, write and damage files of LevelDB."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

from tms_core.tables.leveldb import log


def read_records(data: bytes) -> list[bytes]:
    return list(log.read_records(BytesIO(data)))


def write_records(records: Sequence[bytes]) -> bytes:
    return b"".join(log.pack_records(records))


def file_contents(*folders: Path) -> dict[str, bytes]:
    """Return the contents of all files in folders, except for the files of locks."""
    found = (file for folder in folders for file in folder.rglob("*") if file.is_file() and file.name != "LOCK")
    return {str(file): file.read_bytes() for file in found}


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def flip(file: Path, offset: int) -> None:
    """Flip a bit of the byte at an offset."""
    file.write_bytes(flipped(file.read_bytes(), 8 * offset))
