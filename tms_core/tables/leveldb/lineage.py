"""Marks that a backup of a LevelDB store does not have, to recognize a restored store.

Path and inode do not suffice: a backup can be copied into the same folders, and another volume at the same path may
issue the same inode numbers. But each write increases a folder's sequence number, each opening increases the number of
its MANIFEST, and no file number is issued twice. Therefore three marks of each folder are recorded (invariant S13): its
inode and file system, its numbers, and its tables. A folder with lower numbers was restored. A folder that has a table
with an old number that is not in the record was restored, too, and written to since.

The trade-off: LevelDB does not report these numbers. This module reads MANIFEST and logs itself, but only the heads of
records, and only after a change.
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
from tms_core.tables.leveldb.lock import convert_errors, sync_logs
from tms_core.tables.leveldb.log import last_sequence
from tms_core.tables.leveldb.manifest import current_manifest, read_manifest, table_files

#: FS_IOC_GETVERSION of Linux: returns the generation of an inode, which differs for the next file with this inode.
_GET_GENERATION = 0x80087601
#: Constants of statx(2): the directory of relative paths, the mask of the birth time, and its position.
_AT_FDCWD, _STATX_BTIME, _STATX_BYTES, _BTIME = -100, 0x800, 256, struct.Struct("<qI")
_BTIME_OFFSET = 80


class FolderTrace(NamedTuple):
    """The marks of one folder at one time.

    Attributes:
        birth_ns: the birth time of the folder in nanoseconds; None: the file system does not store it.
        generation: the generation of its inode, a counter or a random number; None: unknown.
        sequence: the highest sequence number of a write.
        manifest: the number of the MANIFEST in force.
        next_file: the next file number; all lower numbers had been issued.
        tables: the numbers of the existing table files.
        live: the numbers of the table files in force.
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
    """The marks of an open store, and the check whether it is the recorded store.

    A record is compared with the files as they were before this opening, because the opening changes them. After the
    first match, records are compared with the current files.

    Args:
        frozen: whether ``opened`` never changes, as for a clone.
    """

    def __init__(self, path: Path, opened: Mapping[TableName, FolderTrace], *, frozen: bool = False) -> None:
        self._path = path
        self._opened = opened
        self._frozen = frozen
        self._lock = Lock()
        self._recognized = False
        self._known: dict[Path, tuple[object, FolderTrace]] = {}

    def current_marks(self) -> dict[str, Any]:
        """Return the current marks of the store by table, as JSON values. The marked writes are durable on return.

        Raises:
            StoreError: a file cannot be read or synced.
        """
        with self._lock:
            found = self._current_traces()
            self._recognized = True
        return {table: _as_json(trace) for table, trace in found.items()}

    def find_restore_evidence(self, known: Mapping[str, Any]) -> str | None:
        """Return the evidence that this is not the recorded store in a later state; None without evidence.

        Raises:
            StoreError: a file cannot be read.
        """
        with self._lock:
            found = self._current_traces() if self._recognized else self._opened
            for table in [table for table in FOLDERS if table in known]:
                trace = found.get(table)
                reason = "is missing" if trace is None else _difference(known[table], trace)
                if reason is not None:
                    return f"the {table} table {reason}"
            self._recognized = True
        return None

    def _current_traces(self) -> Mapping[TableName, FolderTrace]:
        if self._frozen:
            return self._opened
        return {table: self._trace(folder) for table, folder in find_tables(self._path).items()}

    def _trace(self, folder: Path) -> FolderTrace:
        with convert_errors(folder):
            files = _sizes(folder)
        known = self._known.get(folder)
        if known is not None and known[0] == files:
            return known[1]
        trace = trace_folder(folder)
        with convert_errors(folder):
            # Sync before the number is recorded: if a crash undid a recorded sequence number, the store would look
            # restored (invariant S13).
            sync_logs(folder)
        self._known[folder] = (files, trace)
        return trace


def trace_folder(folder: Path) -> FolderTrace:
    """Return the marks of a folder from its files, even if LevelDB has it open.

    Raises:
        StoreError: the MANIFEST cannot be read.
    """
    with convert_errors(folder):
        # In this order: if LevelDB makes a table of a log in between, the later MANIFEST covers it, and every table in
        # the MANIFEST exists when the folder is listed.
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
    """Return the marks of a folder as JSON, without ``live``, which ``tables`` includes."""
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
    """Return why a folder is another folder or was restored; skip a mark that is missing on either side."""
    for name, what in (("inode", "inode"), ("birth_ns", "birth time"), ("generation", "inode generation")):
        known, present = before.get(name), getattr(now, name)
        if known is not None and present is not None and known != present:
            return f"is another folder (its {what} was {known} and is {present})"
    for name, what in (("sequence", "last write was number"), ("manifest", "MANIFEST was number")):
        if getattr(now, name) < before[name]:
            return f"went back (its {what} {before[name]} and is {getattr(now, name)})"
    had = set(before["tables"])
    strange = [number for number in now.live if number < before["next_file"] and number not in had]
    if strange:
        return f"went back and on (its file {strange[0]:06d} did not exist, although that number was used)"
    return None


def _sizes(folder: Path) -> object:
    """Return a value that changes with every write to a folder."""
    names = ("CURRENT", "MANIFEST-*", "*.log")
    found = []
    for entry in sorted(entry for name in names for entry in folder.glob(name)):
        with suppress(FileNotFoundError):
            stat = entry.stat()
            found.append((entry.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return folder.stat().st_ino, found


def _birth_ns(folder: Path) -> int | None:
    """Return the birth time of a folder by statx(2), because Python has no function for it on Linux."""
    statx = getattr(ctypes.CDLL(None), "statx", None)
    if statx is None:
        return None
    answer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(folder), 0, _STATX_BTIME, answer) != 0:
        return None
    (mask,) = struct.unpack_from("<I", answer)
    seconds, nanoseconds = _BTIME.unpack_from(answer, _BTIME_OFFSET)
    return seconds * 1_000_000_000 + nanoseconds if mask & _STATX_BTIME else None


def _generation(folder: Path) -> int | None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        answer = fcntl.ioctl(handle, _GET_GENERATION, bytes(8))
    except OSError:
        return None  # some file systems have no generations
    finally:
        os.close(handle)
    return int.from_bytes(answer[:4], "little")
