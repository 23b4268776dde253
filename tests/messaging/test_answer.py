"""What becomes of a request: for those who wait, those who are called, and those who come later."""

from __future__ import annotations

import pytest

from tms_core.messaging.publish.workers import Answer


def test_answer_that_settles_calls_each_waiter_once_and_late_ones_at_once() -> None:
    answer: Answer[None] = Answer()
    told: list[int] = []
    answer.when_done(lambda: told.append(1))
    answer.when_done(lambda: told.append(2))
    assert told == []
    answer.settle(None)
    assert told == [1, 2]
    answer.when_done(lambda: told.append(3))
    assert told == [1, 2, 3]


def test_answer_with_a_callback_that_fails_is_settled_and_calls_the_others(capfd: pytest.CaptureFixture[str]) -> None:
    answer: Answer[str] = Answer()
    told: list[int] = []
    answer.when_done(lambda: told.append(1 // 0))
    answer.when_done(lambda: told.append(2))
    answer.settle("written")
    answer.when_done(lambda: told.append(3 // 0))
    assert (told, answer.result()) == ([2], "written")
    assert capfd.readouterr().err.count("ZeroDivisionError") == 2


def test_result_of_an_error_raises_it_each_time() -> None:
    answer: Answer[str] = Answer()
    answer.settle(ZeroDivisionError("a bug"))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="a bug"):
            answer.result()


def test_result_without_an_answer_times_out() -> None:
    with pytest.raises(TimeoutError):
        Answer[str]().result(0)
