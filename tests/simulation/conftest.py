"""What holds for every simulated history: it is told by what happened in it, not by what the janitor logged."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _silent_janitor(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="janitor")
