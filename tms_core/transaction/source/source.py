"""Sources of transaction snapshots.

A source returns the newest usable snapshot, and the skipped ones. Another process writes the folder: it adds, renames
and deletes files at any time, so a listing may be outdated. An unusable file is not an error if an older file is
usable. The source reports it, and the caller decides by the snapshot's time whether it is fresh enough (invariant S14).
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

#: A Tephra snapshot's name; the number is the wall time in ms at which its state was copied.
_NAME = re.compile(r"snapshot\.([0-9]{1,19})")
#: The file with the id of the transaction system, in the directory of a manager of this project.
SYSTEM_FILE = "system"
#: A snapshot that is further ahead of the local clock is used only if there is no older one; in milliseconds.
_AHEAD_MS = 300_000
#: The most listings of a directory whose files disappear between listing and reading.
_LISTINGS = 3
#: The longest id of a transaction system.
_ID_BYTES = 100
#: The most unusable files that an error names.
_NAMED = 5
_HINT = (
    "Set transactions.directory (or --snapshots) to the directory in which the transaction manager leaves "
    "its snapshot.<ms> files, or to one such file."
)


class Rejection(StrEnum):
    """Why a snapshot file was passed over."""

    EMPTY = "empty"
    TRUNCATED = "truncated"
    CORRUPT = "corrupt"
    IMPLAUSIBLE = "implausible"
    VERSION = "version"
    MISNAMED = "misnamed"
    FUTURE = "future"
    VANISHED = "vanished"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class RejectedSnapshot:
    """A snapshot that could not be used.

    Attributes:
        detail: the same in a sentence.
    """

    name: str
    reason: Rejection
    detail: str


class ImplausibleSnapshot(SnapshotError):
    """A snapshot has ids that no transaction manager issues, so nothing in it can be relied on (invariant S13).

    Args:
        wrong: the impossible content, in a few words.
    """

    def __init__(self, name: str, wrong: str) -> None:
        super().__init__(
            f"the snapshot of {name} is damaged: {wrong}.",
            "Have the transaction service write another one; if that is no better, see what it recovered from.",
        )


@dataclass(frozen=True, slots=True)
class Loaded:
    """The snapshot that a source found. Every source returns it as this, so that each snapshot is checked.

    Raises:
        ImplausibleSnapshot: the snapshot has ids that no manager gives out.

    Attributes:
        snapshot: the newest snapshot that can be used.
        name: its source: a file name, or the name of a service.
        rejected: newer snapshots that cannot be used, newest first.
        ignored: the number of names that are not names of snapshots.
        notes: oddities of the snapshot that do not prevent its use.
        system: the id of its transaction system; empty: unknown.
    """

    snapshot: VisibilityState
    name: str
    rejected: tuple[RejectedSnapshot, ...] = ()
    ignored: int = 0
    notes: tuple[str, ...] = ()
    system: str = ""

    def __post_init__(self) -> None:
        if wrong := self.snapshot.implausible():
            raise ImplausibleSnapshot(self.name, wrong)


class SnapshotSource(Protocol):
    """A source of the newest snapshot."""

    def latest(self) -> Loaded:
        """Return the newest snapshot that can be used.

        Raises:
            SnapshotError: no existing snapshot can be used.
            NoSnapshot: no snapshot exists.
        """
        ...


class NoUsableSnapshot(NoSnapshot):
    """There are snapshots, and none can be used.

    Attributes:
        rejected: the defect of each.
    """

    def __init__(self, folder: Folder, rejected: tuple[RejectedSnapshot, ...]) -> None:
        named = "; ".join(f"{one.name} is {one.reason}" for one in rejected[:_NAMED])
        more = f"; and {len(rejected) - _NAMED} more" if len(rejected) > _NAMED else ""
        super().__init__(f"no snapshot in {folder} can be used: {named}{more}.", _HINT)
        self.rejected = rejected


class SourceUnreachable(NoSnapshot):
    """The transaction manager did not respond with its state."""


class Folder(Protocol):
    """Where snapshot files lie; its ``str`` is what people know it by."""

    def names(self) -> tuple[list[str], int]:
        """Return the names of its files, and the number of other names; one empty name: it is a file itself.

        Raises:
            NoSnapshot: it cannot be listed; the message has the reason.
        """
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """Return a file to be read.

        Raises:
            FileNotFoundError: it was deleted.
            OSError: it cannot be read.
        """
        ...


class LocalFolder:
    """A folder of this machine, or one file."""

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
    """The folder of a transaction manager's snapshots, or one snapshot file."""

    def __init__(self, folder: Path | Folder, clock: Clock | None = None) -> None:
        self._folder = LocalFolder(folder) if isinstance(folder, Path) else folder
        self._clock = clock or SystemClock()

    @classmethod
    def at(cls, place: str, kerberos: Any = None, ca_file: Path | None = None) -> DirectorySource:
        """Return the folder of the setting ``transactions.directory``.

        Args:
            place: a path or a ``webhdfs://`` URL.
            kerberos, ca_file: as :class:`WebHdfsFolder` takes them.

        Raises:
            ConfigurationError: it is another URL, or a file cannot be used.
        """
        if "://" not in place:
            return cls(Path(place))
        # To read a folder needs no HTTP client.
        from tms_core.transaction.source.webhdfs import WebHdfsFolder  # noqa: PLC0415

        return cls(WebHdfsFolder(place, kerberos, ca_file))

    def latest(self) -> Loaded:
        """Return the newest usable file.

        The newest file has the largest number in its name, if that agrees with the time of its content. A file of
        another name, such as a copy made by hand, counts by its content. A file ahead of the clock counts only if all
        files are.

        Raises:
            NoSnapshot: the directory or a snapshot does not exist; :class:`NoUsableSnapshot`: no snapshot is usable.
        """
        latest_ms = self._clock.now_ms() + _AHEAD_MS
        for _ in range(_LISTINGS):
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
                rejected += [_passed_over(one, latest_ms) for one in found[:at]]
                return replace(found[at], rejected=tuple(rejected), ignored=ignored, system=self._system(names))
            if all(one.reason is not Rejection.VANISHED for one in rejected):
                break
        if rejected:
            raise NoUsableSnapshot(self._folder, tuple(rejected))
        raise NoSnapshot(f"there is no snapshot in {self._folder} ({ignored} other names).", _HINT)

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


def _passed_over(one: Loaded, latest_ms: int) -> RejectedSnapshot:
    taken_ms = one.snapshot.timestamp_ms
    if taken_ms > latest_ms:
        return RejectedSnapshot(
            one.name, Rejection.FUTURE, f"it was taken at {taken_ms} ms, ahead of this machine's clock."
        )
    return RejectedSnapshot(
        one.name, Rejection.MISNAMED, f"it was taken at {taken_ms} ms by its content, which counts."
    )


def _notes(name: str, state: VisibilityState) -> tuple[str, ...]:
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) == state.timestamp_ms:
        return ()
    return (f"{name} was taken at {state.timestamp_ms} ms by its content, which counts, not at {match[1]}",)
