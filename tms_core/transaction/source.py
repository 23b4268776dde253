"""Where a transaction snapshot comes from.

A source answers one question: what is the newest snapshot that can be used, and what had to be passed over to find it?
A directory is written by another process, which adds files, renames them and deletes old ones at any moment, so nothing
seen in a listing can be relied on. A file that cannot be used is never an error while an older one can: it is reported,
and the caller judges by the snapshot's own time whether it is still fresh enough (rule S14).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from tms_core.errors import NoSnapshot, SnapshotError, UnsupportedSnapshotVersion
from tms_core.transaction.model import VisibilityState
from tms_core.transaction.snapshot import read_complete_visibility
from tms_core.transaction.varint import TruncatedSnapshot

#: A Tephra snapshot's name; the number is the wall time in ms at which its state was copied.
_NAME = re.compile(r"snapshot\.([0-9]{1,19})")
#: How often a directory is listed before giving up, when files vanish between listing and reading.
_LISTINGS = 3
#: How many unusable files an error names.
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
    VERSION = "version"
    VANISHED = "vanished"
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A snapshot that could not be used.

    Attributes:
        name: its file name.
        reason: what was wrong with it.
        detail: the same in a sentence.
    """

    name: str
    reason: Rejection
    detail: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a source found.

    Attributes:
        snapshot: the newest snapshot that can be used.
        name: where it came from: a file name, or the name of a service.
        rejected: newer ones that could not be used, newest first.
        ignored: how many names were there that no snapshot has.
        notes: what is odd about the snapshot and does not prevent its use.
    """

    snapshot: VisibilityState
    name: str
    rejected: tuple[Rejected, ...] = ()
    ignored: int = 0
    notes: tuple[str, ...] = ()


class SnapshotSource(Protocol):
    """Anything that knows the newest snapshot."""

    def latest(self) -> Loaded:
        """The newest snapshot that can be used.

        Raises:
            NoSnapshot: there is none.
        """
        ...


class NoUsableSnapshot(NoSnapshot):
    """There are snapshots, and none can be used.

    Attributes:
        rejected: what was wrong with each.
    """

    def __init__(self, path: Path, rejected: tuple[Rejected, ...]) -> None:
        named = "; ".join(f"{one.name} is {one.reason}" for one in rejected[:_NAMED])
        more = f"; and {len(rejected) - _NAMED} more" if len(rejected) > _NAMED else ""
        super().__init__(f"no snapshot in {path} can be used: {named}{more}.", _HINT)
        self.rejected = rejected


class SourceSilent(NoSnapshot):
    """The transaction manager that was asked for its state did not answer."""


class DirectorySource:
    """The directory in which a transaction manager leaves its snapshots, or one snapshot file by itself.

    Args:
        path: the directory (``transactions.directory``), or a file of any name.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def latest(self) -> Loaded:
        """The file with the largest number in its name that can be used.

        Raises:
            NoSnapshot: no such directory, or no snapshot in it; :class:`NoUsableSnapshot` when there are some.
        """
        for _ in range(_LISTINGS):
            files, ignored = self._list()
            rejected: list[Rejected] = []
            for file in files:
                result = _load(file)
                if isinstance(result, VisibilityState):
                    return Loaded(result, file.name, tuple(rejected), ignored, _notes(file.name, result))
                rejected.append(result)
            if all(one.reason is not Rejection.VANISHED for one in rejected):
                break
        if rejected:
            raise NoUsableSnapshot(self._path, tuple(rejected))
        raise NoSnapshot(f"there is no snapshot in {self._path} ({ignored} other names).", _HINT)

    def _list(self) -> tuple[list[Path], int]:
        """The snapshot files, newest first, and how many other names there are."""
        try:
            if self._path.is_file():
                return [self._path], 0
            with os.scandir(self._path) as entries:
                names = [entry.name if entry.is_file() else "" for entry in entries]
        except OSError as error:
            raise NoSnapshot(f"no snapshots at {self._path}: {error.strerror}.", _HINT) from error
        numbers = {name: int(match[1]) for name in names if (match := _NAME.fullmatch(name))}
        newest_first = sorted(numbers, key=lambda name: numbers[name], reverse=True)
        return [self._path / name for name in newest_first], len(names) - len(numbers)


def _load(file: Path) -> VisibilityState | Rejected:
    try:
        with file.open("rb", buffering=0) as stream:
            return read_complete_visibility(stream)
    except TruncatedSnapshot as error:
        reason = Rejection.TRUNCATED if error.size_bytes else Rejection.EMPTY
        return Rejected(file.name, reason, error.message)
    except UnsupportedSnapshotVersion as error:
        return Rejected(file.name, Rejection.VERSION, error.message)
    except SnapshotError as error:
        return Rejected(file.name, Rejection.CORRUPT, error.message)
    except FileNotFoundError as error:
        return Rejected(file.name, Rejection.VANISHED, str(error))
    except OSError as error:
        return Rejected(file.name, Rejection.UNREADABLE, str(error))


def _notes(name: str, state: VisibilityState) -> tuple[str, ...]:
    match = _NAME.fullmatch(name)
    if match is None or int(match[1]) == state.timestamp_ms:
        return ()
    return (f"{name} was taken at {state.timestamp_ms} ms by its content, which counts, not at {match[1]}",)
