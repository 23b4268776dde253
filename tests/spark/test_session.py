"""Errors of Spark sessions: one sentence for missing, old or unreachable parts."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any, cast

import pytest
from pyspark.sql import SparkSession

from janitor.spark import session as on
from janitor.spark.session import (
    error_of,
    plain_kind,
    require_answer,
    require_java,
    require_pyspark,
    run_on_spark,
    session,
    translated,
)
from tests.spark.settings import JAVA_OPTIONS
from tests.support import raising, require_or_skip
from tms_core import errors
from tms_core.errors import ConfigurationError, StoreBusy, StoreUnavailable, TmsError, hint_for_extra
from tms_core.tables.hbase.thrift import ConnectionLost


def make_java(folder: Path, version: str) -> Path:
    """Write a fake ``java`` that prints a version; return its ``JAVA_HOME``."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{version}' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ['openjdk version "17.0.15" 2025-04-15', 'java version "21" 2023-09-19 LTS'])
def test_require_java_accepts_supported_versions(version: str, tmp_path: Path) -> None:
    home = make_java(tmp_path, version)
    require_java({"JAVA_HOME": str(home)})
    require_java({"PATH": str(home / "bin")})


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11"),
        ('java version "1.8.0_392"', "is Java 8"),
        ("no such option", "an unknown version"),
    ],
)
def test_require_java_names_an_unsupported_version(version: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_java({"JAVA_HOME": str(make_java(tmp_path, version))})


def test_require_java_without_java_hints_at_installation(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"\bPATH\b") as raised:
        require_java({"PATH": str(tmp_path)})
    assert "openjdk-17" in raised.value.hint
    with pytest.raises(ConfigurationError, match=f"JAVA_HOME .*{tmp_path}"):
        require_java({"JAVA_HOME": str(tmp_path)})


def test_require_pyspark_without_pyspark_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    require_pyspark()
    monkeypatch.setattr(on, "find_spec", lambda name: None if name == "pyspark" else object())
    with pytest.raises(ConfigurationError, match="pyspark") as raised:
        require_pyspark()
    assert raised.value.hint == hint_for_extra("spark")


def test_error_of_traceback_is_the_last_project_error() -> None:
    text = """[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):
  File "x.py", line 3, in y
tms_core.errors.StoreError: an earlier error.

tms_core.errors.StoreBusy: Another process has the store open. Stop the process.
 SQLSTATE: 38000
"""
    error = error_of(text)
    assert type(error) is StoreBusy
    assert str(error) == "Another process has the store open. Stop the process."


def test_error_of_internal_class_becomes_the_public_class() -> None:
    error = error_of("tms_core.tables.hbase.thrift.ConnectionLost: gone.")
    assert (type(error), plain_kind(ConnectionLost)) == (StoreUnavailable, StoreUnavailable)
    assert plain_kind(errors.Conflict) is errors.TransactionError
    assert plain_kind(ValueError) is TmsError


def test_error_of_spark_contains_its_first_line() -> None:
    assert "Job aborted." in str(error_of("\nJob aborted.\n  at org.apache.Stack"))
    assert re.search(r": \w", str(error_of("")))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            (
                "An error occurred while calling None.org.apache.spark.sql.classic.SparkSession.\n"
                ": java.lang.IllegalStateException: Cannot call methods on a stopped SparkContext.\n\tat x.Y\n"
                "Caused by: org.apache.spark.SparkException: All masters are unresponsive! Giving up.\n\tat x.Y\n"
            ),
            "SparkException: All masters are unresponsive! Giving up.",
        ),
        (
            (
                "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n"
                "  File \"x.py\", line 1, in y\nModuleNotFoundError: No module named 'janitor'\n"
            ),
            "ModuleNotFoundError: No module named 'janitor'",
        ),
    ],
)
def test_error_of_java_stack_trace_starts_with_the_cause(text: str, message: str) -> None:
    error = error_of(text)
    assert str(error).startswith(f"Spark failed: {message}")
    assert "SPARK_CONF_DIR" in error.hint


@pytest.mark.parametrize("master", ["sc://127.0.0.1:1/;user_id=x", "spark://127.0.0.1:1,127.0.0.1:2", "spark://h:x"])
def test_session_with_unreachable_master_fails(master: str) -> None:
    with pytest.raises(TmsError, match="No Spark responds at"), session(master):
        pass


def test_require_answer_accepts_any_reachable_master() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        require_answer(f"spark://127.0.0.1:1,127.0.0.1:{server.getsockname()[1]}")
    require_answer("local[2]")
    require_answer("k8s://https://nowhere:1")


def test_refused_jvm_connection_reports_missing_driver() -> None:
    with pytest.raises(TmsError, match="driver process is gone"), translated():
        raise ConnectionRefusedError(111, "Connection refused")


def test_run_on_spark_cancels_jobs_on_ctrl_c() -> None:
    interrupted = Event()

    class FakeSession:
        def interruptAll(self) -> None:  # noqa: N802 - Spark's name
            interrupted.set()

    with pytest.raises(KeyboardInterrupt):
        run_on_spark(cast(Any, FakeSession()), lambda: interrupted.wait(60), raising(KeyboardInterrupt))
    assert interrupted.is_set()
    assert run_on_spark(cast(Any, FakeSession()), lambda: 3) == 3


def test_convert_sigterm_raises_keyboard_interrupt() -> None:
    before = signal.getsignal(signal.SIGTERM)

    def terminate() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        Event().wait(60)

    with pytest.raises(KeyboardInterrupt), on.convert_sigterm():
        terminate()
    assert signal.getsignal(signal.SIGTERM) is before

    def keeps_handler() -> bool:
        with on.convert_sigterm():
            return signal.getsignal(signal.SIGTERM) is before

    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(keeps_handler).result(), "only the main thread may handle signals"


def test_failed_task_shows_its_error_without_java_log() -> None:
    if shutil.which("java") is None:
        require_or_skip("java is missing; install it: apt-get install openjdk-17-jdk-headless")
    program = (
        "from janitor.spark.session import session, translated\n"
        "def fail(batches):\n"
        "    from tms_core.errors import StoreUnavailable\n"
        "    raise StoreUnavailable('the task for part 0 lost its store.', 'Start it.')\n"
        "    yield\n"
        "with session('local[1]') as spark, translated():\n"
        "    spark.range(1).mapInArrow(fail, 'id long').count()\n"
    )
    environ = {**os.environ, "SPARK_SUBMIT_OPTS": JAVA_OPTIONS}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, env=environ)
    assert done.returncode == 1
    message = done.stderr[: done.stderr.index("Traceback")]
    assert [line for line in message.splitlines() if "incubator" not in line] == []
    error = "tms_core.errors.StoreUnavailable: the task for part 0 lost its store. Start it."
    assert done.stderr.splitlines()[-1] == error


def test_existing_session_is_reused_and_kept(spark: SparkSession) -> None:
    before = dict(os.environ)
    for environ in (os.environ, {"PYSPARK_GATEWAY_PORT": "as under spark-submit"}):
        with session("local[1]", environ) as found:
            assert found.range(3).count() == 3
    assert dict(os.environ) == before, "other programs inherit the environment"
    assert spark.range(3).count() == 3
