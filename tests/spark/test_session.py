"""What is missing, too old or out of reach is said in a sentence, and never as a bare stack."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from janitor.spark import session as on
from janitor.spark.session import error_of, plain_kind, require_java, require_pyspark, session
from tms_core import errors
from tms_core.errors import ConfigurationError, StoreBusy, StoreUnavailable, TmsError
from tms_core.tables.hbase_wire import ConnectionLost

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def java(folder: Path, says: str) -> Path:
    """A Java that says its version."""
    program = folder / "bin" / "java"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho '{says}' >&2\n", encoding="utf-8")
    program.chmod(0o755)
    return folder


@pytest.mark.parametrize("version", ['openjdk version "17.0.15" 2025-04-15', 'java version "21" 2023-09-19 LTS'])
def test_given_a_java_that_spark_runs_on_when_looked_for_then_all_is_well(version: str, tmp_path: Path) -> None:
    home = java(tmp_path, version)
    require_java({"JAVA_HOME": str(home)})
    require_java({"PATH": str(home / "bin")})


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ('openjdk version "11.0.2" 2019-01-15', "is Java 11"),
        ('java version "1.8.0_392"', "is Java 8"),
        ("no such option", "no Java that says its version"),
    ],
)
def test_given_another_java_when_looked_for_then_its_version_is_named(says: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=message):
        require_java({"JAVA_HOME": str(java(tmp_path, says))})


def test_given_no_java_when_looked_for_then_the_hint_installs_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="no java on the PATH") as raised:
        require_java({"PATH": str(tmp_path)})
    assert "openjdk-17" in raised.value.hint
    with pytest.raises(ConfigurationError, match="JAVA_HOME is"):
        require_java({"JAVA_HOME": str(tmp_path)})


def test_given_no_pyspark_when_wanted_then_the_hint_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    require_pyspark()
    monkeypatch.setattr(on, "find_spec", lambda name: None if name == "pyspark" else object())
    with pytest.raises(ConfigurationError, match="needs pyspark") as raised:
        require_pyspark()
    assert raised.value.hint == "Install tms-janitor[spark]."


def test_given_a_traceback_that_ends_in_an_error_of_ours_when_it_comes_back_then_it_is_that_error() -> None:
    text = """[PYTHON_DATA_SOURCE_ERROR] Failed: Traceback (most recent call last):
  File "x.py", line 3, in y
tms_core.errors.StoreError: something older.

tms_core.errors.StoreBusy: Somebody has the store open. Stop that one.
 SQLSTATE: 38000
"""
    error = error_of(text)
    assert type(error) is StoreBusy
    assert str(error) == "Somebody has the store open. Stop that one."


def test_given_an_error_of_a_module_when_it_comes_back_then_it_is_of_the_kind_it_stands_for() -> None:
    error = error_of("tms_core.tables.hbase_wire.ConnectionLost: gone.")
    assert (type(error), plain_kind(ConnectionLost)) == (StoreUnavailable, StoreUnavailable)
    assert plain_kind(errors.Conflict) is errors.TransactionError
    assert plain_kind(ValueError) is TmsError


def test_given_an_error_of_sparks_own_when_it_comes_back_then_its_first_line_is_told() -> None:
    assert str(error_of("\nJob aborted.\n  at org.apache.Stack")).startswith("Spark failed: Job aborted.")
    assert "did not say why" in str(error_of(""))


def test_given_a_session_that_is_there_when_one_is_wanted_then_it_is_that_one_and_stays(spark: SparkSession) -> None:
    with session("local[1]") as found:
        assert found.range(3).count() == 3
    assert spark.range(3).count() == 3
