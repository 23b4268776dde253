"""``janitor spark``: counts and sweeps of a large store on Spark."""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from janitor.cli import render
from janitor.cli.options import common_options, session, topic_patterns
from janitor.cli.outcome import finish, show, skip
from janitor.cli.run import after_run
from janitor.rules.policy import Rule
from janitor.run.log import RunLog
from tms_core.cli.help import CommandGroup, combine_options
from tms_core.errors import BUSY
from tms_core.logs.printable import duration

if TYPE_CHECKING:
    from janitor.app.session import Session
    from janitor.spark.stats import GenerationStats

#: The options for Spark's address and the number of tasks.
on_spark = combine_options(
    click.option(
        "--master",
        metavar="URL",
        help="The Spark master: local[*] (the default), spark://…, k8s://…, sc://… (Connect).",
    ),
    click.option(
        "--partitions", type=click.IntRange(min=1), metavar="N", help="Approximate number of tasks; default: by size."
    ),
)


@click.group("spark", cls=CommandGroup)
def command() -> None:
    """Count and clean a large store on Spark."""


@command.command("stats")
@on_spark
@topic_patterns
@click.option("--out", metavar="PATH", help="Also write the counts as Parquet to PATH/day=YYYY-MM-DD.")
@click.option(
    "--remember/--no-remember",
    default=True,
    help="Show the result on the status page and in metrics (the default), or not.",
)
@common_options
def stats(
    master: str | None, partitions: int | None, patterns: tuple[str, ...], out: str | None, remember: bool
) -> None:
    """Count all rows of a store, and the overdue rows.

    The command reads every row. It shows the number and age of rows, overdue rows by rule, payloads
    without a message, references to missing payloads, and the transactions that block readers. It
    does not change the store.

    \b
    Examples:
      janitor spark stats --config janitor.yaml
      janitor spark stats --master spark://head:7077 --out data/stats --config janitor.yaml
    """
    from janitor.spark import session as on  # noqa: PLC0415

    on.require_pyspark()
    from janitor.spark import stats as counting  # noqa: PLC0415
    from janitor.spark.access import Access  # noqa: PLC0415
    from janitor.spark.source.source import register  # noqa: PLC0415

    current = session()
    current.place.require()
    access, now_ms = Access(current.settings), current.clock.now_ms()
    transactions = access.transactions(now_ms, current.clock)
    options = source_options(current, patterns, partitions)
    day = datetime.fromtimestamp(now_ms / 1000, UTC).date().isoformat()
    with on.convert_sigterm(), on.session(master) as spark:
        register(spark)
        found = on.run_on_spark(spark, lambda: counting.count(spark, options, now_ms, transactions), name="count")
        place = _absolute(out) if out else None
        written = (
            on.run_on_spark(spark, lambda: counting.write(spark, found, place, day), name="write the counts")
            if place
            else None
        )
    if remember:
        with access.reading() as store, current.place.state() as state:
            living = {
                t: g for t, g in counting.existing_generations(store).items() if not patterns or t.matches(patterns)
            }
            counting.save(state, found, living, now_ms, whole=not patterns)
    if current.as_json:
        output = {"effective_now_ms": now_ms, "topics": [one.to_json() for one in found], "written": written}
        render.print_json(output)
    else:
        show_stats(found, now_ms)
        if written:
            render.console().print(f"written to {written}")


@command.command("sweep")
@on_spark
@click.option("--dry-run", is_flag=True, help="Only make a plan; do not write to the store.")
@click.option("--adopt", is_flag=True, help="Adopt the store, and delete its due rows.")
@click.option("--skip-if-locked", is_flag=True, help="Exit with 0 if another process holds the store.")
@topic_patterns
@common_options
def sweep(
    master: str | None,
    partitions: int | None,
    dry_run: bool,
    adopt: bool,
    skip_if_locked: bool,
    patterns: tuple[str, ...],
) -> int:
    """Delete expired rows with tasks on Spark.

    The command makes one pass like janitor run --once, with the same rules, guards, lease, report and
    exit codes. On HBase, each task deletes rows of one salt, and the tasks share the rate limit. A
    large salt has several tasks if its topics were counted. On LevelDB, the tasks search clones of
    the store, and this process deletes the rows that they find.

    \b
    Examples:
      janitor spark sweep --dry-run --config janitor.yaml
      janitor spark sweep --master 'local[4]' --config janitor.yaml
      janitor spark sweep --master spark://head:7077 --hbase thrift1:9090,thrift2:9090
    """
    from janitor.spark import session as on  # noqa: PLC0415

    on.require_pyspark()
    current = session()
    current.place.require()
    if not dry_run and not current.settings.janitor.apply:
        click.echo("janitor.apply is false, so this is only a plan; set it to true to delete", err=True)
        dry_run = True
    from janitor.app.on_spark import SessionOnSpark  # noqa: PLC0415

    with ExitStack() as stack:
        try:
            skips = BUSY if skip_if_locked else ()
            with nullcontext() if dry_run else current.record_failure(skips=skips):
                spark = stack.enter_context(on.session(master))
                tasks = SessionOnSpark(current, spark, partitions)
                if dry_run:
                    show(current, tasks.preview(patterns))
                    return 0
                engine = stack.enter_context(tasks.writing(stack.enter_context(tasks.feedback()), waits=True))
            report = engine.run_once(adopt=adopt, patterns=patterns)
            after_run(engine)
        except BUSY as error:
            if not skip_if_locked:
                raise
            return skip(current, error)
    RunLog(current.arguments()).write(report)
    return finish(current, report)


def source_options(current: Session, patterns: tuple[str, ...], partitions: int | None) -> dict[str, str]:
    """Return the options of the Spark source for the store of a command, with absolute paths."""
    common, found = current.common, {}
    if common.config is not None:
        found["config"] = str(common.config.absolute())
    for name in ("leveldb", "snapshots"):
        folder = getattr(common, name)
        if folder is not None:
            found[name] = _absolute(folder)
    if common.hbase is not None:
        found["hbase"] = common.hbase
    if patterns:
        found["topics"] = ",".join(patterns)
    if partitions is not None:
        found["partitions"] = str(partitions)
    return found


def _absolute(place: str) -> str:
    """Return an absolute path, or a URL unchanged."""
    return place if "://" in place else str(Path(place).absolute())


def show_stats(found: list[GenerationStats], now_ms: int) -> None:
    """Print statistics as text."""
    out = render.console()
    if not found:
        out.print("this store is empty")
        return
    columns = ["topic", "gen", "messages", "payloads", "bytes", "oldest", "newest", "overdue", "orphans", "missing"]
    columns.append("blocked since")
    table = render.grid(columns, right=range(2, len(columns)))
    for one in found:
        table.add_row(
            str(one.topic),
            str(one.generation),
            f"{one.rows:,}",
            f"{one.payload_rows:,}",
            render.size(one.size_bytes),
            _age(one.oldest_ms, now_ms),
            _age(one.newest_ms, now_ms),
            f"{sum(one.overdue.values()):,}",
            f"{one.orphan_payloads:,}",
            f"{one.missing_payloads:,}",
            _age(one.blocking_since_ms, now_ms),
        )
    render.print_table(table)
    totals: dict[str, Any] = {
        "messages": sum(one.rows for one in found),
        "payloads": sum(one.payload_rows for one in found),
        **{str(rule): sum(one.overdue[rule] for one in found) for rule in (Rule.EXPIRED, Rule.OLD_GENERATION)},
    }
    out.print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in totals.items()))
    blocked = [one for one in found if one.blocking_transaction is not None]
    if blocked:
        worst = min(blocked, key=lambda one: one.blocking_transaction or 0)
        out.print(f"transaction {worst.blocking_transaction} has blocked readers of {worst.topic} for longest")


def _age(ms: int | None, now_ms: int) -> str:
    return "" if ms is None else duration(now_ms - ms)
