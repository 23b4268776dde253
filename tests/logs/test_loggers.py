"""Logs: one JSON object per line, or text, and the shipped example."""

from __future__ import annotations

import io
import json
import logging
import logging.config
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from tests.support import TerminalStream
from tms_core.errors import StoreFull
from tms_core.logs import loggers
from tms_core.logs.loggers import LOGGERS, LogFormat, RateLimitedLogger, configure, get_logger
from tms_core.logs.printable import printable

CONF = Path(__file__).parents[2] / "conf" / "logging.yaml"


def test_json_log_line_is_an_object_with_the_fields() -> None:
    stream = io.StringIO()
    configure("json", stream)
    logging.getLogger("janitor.x").warning("%d rows\nleft", 3, extra={"fields": {"run": "r-1"}})
    entry = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert entry.pop("time").endswith("Z")
    assert entry == {"level": "warning", "logger": "janitor.x", "message": "3 rows\nleft", "run": "r-1"}


@pytest.mark.parametrize(
    ("kind", "stream"), [("json", io.StringIO()), ("text", io.StringIO()), ("text", TerminalStream())]
)
def test_logged_command_includes_the_given_options(kind: LogFormat, stream: io.StringIO) -> None:
    configure(kind, stream, "--config 'a b.yaml'")
    logging.getLogger("janitor").warning("%s; see janitor status", "process 1 ends")
    logged = json.loads(stream.getvalue())["message"] if kind == "json" else stream.getvalue().rstrip()
    assert logged.endswith("process 1 ends; see janitor status --config 'a b.yaml'")


def test_json_log_of_an_error_has_a_field_with_the_traceback() -> None:
    stream = io.StringIO()
    configure("json", stream)
    try:
        raise ValueError("odd")
    except ValueError:
        logging.getLogger("janitor").exception("it failed")
    assert "ValueError: odd" in json.loads(stream.getvalue())["error"]


@pytest.mark.parametrize(
    ("kind", "stream", "daemon", "as_text"),
    [
        ("auto", io.StringIO(), True, False),
        ("auto", io.StringIO(), False, True),
        ("auto", TerminalStream(), True, True),
        ("text", io.StringIO(), True, True),
        ("json", TerminalStream(), False, False),
    ],
)
def test_configure_auto_is_json_only_for_daemons_outside_a_terminal(
    kind: LogFormat, stream: io.StringIO, daemon: bool, as_text: bool
) -> None:
    configure(kind, stream, daemon=daemon)
    logging.getLogger("janitor").info("done")
    assert stream.getvalue().endswith("INFO done\n") is as_text
    assert as_text or json.loads(stream.getvalue())["message"] == "done"


def test_logged_error_has_its_code() -> None:
    stream = io.StringIO()
    configure("json", stream)
    logging.getLogger("janitor").error("it failed: %s", StoreFull("The disk is full."))
    assert json.loads(stream.getvalue())["code"] == "TMS-STORE-FULL"
    stream = TerminalStream()
    configure("text", stream)
    logging.getLogger("janitor").error("it failed: %s", StoreFull("The disk is full."))
    assert stream.getvalue() == "ERROR [TMS-STORE-FULL] it failed: The disk is full.\n"


def test_text_log_in_a_file_starts_each_line_with_its_time() -> None:
    stream = io.StringIO()
    configure("text", stream)
    logging.getLogger("tms_core").info("opened")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO opened\n", stream.getvalue())


def test_log_of_a_library_shows_only_warnings() -> None:
    stream = TerminalStream()
    configure("text", stream)
    logging.getLogger("urllib3").info("connected")
    logging.getLogger("urllib3").warning("retrying")
    logging.getLogger("tms_core").info("opened")
    assert stream.getvalue() == "WARNING retrying\nINFO opened\n"


def test_example_log_settings_are_valid_and_name_all_loggers() -> None:
    settings = yaml.safe_load(CONF.read_text(encoding="utf-8"))
    logging.config.dictConfig(settings)
    assert set(settings["loggers"]) == set(LOGGERS)
    assert logging.getLogger("janitor.run.engine").isEnabledFor(logging.INFO)
    assert not logging.getLogger("urllib3").isEnabledFor(logging.INFO)


def test_logger_writes_a_kind_once_a_minute(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(loggers, "time", SimpleNamespace(monotonic=lambda: now))
    seldom = RateLimitedLogger(get_logger("janitor.x"))
    for seconds in (0, 1, 58.5, 0.5, 59):
        now += seconds
        seldom.log(logging.WARNING, "%s is cut off", now)
        seldom.log(logging.ERROR, "the disk is full")
    lines = [(line.levelname, line.getMessage()) for line in caplog.records]
    assert lines == [
        (level, text)
        for moment in (1000.0, 1060.0)
        for level, text in (("WARNING", f"{moment} is cut off"), ("ERROR", "the disk is full"))
    ]


@given(st.text())
def test_printable_of_any_text_commands_nothing_and_keeps_the_rest(text: str) -> None:
    shown = printable(text)
    assert shown.isprintable()
    if text.isprintable():
        assert shown == text


def test_printable_escapes_line_ends_and_control_characters() -> None:
    assert printable("a\nb\x1b[2Jä\u202e") == "a\\nb\\x1b[2Jä\\u202e"
