"""The contents of an archive by topic, day and run, read from the footers of its files.

A listing reads no rows and caches nothing, so the files of an archive may be copied, deleted or merged at any time.
Unreadable files are listed separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from janitor.archive import folder as archive_folder
from janitor.archive import parquet
from janitor.archive.parquet import Summary
from tms_core.errors import ArchiveError
from tms_core.rowkey import MessageKey
from tms_core.topic import TopicId


@dataclass(frozen=True, slots=True)
class ArchivedFile:
    """One file of an archive: a batch of one topic, table and rule.

    Attributes:
        day: the day of archiving, from the name of its folder.
        size_bytes: its size on disk.
    """

    path: Path
    day: date
    size_bytes: int
    summary: Summary


class Listing(NamedTuple):
    """The contents of an archive; ``damaged`` has the reason for each unreadable file."""

    files: list[ArchivedFile]
    damaged: list[ArchiveError]


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection of archived rows.

    Attributes:
        run_id: the run that deleted the rows; None: any run.
        since_ms, until_ms: the half-open interval of their times (publish time, or write time of payload rows); None:
            no limit.
    """

    run_id: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None

    def includes(self, run_id: str, time_ms: int) -> bool:
        return self._overlaps(run_id, time_ms, time_ms)

    def may_include_rows_of(self, summary: Summary) -> bool:
        """Return whether a file may have selected rows."""
        return self._overlaps(summary.run_id, summary.oldest_ms, summary.newest_ms)

    def _overlaps(self, run_id: str, oldest_ms: int, newest_ms: int) -> bool:
        if self.run_id is not None and run_id != self.run_id:
            return False
        if self.since_ms is not None and newest_ms < self.since_ms:
            return False
        return self.until_ms is None or oldest_ms < self.until_ms


#: The selection of all rows.
ANY = Selection()


@dataclass(frozen=True, slots=True)
class Group:
    """The rows that one run archived from one topic on one day.

    Attributes:
        generations: the generations of the rows.
        rules: the rules that deleted the rows.
        oldest_ms, newest_ms: publish times, or write times of payload rows.
    """

    topic: TopicId
    day: date
    run_id: str
    generations: tuple[int, ...]
    rules: tuple[str, ...]
    messages: int
    payloads: int
    size_bytes: int
    files: int
    oldest_ms: int
    newest_ms: int


def find(folder: Path, patterns: tuple[str, ...] = ()) -> Listing:
    """Return the files of an archive, without reading their rows.

    Args:
        folder: the folder of the archive, which may not exist.
        patterns: shell patterns of topics; empty: all.

    Raises:
        ArchiveError: a folder cannot be read. The result has the errors of single files.
        ConfigurationError: pyarrow is not installed.
    """
    return _find(archive_folder.days(folder), lambda topic: not patterns or topic.matches(patterns))


def find_topic(folder: Path, topic: TopicId) -> list[ArchivedFile]:
    """Return the files of one topic.

    Raises:
        ArchiveError: a file is damaged and may have selected rows, or there are no files.
        ConfigurationError: pyarrow is not installed.
    """
    files, damaged = _find(archive_folder.days(folder, topic), lambda found: found == topic)
    if damaged:
        raise damaged[0]
    if not files:
        raise ArchiveError(f"{folder} has no archived rows of {topic}.", "List the archive: janitor archive list")
    return files


def run_of(folder: Path, topic: TopicId, publish_ms: int, sequence: int) -> str | None:
    """Return the last run that archived a message; None if no readable file has the message.

    Args:
        sequence: the sequence number of the message within its millisecond.

    Raises:
        ConfigurationError: pyarrow is not installed.
        ArchiveError: a folder cannot be read.
    """
    files, _ = _find(archive_folder.days(folder, topic), lambda found: found == topic)
    for file in sorted(files, key=lambda file: file.summary.deleted_ms, reverse=True):
        summary = file.summary
        if summary.table != "message" or not summary.oldest_ms <= publish_ms <= summary.newest_ms:
            continue
        keys = (MessageKey.parse(key) for rows in parquet.read(file.path, ["key"]) for (key,) in rows)
        if any(key is not None and (key.publish_ms, key.sequence) == (publish_ms, sequence) for key in keys):
            return summary.run_id
    return None


def groups(files: Iterable[ArchivedFile], selection: Selection) -> list[Group]:
    """Group the files that may have selected rows by topic, day and run."""

    def group_key(file: ArchivedFile) -> tuple[TopicId, date, str]:
        return file.summary.topic, file.day, file.summary.run_id

    found = sorted((file for file in files if selection.may_include_rows_of(file.summary)), key=group_key)
    return [_group(*key, list(members)) for key, members in groupby(found, group_key)]


def _find(days: Iterable[archive_folder.DayFolder], is_selected: Callable[[TopicId], bool]) -> Listing:
    listing = Listing([], [])
    for day in days:
        if day.topic is not None and not is_selected(day.topic):
            continue
        for path in day.files():
            try:
                file = ArchivedFile(path, day.day, path.stat().st_size, parquet.summarize(path))
            except ArchiveError as error:
                listing.damaged.append(error)
            except FileNotFoundError:
                continue  # removed since the listing
            else:
                if is_selected(file.summary.topic):
                    listing.files.append(file)
    return listing


def _group(topic: TopicId, day: date, run_id: str, files: list[ArchivedFile]) -> Group:
    summaries = [file.summary for file in files]
    return Group(
        topic=topic,
        day=day,
        run_id=run_id,
        generations=tuple(sorted({summary.generation for summary in summaries})),
        rules=tuple(sorted({summary.rule for summary in summaries})),
        messages=sum(summary.rows for summary in summaries if summary.table == "message"),
        payloads=sum(summary.rows for summary in summaries if summary.table == "payload"),
        size_bytes=sum(file.size_bytes for file in files),
        files=len(files),
        oldest_ms=min(summary.oldest_ms for summary in summaries),
        newest_ms=max(summary.newest_ms for summary in summaries),
    )
