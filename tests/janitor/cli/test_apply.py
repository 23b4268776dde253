"""``janitor apply``: what moved since the plan is named, and then nothing is done."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.builders import Topic
from tests.janitor.cli.conftest import SETTINGS, Site
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId


def change(site: Site, write: Callable[[Topic], object]) -> None:
    """Let CDAP change the topic of the orders."""
    with LevelDBStore(site.store) as store:
        write(Topic(store, TopicId("default", "orders")))


def replace_by_copy(site: Site) -> None:
    """Restore a backup: the same rows in other files."""
    shutil.copytree(site.store, site.folder / "backup")
    shutil.rmtree(site.store)
    shutil.move(site.folder / "backup", site.store)


def protect(site: Site) -> None:
    site.set(SETTINGS.replace("janitor: {", "janitor: {protect: ['default:audit'], "))


@pytest.mark.parametrize(
    ("move", "named"),
    [
        (
            lambda site: change(site, lambda orders: orders.describe(ttl_seconds=86399)),
            "topic default:orders has a ttl of 86399 s, the plan says 86400 s",
        ),
        (
            lambda site: change(site, lambda orders: orders.describe(ttl_seconds=86400, generation=2)),
            "topic default:orders is at generation 2, the plan at 1",
        ),
        (
            lambda site: change(site, lambda orders: orders.write_metadata(b"{}")),
            "topic default:orders no longer has readable metadata",
        ),
        (protect, "these settings have changed since the plan was made: protect"),
        (replace_by_copy, "it was made for another store, or for this store before the store was copied or restored"),
    ],
    ids=["ttl", "generation", "metadata", "protect", "store"],
)
def test_given_something_moved_since_the_plan_when_applied_then_it_is_named_and_nothing_is_done(
    site: Site, move: Callable[[Site], None], named: str
) -> None:
    site.janitor("adopt")
    site.janitor("plan --out plan.json")
    move(site)
    before = site.janitor("inspect message --format json").json["rows"]
    refused = site.janitor("apply plan.json")
    assert (refused.code, refused.out) == (3, "")
    assert (
        f"error: the plan was not applied: {named}. [TMS-PLAN-REFUSED]\n"
        "hint: Make a new one: janitor plan --out FILE --config janitor.yaml\n" in refused.err
    )
    assert site.janitor("inspect message --format json").json["rows"] == before


@pytest.mark.parametrize("line", ["plan", "run --once --adopt", "inspect message", "verify", "adopt"])
def test_given_a_damaged_store_then_every_command_fails_in_a_sentence(site: Site, line: str) -> None:
    current: Path = site.store / "system.tms.message" / "CURRENT"
    current.write_text("nonsense\n")
    failed = site.janitor(line)
    assert (failed.code, failed.out) == (1, "")
    assert f"{current} does not name a MANIFEST" in failed.err
    assert "[TMS-STORE]" in failed.err
    assert "Traceback" not in failed.err


def test_given_a_file_that_is_no_plan_when_applied_then_the_store_is_not_even_opened(site: Site) -> None:
    (site.folder / "plan.json").write_text("{}", encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in site.store.rglob("*")}
    assert site.janitor("apply plan.json --adopt").code == 2
    assert {path: path.stat().st_mtime_ns for path in site.store.rglob("*")} == before
