"""The folders of an archive: names, listing, and the removal of old days.

    namespace=default/topic=orders/day=2026-11-18/janitor-<run>-000001.parquet

Readers of such folders (pandas, DuckDB, Spark) turn the names into columns. A file gets its name when it is complete;
before that its name starts with a dot, which such readers ignore. The removal ignores names, from the namespace down,
that the janitor does not write, and does not follow links.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, date, datetime
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO, NamedTuple

from tms_core.errors import ArchiveError, ConfigurationError
from tms_core.topic import TopicId

#: A longer name would not fit a folder's: those have 255 bytes.
NAME_BYTES = 200
#: A name that CDAP accepts and readers of such folders take for "no value".
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
#: A long name is replaced by its first characters, this character, which no name has, and digits of its SHA-256.
_INSTEAD, _DIGEST_DIGITS = "~", 16

_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_FILE = re.compile(rf"janitor-{_RUN_ID.pattern}-\d{{6,}}\.parquet")
_TEMPORARY = re.compile(rf"\.{_FILE.pattern}\.tmp")


class DayFolder(NamedTuple):
    """The archived rows of one topic and one day.

    Attributes:
        topic: None: the folder's name is a substitute for the topic's name, which is in the files.
    """

    path: Path
    topic: TopicId | None
    day: date

    def files(self) -> list[Path]:
        """Return the files of rows, in order of name.

        Raises:
            ArchiveError: the folder cannot be read.
        """
        try:
            return sorted(path for path in self.path.iterdir() if _FILE.fullmatch(path.name))
        except OSError as error:
            raise _unreadable(error) from error


def local_folder(path: str) -> Path:
    """Return the folder that the setting ``janitor.archive.path`` names.

    Raises:
        ConfigurationError: it is a URL.
    """
    if "://" in path:
        raise ConfigurationError(
            f"janitor.archive.path is {path}, but this version archives only to local folders.",
            "Set a local folder, and copy its files to the remote place.",
        )
    return Path(path)


def day_of(ms: int) -> date:
    """Return the day of a moment, in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).date()


def day_path(folder: Path, topic: TopicId, day: date) -> Path:
    """Return where rows of a topic go that are deleted on that day."""
    return _topic_path(folder, topic) / f"day={day.isoformat()}"


def file_name(run_id: str, number: int) -> str:
    """Return a file's name.

    Raises:
        ValueError: the run's id has characters that do not belong into one.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} cannot be part of a file's name")
    return f"janitor-{run_id}-{number:06d}.parquet"


def days(folder: Path, topic: TopicId | None = None) -> Iterator[DayFolder]:
    """Yield the days of an archive, in order of name.

    Args:
        folder: the archive's; need not exist.
        topic: of this topic only.

    Raises:
        ArchiveError: a folder cannot be read.
    """
    try:
        for path in [_topic_path(folder, topic)] if topic else list(_topic_paths(folder)):
            for day in _below(path, "day="):
                with suppress(ValueError):
                    yield DayFolder(day, _topic_of(path), date.fromisoformat(day.name.removeprefix("day=")))
    except OSError as error:
        raise _unreadable(error) from error


def create(path: Path, fill: Callable[[BinaryIO], None]) -> None:
    """Write a file atomically and durably.

    Only its owner may read it (mode 0600), because it has messages.

    Args:
        fill: writes the contents.

    Raises:
        OSError: the file does not exist.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with open(temporary, "wb", opener=partial(os.open, mode=0o600)) as stream:
            fill(stream)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    # The name must be durable, too: rows are deleted as soon as this returns (S16).
    try:
        _sync(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def make_durable(path: Path, folder: Path) -> None:
    """Make a day's folder and those above it, up to the archive's, so that they survive a crash of the machine.

    Raises:
        OSError: one of them cannot be made.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    below = path.relative_to(folder).parts
    levels = [folder, *(folder.joinpath(*below[: depth + 1]) for depth in range(len(below)))]
    for level in levels:
        # With ``parents`` the mode would count for the last folder only.
        level.mkdir(mode=0o700, exist_ok=True)
    for level in reversed(levels):
        _sync(level.parent)


def give_up(folder: Path, keep_days: int, now_ms: int) -> int:
    """Remove days older than ``keep_days`` days, and temporary files of a crash.

    Returns:
        The number of removed files with rows.

    Raises:
        ArchiveError: a file cannot be removed.
    """
    today = day_of(now_ms)
    removed = 0
    for found in list(days(folder)):
        age_days = (today - found.day).days
        try:
            if age_days > keep_days:
                removed += _remove(found.path, _FILE)
            # A file that is being written lies in today's folder, or shortly after midnight in yesterday's.
            if age_days > 1:
                _remove(found.path, _TEMPORARY)
            if age_days > keep_days:
                _remove_if_empty(found.path, found.path.parents[2])
        except OSError as error:
            raise ArchiveError(
                f"{found.path} cannot be removed: {error}.", "Remove it by hand, or run as the archive's owner."
            ) from error
    return removed


def _topic_path(folder: Path, topic: TopicId) -> Path:
    return folder / f"namespace={_folder_name(topic.namespace)}" / f"topic={_folder_name(topic.topic)}"


def _topic_paths(folder: Path) -> Iterator[Path]:
    for namespace in _below(folder, "namespace="):
        yield from _below(namespace, "topic=")


def _topic_of(path: Path) -> TopicId | None:
    namespace, topic = path.parent.name.removeprefix("namespace="), path.name.removeprefix("topic=")
    return TopicId.from_prefix(f"{namespace}:{topic}:".encode())


def _folder_name(name: str) -> str:
    if len(name) <= NAME_BYTES and name != NO_VALUE:
        return name
    return f"{name[:NAME_BYTES]}{_INSTEAD}{sha256(name.encode()).hexdigest()[:_DIGEST_DIGITS]}"


def _below(folder: Path, prefix: str) -> list[Path]:
    """Return the folders whose names start with a prefix; empty if the parent does not exist."""
    if not folder.is_dir():
        return []
    found = (path for path in folder.iterdir() if path.name.startswith(prefix))
    return sorted(path for path in found if path.is_dir() and not path.is_symlink())


def _remove(folder: Path, names: re.Pattern[str]) -> int:
    found = [path for path in folder.iterdir() if names.fullmatch(path.name) and not path.is_dir()]
    for path in found:
        path.unlink()
    return len(found)


def _remove_if_empty(path: Path, stop: Path) -> None:
    """Remove a folder, and those above it, below ``stop``, that it leaves empty."""
    while path != stop and not any(path.iterdir()):
        path.rmdir()
        path = path.parent


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _unreadable(error: OSError) -> ArchiveError:
    return ArchiveError(f"The archive cannot be read: {error}.", "Run as the user it belongs to.")
