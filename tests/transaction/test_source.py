"""The newest usable snapshot of a directory that another process writes."""

from __future__ import annotations

import os
import re
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders import encode_state
from tms_core.clock import ManualClock
from tms_core.errors import NoSnapshot
from tms_core.transaction.model import VisibilityState
from tms_core.transaction.source.source import DirectorySource, NoUsableSnapshot, Rejection

#: A time in 2020, in milliseconds.
T = 1_600_000_000_000


def snapshot(timestamp_ms: int) -> bytes:
    return encode_state(VisibilityState(timestamp_ms, 5, 5, array("q", [1, 3])))


def put(directory: Path, *times_ms: int) -> None:
    for time_ms in times_ms:
        (directory / f"snapshot.{time_ms}").write_bytes(snapshot(time_ms))


@pytest.fixture
def after_each_listing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Call a function between listing and reading the directory."""
    scandir = os.scandir

    def install(happens: Callable[[], None]) -> None:
        @contextmanager
        def listing(path: Path) -> Iterator[list[os.DirEntry[str]]]:
            with scandir(path) as entries:
                yield list(entries)
            happens()

        monkeypatch.setattr(os, "scandir", listing)

    return install


def test_newest_snapshot_has_the_largest_number(tmp_path: Path) -> None:
    put(tmp_path, 9, 100, 20)
    assert DirectorySource(tmp_path).latest().name == "snapshot.100"


def test_files_with_other_names_are_ignored_and_counted(tmp_path: Path) -> None:
    put(tmp_path, 7)
    others = ["snapshot.8.bak", "snapshot.", "snapshot.-9", "snapshot.+9", "snapshot.9x", "snapshot.٩", "xsnapshot.9"]
    others += [".in-progress.9", ".in-progress.snapshot.9", "txlog.9", "snapshot.12345678901234567890"]
    for name in others:
        (tmp_path / name).write_bytes(b"no")
    (tmp_path / "snapshot.9").mkdir()
    (tmp_path / "snapshot.10").symlink_to(tmp_path / "nowhere")
    loaded = DirectorySource(tmp_path).latest()
    assert (loaded.name, loaded.rejected, loaded.ignored) == ("snapshot.7", (), len(others) + 2)


def test_content_time_counts_over_the_name(tmp_path: Path) -> None:
    (tmp_path / "snapshot.8").write_bytes(snapshot(7))
    loaded = DirectorySource(tmp_path).latest()
    assert loaded.snapshot.timestamp_ms == 7
    [note] = loaded.notes
    assert re.search(r"snapshot\.8 .*\b7 ms .*\b8 ms", note)


def test_single_file_is_used_with_any_name(tmp_path: Path) -> None:
    file = tmp_path / "saved-for-the-case"
    file.write_bytes(snapshot(7))
    loaded = DirectorySource(file).latest()
    assert (loaded.name, loaded.snapshot.timestamp_ms, loaded.notes) == ("saved-for-the-case", 7, ())


@pytest.mark.parametrize(
    ("data", "reason", "detail"),
    [
        (b"", Rejection.EMPTY, "is empty"),
        (snapshot(9)[:-4], Rejection.TRUNCATED, "ends inside its list of invalid ids"),
        (b"\x08" + b"\xff" * 30, Rejection.CORRUPT, "more than 64 bits"),
        (b"\x0a" + snapshot(9)[1:], Rejection.VERSION, "version 5"),
    ],
)
def test_unusable_newest_snapshot_is_replaced_by_the_previous(
    tmp_path: Path, data: bytes, reason: Rejection, detail: str
) -> None:
    put(tmp_path, 7, 8)
    (tmp_path / "snapshot.9").write_bytes(data)
    loaded = DirectorySource(tmp_path).latest()
    [rejected] = loaded.rejected
    assert loaded.name == "snapshot.8"
    assert (rejected.name, rejected.reason) == ("snapshot.9", reason)
    assert detail in rejected.detail


def test_directory_with_only_an_unknown_version_names_the_file_and_the_reason(tmp_path: Path) -> None:
    (tmp_path / "snapshot.9").write_bytes(b"\x0a" + snapshot(9)[1:])
    with pytest.raises(NoSnapshot, match=r"snapshot\.9 is of an unknown version"):
        DirectorySource(tmp_path).latest()


def test_snapshot_replaced_after_listing_is_listed_again(
    tmp_path: Path, after_each_listing: Callable[[Callable[[], None]], None]
) -> None:
    put(tmp_path, 8)
    times_ms = iter([9, 10])

    def replace_snapshot() -> None:
        for time_ms in times_ms:
            (tmp_path / f"snapshot.{time_ms - 1}").unlink()
            put(tmp_path, time_ms)
            break

    after_each_listing(replace_snapshot)
    loaded = DirectorySource(tmp_path).latest()
    assert (loaded.name, loaded.rejected) == ("snapshot.10", ())


def test_directory_that_changes_at_each_listing_is_given_up(
    tmp_path: Path, after_each_listing: Callable[[Callable[[], None]], None]
) -> None:
    put(tmp_path, 1)
    listings: list[int] = []

    def replace_snapshot() -> None:
        listings.append(len(listings) + 1)
        (tmp_path / f"snapshot.{listings[-1]}").unlink()
        put(tmp_path, listings[-1] + 1)

    after_each_listing(replace_snapshot)
    with pytest.raises(NoUsableSnapshot, match=r"snapshot\.3"):
        DirectorySource(tmp_path).latest()
    assert listings == [1, 2, 3]


def test_missing_directory_is_named_with_its_setting(tmp_path: Path) -> None:
    missing = tmp_path / "tx.snapshot"
    with pytest.raises(NoSnapshot) as caught:
        DirectorySource(missing).latest()
    assert f"{missing}: No such file or directory" in caught.value.message
    assert "transactions.directory" in caught.value.hint
    assert "--snapshots" in caught.value.hint


def test_directory_without_snapshots_is_described(tmp_path: Path) -> None:
    (tmp_path / "txlog.9").write_bytes(b"")
    with pytest.raises(NoSnapshot) as caught:
        DirectorySource(tmp_path).latest()
    assert f"{tmp_path} has no snapshot (1 other" in caught.value.message
    assert "transactions.directory" in caught.value.hint


def test_unusable_snapshots_are_all_named(
    tmp_path: Path, after_each_listing: Callable[[Callable[[], None]], None]
) -> None:
    listings: list[None] = []
    after_each_listing(lambda: listings.append(None))
    for time_ms in range(7):
        (tmp_path / f"snapshot.{time_ms}").write_bytes(b"")
    with pytest.raises(NoUsableSnapshot) as caught:
        DirectorySource(tmp_path).latest()
    assert [one.name for one in caught.value.rejected] == [f"snapshot.{time_ms}" for time_ms in range(6, -1, -1)]
    assert caught.value.message.index("snapshot.6") < caught.value.message.index("snapshot.5")
    assert caught.value.message.endswith("snapshot.2 is empty; and 2 more.")
    assert len(listings) == 1, "nothing had vanished, so there was no reason to look again"


def test_newest_snapshot_cut_at_any_byte_is_replaced_by_the_previous(tmp_path: Path) -> None:
    put(tmp_path, 7)
    whole = snapshot(8)
    for length in range(len(whole)):
        (tmp_path / "snapshot.8").write_bytes(whole[:length])
        loaded = DirectorySource(tmp_path).latest()
        assert loaded.name == "snapshot.7", f"cut at byte {length} of {len(whole)}"
        assert [one.reason for one in loaded.rejected] == [Rejection.TRUNCATED if length else Rejection.EMPTY]


@pytest.mark.parametrize("content_ms", [T - 86_400_000, 9_999_999_999_999], ids=["an old copy", "a clock in 2286"])
def test_misnamed_snapshot_with_a_large_number_is_rejected(tmp_path: Path, content_ms: int) -> None:
    for name, taken_ms in ((9_999_999_999_999, content_ms), (T, T), (T - 1, T - 1)):
        (tmp_path / f"snapshot.{name}").write_bytes(encode_state(VisibilityState(taken_ms, 1, 1)))
    loaded = DirectorySource(tmp_path, ManualClock(T + 1000)).latest()
    assert (loaded.name, loaded.snapshot.timestamp_ms) == (f"snapshot.{T}", T)
    [passed_over] = loaded.rejected
    assert passed_over.name == "snapshot.9999999999999"
    assert passed_over.reason in (Rejection.MISNAMED, Rejection.FUTURE)


def test_files_ahead_of_the_clock_give_the_newest(tmp_path: Path) -> None:
    for taken_ms in (T, T + 1):
        (tmp_path / f"snapshot.{taken_ms}").write_bytes(encode_state(VisibilityState(taken_ms, 1, 1)))
    assert DirectorySource(tmp_path, ManualClock(T - 400_000)).latest().name == f"snapshot.{T + 1}"
