"""The daemon on a sample store, with somebody who gives it work: ``make run``.

The store is one that CDAP's own classes wrote, with two topics more: one whose messages live for seconds and are
published while one looks on, and one whose ttl is shortened after a while, as a person might do by mistake. So within
a minute rows have expired, an old generation has gone, an invalid transaction's rows have been inverted, and something
was held and let go. The daemon is the real one, and every command works against it from another terminal.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event, Thread

import click

from janitor.cli.context import Session
from janitor.cli.options import Common
from janitor.cli.serve import serve
from janitor.daemon import Daemon
from janitor.demo import ROOT, SAMPLE, unpack
from janitor.logs import configure
from janitor.picture import Picture, RunSummary
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreBusy, StoreError, TmsError
from tms_core.rowkey import MessageKey
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.leveldb import LevelDBStore
from tms_core.topic import TopicId, encode_properties

#: Messages of this one live for ten seconds.
TICKS = TopicId("demo", "ticks")
TICKS_TTL_SECONDS = 10
#: This one has a message for each second of the last hour, and keeps them for a day, until somebody types 600 s.
ORDERS = TopicId("demo", "orders")
ORDERS_TTL_SECONDS, MISTAKEN_TTL_SECONDS = 86_400, 600
#: How many runs may end while the narrator is looking elsewhere.
RECENT_RUNS = 50
#: How often a second passes for the narrator; a test makes it shorter.
STEP_SECONDS = 1.0
#: When the ttl is shortened, and when what it held is let go, in steps.
SHORTEN_AT, APPROVE_AT = 15, 35

SETTINGS = """\
# Written by `make run`: the standalone defaults, in a hurry.
storage: {{kind: leveldb, leveldb: {{path: messaging}}}}
transactions:
  {{source: directory, directory: tx.snapshot, snapshot_interval_seconds: 86400, max_lifetime_seconds: 90000}}
janitor:
  every_seconds: 3
  hold_seconds: 300
  state: janitor
  canary: {{enabled: false}}
  http: {{port: {port}}}
"""


def main(folder: Path = ROOT / "data" / "run", clock: Clock | None = None, port: int = 9847) -> int:
    """Unpack the sample, start the daemon on it and tell what happens; returns an exit code.

    Args:
        folder: where to work; what was there is removed.
        clock: what time it is; the machine's by default.
        port: of the status page; 0 takes a free one.
    """
    clock = clock or SystemClock()
    if not SAMPLE.exists():
        click.echo(f"the sample store {SAMPLE} is missing; it comes with a checkout, not with a package", err=True)
        return 1
    if in_use(folder / "messaging"):
        where = f"http://localhost:{port}/"
        click.echo(f"a janitor is at work in {folder}: end that one first, or look at {where}", err=True)
        return 1
    store, _ = unpack(folder, clock)
    _furnish(store, clock)
    settings = folder / "janitor.yaml"
    settings.write_text(SETTINGS.format(port=port), encoding="utf-8")
    configure("text" if sys.stderr.isatty() else "auto", sys.stderr)
    try:
        current = Session(Common(config=settings), clock)
        shown = f"--config {settings.relative_to(Path.cwd()) if settings.is_relative_to(Path.cwd()) else settings}"
        _say(f"A messaging store that CDAP wrote, and a daemon on it. Ask it from another terminal, for example:\n"
             f"  .venv/bin/janitor status {shown}\n  .venv/bin/janitor plan {shown}\nCtrl-C ends it.")  # fmt: skip
        return serve(current, adopt=True, companion=partial(visitor, clock=clock, arguments=shown))
    except TmsError as error:
        click.echo(str(error), err=True)
        return 1


@contextmanager
def visitor(store: Store, daemon: Daemon, url: str, clock: Clock, arguments: str) -> Iterator[None]:
    """Somebody who publishes, makes a mistake, and tells what the janitor does about it."""
    _say(f"Its status page: {url}")
    gone = Event()
    thread = Thread(target=_visit, args=(store, daemon, clock, arguments, gone), name="visitor", daemon=True)
    thread.start()
    try:
        yield
    finally:
        gone.set()
        thread.join(10)


def _visit(store: Store, daemon: Daemon, clock: Clock, arguments: str, gone: Event) -> None:
    narrator = Narrator(_say)
    sequence = count()
    for step in count():
        if gone.wait(STEP_SECONDS):
            return
        publish(store, TICKS, [clock.now_ms()], sequence)
        narrator.look(daemon.picture(), daemon.runs(RECENT_RUNS))
        if step == SHORTEN_AT:
            describe(store, ORDERS, MISTAKEN_TTL_SECONDS)
            _say(
                f"somebody sets the ttl of {ORDERS} to {MISTAKEN_TTL_SECONDS} s: most of its messages would go at once"
            )
        if step == APPROVE_AT:
            _say(f"it was meant: janitor approve {ORDERS} {arguments}")
            daemon.engine.approve((str(ORDERS),))
            daemon.sweep_now()


class Narrator:
    """Tells of each thing once.

    Args:
        say: told each sentence.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._told: set[str] = set()
        self._held: set[str] = set()

    def look(self, picture: Picture, runs: Sequence[RunSummary]) -> None:
        """Tell what is new in a picture, and of the runs that have ended since."""
        ended = [run for run in reversed(runs) if run.finished_ms is not None and run.id not in self._told]
        self._told.update(run.id for run in ended)
        for run in ended:
            parts = (
                (run.expired, "expired"),
                (run.old_generation, "of old generations"),
                (run.invalid_transaction, "of invalid transactions, inverted"),
            )
            told = ", ".join(f"{number:,} {what}" for number, what in parts if number)
            if told:
                self._say(f"swept: {told}")
        for held in picture.held:
            if held.topic not in self._held and held.rows:
                self._say(f"held: {held.rows:,} rows of {held.topic}; let them go with: {held.command}")
        self._held = {held.topic for held in picture.held if held.rows}


def in_use(path: Path) -> bool:
    """Whether another process has this store open."""
    try:
        LevelDBStore(path).close()
    except StoreBusy:
        return True
    except StoreError:
        return False
    return False


def describe(store: Store, topic: TopicId, ttl_seconds: int) -> None:
    """Write a topic's metadata, as CDAP would."""
    table = store.metadata
    value = encode_properties({"generation": "1", "ttl": str(ttl_seconds)})
    table.compare_and_set(topic.prefix, table.get(topic.prefix), value)


def publish(store: Store, topic: TopicId, times_ms: list[int], sequence: Iterator[int]) -> None:
    """Publish messages outside transactions."""
    rows = [(MessageKey(topic, 1, ms, next(sequence) & 0xFFFF).pack(), MessageValue(None, b"tick")) for ms in times_ms]
    store.message.put(rows)


def _furnish(path: Path, clock: Clock) -> None:
    now_ms = clock.now_ms()
    with LevelDBStore(path) as store:
        describe(store, TICKS, TICKS_TTL_SECONDS)
        describe(store, ORDERS, ORDERS_TTL_SECONDS)
        publish(store, ORDERS, list(range(now_ms - 3_600_000, now_ms, 1000)), count())


def _say(text: str) -> None:
    click.secho(text, bold=True)


if __name__ == "__main__":
    sys.exit(main())
