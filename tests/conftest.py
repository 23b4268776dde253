"""What holds for every test: how hypothesis searches, what is traced, and that no test's log goes on in the next.

In CI the search is the same every time, so that a red build is about the change; at a desk it goes on looking for new
counterexamples. Time limits per example are off: a slow machine is no counterexample.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import in_ci, size

_COMMON = settings(
    deadline=None,
    print_blob=True,
    max_examples=size("TMS_TEST_EXAMPLES", 60),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("desk", _COMMON)
settings.register_profile("ci", _COMMON, derandomize=True, database=None)
settings.load_profile("ci" if in_ci() else "desk")

#: Rooms and files that play the same code again and again, each line of which has tests in a room of its own: to trace
#: them would double their time, and would hide what has none.
UNTRACED = (
    "disasters", "hostile", "interop", "kafka", "simulation", "test_docs.py", "test_tms_hints.py",
    "janitor/cli/test_hints.py", "janitor/cli/test_sample_stores.py", "janitor/law/test_differential.py",
    "janitor/test_patience.py", "server/test_manager_log_model.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    untraced = {here / name for name in UNTRACED}
    for item in items:
        if not untraced.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.no_cover)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Trace nothing in a test with the marker ``no_cover``.

    In a worker process pytest-cov has two tracers on top of each other, and its own marker stops the upper one only.
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
    """Commands set up the log of their process; what they write to is gone when their test is."""
    before = list(logging.root.handlers)
    yield
    logging.root.handlers[:] = before
