"""Fixtures of the HBase of a test run and its tables."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import happybase
import pytest

from janitor.cli.main import execute
from tests.hbase.fixture import running
from tests.hbase.server import HBaseServer
from tests.hbase.sweep_kit import FilledStore
from tests.hbase.tables import Tables


@pytest.fixture(scope="session")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseServer]:
    """Return a running HBase that all processes of the run share."""
    own = tmp_path_factory.getbasetemp()
    # With xdist, each worker has a separate folder in the folder of the run.
    with running(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as server:
        yield server


@pytest.fixture(scope="session")
def hbase_tables(hbase: HBaseServer) -> Iterator[Tables]:
    with Tables(hbase) as tables:
        yield tables


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.shared()


@pytest.fixture
def filled(hbase_tables: Tables, namespace: str) -> Iterator[FilledStore]:
    with hbase_tables.open(namespace) as store:
        yield FilledStore.fill(store)


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], dict[str, tuple[str, str]]]:
    """Run the command; return status and message by the name of the check."""

    def checks(config: Path) -> dict[str, tuple[str, str]]:
        execute(["doctor", "--config", str(config), "--format", "json"])
        found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
        return {each["check"]: (each["status"], each["message"]) for each in found}

    return checks


@pytest.fixture
def witness(hbase: HBaseServer) -> Iterator[happybase.Connection]:
    """Return another client of the same HBase, without code of the project."""
    connection = happybase.Connection(hbase.address.host, hbase.address.thrift, timeout=240_000)
    yield connection
    connection.close()


@pytest.fixture
def message(witness: happybase.Connection, namespace: str) -> happybase.Table:
    return witness.table(f"{namespace}:tms.message".encode())
