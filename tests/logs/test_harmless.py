"""Counters, log handlers and notifications may fail without an effect on responses."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import Counter, Histogram

from tests.kit.avro import POLL_ALL, publish_body
from tests.server.client import AVRO, Client, TopicClient
from tests.server.conftest import serving
from tests.server.test_messages import NOW_POINTER
from tms_core.logs.loggers import get_logger, harmless
from tms_core.messaging.ids import Ids
from tms_core.messaging.publish.open_topics import FirstReads, OpenTopic


class ObserverFailed(Exception):
    """The error of every counter, histogram and log handler."""


def fail(*_: Any, **__: Any) -> None:
    raise ObserverFailed


class FailingHandler(logging.Handler):
    """A log handler that fails outside of logging's error handling."""

    calls = 0

    def handle(self, record: logging.LogRecord) -> bool:
        type(self).calls += 1
        raise ObserverFailed


@pytest.fixture
def failing_observers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let every counter, histogram and logger of the product raise."""
    for kind, name in ((Counter, "inc"), (Histogram, "observe"), (FirstReads, "note")):
        monkeypatch.setattr(kind, name, fail)
    loggers = [logging.getLogger(name) for name in ("tms_core", "janitor")]
    handler = FailingHandler()
    for logger in loggers:
        logger.addHandler(handler)
        before = logger.level
        logger.setLevel(logging.DEBUG)
    yield
    for logger in loggers:
        logger.removeHandler(handler)
        logger.setLevel(before)


@pytest.mark.usefixtures("failing_observers")
def test_failing_counters_and_loggers_change_no_response(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(access_log=True) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        assert topic.post("publish", publish_body(b"a"), content_type=AVRO).status == 200
        in_transaction = topic.post("publish", publish_body(b"b", pointer=NOW_POINTER), content_type=AVRO)
        assert in_transaction.status == 200
        assert topic.post("store", publish_body(b"c", pointer=NOW_POINTER), content_type=AVRO).status == 200
        assert topic.client.ask("POST", f"{topic.path}/rollback", in_transaction.body).status == 200
        assert topic.post("poll", POLL_ALL, content_type=AVRO).status == 200
        assert topic.poll() == ["a", "b"]
        assert client.ask("GET", topic.path).status == 200
        assert client.ask("GET", "/nothing").status == 404
        assert topic.post("publish", b"nonsense").status == 400
        assert client.ask("DELETE", topic.path).status == 200
    assert FailingHandler.calls > 0
    assert "ObserverFailed()" in capsys.readouterr().err


def test_failing_notification_does_not_fail_the_publish() -> None:
    calls = []
    open_topic = OpenTopic(b"", Ids(0))
    open_topic.wakes[fail] = None
    open_topic.wakes[lambda: calls.append(1)] = None
    open_topic.wake_polls()
    assert calls == [1]


def test_harmless_prints_errors_and_propagates_interrupts(capsys: pytest.CaptureFixture[str]) -> None:
    harmless(fail)
    assert "ObserverFailed()" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt):
        harmless(_interrupted)


def _interrupted() -> None:
    raise KeyboardInterrupt


def test_log_line_names_the_file_of_the_caller(caplog: pytest.LogCaptureFixture) -> None:
    get_logger("tms_core.test").warning("hello %s", "world")
    assert [(one.getMessage(), one.filename) for one in caplog.records] == [("hello world", "test_harmless.py")]
