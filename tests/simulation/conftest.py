"""Fixtures of all simulated histories, whose reports contain their events, not the janitor's log."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture(autouse=True)
def _silent_janitor(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, logger="janitor")
