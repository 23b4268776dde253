"""``janitor spark``: the same work at cluster size."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from janitor import plan
from janitor.cli import render
from janitor.cli.context import Session, session
from janitor.cli.options import Command, Common, common_options, topic_patterns
from janitor.cli.outcome import finish
from janitor.engine import Engine
from janitor.policy import Rule
from janitor.report import Report
from janitor.run_log import RunLog
from janitor.settings import config_digest
from janitor.state.base import State
from tms_core.clock import Clock
from tms_core.errors import ConfigurationError, StoreBusy
from tms_core.tables.base import Store
from tms_core.transaction.source import SnapshotSource

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from janitor.spark.stats import GenerationStats

_ON_SPARK = (
    click.option(
        "--master",
        metavar="URL",
        help="Where Spark is: local[*] (the default), spark://…, k8s://…, sc://… (Connect).",
    ),
    click.option("--partitions", type=click.IntRange(min=1), help="About how many tasks; default: by size."),
)


def on_spark(command: Command) -> Command:
    """Add the options that say where Spark is, and how many tasks there are to be."""
    for option in reversed(_ON_SPARK):
        command = option(command)
    return command


@click.group("spark")
def command() -> None:
    """The same work on Spark, for stores too large for one process."""


@command.command("stats")
@on_spark
@topic_patterns
@click.option("--what-if", metavar="POLICY", help="Judge by another policy: ttl=3d,topic=default:*")
@click.option("--out", metavar="PATH", help="Write them as Parquet into PATH/day=YYYY-MM-DD, too.")
@click.option("--remember", is_flag=True, help="Let status page and metrics show the counts.")
@common_options
def stats(
    master: str | None,
    partitions: int | None,
    patterns: tuple[str, ...],
    what_if: str | None,
    out: str | None,
    remember: bool,
) -> None:
    """Count what lies in a store, and what the law would take of it.

    Every row is read: how many there are, how old, how many are overdue and by which rule, which
    payloads no message refers to, which are missing, and what blocks readers. With --what-if
    beside what another ttl would take. Changes nothing in the store.

    \b
    Examples:
      janitor spark stats --config janitor.yaml
      janitor spark stats --what-if 'ttl=3d,topic=default:*' --config janitor.yaml
      janitor spark stats --master spark://head:7077 --out data/stats --config janitor.yaml
    """
    from janitor.spark import session as on  # noqa: PLC0415

    on.require_pyspark()
    from janitor.spark import stats as counting  # noqa: PLC0415
    from janitor.spark.access import Access  # noqa: PLC0415
    from janitor.spark.source import register  # noqa: PLC0415
    from janitor.spark.whatif import WhatIf  # noqa: PLC0415

    if what_if is not None:
        WhatIf.parse(what_if)
        if remember:
            raise ConfigurationError("--remember is for what is there, and --what-if for what is not.", "Give one.")
    current = session()
    current.place.require()
    access, now_ms = Access(current.settings), current.clock.now_ms()
    transactions = access.transactions(now_ms, current.clock)
    options = source_options(current, patterns, partitions)
    day = datetime.fromtimestamp(now_ms / 1000, UTC).date().isoformat()
    with on.session(master) as spark:
        register(spark)
        found = counting.count(spark, options, now_ms, transactions)
        changed = counting.count(spark, {**options, "what_if": what_if}, now_ms, transactions) if what_if else None
        written = counting.write(spark, found, _absolute(out), day) if out else None
    if remember:
        with access.reading() as store, current.place.memory() as state:
            counting.save(state, found, counting.living(store), now_ms)
    if current.as_json:
        shown = {"effective_now_ms": now_ms, "topics": [one.to_json() for one in found], "written": written}
        if changed is not None:
            shown["what_if"] = {"policy": what_if, "topics": [one.to_json() for one in changed]}
        render.print_json(shown)
    else:
        show(found, changed, now_ms)
        if written:
            render.console().print(f"written to {written}")


@command.command("sweep")
@on_spark
@click.option("--dry-run", is_flag=True, help="Only plan; nothing is written to the store.")
@click.option("--adopt", is_flag=True, help="Accept a store met for the first time, with all that is due in it.")
@click.option("--skip-if-locked", is_flag=True, help="Exit 0 when another process holds the store.")
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
    """Delete what is due, with tasks on Spark.

    One pass, as janitor run --once makes it: the same law, guards, lease, report and exit codes.
    In HBase tasks delete, each under one salt, and the rate is shared out among them. In LevelDB
    tasks plan, on clones, and this process carries the plan out as janitor apply does.

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
    with on.session(master) as spark:
        desk = _SparkDesk(current.common, current.clock, spark, partitions)
        if dry_run:
            with desk.looking() as engine:
                report = engine.plan(patterns=patterns).report
            return _print_plan(current, report)
        try:
            report = desk.sweep(adopt=adopt, patterns=patterns)
        except StoreBusy as error:
            if not skip_if_locked:
                raise
            click.echo(f"skipped: {error}", err=True)
            return 0
    RunLog().write(report)
    return finish(current, report)


class _SparkDesk(Session):
    """A session whose engines have their passes walked on Spark."""

    def __init__(self, common: Common, clock: Clock, spark: SparkSession, partitions: int | None) -> None:
        super().__init__(common, clock)
        self._spark = spark
        self._partitions = partitions

    def engine(self, store: Store, state: State, *, source: SnapshotSource | None = None, **options: Any) -> Engine:
        from janitor.spark.access import Access  # noqa: PLC0415
        from janitor.spark.sender import SparkSender  # noqa: PLC0415
        from janitor.spark.sweep import SparkEngine, cutter  # noqa: PLC0415
        from janitor.spark.tasks import StoreGround  # noqa: PLC0415

        access, janitor = Access(self.settings), self.settings.janitor
        return SparkEngine(
            store,
            state,
            source or self.source(),
            self.clock,
            self.terms(),
            sender=SparkSender(self._spark, StoreGround(access)),
            cut=cutter(access, self._partitions),
            rows_per_second=janitor.rate_rows_per_second,
            archive_days=janitor.archive.keep_days,
            **self._options(),
            **options,
        )

    def looking(self) -> AbstractContextManager[Engine]:
        """An engine that cannot write."""
        return self._cloned()

    def sweep(self, *, adopt: bool, patterns: tuple[str, ...]) -> Report:
        """One pass that deletes."""
        if not self.place.exclusive:
            with self.feedback() as feedback, self.writing(feedback) as engine:
                return engine.run_once(adopt=adopt, patterns=patterns)
        with self.looking() as engine:
            document = engine.plan(patterns=patterns, digest=config_digest(self.settings)).document
        with Session(self.common, self.clock).writing() as engine:
            return engine.apply(plan.parse(document, "the plan"), adopt=adopt)


def _print_plan(current: Session, report: Report) -> int:
    if current.as_json:
        render.print_json(report.to_json())
    else:
        render.print_report(report)
    return 0


def source_options(current: Session, patterns: tuple[str, ...], partitions: int | None) -> dict[str, str]:
    """Options of the source that lead to the store of a command, also from another folder."""
    common, found = current.common, {}
    if common.config is not None:
        found["config"] = str(common.config.absolute())
    for name in ("leveldb", "snapshots"):
        given = getattr(common, name)
        if given is not None:
            found[name] = _absolute(given)
    if common.hbase is not None:
        found["hbase"] = common.hbase
    if patterns:
        found["topics"] = ",".join(patterns)
    if partitions is not None:
        found["partitions"] = str(partitions)
    return found


def _absolute(place: str) -> str:
    """A path or a URL, for processes that work in other folders."""
    return place if "://" in place else str(Path(place).absolute())


def show(found: list[GenerationStats], changed: list[GenerationStats] | None, now_ms: int) -> None:
    """Statistics as a person reads them.

    Args:
        changed: the same by another policy; None without one.
    """
    out = render.console()
    if not found:
        out.print("nothing lies in this store")
        return
    columns = ["topic", "gen", "messages", "payloads", "bytes", "oldest", "newest", "overdue", "orphans", "missing"]
    columns += ["blocked since"] if changed is None else ["then overdue", "difference"]
    table = render.grid(columns, right=range(2, len(columns)))
    later = {(one.topic, one.generation): one for one in changed or ()}
    for one in found:
        then = later.get((one.topic, one.generation))
        table.add_row(
            str(one.topic),
            str(one.generation),
            f"{one.rows:,}",
            f"{one.payload_rows:,}",
            render.size(one.size_bytes),
            _age(one.oldest_ms, now_ms),
            _age(one.newest_ms, now_ms),
            f"{_overdue(one.overdue):,}",
            f"{one.orphans:,}",
            f"{one.missing:,}",
            *(
                [_age(one.to_json()["blocking_since_ms"], now_ms)]
                if changed is None
                else [f"{_overdue(then.overdue if then else {}):,}", f"{_difference(one, then):+,}"]
            ),
        )
    render.print_table(table)
    totals: dict[str, Any] = {
        "messages": sum(one.rows for one in found),
        "payloads": sum(one.payload_rows for one in found),
        **{str(rule): sum(one.overdue[rule] for one in found) for rule in (Rule.EXPIRED, Rule.OLD_GENERATION)},
    }
    out.print(", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in totals.items()))


def _overdue(overdue: Mapping[str, int]) -> int:
    return sum(overdue.values())


def _difference(one: GenerationStats, then: GenerationStats | None) -> int:
    return _overdue(then.overdue if then else {}) - _overdue(one.overdue)


def _age(ms: int | None, now_ms: int) -> str:
    return "" if ms is None else render.duration(now_ms - ms)
