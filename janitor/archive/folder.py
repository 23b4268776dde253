"""The folders of an archive: names, listing, and the removal of old days.

    namespace=default/topic=orders/day=2026-11-18/janitor-<run>-000001.parquet

Tools such as pandas, DuckDB and Spark convert the names into columns. A file gets its name when it is complete; until
then the name starts with a dot, so these tools ignore the file. The removal ignores files and folders with names that
the janitor does not write, and does not follow links.
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

#: The maximum length of a name in a folder's name, which has at most 255 bytes.
NAME_BYTES = 200
#: A name that CDAP accepts, but that tools interpret as "no value".
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
#: A long name is replaced by its first characters, this mark, which no name has, and digits of its SHA-256.
_DIGEST_MARK, _DIGEST_DIGITS = "~", 16

_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,100}")
_FILE = re.compile(rf"janitor-{_RUN_ID.pattern}-\d{{6,}}\.parquet")
_TEMPORARY = re.compile(rf"\.{_FILE.pattern}\.tmp")


class DayFolder(NamedTuple):
    """The archived rows of one topic and one day.

    Attributes:
        topic: the topic; None if the folder's name has a digest, so that only the files have the topic's name.
    """

    path: Path
    topic: TopicId | None
    day: date

    def files(self) -> list[Path]:
        """Return the files with rows, sorted by name.

        Raises:
            ArchiveError: the folder cannot be read.
        """
        try:
            return sorted(path for path in self.path.iterdir() if _FILE.fullmatch(path.name))
        except OSError as error:
            raise _unreadable(error) from error


def local_folder(path: str) -> Path:
    """Return the folder of the setting ``janitor.archive.path``.

    Raises:
        ConfigurationError: the setting is a URL.
    """
    if "://" in path:
        raise ConfigurationError(
            f"janitor.archive.path is {path}, but this version archives only to local folders.",
            "Set a local folder, and copy its files to the remote storage.",
        )
    return Path(path)


def day_of(ms: int) -> date:
    """Return the day of a time, in UTC."""
    return datetime.fromtimestamp(ms / 1000, UTC).date()


def day_path(folder: Path, topic: TopicId, day: date) -> Path:
    """Return the folder for rows of a topic that are deleted on a day."""
    return _topic_path(folder, topic) / f"day={day.isoformat()}"


def file_name(run_id: str, number: int) -> str:
    """Return the name of a file.

    Raises:
        ValueError: the id of the run has characters that are not allowed in a file name.
    """
    if not _RUN_ID.fullmatch(run_id):
        raise ValueError(f"{run_id!r} is not allowed in a file name")
    return f"janitor-{run_id}-{number:06d}.parquet"


def days(folder: Path, topic: TopicId | None = None) -> Iterator[DayFolder]:
    """Yield the days of an archive, sorted by name.

    Args:
        folder: the folder of the archive, which may not exist.
        topic: only days of this topic.

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

    Only its owner may read the file (mode 0600), because it contains messages.

    Args:
        fill: writes the contents.

    Raises:
        OSError: the file could not be written; then it does not exist.
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
    # S16: sync the name, too: the caller deletes the rows as soon as this returns.
    try:
        _sync(path.parent)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def make_durable(path: Path, folder: Path) -> None:
    """Create the folder of a day and its parents durably, up to the folder of the archive.

    Raises:
        OSError: a folder could not be created.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    below = path.relative_to(folder).parts
    levels = [folder, *(folder.joinpath(*below[: depth + 1]) for depth in range(len(below)))]
    for level in levels:
        # Create each folder separately: with ``parents`` the mode would apply to the last folder only.
        level.mkdir(mode=0o700, exist_ok=True)
    for level in reversed(levels):
        _sync(level.parent)


def remove_old_days(folder: Path, keep_days: int, now_ms: int) -> int:
    """Remove days older than ``keep_days`` days, and temporary files that a crash left.

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
            # A file that is being written is in the folder of today or, shortly after midnight, of yesterday.
            if age_days > 1:
                _remove(found.path, _TEMPORARY)
            if age_days > keep_days:
                _remove_if_empty(found.path, found.path.parents[2])
        except OSError as error:
            raise ArchiveError(
                f"{found.path} cannot be removed: {error}.", "Remove it, or run the janitor as the archive's owner."
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
    return f"{name[:NAME_BYTES]}{_DIGEST_MARK}{sha256(name.encode()).hexdigest()[:_DIGEST_DIGITS]}"


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
    """Remove a folder if it is empty, and then its empty parents below ``stop``."""
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
    return ArchiveError(f"The archive cannot be read: {error}.", "Run the command as the archive's owner.")
