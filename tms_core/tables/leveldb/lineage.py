"""Marks that a backup of a LevelDB store does not have, so that a restored one is told from the store itself.

Path and inode do not tell: a backup can be copied into the same folders, and another volume at the same path may well
give out the same inode numbers. But each write raises a folder's sequence number, each opening the number of its
MANIFEST, and no file number is given out twice. So three things are remembered of each folder (rule S13): which folder
of which file system it is, how far its numbers had come, and which tables it had by then. A folder whose numbers are
lower was put back. So was one that has a table which is older than that moment, and which it did not have: it was put
back and written to since.

The trade: LevelDB tells none of that, so MANIFEST and logs are read beside it, heads of records only, and only when
they have changed.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

from tms_core.tables.base import TableName
from tms_core.tables.leveldb.layout import FOLDERS, find_tables
from tms_core.tables.leveldb.lock import sync_logs, translated
from tms_core.tables.leveldb.log import last_sequence
from tms_core.tables.leveldb.manifest import current_manifest, read_manifest, table_files

#: FS_IOC_GETVERSION of Linux: the number of an inode's use, which the next file under this inode does not have.
_GET_GENERATION = 0x80087601
#: Of statx(2): the directory that relative paths start from, the mask that asks for the birth time, and where that is.
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _BTIME = -100, 0x800, 256, struct.Struct("<qI")
_BTIME_OFFSET = 80


class FolderTrace(NamedTuple):
    """One folder at one moment.

    Attributes:
        birth_ns: when the folder was made; None where the file system does not say.
        generation: how often its inode was given out, or a random number for that; None if unknown.
        sequence: the highest sequence number of a write in it.
        manifest: the number of the MANIFEST in force.
        next_file: all lower file numbers were issued by then.
        tables: numbers of the table files that are there.
        live: numbers of those that are in force.
    """

    inode: int
    birth_ns: int | None
    generation: int | None
    sequence: int
    manifest: int
    next_file: int
    tables: tuple[int, ...]
    live: tuple[int, ...]


class StoreTrace:
    """The marks of a store that is open, and whether it is still the store that was recorded before.

    Between two openings another process may have written to the store. So until what is remembered was found right
    once, it is held against the files as they were before this opening; from then on, against those of the moment.

    Args:
        frozen: whether ``opened`` is all there will ever be: of a clone.
    """

    def __init__(self, path: Path, opened: Mapping[TableName, FolderTrace], *, frozen: bool = False) -> None:
        self._path = path
        self._opened = opened
        self._frozen = frozen
        self._lock = Lock()
        self._recognised = False
        self._known: dict[Path, tuple[object, FolderTrace]] = {}

    def remembered(self) -> dict[str, Any]:
        """What to remember of the store as it is now, as JSON values by table. All of it is durable on return.

        Raises:
            StoreError: a file cannot be read or synced.
        """
        with self._lock:
            found = self._present()
            self._recognised = True
        return {table: _as_json(trace) for table, trace in found.items()}

    def restored_since(self, known: Mapping[str, Any]) -> str | None:
        """Return how it shows that this is not the store as it went on from there; None: nothing shows that.

        Raises:
            StoreError: a file cannot be read.
        """
        with self._lock:
            found = self._present() if self._recognised else self._opened
            for table in [table for table in FOLDERS if table in known]:
                trace = found.get(table)
                reason = "is gone" if trace is None else _difference(known[table], trace)
                if reason is not None:
                    return f"the {table} table {reason}"
            self._recognised = True
        return None

    def _present(self) -> Mapping[TableName, FolderTrace]:
        if self._frozen:
            return self._opened
        return {table: self._trace(folder) for table, folder in find_tables(self._path).items()}

    def _trace(self, folder: Path) -> FolderTrace:
        with translated(folder):
            files = _sizes(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == files:
            return known[1]
        trace = trace_folder(folder)
        with translated(folder):
            # A sequence number that a crash of the machine takes back must not have been remembered.
            sync_logs(folder)
        self._known[folder] = (files, trace)
        return trace


def trace_folder(folder: Path) -> FolderTrace:
    """Return a folder as its files tell; LevelDB may have it open.

    Raises:
        StoreError: the MANIFEST cannot be read.
    """
    with translated(folder):
        # In this order: a log that has become a table since is told of by the MANIFEST, and a table that LevelDB has
        # counted there exists by then, in force or not yet.
        logs = [last_sequence(log) for log in _read_logs(folder)]
        manifest = current_manifest(folder)
        version = read_manifest(manifest)
        tables = table_files(folder)
        return FolderTrace(
            inode=folder.stat().st_ino,
            birth_ns=_birth_ns(folder),
            generation=_generation(folder),
            sequence=max([version.sequence, *logs]),
            manifest=int(manifest.name.rpartition("-")[2]),
            next_file=version.next_file,
            tables=tuple(sorted(tables)),
            live=tuple(sorted(version.live)),
        )


def _as_json(trace: FolderTrace) -> dict[str, Any]:
    """Return the marks of a folder as JSON; the tables in force are among the others."""
    fields = trace._asdict()
    del fields["live"]
    return {**fields, "tables": list(trace.tables)}


def _read_logs(folder: Path) -> Iterator[bytes]:
    for log in sorted(folder.glob("*.log")):
        try:
            yield log.read_bytes()
        except FileNotFoundError:
            continue


def _difference(before: Mapping[str, Any], now: FolderTrace) -> str | None:
    """Return how it shows that a folder is another one or was put back; what one of the two does not say is not
    compared.
    """
    for name, what in (("inode", "inode"), ("birth_ns", "time of making"), ("generation", "inode generation")):
        known, present = before.get(name), getattr(now, name)
        if known is not None and present is not None and known != present:
            return f"is another folder (its {what} was {known} and is {present})"
    for name, what in (("sequence", "last write was number"), ("manifest", "MANIFEST was number")):
        if getattr(now, name) < before[name]:
            return f"went back (its {what} {before[name]} and is {getattr(now, name)})"
    had = set(before["tables"])
    strange = [number for number in now.live if number < before["next_file"] and number not in had]
    if strange:
        return f"went back and on (its file {strange[0]:06d} was not there, and numbers up to that were used)"
    return None


def _sizes(folder: Path) -> object:
    """What changes when anything is written; a folder of the same answer is as it was."""
    names = ("CURRENT", "MANIFEST-*", "*.log")
    found = []
    for entry in sorted(entry for name in names for entry in folder.glob(name)):
        with suppress(FileNotFoundError):
            stat = entry.stat()
            found.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return folder.stat().st_ino, found


def _birth_ns(folder: Path) -> int | None:
    """Return when the folder was made; Python has no call for it on Linux."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(folder), 0, _STATX_BTIME, answer) != 0:
        return None
    (said,) = struct.unpack_from("<I", answer)
    seconds, nanoseconds = _BTIME.unpack_from(answer, _BTIME_OFFSET)
    return seconds * 1_000_000_000 + nanoseconds if said & _STATX_BTIME else None


def _generation(folder: Path) -> int | None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        answer = fcntl.ioctl(handle, _GET_GENERATION, bytes(8))
    except OSError:
        return None  # not every file system counts them
    finally:
        os.close(handle)
    return int.from_bytes(answer[:4], "little")
