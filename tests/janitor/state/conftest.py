"""Fixtures of states of every kind, for tests of their common behavior."""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from janitor.state.base import State
from janitor.state.hbase.state import HBaseState
from janitor.state.sqlite.state import SqliteState
from tests.hbase.conftest import hbase
from tests.hbase.server import HBaseServer
from tests.support import require_or_skip
from tms_core.settings.models import HBaseSettings

__all__ = ["hbase"]


class StateKind(ABC):
    @abstractmethod
    def new(self) -> State:
        """Return an empty state."""


class MemoryStates(StateKind):
    def new(self) -> State:
        return SqliteState.in_memory()


class DurableStateKind(StateKind):
    """A kind of state that outlives its object."""

    @abstractmethod
    def reopen(self) -> State:
        """Return the newest state, as another process opens it."""


class FileStates(DurableStateKind):
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def new(self) -> State:
        self._last = self._folder / secrets.token_hex(4)
        return self.reopen()

    def reopen(self) -> State:
        return SqliteState(self._last)


class HBaseStates(DurableStateKind):
    """A kind of state in one shared table, in which each state has its key prefix."""

    def __init__(self, server: HBaseServer) -> None:
        if server.thrift2 is None:
            require_or_skip(f"the HBase at {server.address} has no Thrift 2, with which tables are made")
        self._wanted = HBaseSettings(thrift=(server.thrift,), thrift2=(server.thrift2,), namespace="janitor_test")

    def new(self) -> State:
        self._prefix = secrets.token_bytes(4)
        return self.reopen()

    def reopen(self) -> HBaseState:
        return HBaseState(self._wanted, prefix=self._prefix)


@pytest.fixture(scope="session", params=["memory", "file", "hbase"])
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> StateKind:
    """Return each kind of state in turn."""
    return MemoryStates() if request.param == "memory" else durable_kind(request, tmp_path_factory)


@pytest.fixture(scope="session", params=["file", "hbase"])
def lasting(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DurableStateKind:
    """Return each durable kind of state in turn."""
    return durable_kind(request, tmp_path_factory)


@pytest.fixture
def state(kind: StateKind) -> Iterator[State]:
    """Return an empty state of each kind in turn."""
    with kind.new() as opened:
        yield opened


@contextmanager
def undone(state: State) -> Iterator[None]:
    """Execute the block in a transaction of the state, and roll the transaction back."""
    with pytest.raises(KeyboardInterrupt), state.transaction():  # noqa: PT012 the block is the caller's
        yield
        raise KeyboardInterrupt


def durable_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DurableStateKind:
    if request.param == "file":
        return FileStates(tmp_path_factory.mktemp("state"))
    return HBaseStates(request.getfixturevalue("hbase"))
