"""Fixtures of a transaction manager and its service; a test module may define another manager."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transaction.managers import NOW_MS, served
from tms_core.clock import ManualClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc.service import TransactionService


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def manager(clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(MemoryStorage(), clock) as manager:
        yield manager


@pytest.fixture
def service(manager: TransactionManager) -> Iterator[TransactionService]:
    with served(manager) as service:
        yield service
