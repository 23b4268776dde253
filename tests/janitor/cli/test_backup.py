"""``janitor backup`` and ``janitor restore``: a consistent copy of the store and its state."""

from __future__ import annotations

import errno
import gc
import re
import shutil
import threading
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import click
import pytest
import yaml

from janitor.cli.main import execute
from janitor.state.sqlite.state import SqliteState
from tests.support import raising
from tms_core.cli import admin
from tms_core.cli import main as tms
from tms_core.cli.outcome import BUSY, FAILED, USAGE
from tms_core.client.sync import Client
from tms_core.errors import ConfigurationError
from tms_core.server.serving import serving
from tms_core.tables.leveldb.database import WritableDatabase
from tms_core.tables.leveldb.layout import FOLDERS

ORDERS, BILLS = "default:orders", "default:bills"
FREE_PORTS = {"TMS_SERVER__PORT": "0", "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0", "TMS_JANITOR__HTTP__PORT": "0"}


@contextmanager
def served(store: Path, *, janitor: bool = True) -> Iterator[Client]:
    with (
        serving(None, FREE_PORTS, {"leveldb": str(store)}, janitor=janitor) as started,
        Client(started.url, transactions=started.transactions or "") as client,
    ):
        yield client


def consume(client: Client, limit: int) -> list[bytes]:
    """Return the messages that a consumer reads and commits."""
    with client.transaction() as tx:
        return [message.payload for message in tx.consume(ORDERS, "billing", limit=limit)]


def files(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("LOCK", ".lock")
    }


def settings_file(folder: Path, store: Path, state: str) -> Path:
    """Write settings with a store and a state, which may belong to another store."""
    path = folder / "janitor.yaml"
    path.write_text(yaml.safe_dump({"storage": {"leveldb": {"path": str(store)}}, "janitor": {"state": state}}))
    return path


def run_command(verb: str, folder: Path, store: Path) -> int:
    return execute([verb, str(folder), "--leveldb", str(store)])


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Return a store with ten orders, seven of which a consumer has read."""
    store = tmp_path / "store"
    with served(store) as client:
        client.create_topic(ORDERS)
        client.create_topic(BILLS)
        client.publish(ORDERS, [b"%d" % number for number in range(10)])
        assert len(consume(client, 7)) == 7
    with served(store):
        """LevelDB makes tables of its logs when it opens them again."""
    return store


def remove(store: Path) -> None:
    for end in ("", ".side", ".tx", ".janitor"):
        shutil.rmtree(f"{store}{end}")


@pytest.mark.parametrize("links", [True, False])
def test_backup_of_a_closed_store_restores_the_consumers_positions(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", raising(OSError(errno.EPERM, "Operation not permitted")))
    before = files(store)
    assert run_command("backup", tmp_path / "saved", store) == 0
    assert files(store) == before, "a backup changes nothing"
    tables = [path for path in (tmp_path / "saved").rglob("*.sst") if "messaging/" in str(path)]
    assert {path.stat().st_nlink > 1 for path in tables} == {links}
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {
        "messaging",
        "messaging.side",
        "messaging.tx",
        "messaging.janitor",
    }
    remove(store)
    saved = files(tmp_path / "saved")
    assert run_command("restore", tmp_path / "saved", store) == 0
    with served(store) as client:
        assert consume(client, 100) == [b"7", b"8", b"9"]
    assert files(tmp_path / "saved") == saved, "a restored store shares nothing with its backup"


def test_backup_while_a_server_writes_is_consistent(store: Path, tmp_path: Path) -> None:
    done = threading.Event()

    def work(client: Client) -> None:
        number = 100
        while not done.is_set():
            number += 1
            with client.transaction() as tx:
                assert len([*tx.consume(ORDERS, "billing", limit=1)]) == 1
                tx.publish(ORDERS, [b"%d" % number])
                tx.publish(BILLS, [b"%d" % number])

    with served(store) as client:
        worker = threading.Thread(target=work, args=(client,))
        worker.start()
        try:
            for number in range(3):
                assert run_command("backup", tmp_path / f"saved-{number}", store) == 0
        finally:
            done.set()
            worker.join()
    for number in range(3):
        restored = tmp_path / f"restored-{number}"
        assert run_command("restore", tmp_path / f"saved-{number}", restored) == 0
        with served(restored) as client:
            # A transaction in progress during the backup is open, as after a crash of its client.
            for entry in client._transactions.latest().snapshot.in_progress:
                client._transactions.invalidate(entry.write_pointer)
            with client.transaction() as tx:
                bills = [message.payload for message in tx.consume(BILLS, "audit")]
                orders = [message.payload for message in tx.consume(ORDERS, "audit")][10:]
                left = [message.payload for message in tx.consume(ORDERS, "billing")]
        assert bills == orders, "a backup has all of a transaction or nothing"
        # Each transaction has read one order and published one, so the number of orders is unchanged.
        assert len(left) == 3
    assert bills, "the work continued during the last backup"


def test_backup_locks_all_tables_during_copy(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def held() -> set[str]:
        # A database that failed to open in an earlier test may still be in memory, without its locks.
        objects = [found for found in gc.get_objects() if isinstance(found, WritableDatabase)]
        opened = [found for found in objects if hasattr(found, "_disk")]
        return {found.folder.name for found in opened if found._disk.locked()}

    copied, real = [], shutil.copyfile

    def watched(source: Path, target: Path) -> Path:
        if source.parent.name == "store.tx":
            copied.append(held())
        return real(source, target)

    monkeypatch.setattr(shutil, "copyfile", watched)
    with served(store) as client:
        assert run_command("backup", tmp_path / "saved", store) == 0
        assert held() == set()
        client.publish(ORDERS, [b"later"])
    assert copied
    assert all(names == {*FOLDERS.values(), "store.side"} for names in copied)


def test_backup_into_a_folder_of_the_store_is_rejected(store: Path) -> None:
    for end in ("", ".side", ".tx", ".janitor"):
        target = Path(f"{store}{end}", "saved")
        assert (run_command("backup", target, store), target.exists()) == (USAGE, False)


def test_backup_without_a_janitor_is_rejected(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with served(store, janitor=False):
        assert run_command("backup", tmp_path / "saved", store) == BUSY
    assert "TMS-STORE" in capsys.readouterr().err
    assert not list(tmp_path.glob("*saved*"))


@pytest.mark.parametrize("end", ["", ".side", ".tx", ".janitor"])
def test_restore_over_existing_files_is_rejected_and_changes_nothing(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], end: str
) -> None:
    assert run_command("backup", tmp_path / "saved", store) == 0
    other = tmp_path / "other"
    Path(f"{other}{end}").mkdir()
    (Path(f"{other}{end}") / "something").touch()
    before = sorted(tmp_path.iterdir())
    assert run_command("restore", tmp_path / "saved", other) == USAGE
    assert f"{other}{end} is not empty" in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.usefixtures("store")
@pytest.mark.parametrize("name", ["store", "nowhere"])
def test_restore_of_a_folder_without_a_backup_names_the_folder_and_no_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run_command("restore", tmp_path / name, tmp_path / "other") == FAILED
    output = capsys.readouterr().err
    assert f"{tmp_path / name} has no backup" in output
    assert "hint: " in output
    assert "--" not in output
    assert not (tmp_path / "other").exists()


def test_backup_and_restore_through_links_write_to_the_link_targets(store: Path, tmp_path: Path) -> None:
    for name in ("saved", "other"):
        (tmp_path / "disk" / name).mkdir(parents=True)
        (tmp_path / name).symlink_to(tmp_path / "disk" / name)
    assert run_command("backup", tmp_path / "saved", store) == 0
    assert run_command("restore", tmp_path / "saved", tmp_path / "other") == 0
    assert (tmp_path / "saved").is_symlink()
    assert (tmp_path / "other").is_symlink()
    assert files(tmp_path / "other") == files(tmp_path / "disk" / "saved" / "messaging") != {}


@pytest.mark.parametrize("verb", ["backup", "restore"])
@pytest.mark.parametrize("name", ["loop", "n" * 300])
def test_backup_to_an_unusable_folder_name_is_rejected_in_one_sentence(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str, name: str
) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert run_command("backup", tmp_path / "saved", store) == 0
    if verb == "backup":
        assert run_command("backup", tmp_path / name, store) == USAGE
    else:
        assert run_command("restore", tmp_path / "saved", tmp_path / name) == USAGE
    assert re.search(rf"/{name}(\.side)? cannot be used: [A-Za-z ]+\. ", capsys.readouterr().err)


def test_restore_into_the_backup_is_rejected(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "saved"
    assert run_command("backup", saved, store) == 0
    before = sorted(saved.rglob("*"))
    for target in (saved / "store", saved / "messaging" / "store"):
        assert run_command("restore", saved, target) == USAGE
        assert f"is inside {saved}" in capsys.readouterr().err
    assert sorted(saved.rglob("*")) == before


def test_restore_that_fails_can_be_repeated(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved, other = tmp_path / "saved", tmp_path / "new" / "other"
    assert run_command("backup", saved, store) == 0
    (saved / "messaging" / "lost").symlink_to("nowhere")
    assert run_command("restore", saved, other) == FAILED
    output = capsys.readouterr().err
    assert "No such file or directory: '" in output
    assert "[(" not in output
    assert list((tmp_path / "new").iterdir()) == []
    (saved / "messaging" / "lost").unlink()
    assert run_command("restore", saved, other) == 0
    with served(other) as client:
        assert consume(client, 10) == [b"7", b"8", b"9"]


def test_restored_store_without_its_side_table_is_not_served(store: Path, tmp_path: Path) -> None:
    assert run_command("backup", tmp_path / "saved", store) == 0
    shutil.rmtree(tmp_path / "saved" / "messaging.side")
    remove(store)
    assert run_command("restore", tmp_path / "saved", store) == 0
    with pytest.raises(ConfigurationError, match="positions of consumers"), served(store):
        pytest.fail("it was served")


def test_backup_of_hbase_prints_the_snapshots_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["backup", "friday", "--hbase", "127.0.0.1:1"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        f"snapshot 'cdap_system:{table}', '{table}-friday'"
        for table in ("tms.message", "tms.payload", "tms.side", "tms.meta", "tms.janitor")
    ]
    assert "servers and janitors" in output.err


def test_restored_store_starts_at_once_after_its_server_was_killed(store: Path, tmp_path: Path) -> None:
    saved, restored = tmp_path / "saved", tmp_path / "restored"
    assert run_command("backup", saved, store) == run_command("restore", saved, restored) == 0
    with served(restored), SqliteState(Path(f"{restored}.janitor")) as state:
        lease = state.lease()
    with SqliteState(Path(f"{restored}.janitor")) as state:
        # A killed server leaves its lease.
        assert state.swap_lease(state.lease(), lease or b"")
    with served(restored) as client:
        assert consume(client, 100) == [b"7", b"8", b"9"]


def test_state_whose_janitor_works_on_another_store_is_rejected(store: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(store, other)
    with served(store):
        assert execute(["run", "--once", "--config", str(settings_file(tmp_path, other, f"{store}.janitor"))]) == BUSY


@pytest.fixture
def provided(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Return the commands of ``tms admin`` in the project file, which may differ from the installed package."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8"))
    found: dict[str, str] = project["project"]["entry-points"][admin.GROUP]
    entries = EntryPoints(EntryPoint(name, value, admin.GROUP) for name, value in found.items())
    monkeypatch.setattr(admin, "entry_points", entries.select)
    for name in found:
        monkeypatch.delitem(admin.admin.commands, name, raising=False)
    return found


def test_admin_commands_of_another_package_are_listed_with_their_help(provided: dict[str, str]) -> None:
    context = click.Context(admin.admin)
    found = {name: admin.admin.get_command(context, name) for name in provided}
    helps = {name: command.get_short_help_str(100) for name, command in found.items() if command is not None}
    assert helps == {name: known.help for name, known in admin.PROVIDED.items()}


def test_tms_admin_backup_without_the_janitor_names_the_package(
    monkeypatch: pytest.MonkeyPatch, provided: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(admin, "entry_points", lambda **_: EntryPoints())
    assert provided
    assert tms.execute(["admin", "backup", "saved"]) == USAGE
    assert "[TMS-CONFIGURATION]" in capsys.readouterr().err
    assert tms.execute(["admin", "--help"]) == 0
    assert "backup" in capsys.readouterr().out


def test_tms_admin_backup_that_cannot_be_imported_says_why(
    monkeypatch: pytest.MonkeyPatch, provided: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    broken = EntryPoints([EntryPoint(name, "no_such_package:command", admin.GROUP) for name in provided])
    monkeypatch.setattr(admin, "entry_points", broken.select)
    assert tms.execute(["admin", "backup", "saved"]) == USAGE
    assert "'no_such_package'" in capsys.readouterr().err
