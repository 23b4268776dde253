"""A store in HBase records its transaction log in ``tms.side`` and rejects another log."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables, write_config
from tms_core.cli.main import execute
from tms_core.client.sync import Client
from tms_core.errors import ConfigurationError
from tms_core.server.serving import serving
from tms_core.tables.hbase.side import HBaseSide
from tms_core.tables.record import SystemRecord, recorded_transactions
from tms_core.transaction.manager.storage import system_of

ORDERS = "default:orders"
FREE_PORTS = {"TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0"}


class Deployment:
    """The settings of a server on its own tables, with folders for transaction logs."""

    def __init__(self, tables: Tables, folder: Path) -> None:
        self._tables = tables
        self.folder = folder
        self.namespace = tables.make(buckets=2)
        self.config = folder / "tms.yaml"

    @contextmanager
    def served(self, directory: str = "log") -> Iterator[Client]:
        settings = self._tables.server.settings(self.namespace, buckets=2)
        write_config(self.config, settings, transactions={"directory": str(self.folder / directory)})
        with (
            serving(self.config, FREE_PORTS, {}, janitor=False) as started,
            Client(started.url, transactions=started.transactions or "127.0.0.1:1") as client,
        ):
            yield client

    def error(self, directory: str = "log") -> str:
        """Return the error of a server that is rejected."""
        with pytest.raises(ConfigurationError) as caught, self.served(directory):
            pytest.fail("the server has started")
        return str(caught.value)

    def record(self) -> SystemRecord | None:
        with self._tables.open(self.namespace, buckets=2) as store:
            return recorded_transactions(HBaseSide(store.pool, self.namespace))


@pytest.fixture
def deployment(hbase_tables: Tables, tmp_path: Path) -> Deployment:
    """Return a deployment with a published message and an open transaction."""
    made = Deployment(hbase_tables, tmp_path)
    with made.served() as client:
        client.create_topic(ORDERS)
        lost = client.transaction()
        client.store(ORDERS, [b"NEVER COMMITTED"], transaction=lost.__enter__().transaction)
    return made


def test_server_with_different_transaction_log_is_rejected(
    deployment: Deployment, hbase_tables: Tables, tmp_path: Path
) -> None:
    before = deployment.record()
    assert before is not None
    assert (before.id, before.place) == (system_of(tmp_path / "log"), str(tmp_path / "log"))
    assert before.pointer > 0

    message = deployment.error("elsewhere")
    assert f"{tmp_path}/elsewhere has no transaction log" in message
    assert f"Set transactions.directory to {tmp_path}/log" in message
    assert not (tmp_path / "elsewhere").exists()

    (tmp_path / "other").mkdir()
    with Deployment(hbase_tables, tmp_path / "other").served() as client, client.transaction():
        pass
    files = sorted(path.name for path in (tmp_path / "other" / "log").iterdir())
    message = deployment.error("other/log")
    assert f"the transaction log of another system ({system_of(tmp_path / 'other' / 'log')})" in message
    assert sorted(path.name for path in (tmp_path / "other" / "log").iterdir()) == files
    assert deployment.record() == before

    with deployment.served() as client, client.transaction() as tx:
        assert tx.transaction.write_pointer > before.pointer


def test_server_with_missing_side_table_requires_accept(deployment: Deployment, hbase: HBaseServer) -> None:
    hbase.command("drop", f"{deployment.namespace}:tms.side")
    # The first attempt creates the table again, without rows.
    for _ in range(2):
        message = deployment.error()
        assert "is missing or empty" in message
        assert "tms admin accept" in message
    assert deployment.record() is None
    assert execute(["admin", "accept", "--config", str(deployment.config)]) == 0
    with deployment.served() as client, client.transaction():
        pass
    assert deployment.record() is not None
