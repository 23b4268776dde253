"""Settings of all tests: their folder, the search of hypothesis, the traced tests, and the reset of the log.

The search is the same in every run, so that a failure is about the change or the machine. ``TMS_TEST_FUZZ``, which
``make fuzz`` sets, searches for new counterexamples. Time limits per example are off: a slow machine is not a
counterexample.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import size
from tms_core.logs.loggers import AUDIT, LOGGERS

_COMMON = settings(
    deadline=None,
    print_blob=True,
    max_examples=size("TMS_TEST_EXAMPLES", 60),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("fuzz", _COMMON)
settings.register_profile("fixed", _COMMON, derandomize=True, database=None)
settings.load_profile("fuzz" if "TMS_TEST_FUZZ" in os.environ else "fixed")

#: A folder in memory, and the free space that it needs, in bytes. Tests kill processes, not machines, so no file must
#: reach a disk, for which tests would wait at every sync.
MEMORY, MEMORY_BYTES = Path("/dev/shm"), 6 << 30  # noqa: S108

#: Tests that repeat code which other tests cover. Tracing would double their time, and hide lines without other tests.
UNTRACED = (
    "disasters", "hostile", "interop", "kafka", "processes", "simulation", "test_docs.py", "test_tms_hints.py",
    "janitor/cli/test_sample_stores.py", "janitor/rules/test_differential.py", "janitor/test_patience.py",
    "server/test_manager_log_model.py",
)  # fmt: skip


def pytest_configure() -> None:
    """Set ``TMPDIR`` to a folder in memory if it has space and can run programs; worker processes inherit it."""
    if "TMPDIR" in os.environ or not os.access(MEMORY, os.W_OK):
        return
    if shutil.disk_usage(MEMORY).free > MEMORY_BYTES and not os.statvfs(MEMORY).f_flag & os.ST_NOEXEC:
        os.environ["TMPDIR"] = tempfile.tempdir = str(MEMORY)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    untraced = {here / name for name in UNTRACED}
    for item in items:
        if not untraced.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.no_cover)
    # A Spark session starts in ten seconds of processor time. Each worker process starts with a part of the list, and
    # takes tests from the ends of other parts: the first tests stay in one process.
    items.sort(key=lambda item: "spark" not in getattr(item, "fixturenames", ()))


def pytest_collection_finish() -> None:
    """Exclude the collected tests from garbage collection, which would otherwise traverse all of them each time."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Disable tracing in a test with the marker ``no_cover``.

    In a worker process, pytest-cov has two nested tracers, and its marker stops only one of them.
    """
    if item.get_closest_marker("no_cover") is None:
        return (yield)
    here, in_threads = sys.gettrace(), threading.gettrace()
    sys.settrace(None)
    threading.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(here)
        threading.settrace(in_threads)


@pytest.fixture(autouse=True)
def _own_log() -> Iterator[None]:
    """Restore the loggers after each test: a command sets their levels, and closes the streams of their handlers."""
    loggers = [logging.root, *map(logging.getLogger, (AUDIT, *LOGGERS))]
    before = [(one, one.level, one.propagate, list(one.handlers)) for one in loggers]
    yield
    for one, level, propagate, handlers in before:
        one.setLevel(level)
        one.propagate, one.handlers[:] = propagate, handlers
