"""S13: a store is known by more than its name, and so is the transaction system. Another one is a first contact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from janitor.policy import Hold
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, Rig, Topic, janitor, pointer, topic
from tms_core.errors import PlanRefused
from tms_core.tables.base import Store
from tms_core.tables.leveldb import LevelDBStore
from tms_core.tables.memory import MemoryStore

OLD = pointer(NOW_MS - 10 * HOUR)
TTL_SECONDS = 86400


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A store with a row that is due, in a folder."""
    with LevelDBStore(tmp_path / "messaging", create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - 2 * DAY)
    return tmp_path / "messaging"


@pytest.fixture
def known(folder: Path) -> Rig:
    """A janitor that has adopted it and made one pass; its store is closed."""
    with LevelDBStore(folder) as store:
        rig = janitor(store)
        rig.snapshots.invalid = [OLD]
        rig.engine.run_once(adopt=True)
        assert orders(store).times() == []
        orders(store).plain(NOW_MS - 2 * DAY)
    return rig


def orders(store: Store) -> Topic:
    return Topic(store, topic(MemoryStore(), "default:orders", ttl_seconds=1).id)


def identity_guards(rig: Rig) -> list[bool]:
    return [note.tripped for note in rig.engine.run_once().guards if note.guard == "identity"]


def assert_first_contact(rig: Rig) -> None:
    """Nothing is deleted, the plan says why, and adopting it is what helps."""
    due = orders(rig.store).times()
    assert due != []
    assert identity_guards(rig) == [True]
    assert orders(rig.store).times() == due
    assert set(rig.engine.preview().held_topics().values()) == {Hold.FIRST_CONTACT}
    report = rig.engine.run_once(adopt=True)
    assert not report.tripped
    assert orders(rig.store).times() == []
    assert identity_guards(rig) == []


def test_given_the_store_itself_when_opened_again_then_it_is_known(known: Rig, folder: Path) -> None:
    with LevelDBStore(folder) as store:
        assert not known.restart(store=store).engine.run_once().tripped
        assert orders(store).times() == []


def test_given_a_copy_at_another_path_when_run_then_it_is_a_first_contact(known: Rig, folder: Path) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    with LevelDBStore(copied) as store:
        assert_first_contact(known.restart(store=store))


def test_given_a_copy_put_in_the_stores_place_when_run_then_it_is_a_first_contact(known: Rig, folder: Path) -> None:
    copied = shutil.copytree(folder, folder.with_name("copied"))
    folder.rename(folder.with_name("before"))
    copied.rename(folder)
    with LevelDBStore(folder) as store:
        assert_first_contact(known.restart(store=store))


def test_given_a_store_moved_to_another_path_when_run_then_it_is_a_first_contact(known: Rig, folder: Path) -> None:
    moved = folder.rename(folder.with_name("moved"))
    with LevelDBStore(moved) as store:
        assert_first_contact(known.restart(store=store))


def test_given_the_same_store_through_a_link_when_run_then_it_is_known(known: Rig, folder: Path) -> None:
    link = folder.with_name("link")
    link.symlink_to(folder)
    with LevelDBStore(link) as store:
        assert not known.restart(store=store).engine.run_once().tripped


def test_given_a_state_folder_reused_for_another_store_when_adopted_then_nothing_of_the_former_is_believed(
    known: Rig, tmp_path: Path
) -> None:
    before = known.state.store()
    with LevelDBStore(tmp_path / "another", create=True) as store:
        topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - 2 * DAY).tx(OLD, NOW_MS)
        rig = known.restart(store=store)
        assert rig.engine.run_once().tripped
        assert rig.state.store() == before
        assert rig.state.claim() is not None
        rig.engine.adopt()
        after = rig.state.store()
        assert before is not None
        assert after is not None
        assert after.mark != before.mark
        assert (rig.state.claim(), rig.state.evidence(), rig.state.open_ids()) == (None, [], {})
        assert rig.state.last_thorough_ms() is None
        rig.engine.run_once()
        assert orders(store).pointers() == [-OLD]


def test_given_a_plan_of_the_store_when_applied_to_a_copy_then_it_is_refused(
    known: Rig, folder: Path, tmp_path: Path
) -> None:
    with LevelDBStore(folder) as store:
        known.restart(store=store).engine.preview(out=tmp_path / "plan.json")
    copied = shutil.copytree(folder, folder.with_name("copied"))
    with LevelDBStore(copied) as store:
        with pytest.raises(PlanRefused, match="another store"):
            known.restart(store=store).engine.carry_out(tmp_path / "plan.json", adopt=True)
        assert orders(store).times() == [NOW_MS - 2 * DAY]


def wrong_directory(store: Store) -> tuple[Rig, Topic]:
    """An adopted store, and then snapshots of another transaction system: its pointers have not come so far."""
    described = topic(store, "default:orders", ttl_seconds=TTL_SECONDS).plain(NOW_MS - DAY + MINUTE).tx(OLD, NOW_MS)
    rig = janitor(store)
    rig.snapshots.invalid = [OLD - 1]
    rig.engine.run_once(adopt=True)
    rig.clock.advance(HOUR)
    rig.snapshots.invalid = [OLD]
    rig.snapshots.write_pointer = pointer(NOW_MS) - 1
    return rig, described


def test_given_a_wrong_snapshot_directory_when_run_then_nothing_is_deleted_or_inverted(store: Store) -> None:
    rig, described = wrong_directory(store)
    assert identity_guards(rig) == [True]
    assert described.times() == [NOW_MS - DAY + MINUTE, NOW_MS]
    assert described.pointers() == [None, OLD]


def test_given_a_write_pointer_that_only_grows_when_run_then_it_is_the_same_system(store: Store) -> None:
    rig, described = wrong_directory(store)
    rig.snapshots.write_pointer = pointer(NOW_MS)
    assert identity_guards(rig) == []
    assert described.pointers() == [-OLD]


def test_given_another_transaction_system_when_adopted_then_its_transactions_are_judged_by_from_then_on(
    store: Store,
) -> None:
    rig, described = wrong_directory(store)
    assert rig.engine.run_once(adopt=True).tripped, "a timer that always adopts must not accept a wrong directory"
    assert described.pointers() == [None, OLD]
    rig.engine.adopt()
    assert not rig.engine.run_once().tripped
    assert described.pointers() == [-OLD]
    assert identity_guards(rig) == []


def test_given_another_transaction_system_when_adopted_then_what_was_claimed_about_the_former_is_withdrawn(
    store: Store,
) -> None:
    rig, _ = wrong_directory(store)
    assert rig.state.claim() is not None
    rig.engine.adopt()
    assert (rig.state.claim(), rig.state.evidence()) == (None, [])


def test_given_another_transaction_system_when_asked_then_what_was_claimed_about_the_former_is_not_in_force(
    store: Store,
) -> None:
    rig, _ = wrong_directory(store)
    claim, explained = rig.engine.boundary()
    assert (claim, explained.bound) == (None, None)
    assert "has not been adopted" in " ".join(explained.obstacles)
    assert (rig.engine.preview().boundary, rig.engine.audit().bound) == (None, None)
    assert rig.state.claim() is not None


def test_given_a_memory_of_nothing_when_run_then_it_is_a_first_contact(store: Store) -> None:
    described = topic(store, "default:orders", ttl_seconds=60).plain(1)
    janitor(store).engine.run_once(adopt=True)
    described.plain(1)
    assert janitor(store).engine.run_once().tripped
    assert described.times() == [1]
