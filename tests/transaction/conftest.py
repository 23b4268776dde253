"""Fixtures of a transaction service on the manager of the test module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.transaction.managers import NOW_MS, served
from tms_core.clock import ManualClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.service import TransactionService


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def service(manager: TransactionManager) -> Iterator[TransactionService]:
    with served(manager) as service:
        yield service
