"""``janitor run --once``: who may stop it, what it leaves behind, and how it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.builders import DAY, NOW_MS, topic
from tests.janitor.cli.command import Janitor, held_elsewhere
from tests.janitor.cli.conftest import INVALID
from tms_core.errors import StoreError
from tms_core.tables.leveldb import LevelDBMessageTable


def test_given_a_store_never_adopted_when_run_then_nothing_is_deleted_and_the_next_step_is_said(
    small: Janitor,
) -> None:
    before = small.report("inspect", "message")["rows"]
    result = small("run", "--once")
    assert result.code == 3
    assert "adoption: nobody has adopted this store yet, nothing is deleted" in result.out
    assert result.out.splitlines()[-1].startswith("next: janitor plan --config ")
    assert small.report("inspect", "message")["rows"] == before


def test_given_the_sample_when_run_and_adopted_then_it_is_clean_in_one_pass(sample: Janitor) -> None:
    report = sample.report("run", "--once", "--adopt")
    assert (report["mode"], report["errors"], report["guards"]) == ("apply", [], [])
    del report["totals"]["kept"]
    assert report["totals"] == {"expired": 2780, "old_generation": 800, "invalid_transaction": 71}
    assert sample.report("run", "--once")["topics"] == []


def test_given_the_sample_when_run_then_all_tables_have_the_names_that_cdap_knows(sample: Janitor) -> None:
    sample("run", "--once", "--adopt")
    assert {path.suffix for path in sample.place.store.rglob("*.[ls][ds][bt]")} == {".sst"}


def test_given_patterns_when_run_then_the_other_topics_stay(small: Janitor) -> None:
    small("adopt")
    assert small.report("run", "--once", "--topic", "default:orders")["totals"]["expired"] == 2
    assert {entry["topic"] for entry in small.report("plan")["topics"]} == {"returns"}


def test_given_a_protected_topic_when_run_then_its_rows_stay_and_its_invalid_ones_are_inverted(small: Janitor) -> None:
    small.place.configure(janitor={"protect": ["default:ord*"]})
    report = small.report("run", "--once", "--adopt")
    assert [(entry["topic"], entry["rule"], entry["rows"], entry["held"]) for entry in report["topics"]] == [
        ("orders", "expired", 2, "protected"),
        ("orders", "invalid_transaction", 1, None),
        ("returns", "expired", 1, None),
    ]


def test_given_no_once_when_run_then_it_says_that_there_is_no_daemon(small: Janitor) -> None:
    result = small("run")
    assert result.code == 2
    assert "this version has no daemon: write janitor run --once" in result.err


def test_given_apply_false_when_run_then_it_only_plans(small: Janitor) -> None:
    small("adopt")
    small.place.configure(janitor={"apply": False})
    before = small.place.digests()
    result = small("run", "--once", "--format", "json")
    assert result.code == 0
    assert (result.json["mode"], result.json["totals"]["expired"]) == ("plan", 3)
    assert "janitor.apply is false" in result.err
    assert small.place.digests() == before


# --- guards ----------------------------------------------------------------------------------------------------------


def test_given_a_clock_that_jumped_when_run_then_nothing_is_deleted_until_it_is_approved(small: Janitor) -> None:
    small("run", "--once", "--adopt")
    small.clock.step(DAY)
    small.place.snapshot(NOW_MS + DAY)
    stopped = small("run", "--once")
    assert stopped.code == 3
    assert "clock: the clock is 86400 s ahead of what running time makes of the last run" in stopped.out
    assert "janitor approve" in stopped.out
    assert "rows: 0 expired" in stopped.out
    small("approve")
    assert small.report("run", "--once")["totals"]["expired"] == 2


def test_given_another_systems_snapshot_when_run_then_it_is_refused(small: Janitor) -> None:
    small("run", "--once", "--adopt")
    small.place.snapshot(NOW_MS + 1, newest=INVALID)
    result = small("run", "--once")
    assert result.code == 3
    assert f"identity: the snapshot's write pointer {INVALID} is below" in result.out
    assert "next: janitor plan" in result.out


def test_given_a_stale_snapshot_when_run_then_ttls_go_on_with_a_warning(small: Janitor) -> None:
    small.place.configure(transactions={"snapshot_interval_seconds": 1})
    small.clock.advance(2001)
    result = small("run", "--once", "--adopt")
    assert result.code == 0
    assert "no transaction snapshot" in result.out
    assert "more than twice transactions.snapshot_interval_seconds (1)" in result.out
    assert "0 of invalid transactions inverted" in result.out


# --- one process at a time -------------------------------------------------------------------------------------------


def test_given_a_store_held_by_another_process_when_run_then_it_is_named_and_the_code_is_4(small: Janitor) -> None:
    with held_elsewhere(small.place.store) as pid:
        result = small("run", "--once", "--adopt")
    assert result.code == 4
    assert f"is held by process {pid} (" in result.err
    assert "LevelDB allows one process at a time" in result.err
    assert result.out == ""


def test_given_a_store_held_by_another_process_when_planned_then_the_code_is_4(small: Janitor) -> None:
    with held_elsewhere(small.place.store):
        assert small("plan").code == 4


@pytest.mark.parametrize("apply", [True, False])
def test_given_skip_if_locked_when_the_store_is_held_then_the_run_is_left_out_with_code_0(
    small: Janitor, apply: bool
) -> None:
    small.place.configure(janitor={"apply": apply})
    with held_elsewhere(small.place.store):
        result = small("run", "--once", "--adopt", "--skip-if-locked")
    assert (result.code, result.out) == (0, "")
    assert "is held by process" in result.err
    assert small.report("plan")["totals"]["expired"] == 3


# --- failures --------------------------------------------------------------------------------------------------------


def test_given_a_topic_that_fails_when_run_then_the_others_are_done_and_the_code_is_5(
    small: Janitor, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LevelDBMessageTable.delete

    def failing(table: LevelDBMessageTable, keys: Sequence[bytes]) -> None:
        if keys[0].startswith(b"default:orders:"):
            raise StoreError("the disk is on fire.", "Put it out.")
        delete(table, keys)

    monkeypatch.setattr(LevelDBMessageTable, "delete", failing)
    result = small("run", "--once", "--adopt")
    assert result.code == 5
    assert "failed: default:orders: the disk is on fire. Put it out." in result.out
    monkeypatch.undo()
    left = small.report("run", "--once")
    assert [(entry["topic"], entry["rule"], entry["rows"]) for entry in left["topics"]] == [
        ("orders", "expired", 2),
        ("orders", "invalid_transaction", 1),
    ]


def test_given_a_damaged_store_when_run_then_it_fails_in_a_sentence(small: Janitor) -> None:
    (small.place.store / "system.tms.message" / "CURRENT").write_text("nonsense\n")
    result = small("run", "--once", "--adopt")
    assert result.code == 1
    assert "does not name a MANIFEST" in result.err
    assert "Traceback" not in result.err


def test_given_a_layout_of_cdap_6_when_run_then_it_is_refused_by_name(small: Janitor) -> None:
    (small.place.store / "cdap_system.tms.message.orders.1").mkdir()
    result = small("run", "--once", "--adopt")
    assert result.code == 2
    assert "is in a layout of CDAP 6 (cdap_system.tms.message.orders.1)" in result.err
    assert "Only stores of CDAP 4.0 to 5.1" in result.err


def test_given_no_store_when_run_then_none_is_made(small: Janitor) -> None:
    nowhere = small.place.folder / "nowhere"
    result = small.bare("run", "--once", "--adopt", "--leveldb", str(nowhere))
    assert result.code == 1
    assert result.err.splitlines() == [f"There is no folder {nowhere}.", "Give the folder that holds system.tms.meta."]
    assert list(small.place.folder.glob("nowhere*")) == []


def test_given_a_topic_whose_metadata_does_not_parse_when_run_then_it_is_named_and_kept(small: Janitor) -> None:
    small.place.fill(lambda store: topic(store, "default:orders", ttl_seconds=1).write_metadata(b'{"ttl":"soon"}'))
    result = small("run", "--once", "--adopt")
    assert result.code == 0
    assert "metadata: topic default:orders" in result.out
    assert "kept on purpose: 4 of unknown topics" in result.out
