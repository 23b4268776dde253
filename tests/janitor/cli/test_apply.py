"""``janitor apply``: it names the changes since the plan, and then changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import Topic
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId


def change(kit: CommandKit, write: Callable[[Topic], object]) -> None:
    """Change the topic ``orders`` as CDAP does."""
    with LevelDBStore(kit.store) as store:
        write(Topic(store, TopicId("default", "orders")))


def replace_by_copy(kit: CommandKit) -> None:
    """Replace the store by a copy: the same rows in other files."""
    shutil.copytree(kit.store, kit.folder / "backup")
    shutil.rmtree(kit.store)
    shutil.move(kit.folder / "backup", kit.store)


def protect(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {protect: ['default:audit'], "))


@pytest.mark.parametrize(
    ("change_store", "named"),
    [
        (
            lambda kit: change(kit, lambda orders: orders.describe(ttl_seconds=86399)),
            "topic default:orders has a ttl of 86399 s, the plan has 86400 s",
        ),
        (
            lambda kit: change(kit, lambda orders: orders.describe(ttl_seconds=86400, generation=2)),
            "topic default:orders has generation 2, the plan has 1",
        ),
        (
            lambda kit: change(kit, lambda orders: orders.write_metadata(b"{}")),
            "topic default:orders no longer has readable metadata",
        ),
        (protect, "these settings have changed since the plan was made: protect"),
        (replace_by_copy, "it was made for another store, or for this store before the store was copied or restored"),
    ],
    ids=["ttl", "generation", "metadata", "protect", "store"],
)
def test_apply_of_a_stale_plan_is_rejected(
    kit: CommandKit, change_store: Callable[[CommandKit], None], named: str
) -> None:
    kit.janitor("adopt")
    kit.janitor("plan --out plan.json")
    change_store(kit)
    before = kit.janitor("inspect message --format json").json["rows"]
    refused = kit.janitor("apply plan.json")
    assert (refused.code, refused.out) == (3, "")
    assert (
        f"error: the plan was not applied: {named}. [TMS-PLAN-REFUSED]\n"
        "hint: Make a new plan: janitor plan --out FILE --config janitor.yaml\n" in refused.err
    )
    assert kit.janitor("inspect message --format json").json["rows"] == before


@pytest.mark.parametrize("line", ["plan", "run --once --adopt", "inspect message", "verify", "adopt"])
def test_command_on_a_damaged_store_exits_1_without_traceback(kit: CommandKit, line: str) -> None:
    current: Path = kit.store / "system.tms.message" / "CURRENT"
    current.write_text("nonsense\n")
    failed = kit.janitor(line)
    assert (failed.code, failed.out) == (1, "")
    assert f"{current} does not name a MANIFEST" in failed.err
    assert "[TMS-STORE]" in failed.err
    assert "Traceback" not in failed.err


def test_apply_of_an_invalid_plan_file_exits_2_and_leaves_the_store_unopened(kit: CommandKit) -> None:
    (kit.folder / "plan.json").write_text("{}", encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in kit.store.rglob("*")}
    assert kit.janitor("apply plan.json --adopt").code == 2
    assert {path: path.stat().st_mtime_ns for path in kit.store.rglob("*")} == before
