"""Functions that read and write records of LevelDB's logs and MANIFEST files."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

from tms_core.tables.leveldb import log


def read_records(data: bytes) -> list[bytes]:
    return list(log.read_records(BytesIO(data)))


def write_records(records: Sequence[bytes]) -> bytes:
    return b"".join(log.pack_records(records))
