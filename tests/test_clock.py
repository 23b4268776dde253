"""Clocks: the system clock, and the manual clock of tests."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tms_core.clock import Clock, ManualClock, SystemClock


def test_clock_cuts_nanoseconds_to_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("tms_core.clock.time.time_ns", lambda: 1_500_000_000_123_999_999)
        now_ms = SystemClock().now_ms()
    assert now_ms == 1_500_000_000_123


@pytest.mark.parametrize(("suspended", "monotonic_ms"), [(True, 7_000_000), (False, 2_000_000)])
def test_clock_prefers_a_source_that_counts_suspended_time(
    suspended: bool, monotonic_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = {1001: 7_000_000_999_999, time.CLOCK_MONOTONIC: 2_000_000_999_999}
    with monkeypatch.context() as patch:
        if suspended:
            patch.setattr("tms_core.clock.time.CLOCK_BOOTTIME", 1001, raising=False)
        else:
            patch.delattr("tms_core.clock.time.CLOCK_BOOTTIME", raising=False)
        patch.setattr("tms_core.clock.time.clock_gettime_ns", readings.__getitem__)
        answer = SystemClock().monotonic_ms()
    assert answer == monotonic_ms


def test_system_clock_read_twice_does_not_go_back() -> None:
    clock = SystemClock()
    assert 0 < clock.monotonic_ms() <= clock.monotonic_ms()


def test_boot_id_is_the_bare_name_of_the_boot_or_empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.clock._BOOT_ID", tmp_path / "boot_id")
    assert SystemClock().boot_id() == ""
    (tmp_path / "boot_id").write_text("c0ffee\n", encoding="ascii")
    assert SystemClock().boot_id() == "c0ffee"


def test_system_clock_sleeps_by_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    with monkeypatch.context() as patch:
        patch.setattr("tms_core.clock.time.sleep", slept.append)
        SystemClock().sleep(1.5)
    assert slept == [1.5]


def readings(clock: Clock) -> tuple[int, int, str]:
    return clock.now_ms(), clock.monotonic_ms(), clock.boot_id()


def test_manual_clock_moves_only_by_its_methods() -> None:
    clock = ManualClock(1000, monotonic_ms=50)
    assert readings(clock) == readings(clock) == (1000, 50, "manual")
    clock.advance(5)
    clock.sleep(2.5)
    assert readings(clock) == (3505, 2555, "manual")
    # A step of the wall clock does not change the monotonic time.
    clock.step(500)
    clock.step(-700)
    assert readings(clock) == (3305, 2555, "manual")
    clock.reboot("two")
    assert readings(clock) == (3305, 0, "two")
    clock.reboot("three", monotonic_ms=9)
    assert readings(clock) == (3305, 9, "three")
