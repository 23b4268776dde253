"""``janitor archive``: the list of archived rows, and their restore."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from janitor.archive import folder as archive_folder
from janitor.archive import index as archived
from janitor.archive.index import Listing, Selection
from janitor.archive.restore import Request, RestoreResult
from janitor.cli import render
from janitor.cli.options import PARTLY, common_options, session, topic_patterns
from janitor.cli.state import complete_topics
from tms_core.cli.help import CommandGroup, combine_options
from tms_core.cli.outcome import DONE
from tms_core.cli.typed import Moment, TimeType, TopicType
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from janitor.app.session import Session

#: The options that select rows.
selecting = combine_options(
    click.option("--run", "run_id", metavar="RUN_ID", help="Only rows that this run deleted."),
    click.option("--since", type=TimeType(), help="Only rows published at this time or later."),
    click.option("--until", type=TimeType(), help="Only rows published before this time."),
)


@click.group("archive", cls=CommandGroup)
def command() -> None:
    """List and restore archived rows."""


@command.command("list")
@topic_patterns
@selecting
@common_options
def show(patterns: tuple[str, ...], run_id: str | None, since: Moment | None, until: Moment | None) -> int:
    """List archived rows by topic, day and run.

    The exit code is 5 if a file of the archive cannot be read; the command lists the other files.

    \b
    Examples:
      janitor archive list --config janitor.yaml
      janitor archive list --topic 'default:*' --since now-2d --config janitor.yaml
    """
    current = session()
    folder = archive_folder.local_folder(current.settings.janitor.archive.path)
    found = archived.find(folder, patterns)
    groups = archived.groups(found.files, _selection(current, run_id, since, until))
    if current.as_json:
        damaged = [str(error) for error in found.damaged]
        render.print_json({"path": str(folder), "archived": groups, "damaged": damaged})
    else:
        _show_groups(current, groups, found)
    return PARTLY if found.damaged else DONE


@command.command("restore")
@click.argument("topic", type=TopicType(), metavar="NS:TOPIC", shell_complete=complete_topics)
@click.option("--to", "target", type=TopicType(), metavar="NS:TOPIC", help="Restore to another topic, paused or not.")
@click.option("--dry-run", is_flag=True, help="Only list and count the rows; write nothing.")
@selecting
@common_options
def restore(
    topic: TopicId,
    target: TopicId | None,
    dry_run: bool,
    run_id: str | None,
    since: Moment | None,
    until: Moment | None,
) -> None:
    """Restore archived rows of a topic.

    The rows are written to the topic's current generation. Pause the topic first, except for
    --dry-run; otherwise the next run would delete them again. Existing rows stay unchanged. Rows of
    transactions that may not have committed are restored inverted, so that no transactional reader
    gets them.

    \b
    Examples:
      janitor archive restore default:orders --dry-run --config janitor.yaml
      janitor archive restore default:orders --since now-3d --config janitor.yaml
      janitor archive restore default:orders --to default:found --config janitor.yaml
    """
    current = session()
    folder = archive_folder.local_folder(current.settings.janitor.archive.path)
    request = Request(topic, target, _selection(current, run_id, since, until), dry_run)
    with current.reading() if dry_run else current.deciding() as engine:
        done = engine.restorable(folder, request) if dry_run else engine.restore(folder, request)
    found = _find_groups(folder, request) if dry_run else []
    if current.as_json:
        render.print_json({**done.to_json(), **({"archived": found} if dry_run else {})})
        return
    if found:
        _print_groups(found)
    _show_restored(done)


def _find_groups(folder: Path, request: Request) -> list[archived.Group]:
    """Return the parts of the archive that a restore reads, by day and run."""
    return archived.groups(archived.find_topic(folder, request.source), request.selection)


def _selection(current: Session, run_id: str | None, since: Moment | None, until: Moment | None) -> Selection:
    now_ms = current.clock.now_ms()
    return Selection(
        run_id=run_id,
        since_ms=None if since is None else since.at(now_ms),
        until_ms=None if until is None else until.at(now_ms),
    )


def _show_groups(current: Session, groups: list[archived.Group], found: Listing) -> None:
    out = render.console()
    if groups:
        _print_groups(groups)
    else:
        out.print("no archived rows match" if found.files else "no rows are archived")
        if not current.settings.janitor.archive.enabled:
            out.print("janitor.archive.enabled is false: deleted rows are lost")
    for error in found.damaged:
        out.print(render.styled(str(error), "bold red"))


def _print_groups(groups: list[archived.Group]) -> None:
    columns = ["topic", "deleted on", "run", "gen", "rule", "messages", "payloads", "bytes", "oldest", "newest"]
    table = render.grid(columns, right=(5, 6, 7))
    for group in groups:
        table.add_row(
            str(group.topic),
            group.day.isoformat(),
            group.run_id,
            ", ".join(map(str, group.generations)),
            ", ".join(group.rules),
            f"{group.messages:,}",
            f"{group.payloads:,}",
            render.size(group.size_bytes),
            render.moment(group.oldest_ms),
            render.moment(group.newest_ms),
        )
    render.print_table(table)


def _show_restored(done: RestoreResult) -> None:
    out = render.console()
    would = "would be " if done.dry_run else ""
    out.print(
        render.styled(
            f"{done.restored:,} rows {would}restored to {done.target}, generation {done.generation}: "
            f"{done.messages:,} messages, {done.payloads:,} payloads",
            "bold",
        )
    )
    for figure, meaning in (
        (done.negated, "of them inverted, because the janitor does not know that their transactions committed"),
        (done.already_there, "already present, unchanged"),
        (done.skipped, "not selected"),
    ):
        if figure:
            out.print(f"{figure:,} {meaning}")
    for warning in done.warnings:
        out.print(render.styled(warning, "yellow"))
