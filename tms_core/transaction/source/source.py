"""Sources of transaction snapshots.

A source returns the newest usable snapshot, and the rejected newer files. Another process writes the folder: it adds,
renames and deletes files at any time, so a listing may be outdated. An unusable file is not an error if an older file
is usable. The caller decides by the snapshot's time whether the snapshot is fresh enough (invariant S14).
"""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from tms_core.clock import Clock, SystemClock
from tms_core.errors import NoSnapshot, SnapshotError, UnsupportedSnapshotVersion
from tms_core.transaction.codec.snapshot import read_complete_visibility
from tms_core.transaction.codec.varint import TruncatedSnapshot
from tms_core.transaction.model import VisibilityState

#: The name of a Tephra snapshot; the number is the wall time in milliseconds at which its state was copied.
_NAME = re.compile(r"snapshot\.([0-9]{1,19})")
#: The file with the id of the transaction system, in the directory of a manager of this project.
SYSTEM_FILE = "system"
#: The allowed advance of a snapshot over the local clock, in milliseconds; beyond it, older snapshots have precedence.
_AHEAD_MS = 300_000
#: The largest number of listings of a directory whose files disappear between listing and reading.
_MAX_LISTINGS = 3
#: The longest id of a transaction system.
_ID_BYTES = 100
#: The largest number of unusable files in an error.
_MAX_NAMES = 5
_HINT = (
    "Set transactions.directory (or --snapshots) to the directory to which the transaction manager writes "
    "its snapshot.<ms> files, or to one such file."
)


class Rejection(StrEnum):
    """The reason for which a snapshot file was rejected."""

    EMPTY = "empty"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    IMPLAUSIBLE = "implausible"
    VERSION = "of an unknown version"
    MISNAMED = "misnamed"
    FUTURE = "future"
    VANISHED = "vanished"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class RejectedSnapshot:
    """A snapshot file that was rejected.

    Attributes:
        detail: the reason as a sentence.
    """

    name: str
    reason: Rejection
    detail: str


class ImplausibleSnapshot(SnapshotError):
    """A snapshot has ids that no transaction manager issues, so its contents are unreliable (invariant S13).

    Args:
        problem: the implausible value, in a few words.
    """

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"the snapshot of {name} is damaged: {problem}.",
            "Make the transaction service write another snapshot; if it is also damaged, check the service's recovery.",
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The result of a source. Its constructor checks the snapshot, whatever the source.

    Raises:
        ImplausibleSnapshot: the snapshot has ids that no manager issues.

    Attributes:
        snapshot: the newest usable snapshot.
        name: its origin: a file name, or the name of a service.
        rejected: newer unusable snapshots, newest first.
        ignored: the number of names that are not names of snapshots.
        notes: anomalies of the snapshot that do not prevent its use.
        system: the id of its transaction system; empty: unknown.
    """

    snapshot: VisibilityState
    name: str
    rejected: tuple[RejectedSnapshot, ...] = ()
    ignored: int = 0
    notes: tuple[str, ...] = ()
    system: str = ""

    def __post_init__(self) -> None:
        if problem := self.snapshot.implausible():
            raise ImplausibleSnapshot(self.name, problem)


class SnapshotSource(Protocol):
    """A source of the newest snapshot."""

    def latest(self) -> Loaded:
        """Return the newest usable snapshot.

        Raises:
            SnapshotError: the snapshot is unusable.
            NoSnapshot: no usable snapshot exists.
        """
        ...


class NoUsableSnapshot(NoSnapshot):
    """A folder has snapshots, but all of them are unusable.

    Attributes:
        rejected: the snapshots, each with its problem.
    """

    def __init__(self, folder: Folder, rejected: tuple[RejectedSnapshot, ...]) -> None:
        names = "; ".join(f"{one.name} is {one.reason}" for one in rejected[:_MAX_NAMES])
        more = f"; and {len(rejected) - _MAX_NAMES} more" if len(rejected) > _MAX_NAMES else ""
        super().__init__(f"no snapshot in {folder} can be used: {names}{more}.", _HINT)
        self.rejected = rejected


class SourceUnreachable(NoSnapshot):
    """The transaction manager did not respond with its state."""


class Folder(Protocol):
    """A folder of snapshot files; its ``str`` is its path or URL, for operators."""

    def names(self) -> tuple[list[str], int]:
        """Return the names of its files, and the number of other names; for a file, one empty name.

        Raises:
            NoSnapshot: the folder cannot be listed; the message has the reason.
        """
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Open a file for reading.

        Raises:
            FileNotFoundError: the file was deleted.
            OSError: the file cannot be read.
        """
        ...


class LocalFolder:
    """A folder or a file on this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def names(self) -> tuple[list[str], int]:
        try:
            if self._path.is_file():
                return [""], 0
            with os.scandir(self._path) as entries:
                found = [(entry.name, entry.is_file()) for entry in entries]
        except OSError as error:
            raise NoSnapshot(f"no snapshots at {self._path}: {error.strerror}.", _HINT) from error
        files = [name for name, is_file in found if is_file]
        return files, len(found) - len(files)

    def open(self, name: str) -> BinaryIO:
        return (self._path / name if name else self._path).open("rb", buffering=0)


class DirectorySource:
    """A source that reads the folder of a transaction manager's snapshots, or one snapshot file."""

    def __init__(self, folder: Path | Folder, clock: Clock | None = None) -> None:
        self._folder = LocalFolder(folder) if isinstance(folder, Path) else folder
        self._clock = clock or SystemClock()

    @classmethod
    def at(cls, place: str, kerberos: Any = None, ca_file: Path | None = None) -> DirectorySource:
        """Return the source for the setting ``transactions.directory``.

        Args:
            place: a path or a ``webhdfs://`` URL.
            kerberos, ca_file: as of :class:`WebHdfsFolder`.

        Raises:
            ConfigurationError: the URL has another scheme, or a file cannot be used.
        """
        if "://" not in place:
            return cls(Path(place))
        # Imported here, because local folders need no HTTP client.
        from tms_core.transaction.source.webhdfs import WebHdfsFolder  # noqa: PLC0415

        return cls(WebHdfsFolder(place, kerberos, ca_file))

    def latest(self) -> Loaded:
        """Return the newest usable file.

        The newest file has the largest number in its name, if that agrees with the time in its content. Otherwise, as
        for a renamed copy, the time in the content counts. A file ahead of the clock is used only if all files are.

        Raises:
            NoSnapshot: the directory or a snapshot does not exist; :class:`NoUsableSnapshot`: no snapshot is usable.
        """
        latest_ms = self._clock.now_ms() + _AHEAD_MS
        for _ in range(_MAX_LISTINGS):
            names, ignored = self._list()
            rejected: list[RejectedSnapshot] = []
            found: list[Loaded] = []
            for name in names:
                result = self._load(name)
                if isinstance(result, RejectedSnapshot):
                    rejected.append(result)
                    continue
                found.append(result)
                if result.snapshot.timestamp_ms <= latest_ms and not result.notes:
                    break
            if found:
                times = [one.snapshot.timestamp_ms for one in found]
                at = times.index(max(times, key=lambda taken_ms: (taken_ms <= latest_ms, taken_ms)))
                rejected += [_reject(one, latest_ms) for one in found[:at]]
                return replace(found[at], rejected=tuple(rejected), ignored=ignored, system=self._system(names))
            if all(one.reason is not Rejection.VANISHED for one in rejected):
                break
        if rejected:
            raise NoUsableSnapshot(self._folder, tuple(rejected))
        raise NoSnapshot(f"{self._folder} has no snapshot ({ignored} other names).", _HINT)

    @property
    def _own_name(self) -> str:
        return str(self._folder).rpartition("/")[2]

    def _list(self) -> tuple[list[str], int]:
        """Return the snapshot files, newest first, and the number of other names."""
        files, others = self._folder.names()
        if files == [""]:
            return files, 0
        numbers = {name: int(match[1]) for name in files if (match := _NAME.fullmatch(name))}
        newest_first = sorted(numbers, key=lambda name: numbers[name], reverse=True)
        return newest_first, others + len(files) - len(numbers)

    def _system(self, names: list[str]) -> str:
        """Return the id of the transaction system; a single snapshot file does not contain it."""
        if names == [""]:
            return ""
        try:
            with self._folder.open(SYSTEM_FILE) as stream:
                return stream.read(_ID_BYTES).decode("ascii", "replace").strip()
        except OSError:
            return ""

    def _load(self, name: str) -> Loaded | RejectedSnapshot:
        snapshot_name = name or self._own_name
        try:
            with self._folder.open(name) as stream:
                state = read_complete_visibility(stream)
            return Loaded(state, snapshot_name, notes=_notes(snapshot_name, state))
        except TruncatedSnapshot as error:
            reason = Rejection.TRUNCATED if error.size_bytes else Rejection.EMPTY
            return RejectedSnapshot(snapshot_name, reason, error.message)
        except UnsupportedSnapshotVersion as error:
            return RejectedSnapshot(snapshot_name, Rejection.VERSION, error.message)
        except ImplausibleSnapshot as error:
            return RejectedSnapshot(snapshot_name, Rejection.IMPLAUSIBLE, error.message)
        except SnapshotError as error:
            return RejectedSnapshot(snapshot_name, Rejection.CORRUPT, error.message)
        except FileNotFoundError as error:
            return RejectedSnapshot(snapshot_name, Rejection.VANISHED, str(error))
        except OSError as error:
            return RejectedSnapshot(snapshot_name, Rejection.UNREADABLE, str(error))


def _reject(one: Loaded, latest_ms: int) -> RejectedSnapshot:
    taken_ms = one.snapshot.timestamp_ms
    if taken_ms > latest_ms:
        return RejectedSnapshot(
            one.name, Rejection.FUTURE, f"it was taken at {taken_ms} ms, ahead of this machine's clock."
        )
    return RejectedSnapshot(
        one.name, Rejection.MISNAMED, f"it was taken at {taken_ms} ms by its content, not by its name."
    )


def _notes(name: str, state: VisibilityState) -> tuple[str, ...]:
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) == state.timestamp_ms:
        return ()
    return (f"{name} was taken at {state.timestamp_ms} ms by its content, not at {match[1]} ms by its name",)
