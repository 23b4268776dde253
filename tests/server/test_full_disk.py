"""A full or read-only disk of the transaction log: 503 from REST, no loss and no duplicates."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.builders import DAY, NOW_MS
from tests.server.client import Client, TopicClient
from tests.server.conftest import Serving, serving
from tests.server.test_groups import GroupClient
from tests.support import raising
from tms_core.clock import ManualClock
from tms_core.tables.side import SideChange
from tms_core.transaction.manager import journal
from tms_core.transaction.manager.journal import LogFailed
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage

CODES = [errno.ENOSPC, errno.EDQUOT, errno.EROFS]


class LogDisk:
    """The disk of a transaction log."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch
        self.manager = TransactionManager(DirectoryStorage(folder), ManualClock(NOW_MS, monotonic_ms=DAY))

    def fill(self, code: int) -> None:
        error = OSError(code, os.strerror(code))
        self._patch.setattr(journal, "write_all", raising(error))
        self._patch.setattr(os, "fsync", raising(error))

    def clear(self) -> None:
        self._patch.undo()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[LogDisk]:
    with pytest.MonkeyPatch.context() as patch:
        found = LogDisk(tmp_path / "tx", patch)
        yield found
        found.clear()
    found.manager.__exit__()


@contextmanager
def open_group(disk: LogDisk) -> Iterator[tuple[Serving, GroupClient]]:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with serving(transactions=disk.manager, clock=clock) as server, Client(server.port) as client:
        yield server, GroupClient(TopicClient(client, "orders").create(), disk.manager, server.service)


@pytest.mark.parametrize("code", CODES)
def test_register_with_a_full_log_disk_is_503(disk: LogDisk, code: int, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with serving(transactions=disk.manager, clock=clock) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        first, second = (b'{"instance": "00000000-0000-0000-0000-00000000000%d"}' % number for number in (1, 2))
        answer = topic.post("producers/p", first)
        assert answer.status == 200, answer.text
        pointer = disk.manager.start_short().write_pointer
        messages = {
            "x_tms_producer": "default:t/p",
            "x_tms_generation": str(answer.json["generation"]),
            "x_tms_sequence": "1",
        }
        published = topic.post("publish", {"transactionWritePointer": str(pointer), "messages": ["a"]}, **messages)
        assert published.status == 200, published.text
        disk.fill(code)
        answers = [topic.post("producers/p", second) for _ in range(3)]
        assert [(one.status, one.headers.get("retry-after")) for one in answers] == [(503, "1")] * 3
        assert "could not be written" in answers[0].text
        assert not [record for record in caplog.records if record.exc_info]
        disk.clear()
        assert topic.post("producers/p", second).status == 200


@pytest.mark.parametrize("code", CODES)
def test_poll_group_with_a_full_log_disk_is_503_and_claims_nothing(disk: LogDisk, code: int) -> None:
    with open_group(disk) as (_, group):
        tx = disk.manager.start_short()
        disk.fill(code)
        with pytest.raises(LogFailed):
            disk.manager.start_short()
        assert group.poll(tx).status == 503
        disk.clear()
        assert [one["payload"] for one in group.poll(disk.manager.start_short(), 5).json] == ["a", "b", "c"]


def test_poll_group_gets_a_response_if_the_log_disk_fills_after_the_claim(
    disk: LogDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that got 503 would repeat the request in the same transaction, and miss what it has claimed."""
    with open_group(disk) as (server, group):
        tx, exchange_each = disk.manager.start_short(), server.service.side.exchange_each

        def exchange_and_fail(changes: Sequence[SideChange]) -> list[bool]:
            done = exchange_each(changes)
            disk.fill(errno.ENOSPC)
            with pytest.raises(LogFailed):
                disk.manager.start_short()
            return done

        monkeypatch.setattr(server.service.side, "exchange_each", exchange_and_fail)
        answer = group.poll(tx, 5)
    assert (answer.status, [one["payload"] for one in answer.json]) == (200, ["a", "b", "c"])
