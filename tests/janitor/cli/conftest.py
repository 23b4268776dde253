"""Places to point the command at: CDAP's sample stores as they are, and a small store that a test knows by heart."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import DAY, HOUR, NOW_MS, pointer, topic
from tests.interop.conftest import unpack
from tests.janitor.cli.command import Janitor, Place, logging_as_it_was
from tms_core.clock import ManualClock
from tms_core.tables.base import Store

#: The transaction in the small store that is invalid.
INVALID = pointer(NOW_MS - 6 * HOUR)


@pytest.fixture(autouse=True)
def _logging() -> Iterator[None]:
    with logging_as_it_was():
        yield


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No setting and no terminal of the desk the tests run at."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")


@pytest.fixture
def clock() -> ManualClock:
    """The moment the sample stores were made for."""
    return ManualClock(NOW_MS, running_ms=DAY)


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CDAP's sample stores, unpacked once."""
    folder = tmp_path_factory.mktemp("cdap")
    for name in ("sample", "edge"):
        (folder / name).mkdir()
        assert unpack(name, folder / name).now_ms == NOW_MS
    return folder


def _copied(unpacked: Path, name: str, folder: Path) -> Place:
    place = Place(folder / name)
    shutil.copytree(unpacked / name, place.folder)
    place.configure()
    return place


@pytest.fixture
def sample(unpacked: Path, tmp_path: Path, clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> Janitor:
    """The janitor on CDAP's ordinary store."""
    return Janitor(_copied(unpacked, "sample", tmp_path), clock, capsys)


@pytest.fixture
def edge(unpacked: Path, tmp_path: Path, clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> Janitor:
    """The janitor on CDAP's store of rare rows."""
    return Janitor(_copied(unpacked, "edge", tmp_path), clock, capsys)


def write_small(store: Store) -> None:
    """Two orders are due and one is not; a fourth is of an invalid transaction. A return is due as well."""
    orders = topic(store, "default:orders", ttl_seconds=86400)
    orders.plain(NOW_MS - 2 * DAY, NOW_MS - DAY - 1, NOW_MS - DAY).tx(INVALID, NOW_MS - 6 * HOUR)
    topic(store, "default:returns", ttl_seconds=86400).plain(NOW_MS - 2 * DAY)


@pytest.fixture
def small(tmp_path: Path, clock: ManualClock, capsys: pytest.CaptureFixture[str]) -> Janitor:
    """The janitor on a store of five messages, see :func:`write_small`."""
    place = Place(tmp_path)
    place.fill(write_small)
    place.snapshot(invalid=[INVALID])
    place.configure()
    return Janitor(place, clock, capsys)
