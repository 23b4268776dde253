"""The future of a publish: waiting threads, callbacks, and callbacks that are registered afterwards."""

from __future__ import annotations

import pytest

from tms_core.messaging.publish.workers import PublishFuture


def test_future_with_an_outcome_calls_each_callback_once() -> None:
    future: PublishFuture[None] = PublishFuture()
    calls: list[int] = []
    future.when_done(lambda: calls.append(1))
    future.when_done(lambda: calls.append(2))
    assert calls == []
    future.set_outcome(None)
    assert calls == [1, 2]
    future.when_done(lambda: calls.append(3))
    assert calls == [1, 2, 3]


def test_future_with_a_failing_callback_is_done_and_calls_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    future: PublishFuture[str] = PublishFuture()
    calls: list[int] = []
    future.when_done(lambda: calls.append(1 // 0))
    future.when_done(lambda: calls.append(2))
    future.set_outcome("written")
    future.when_done(lambda: calls.append(3 // 0))
    assert (calls, future.result()) == ([2], "written")
    assert capfd.readouterr().err.count("ZeroDivisionError") == 2


def test_result_of_a_future_with_an_error_raises_each_time() -> None:
    future: PublishFuture[str] = PublishFuture()
    future.set_outcome(ZeroDivisionError("a bug"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            future.result()


def test_result_of_a_future_without_an_outcome_times_out() -> None:
    with pytest.raises(TimeoutError):
        PublishFuture[str]().result(0)
