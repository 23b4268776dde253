"""The HBase of a test run, and tables in it."""

from __future__ import annotations

import os
from collections.abc import Iterator

import happybase
import pytest

from tests.hbase.fixture import running
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables


@pytest.fixture(scope="session")
def hbase(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseServer]:
    """A running HBase, shared by all processes of the run."""
    own = tmp_path_factory.getbasetemp()
    # Under xdist each worker has a folder of its own in the run's.
    with running(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) as server:
        yield server


@pytest.fixture(scope="session")
def hbase_tables(hbase: HBaseServer) -> Iterator[Tables]:
    with Tables(hbase) as tables:
        yield tables


@pytest.fixture
def witness(hbase: HBaseServer) -> Iterator[happybase.Connection]:
    """Another client of the same HBase, which knows nothing of ours."""
    connection = happybase.Connection(hbase.address.host, hbase.address.thrift, timeout=240_000)
    yield connection
    connection.close()
