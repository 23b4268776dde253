"""``janitor archive``: lists and restores deleted rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from janitor.archive import parquet
from janitor.cli import archive
from janitor.cli.main import cli
from janitor.state.sqlite.state import SqliteState
from tests.archives import Undo
from tests.builders import DAY, HOUR, NOW_MS, topic, unknown_topic, visibility
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tms_core.rowkey import MessageId
from tms_core.tables.leveldb.store import LevelDBStore

ARCHIVED = SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, ")
OLD_MS = NOW_MS - 2 * DAY


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.commands, "archive", archive.command)


@pytest.fixture
def archived(kit: CommandKit) -> CommandKit:
    """Return a store with two more topics, from each of which two messages were deleted, one of them invalid."""
    kit.set(ARCHIVED)
    with LevelDBStore(kit.store) as store:
        for name, generation in (("default:billing", 1), ("default:shipping", 2)):
            made = topic(store, name, ttl_seconds=86_400, generation=generation)
            made.plain(OLD_MS, body=b"old").tx(INVALID, OLD_MS + HOUR)
            undo = Undo(store, Path("data/archive"), kit.clock)
            undo.sweep(made, run_id=f"run-{generation}", snapshot=visibility(NOW_MS, invalid=[INVALID]))
    return kit


def pause(kit: CommandKit, pattern: str) -> None:
    with SqliteState(kit.folder / "data" / "janitor") as state:
        state.pause(pattern, kit.clock.now_ms())


def billing(kit: CommandKit) -> list[tuple[int, int | None]]:
    with LevelDBStore(kit.store) as store:
        return [(key.publish_ms, value.pointer) for key, value in unknown_topic(store, "default:billing").messages()]


def test_archive_list_shows_a_line_per_topic(archived: CommandKit) -> None:
    shown = archived.janitor("archive list")
    assert (shown.code, shown.err) == (0, "")
    lines = [line.split() for line in shown.out.splitlines()]
    assert lines[1][:7] == ["default:billing", "2023-11-14", "run-1", "1", "expired", "2", "0"]
    assert lines[2][:4] == ["default:shipping", "2023-11-14", "run-2", "2"]
    listed = archived.janitor("archive list --topic 'default:b*' --format json").json
    assert [(group["topic"], group["messages"]) for group in listed["archived"]] == [("billing", 2)]
    assert (listed["path"].endswith("data/archive"), listed["damaged"]) == (True, [])


@pytest.mark.parametrize(
    ("options", "topics"),
    [
        ("--run run-2", ["shipping"]),
        (f"--since {OLD_MS + HOUR}", ["billing", "shipping"]),
        ("--since now-1d", []),
        ("--until now-1d", ["billing", "shipping"]),
    ],
)
def test_archive_list_by_options_shows_the_topics(archived: CommandKit, options: str, topics: list[str]) -> None:
    listed = archived.janitor(f"archive list {options} --format json").json
    assert [group["topic"] for group in listed["archived"]] == topics


def test_archive_list_without_archive_names_the_setting_only_if_disabled(kit: CommandKit) -> None:
    assert "janitor.archive.enabled is false" in kit.janitor("archive list").out
    kit.set(ARCHIVED)
    [line] = kit.janitor("archive list").out.splitlines()
    assert "janitor.archive.enabled" not in line


def test_archive_list_with_a_damaged_file_names_it_and_shows_the_rest(archived: CommandKit) -> None:
    [path] = Path("data/archive").glob("*/topic=billing/*/*.parquet")
    path.write_bytes(b"nothing")
    shown = archived.janitor("archive list")
    assert shown.code == 5
    assert "default:shipping" in shown.out
    assert f"{path.name} cannot be read" in shown.out
    [damaged] = archived.janitor("archive list --format json").json["damaged"]
    assert path.name in damaged
    refused = archived.janitor("archive restore default:billing --dry-run")
    assert (refused.code, path.name in refused.err) == (1, True)


def test_archive_restore_needs_a_pause_except_in_a_dry_run(archived: CommandKit) -> None:
    assert archived.janitor("archive restore default:billing").code == 3
    dry = archived.janitor("archive restore default:billing --dry-run --format json")
    assert (dry.code, dry.json["restored"], billing(archived)) == (0, 2, [])


def test_archive_restore_brings_rows_back_inverted_if_invalid(archived: CommandKit) -> None:
    pause(archived, "default:billing")
    outcome = archived.janitor("archive restore default:billing --dry-run")
    listed, summary = outcome.out.split("\n2 rows would be restored to ")
    cells = listed.splitlines()[1].split()
    assert cells[:7] == ["default:billing", "2023-11-14", "run-1", "1", "expired", "2", "0"]
    assert listed.count("2023-11-12") == 2
    assert summary.startswith("default:billing, generation 1: 2 messages, 0 payloads\n")
    [group] = archived.janitor("archive restore default:billing --dry-run --format json").json["archived"]
    assert (group["run_id"], group["oldest_ms"], group["newest_ms"]) == ("run-1", OLD_MS, OLD_MS + HOUR)
    assert billing(archived) == []
    done = archived.janitor("archive restore default:billing")
    assert done.code == 0
    assert done.out.startswith("2 rows restored to default:billing, generation 1")
    assert "1 of them" in done.out
    assert "first set the ttl of the topic to 3d" in done.out
    assert billing(archived) == [(OLD_MS, None), (OLD_MS + HOUR, -INVALID)]
    again = archived.janitor("archive restore default:billing --format json").json
    assert (again["restored"], again["already_there"], again["warnings"]) == (0, 2, [])


def test_why_of_an_archived_message_prints_working_commands(archived: CommandKit) -> None:
    shown = archived.janitor(f"why default:billing {MessageId(OLD_MS, 0)}").out.splitlines()
    commands = [line.removeprefix("  janitor ") for line in shown if line.startswith("  janitor ")]
    assert [command.split()[0] for command in commands] == ["pause", "archive"]
    for command in commands:
        assert archived.run(command).code == 0
    assert billing(archived) == [(OLD_MS, None)]
    never_there = archived.janitor(f"why default:billing {MessageId(OLD_MS, 7)}").out
    assert "archived" not in never_there


@pytest.mark.parametrize(
    "line", ["restore", "restore default:*", "restore nonsense", "restore default:a --to x", "list --since never"]
)
def test_archive_with_an_invalid_topic_or_time_exits_2(archived: CommandKit, line: str) -> None:
    assert archived.janitor(f"archive {line}").code == 2


def test_archive_list_with_a_url_as_path_exits_2(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {path: 's3://bucket/archive'}, "))
    assert kit.janitor("archive list").code == 2


@pytest.mark.parametrize("verb", ["plan", "boundary"])
def test_plan_with_an_archive_needs_no_pyarrow(kit: CommandKit, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: archive}, "))
    monkeypatch.setattr(parquet, "find_spec", lambda _: None)
    answered, run = kit.janitor(verb), kit.janitor("run --once --adopt")
    assert (answered.code, "pyarrow" in answered.err, run.code, "pyarrow" in run.err) == (0, False, 2, True)
