"""S13: a store and a transaction system are identified by more than their names. Another one is a first contact."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import pytest

from janitor.rules.policy import Hold
from janitor.state.decided import NOTE as DECIDED
from janitor.state.records import LINEAGE
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Kit, Topic, adopted_janitor, janitor, pointer, topic, watch
from tests.support import require_or_skip
from tests.tables.test_leveldb_manifest import overstate
from tms_core.errors import PlanRefused
from tms_core.tables.base import Store
from tms_core.tables.leveldb.clone import clone
from tms_core.tables.leveldb.store import LevelDBStore, release
from tms_core.tables.memory import MemoryStore

OLD = pointer(NOW_MS - 10 * HOUR)
TTL_SECONDS = 86400


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Return a folder on disk, because tmpfs does not report inode generations."""
    with TemporaryDirectory(dir="/var/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - 2 * DAY)
    return tmp_path / "messaging"


@pytest.fixture
def known(folder: Path) -> Kit:
    """Return a janitor after adoption and one pass; its store is closed."""
    with LevelDBStore(folder) as store:
        kit = adopted_janitor(store, invalid=[OLD])
        assert orders(store).times() == []
        orders(store).plain(NOW_MS - 2 * DAY)
    return kit


def orders(store: Store) -> Topic:
    return Topic(store, topic(MemoryStore(), "default:orders", ttl_seconds=1).id)


def identity_guards(kit: Kit) -> list[bool]:
    return [note.tripped for note in kit.engine.run_once().guards if note.guard == "identity"]


def assert_first_contact(kit: Kit) -> None:
    """Check that a run deletes and proves nothing, the plan has the reason, and adoption unblocks it."""
    due = orders(kit.store).times()
    assert due != []
    assert identity_guards(kit) == [True]
    assert kit.engine.boundary()[0] is None
    assert set(kit.engine.preview().held_topics().values()) == {Hold.FIRST_CONTACT}
    assert kit.engine.run_once(adopt=True).tripped, "a timer that always adopts must not accept another store"
    assert orders(kit.store).times() == due
    kit.engine.adopt()
    assert not kit.engine.run_once().tripped
    assert orders(kit.store).times() == []
    assert identity_guards(kit) == []


def test_reopened_store_is_known(known: Kit, folder: Path) -> None:
    with LevelDBStore(folder) as store:
        assert not known.restart(store=store).engine.run_once().tripped
        assert orders(store).times() == []


def test_copy_at_another_path_is_a_first_contact(known: Kit, folder: Path) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    with LevelDBStore(copied) as store:
        assert_first_contact(known.restart(store=store))


def test_copy_at_the_same_path_is_a_first_contact(known: Kit, folder: Path) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    folder.rename(folder.with_name("before"))
    copied.rename(folder)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


def test_store_moved_to_another_path_is_a_first_contact(known: Kit, folder: Path) -> None:
    moved = folder.rename(folder.with_name("moved"))
    with LevelDBStore(moved) as store:
        assert_first_contact(known.restart(store=store))


def test_store_opened_through_a_symlink_is_known(known: Kit, folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with LevelDBStore(link) as store:
        assert not known.restart(store=store).engine.run_once().tripped


def test_state_of_another_store_is_not_trusted(known: Kit, tmp_path: Path) -> None:
    before = known.state.store()
    with LevelDBStore(tmp_path / "another", create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - 2 * DAY).tx(OLD, NOW_MS)
        kit = known.restart(store=store)
        assert kit.engine.run_once().tripped
        assert kit.state.store() == before
        assert kit.state.boundary() is not None
        kit.engine.adopt()
        after = kit.state.store()
        assert before is not None
        assert after is not None
        assert after.mark != before.mark
        assert (kit.state.boundary(), kit.state.evidence(), kit.state.open_ids()) == (None, [], {})
        assert kit.state.last_full_pass_ms() is None
        kit.engine.run_once()
        assert orders(store).pointers() == [-OLD]


def test_apply_of_plan_to_a_copy_is_refused(known: Kit, folder: Path, tmp_path: Path) -> None:
    with LevelDBStore(folder) as store:
        known.restart(store=store).engine.preview(out=tmp_path / "plan.json")
    copied = shutil.copytree(folder, folder.with_name("copied"))
    with LevelDBStore(copied) as store:
        with pytest.raises(PlanRefused, match="another store"):
            known.restart(store=store).engine.carry_out(tmp_path / "plan.json", adopt=True)
        assert orders(store).times() == [NOW_MS - 2 * DAY]


# --- restored backups ------------------------------------------------------------------------------------------------

MESSAGE = "system.tms.message"
Restore = Callable[[Path, Path], None]


def copy_over(backup: Path, folder: Path) -> None:
    """Restore like ``cp -a``: keep files that the backup does not have."""
    shutil.copytree(backup, folder, dirs_exist_ok=True)


def unpack_over(backup: Path, folder: Path) -> None:
    """Restore like ``tar -x``: replace files, keep files that the backup does not have."""
    for file in backup.glob("*/*"):
        (folder / file.relative_to(backup)).unlink(missing_ok=True)
    copy_over(backup, folder)


def mirror_over(backup: Path, folder: Path) -> None:
    """Restore like ``rsync -a --delete``: keep folders, replace and delete files."""
    for file in folder.glob("*/*"):
        file.unlink()
    copy_over(backup, folder)


def replace_one_table(backup: Path, folder: Path) -> None:
    """Restore one table like ``rm -rf`` and ``cp -a``, often with the same inode."""
    shutil.rmtree(folder / MESSAGE)
    shutil.copytree(backup / MESSAGE, folder / MESSAGE)


def mirror_one_table(backup: Path, folder: Path) -> None:
    """Restore one table like ``rsync -a --delete``."""
    for file in (folder / MESSAGE).glob("*"):
        file.unlink()
    copy_over(backup / MESSAGE, folder / MESSAGE)


@pytest.fixture(params=[copy_over, unpack_over, mirror_over, replace_one_table, mirror_one_table])
def restore(request: pytest.FixtureRequest) -> Restore:
    restore_over: Restore = request.param
    return restore_over


@pytest.fixture
def backup(folder: Path) -> Path:
    return shutil.copytree(folder, folder.with_name("backup"))


def test_restored_backup_is_a_first_contact(backup: Path, known: Kit, folder: Path, restore: Restore) -> None:
    restore(backup, folder)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


def test_restored_backup_withdraws_the_boundary(backup: Path, known: Kit, folder: Path, restore: Restore) -> None:
    assert known.state.boundary() is not None
    restore(backup, folder)
    with LevelDBStore(folder) as store:
        known.restart(store=store).engine.run_once()
    assert (known.state.boundary(), known.state.evidence(), known.state.last_full_pass_ms()) == (None, [], None)


def test_restored_backup_is_reported_by_a_plan(
    backup: Path, known: Kit, folder: Path, tmp_path: Path, restore: Restore
) -> None:
    restore(backup, folder)
    with clone(folder, tmp_path / "clones") as cloned:
        plan = known.restart(store=cloned).engine.preview()
        assert "restored from a backup" in " ".join(note.message for note in plan.guards)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


@pytest.mark.parametrize("restore_over", [mirror_over, mirror_one_table])
def test_restored_backup_with_later_writes_is_a_first_contact(
    backup: Path, known: Kit, folder: Path, restore_over: Restore
) -> None:
    for _ in range(3):
        assert_known(known, folder)
    restore_over(backup, folder)
    with LevelDBStore(folder) as store:
        orders(store).plain(*[NOW_MS - 2 * DAY] * 1000)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


def test_restored_backup_of_a_running_server_is_a_first_contact(
    backup: Path, known: Kit, folder: Path, restore: Restore
) -> None:
    restore(backup, folder)
    with LevelDBStore(folder) as store:
        orders(store).plain(*[NOW_MS - 2 * DAY] * 100)
        assert_first_contact(known.restart(store=store))


def test_restored_store_with_new_writes_is_a_first_contact(backup: Path, known: Kit, folder: Path) -> None:
    mirror_over(backup, folder)
    with LevelDBStore(folder) as store:
        assert known.restart(store=store).engine.run_once().tripped
        orders(store).plain(*[NOW_MS - 2 * DAY] * 100)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


@pytest.mark.parametrize("name", ["inode", "birth_ns", "generation"])
def test_other_volume_at_the_same_path_is_a_first_contact(known: Kit, folder: Path, name: str) -> None:
    lineage = known.state.note(LINEAGE)
    if lineage["message"][name] is None:
        require_or_skip(f"the file system of {folder} does not tell the {name} of a folder")
    # Creation time or inode generation distinguishes volumes with the same inode numbers.
    lineage["message"][name] += 1
    known.state.save_note(LINEAGE, lineage)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


def test_store_with_a_missing_table_is_a_first_contact(known: Kit, folder: Path) -> None:
    shutil.rmtree(folder / MESSAGE)
    with LevelDBStore(folder, create=True) as store:
        orders(store).plain(NOW_MS - 2 * DAY)
        assert_first_contact(known.restart(store=store))


def test_backup_restored_during_a_run_proves_nothing(store: Store) -> None:
    described = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).tx(OLD, NOW_MS)
    kit = janitor(store, invalid=[OLD]).adopt()
    restored: list[str] = []
    with patch.object(type(store), "find_restore_evidence", lambda *_: restored[0] if restored else None):
        watch(store, after=lambda call: restored.append("is back") if call.name == "message.invert" else None)
        report = kit.engine.run_once()
    assert report.tripped
    assert described.pointers() == [-OLD]
    assert (report.boundary, kit.state.boundary(), kit.state.evidence()) == (None, None, [])


# --- changes that are no restore --------------------------------------------------------------------------------------


def assert_known(kit: Kit, folder: Path) -> None:
    with LevelDBStore(folder) as store:
        assert not kit.restart(store=store).engine.run_once().tripped
        assert orders(store).times() == []


def test_store_written_by_others_is_known(known: Kit, folder: Path) -> None:
    for number in range(12):
        with LevelDBStore(folder) as store:
            orders(store).plain(*[NOW_MS - 2 * DAY] * number)
        if number % 2:
            release(folder)
        if number % 3:
            assert_known(known, folder)


def test_compacted_store_is_known(known: Kit, folder: Path) -> None:
    for number in range(3):
        with LevelDBStore(folder) as store:
            kit = known.restart(store=store)
            orders(store).plain(*[NOW_MS - 2 * DAY] * 3000, body=b"x" * 1000)
            assert not kit.engine.run_once().tripped
            store.message.compact(b"", b"\xff" * number)
            assert not kit.engine.run_once().tripped
        assert_known(known, folder)


def test_store_with_java_manifest_sizes_is_known(known: Kit, folder: Path) -> None:
    with LevelDBStore(folder) as store:
        orders(store).plain(*[NOW_MS - 2 * DAY] * 10)
    overstate(folder / MESSAGE)
    assert_known(known, folder)
    assert_known(known, folder)


def test_store_with_new_boot_and_device_number_is_known(known: Kit, folder: Path) -> None:
    known.clock.reboot("boot 2")
    assert "device" not in known.state.note(LINEAGE)["message"]
    assert_known(known, folder)


def test_store_adopted_empty_is_known_with_messages(tmp_path: Path) -> None:
    folder = tmp_path / "messaging"
    with LevelDBStore(folder, create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS)
    for table in ("system.tms.message", "system.tms.payload"):
        shutil.rmtree(folder / table)
    with LevelDBStore(folder) as store:
        kit = janitor(store)
        assert not kit.engine.run_once(adopt=True).tripped
    with LevelDBStore(folder, create=True) as store:
        orders(store).plain(NOW_MS - 2 * DAY)
    assert_known(kit, folder)
    assert_known(kit, folder)


# --- a scheduled --adopt ---------------------------------------------------------------------------------------------


def test_scheduled_adopt_does_not_accept_a_copy(known: Kit, folder: Path) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    with LevelDBStore(copied) as store:
        kit = known.restart(store=store)
        for _ in range(2):
            assert kit.engine.run_once(adopt=True).tripped
        assert orders(store).times() == [NOW_MS - 2 * DAY]


def test_scheduled_adopt_accepts_a_store_never_adopted(folder: Path) -> None:
    with LevelDBStore(folder) as store:
        kit = janitor(store)
        assert kit.engine.run_once().tripped
        assert not kit.engine.run_once(adopt=True).tripped
        assert orders(store).times() == []


def test_restored_store_refuses_apply_adopt(backup: Path, known: Kit, folder: Path, tmp_path: Path) -> None:
    mirror_over(backup, folder)
    with LevelDBStore(folder) as store:
        kit = known.restart(store=store)
        kit.engine.preview(out=tmp_path / "plan.json")
        assert kit.engine.carry_out(tmp_path / "plan.json", adopt=True).tripped
        assert orders(store).times() == [NOW_MS - 2 * DAY]


def test_operator_decisions_survive_a_restored_store(backup: Path, known: Kit, folder: Path) -> None:
    known.state.save_note(DECIDED, {"adopt": ["2024-01-01"]})
    mirror_over(backup, folder)
    with LevelDBStore(folder) as store:
        kit = known.restart(store=store)
        kit.engine.run_once()
        kit.engine.adopt()
    assert known.state.note(DECIDED) == {"adopt": ["2024-01-01"]}


# --- another transaction system --------------------------------------------------------------------------------------


def wrong_directory(store: Store) -> tuple[Kit, Topic]:
    """Return an adopted store with snapshots of another transaction system, whose pointers are lower."""
    described = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - DAY + MINUTE).tx(OLD, NOW_MS)
    kit = adopted_janitor(store, invalid=[OLD - 1])
    kit.clock.advance(HOUR)
    kit.snapshots.invalid = [OLD]
    kit.snapshots.write_pointer = pointer(NOW_MS) - 1
    return kit, described


def test_wrong_snapshot_directory_deletes_and_inverts_nothing(store: Store) -> None:
    kit, described = wrong_directory(store)
    assert identity_guards(kit) == [True]
    assert described.times() == [NOW_MS - DAY + MINUTE, NOW_MS]
    assert described.pointers() == [None, OLD]


def test_growing_write_pointer_is_the_same_transaction_system(store: Store) -> None:
    kit, described = wrong_directory(store)
    kit.snapshots.write_pointer = pointer(NOW_MS)
    assert identity_guards(kit) == []
    assert described.pointers() == [-OLD]


def test_another_transaction_system_is_used_after_adoption(store: Store) -> None:
    kit, described = wrong_directory(store)
    assert kit.engine.run_once(adopt=True).tripped, "a timer that always adopts must not accept a wrong directory"
    assert described.pointers() == [None, OLD]
    kit.engine.adopt()
    assert not kit.engine.run_once().tripped
    assert described.pointers() == [-OLD]
    assert identity_guards(kit) == []


def test_another_transaction_system_withdraws_boundary_on_adoption(store: Store) -> None:
    kit, _ = wrong_directory(store)
    assert kit.state.boundary() is not None
    kit.engine.adopt()
    assert (kit.state.boundary(), kit.state.evidence()) == (None, [])


def test_another_transaction_system_invalidates_the_boundary(store: Store) -> None:
    kit, _ = wrong_directory(store)
    proven, explained = kit.engine.boundary()
    assert (proven, explained.bound) == (None, None)
    assert "adopted" in " ".join(explained.obstacles)
    assert (kit.engine.preview().boundary, kit.engine.verify().bound) == (None, None)
    assert kit.state.boundary() is not None


def test_empty_state_is_a_first_contact(store: Store) -> None:
    described = topic(store, "default:orders", ttl_seconds=60).plain(1)
    janitor(store).engine.run_once(adopt=True)
    described.plain(1)
    assert janitor(store).engine.run_once().tripped
    assert described.times() == [1]
