"""Log files: both kinds from Tephra, older versions, torn ends, and damage."""

from __future__ import annotations

import re
import struct
from pathlib import Path

import pytest

from tests.transaction.test_edits import EDITS
from tests.transaction.vectors import TEPHRA
from tms_core.errors import FormatError
from tms_core.transaction.codec.edits import Edit, EditState, encode_edit
from tms_core.transaction.codec.log import read_log
from tms_core.transaction.model import TransactionType

LOCAL = TEPHRA / "txlog/local.txlog.1600000000000"
SEQUENCE_FILE = TEPHRA / "txlog/sequencefile.txlog.1600000000000"
LONG_WRITABLE = b"org.apache.hadoop.io.LongWritable"
TRANSACTION_EDIT = b"org.apache.tephra.persist.TransactionEdit"
OLD_TRANSACTION_EDIT = b"co.cask.tephra.persist.TransactionEdit"
SYNC = bytes(range(16))
ESCAPE = b"\xff\xff\xff\xff" + SYNC
VERSION_3 = {b"version": b"3"}


def text(value: bytes) -> bytes:
    return bytes([len(value)]) + value


def header(
    metadata: dict[bytes, bytes] | None = None,
    *,
    version: int = 6,
    key: bytes = LONG_WRITABLE,
    value: bytes = TRANSACTION_EDIT,
    flags: bytes = bytes(2),
) -> bytes:
    pairs = {} if metadata is None else metadata
    start = b"SEQ" + bytes([version]) + text(key) + text(value) + flags + struct.pack(">i", len(pairs))
    return start + b"".join(text(name) + text(pair) for name, pair in pairs.items()) + SYNC


def record(key: bytes, value: bytes) -> bytes:
    return struct.pack(">ii", len(key) + len(value), len(key)) + key + value


def marker(count: int) -> bytes:
    return record(b"count", struct.pack(">i", count))


def edits(start: int, stop: int) -> bytes:
    return b"".join(record(struct.pack(">q", number), encode_edit(EDITS[number])) for number in range(start, stop))


def log(path: Path, data: bytes) -> Path:
    file = path / "txlog.1"
    file.write_bytes(data)
    return file


@pytest.mark.parametrize("path", [LOCAL, SEQUENCE_FILE])
def test_read_log_of_tephra_returns_all_edits_in_order(path: Path) -> None:
    assert list(read_log(path)) == EDITS


def test_log_bytes_equal_the_bytes_of_tephra() -> None:
    data = SEQUENCE_FILE.read_bytes()
    ours = header(VERSION_3) + marker(3) + edits(0, 3) + marker(1) + edits(3, 4) + marker(8) + edits(4, 12)
    assert ours.replace(SYNC, data[len(header(VERSION_3)) - 16 :][:16]) == data


@pytest.mark.parametrize(
    ("path", "count"),
    [
        ("recovery-local/txlog.1795219306276", 9),
        ("recovery-local/txlog.1795219307293", 1),
        ("recovery-local/txlog.1795219310299", 11),
        ("recovery-sequencefile/txlog.1795219313642", 9),
        ("recovery-sequencefile/txlog.1795219314829", 1),
    ],
)
def test_read_log_of_a_halted_manager_returns_every_record(path: str, count: int) -> None:
    found = list(read_log(TEPHRA / path))
    assert len(found) == count
    assert sum(len(encode_edit(edit)) for edit in found) <= (TEPHRA / path).stat().st_size
    assert EditState.MOVE_WATERMARK not in {edit.state for edit in found}


def test_local_log_cut_anywhere_has_its_whole_records(tmp_path: Path) -> None:
    data = LOCAL.read_bytes()
    ends = [0]
    for edit in EDITS:
        ends.append(ends[-1] + 8 + len(encode_edit(edit)))
    assert ends[-1] == len(data)
    for length in range(len(data)):
        whole = sum(end <= length for end in ends) - 1
        assert list(read_log(log(tmp_path, data[:length]))) == EDITS[:whole]


def test_sequence_file_cut_anywhere_leaves_a_torn_batch_out(tmp_path: Path) -> None:
    data = SEQUENCE_FILE.read_bytes()
    start = len(header(VERSION_3))
    ends = {start + len(marker(3) + edits(0, 3)): 3}
    ends[max(ends) + len(marker(1) + edits(3, 4))] = 4
    ends[len(data)] = 12
    for length in range(len(data) + 1):
        whole = max((count for end, count in ends.items() if end <= length), default=0)
        assert list(read_log(log(tmp_path, data[:length]))) == EDITS[:whole]


@pytest.mark.parametrize("zeros", [1, 9, 100, 4096, 100_000])
@pytest.mark.parametrize("records", [0, 1, 5])
def test_read_log_with_trailing_zeros_returns_whole_records(tmp_path: Path, zeros: int, records: int) -> None:
    data = b"".join(numbered(number) for number in range(records))
    assert list(read_log(log(tmp_path, data + bytes(zeros)))) == EDITS[:records]


@pytest.mark.parametrize(("behind", "sure"), [(1, False), (50, False), (0, True), (-1, True)])
def test_zeros_that_may_start_in_the_last_record_are_rejected(tmp_path: Path, behind: int, sure: bool) -> None:
    # The last bytes of the record, all zeros, are after the end of a disk block.
    last = Edit(1, EditState.ABORTED, type=TransactionType.SHORT, checkpoints=())
    ended = bytes(8) + encode_edit(last)
    assert ended.endswith(bytes(50))
    filling = Edit(1, EditState.COMMITTING, changes=frozenset([b"x" * (1024 + behind - 2 * len(ended) - 4)]))
    data = bytes(8) + encode_edit(filling) + ended
    assert len(data) == 1024 + behind
    path = log(tmp_path, data + bytes(3000))
    if sure:
        assert list(read_log(path)) == [filling, last]
    else:
        with pytest.raises(FormatError, match="version 0"):
            list(read_log(path))


def test_read_log_with_data_after_zeros_is_rejected(tmp_path: Path) -> None:
    for gap in (9, 4096):
        with pytest.raises(FormatError, match="version 0"):
            list(read_log(log(tmp_path, numbered(0) + bytes(gap) + numbered(1))))


def numbered(number: int) -> bytes:
    return struct.pack(">q", number) + encode_edit(EDITS[number])


def test_empty_batch_does_not_end_the_log(tmp_path: Path) -> None:
    data = header(VERSION_3) + marker(0) + marker(1) + edits(0, 1)
    assert list(read_log(log(tmp_path, data))) == EDITS[:1]


def test_log_of_version_1_has_no_markers(tmp_path: Path) -> None:
    data = header(value=OLD_TRANSACTION_EDIT) + edits(0, 3)
    assert list(read_log(log(tmp_path, data))) == EDITS[:3]
    assert list(read_log(log(tmp_path, data[:-1]))) == EDITS[:2]


def test_read_log_of_version_2_returns_only_complete_batches(tmp_path: Path) -> None:
    data = header({b"version": b"2"}, value=OLD_TRANSACTION_EDIT) + marker(2) + edits(0, 2) + marker(2) + edits(2, 3)
    assert list(read_log(log(tmp_path, data))) == EDITS[:2]


def test_read_log_skips_sync_bytes_between_records(tmp_path: Path) -> None:
    data = header(VERSION_3) + ESCAPE + marker(2) + ESCAPE + edits(0, 1) + ESCAPE + ESCAPE + edits(1, 2) + ESCAPE
    assert list(read_log(log(tmp_path, data))) == EDITS[:2]
    assert list(read_log(log(tmp_path, data[:-1]))) == EDITS[:2]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (header(version=5), "version 5, not 6"),
        (header(key=b"org.apache.hadoop.io.Text"), "a SequenceFile of b'org.apache.hadoop.io.Text'"),
        (header(value=b"org.apache.hadoop.io.Text"), "and b'org.apache.hadoop.io.Text'"),
        (header(flags=b"\x01\x00"), "compressed"),
        (header(flags=b"\x00\x01"), "compressed"),
        (header({b"version": b"4"}), "version b'4'"),
        (header(key=b"x" * 128), "more than 127 bytes"),
        (header(VERSION_3) + edits(0, 1), "marker"),
        (header(VERSION_3) + record(b"count", bytes(5)), "marker"),
        (header(VERSION_3) + marker(-1), " -1 edits"),
        (header(VERSION_3) + marker(1) + marker(1), "key 636f756e74 "),
        (header(VERSION_3) + marker(1) + record(bytes(8), b"\xfc"), "edit of 1 bytes"),
        (header(VERSION_3) + b"\xff\xff\xff\xff" + bytes(16), "sync bytes"),
        (header(VERSION_3) + struct.pack(">ii", 3, 4) + bytes(9), " 3 bytes .* 4"),
        (header(VERSION_3) + struct.pack(">ii", 3, -1) + bytes(9), " 3 bytes .* -1"),
        (header(VERSION_3) + struct.pack(">ii", -2, 0) + bytes(9), " -2 bytes .* 0"),
        (bytes(8) + b"\x07" + bytes(70), "version 7"),
    ],
)
def test_damage_inside_a_log_is_rejected_with_its_place(tmp_path: Path, data: bytes, message: str) -> None:
    path = log(tmp_path, data)
    with pytest.raises(FormatError) as caught:
        list(read_log(path))
    assert caught.value.message.startswith(f"transaction log {path}: ")
    assert re.search(message, caught.value.message)
    assert caught.value.hint


def test_damaged_edit_gives_nothing_of_its_batch(tmp_path: Path) -> None:
    data = header(VERSION_3) + marker(1) + edits(0, 1) + marker(2) + edits(1, 2) + record(bytes(8), b"\x00" * 70)
    found = read_log(log(tmp_path, data))
    assert next(found) == EDITS[0]
    with pytest.raises(FormatError):
        next(found)
