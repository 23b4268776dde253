"""A store is bound to its transaction log: another log, an empty log or a lost side table is rejected."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml

import tms_core.client
from janitor.cli.main import execute as typed_janitor
from janitor.cli.options import REFUSED
from tms_core.cli.main import execute
from tms_core.client.sync import Client
from tms_core.errors import ConfigurationError
from tms_core.server.serving import serving
from tms_core.tables.leveldb.side import LevelDBSide
from tms_core.tables.record import SystemRecord, record_transactions, recorded_transactions
from tms_core.transaction.manager.storage import system_of
from tms_core.transaction.source.source import SYSTEM_FILE

ORDERS = "default:orders"
FREE_PORTS = {"TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0", "TMS_JANITOR__HTTP__PORT": "0"}


@contextmanager
def open_server(folder: Path, **transactions: str) -> Iterator[Client]:
    config = folder / "tms.yaml"
    config.write_text(yaml.safe_dump({"storage": {"leveldb": {"path": "store"}}, "transactions": transactions}))
    with (
        serving(config, FREE_PORTS, {}) as started,
        Client(started.url, transactions=started.transactions or "127.0.0.1:1") as client,
    ):
        yield client


def rejection(folder: Path, **transactions: str) -> str:
    with pytest.raises(ConfigurationError) as caught, open_server(folder, **transactions):
        pytest.fail("the server started")
    return str(caught.value)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of a store with an invalid transaction and the position of a consumer."""
    with open_server(tmp_path) as client:
        client.create_topic(ORDERS)
        client.publish(ORDERS, [b"first"])
        with client.transaction() as tx:
            assert [message.payload for message in tx.consume(ORDERS, "billing")] == [b"first"]
        lost = client.transaction()
        client.store(ORDERS, [b"NEVER COMMITTED"], transaction=lost.__enter__().transaction)
    return tmp_path


def accept(folder: Path, *options: str) -> None:
    assert execute(["admin", "accept", "--config", str(folder / "tms.yaml"), *options]) == 0


def read_record(folder: Path) -> SystemRecord:
    with LevelDBSide(folder / "store.side") as side:
        found = recorded_transactions(side)
    assert found is not None
    return found


def test_open_and_a_settings_file_use_one_transaction_log(tmp_path: Path) -> None:
    with tms_core.client.open(tmp_path) as client:
        client.create_topic(ORDERS)
    (tmp_path / "tms.yaml").write_text("storage: {leveldb: {path: messaging}}")
    before = {path.name for path in tmp_path.iterdir()}
    with serving(tmp_path / "tms.yaml", FREE_PORTS, {}):
        pass
    assert {path.name for path in tmp_path.iterdir()} == before


def test_server_records_the_system_and_the_highest_pointer_of_its_log(folder: Path) -> None:
    found = read_record(folder)
    assert (found.id, found.place) == (system_of(folder / "store.tx"), str(folder / "store.tx"))
    with open_server(folder) as client:
        pass
    assert read_record(folder).pointer == found.pointer
    with open_server(folder) as client, client.transaction() as tx:
        pointer = tx.transaction.write_pointer
    assert read_record(folder).pointer == pointer > found.pointer


def test_server_with_an_empty_log_is_rejected_and_writes_nothing(folder: Path) -> None:
    error_text = rejection(folder, directory="elsewhere")
    assert f"{folder}/elsewhere has no transaction log" in error_text
    assert f"Set transactions.directory to {folder}/store.tx" in error_text
    assert "tms admin accept" in error_text
    assert not (folder / "elsewhere").exists()
    shutil.rmtree(folder / "store.tx")
    error_text = rejection(folder)
    assert f"{folder}/store.tx" in error_text
    assert "transactions.directory" not in error_text
    assert not (folder / "store.tx").exists()


def test_server_with_the_log_of_another_store_is_rejected(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with open_server(other) as client, client.transaction():
        pass
    error_text = rejection(folder, directory="other/store.tx")
    assert f"the transaction log of another system ({system_of(other / 'store.tx')})" in error_text
    (other / "store.tx" / SYSTEM_FILE).unlink()
    assert "a transaction log that is not known to be this store's" in rejection(folder, directory="other/store.tx")


def test_server_with_a_log_that_was_set_back_is_rejected_before_it_writes(folder: Path) -> None:
    shutil.copytree(folder / "store.tx", folder / "backup")
    with open_server(folder) as client, client.transaction():
        pass
    shutil.rmtree(folder / "store.tx")
    shutil.copytree(folder / "backup", folder / "store.tx")
    before = sorted(path.name for path in (folder / "store.tx").iterdir())
    assert f"and the store has seen {read_record(folder).pointer}" in rejection(folder)
    assert sorted(path.name for path in (folder / "store.tx").iterdir()) == before


def test_server_after_accept_starts_with_the_log_it_finds(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rejection(folder, directory="elsewhere")
    was = read_record(folder)
    accept(folder)
    assert f"in {folder}/store.tx, up to write pointer {was.pointer}" in capsys.readouterr().out
    with open_server(folder, directory="elsewhere"):
        pass
    assert read_record(folder).place == str(folder / "elsewhere")
    assert read_record(folder).pointer > was.pointer
    assert "another system" in rejection(folder)


def test_server_on_a_store_without_a_record_accepts_and_records_it(folder: Path) -> None:
    was = read_record(folder)
    (folder / "store.tx" / SYSTEM_FILE).unlink()
    shutil.rmtree(folder / "store.side")
    with open_server(folder):
        pass
    assert read_record(folder).id == system_of(folder / "store.tx") != was.id


def test_server_on_a_copy_without_log_and_side_table_warns_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_server(folder) as client, client.transaction() as tx:
        tx.publish(ORDERS, [b"second"])
    for name in ("store.tx", "store.side"):
        shutil.rmtree(folder / name)
    caplog.clear()
    warning = f"the store has messages of transactions, and {folder}/store.tx has no transaction log"
    for expected in (1, 0):
        with open_server(folder):
            pass
        assert sum(warning in record.getMessage() for record in caplog.records) == expected
        caplog.clear()


def test_store_without_transactions_starts_a_log_unwarned(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open_server(tmp_path) as client:
        client.create_topic(ORDERS)
        client.publish(ORDERS, [b"first"])
    for name in ("store.tx", "store.side"):
        shutil.rmtree(tmp_path / name)
    caplog.clear()
    with open_server(tmp_path):
        pass
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("lost", [["store"], ["store", "store.side"]], ids=str)
def test_server_on_a_new_store_with_an_old_log_starts_with_a_warning(
    folder: Path, lost: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    for name in lost:
        shutil.rmtree(folder / name)
    caplog.clear()
    warning = f"{folder}/store has a new store, and the transaction log in {folder}/store.tx was used with a store"
    for expected in (1, 0):
        with open_server(folder):
            pass
        assert read_record(folder).pointer > 0
        assert sum(warning in record.getMessage() for record in caplog.records) == expected
        caplog.clear()


def test_server_with_its_store_does_not_read_an_unused_log_folder(folder: Path) -> None:
    (folder / "other" / SYSTEM_FILE).mkdir(parents=True)
    with open_server(folder, source="none", directory="other") as client:
        assert [message.payload for message in client.poll(ORDERS)] == [b"first"]


def test_server_without_its_side_table_is_rejected_and_creates_none(folder: Path) -> None:
    shutil.rmtree(folder / "store.side")
    error_text = rejection(folder)
    assert f"{folder}/store.side is missing or empty" in error_text
    assert f"{folder}/store.tx was used with it" in error_text
    assert not (folder / "store.side").exists()
    accept(folder)
    with open_server(folder) as client, client.transaction() as tx:
        assert [message.payload for message in tx.consume(ORDERS, "billing")] == [b"first"]


def test_server_with_an_emptied_side_table_is_rejected(folder: Path) -> None:
    shutil.rmtree(folder / "store.side")
    LevelDBSide(folder / "store.side").close()
    assert "The side table of this store is missing or empty" in rejection(folder)


@pytest.mark.parametrize("steps", ["recorded", "named"])
def test_server_killed_while_it_starts_a_log_starts_again(tmp_path: Path, steps: str) -> None:
    with open_server(tmp_path):
        pass
    with LevelDBSide(tmp_path / "store.side") as side:
        record_transactions(side, recorded_begin := SystemRecord(system_of(tmp_path / "store.tx"), "store.tx"))
    for path in (tmp_path / "store.tx").iterdir():
        if path.name != SYSTEM_FILE or steps == "recorded":
            path.unlink()
    with open_server(tmp_path):
        pass
    assert (read_record(tmp_path).id == recorded_begin.id) == (steps == "named")


def test_server_with_snapshots_of_another_system_is_rejected(folder: Path, tmp_path: Path) -> None:
    with open_server(folder, source="directory", directory="store.tx"):
        pass
    other = tmp_path / "other"
    other.mkdir()
    with open_server(other) as client, client.transaction():
        pass
    error_text = rejection(folder, source="directory", directory="other/store.tx")
    assert f"The transaction snapshots in {other}/store.tx are of transaction system" in error_text


def test_server_with_an_empty_log_after_snapshots_of_cdap_is_rejected(folder: Path) -> None:
    (folder / "store.tx" / SYSTEM_FILE).rename(folder / "kept")
    accept(folder)
    with LevelDBSide(folder / "store.side") as side:
        side.delete([b"it"])
    with open_server(folder, source="directory", directory="store.tx"):
        pass
    assert read_record(folder).id == ""
    assert "at write pointer 0, and the store has seen" in rejection(folder, directory="elsewhere")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("janitor: {state: moved}", "another state has adopted this store"),
        ("transactions: {source: directory, directory: other/store.tx}", "the snapshot is of transaction system"),
    ],
)
def test_janitor_with_another_state_or_other_snapshots_is_stopped(
    folder: Path, capsys: pytest.CaptureFixture[str], settings: str, words: str
) -> None:
    (folder / "other").mkdir()
    with open_server(folder / "other") as client, client.transaction():
        pass
    (folder / "moved.yaml").write_text(f"storage: {{leveldb: {{path: store}}}}\n{settings}\n")
    capsys.readouterr()
    assert typed_janitor(["run", "--once", "--adopt", "--config", str(folder / "moved.yaml")]) == REFUSED
    assert words in capsys.readouterr().out
    assert typed_janitor(["adopt", "--config", str(folder / "moved.yaml")]) == 0
    assert typed_janitor(["run", "--once", "--config", str(folder / "moved.yaml")]) == 0
