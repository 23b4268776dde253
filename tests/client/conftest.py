"""Fixtures of a server in memory with a manual clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.builders import NOW_MS
from tests.client.faults import Faults
from tms_core.client import Client
from tms_core.client.testing import InProcess, in_process
from tms_core.clock import ManualClock


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def server(clock: ManualClock) -> Iterator[InProcess]:
    """A server with the topics ``default:orders`` and ``default:bills``."""
    with in_process(clock=clock) as found:
        with found.client() as client:
            client.create_topic("default:orders")
            client.create_topic("default:bills")
        yield found


@pytest.fixture
def client(server: InProcess) -> Iterator[Client]:
    with server.client() as found:
        yield found


@pytest.fixture
def faults() -> Faults:
    return Faults()
