"""A server with the janitor inside, on a sample store with traffic: ``make run``.

CDAP's own classes wrote the store, and the transactions continue from CDAP's own snapshot. The tour adds five topics.
The messages of ``ticks`` live for seconds. The tour shortens the TTL of ``orders`` after a while, as an operator might
do by mistake. ``payments`` gets messages in three transactions: one commits, one rolls back, and one becomes invalid.
Two topics belong to a consumer group with three workers, one of which the tour kills (:mod:`examples.worker`).

Within a minute, the janitor deletes expired rows and an old generation, inverts rows of invalid transactions, and
holds and releases rows. Server and daemon are the real programs; you can run every command against them in another
terminal.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from http.client import HTTPConnection
from io import StringIO
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, cast
from urllib.parse import urlsplit

import click

from examples import worker
from examples.demo import ROOT, SAMPLE, unpack
from janitor.app.embedded import Embedded
from janitor.app.session import handle_signals
from janitor.cli.main import execute
from janitor.state.base import RunRecord
from janitor.status.status import Status
from tms_core.client import Client
from tms_core.clock import Clock, SystemClock
from tms_core.errors import StoreBusy, StoreError, TmsError
from tms_core.logs.loggers import configure
from tms_core.rowkey import MessageKey
from tms_core.server.serving import RunningServer, serving
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, encode_properties
from tms_core.transaction.codec.thrift import encode_transaction
from tms_core.transaction.rpc.client import TransactionClient

#: Messages of this topic live for ten seconds.
TICKS = TopicId("demo", "ticks")
TICKS_TTL_SECONDS = 10
#: This topic has a message for each second of the last hour, and keeps messages for a day until its ttl is shortened.
ORDERS = TopicId("demo", "orders")
ORDERS_TTL_SECONDS, MISTAKEN_TTL_SECONDS = 86_400, 600
#: This topic gets messages in transactions.
PAYMENTS = TopicId("demo", "payments")
PAYMENTS_TTL_SECONDS = 3600
#: The number of events, and of workers in the group that counts them.
EVENTS, WORKERS = 300, 3
#: The number of recent runs that the narrator checks for unreported runs.
RECENT_RUNS = 50
#: The length of a step in seconds; a test shortens it.
STEP_SECONDS = 1.0
#: The step of each event: three transactions, the shortened TTL, a read, and the approval.
COMMIT_AT, ROLL_BACK_AT, LEAVE_AT, SHORTEN_AT, READ_AT, APPROVE_AT = 4, 6, 8, 15, 30, 35
#: The timeout of the abandoned transaction, in seconds.
LEFT_SECONDS = 1
#: The timeout of a request, in seconds.
_TIMEOUT_SECONDS = 30

SETTINGS = """\
# Written by `make run`: the standalone defaults, in a hurry.
storage: {{kind: leveldb, leveldb: {{path: messaging}}}}
transactions: {{source: manager, directory: tx.snapshot, thrift: "127.0.0.1:{thrift}", max_lifetime_seconds: 90000}}
server: {{port: {rest}}}
janitor:
  every_seconds: 3
  hold_seconds: 300
  state: janitor
  http: {{port: {page}}}
"""


def main(folder: Path = ROOT / "data" / "run", clock: Clock | None = None, *, any_ports: bool = False) -> int:
    """Unpack the sample, serve it, and print the events; return an exit code.

    Args:
        folder: the working folder; its previous contents are deleted.
        clock: the clock; None: the machine's.
        any_ports: use free ports instead of the usual ones.
    """
    clock = clock or SystemClock()
    if not SAMPLE.exists():
        click.echo(f"the sample store {SAMPLE} is missing; a checkout contains it, a package does not", err=True)
        return 1
    with lock(folder) as is_alone:
        if not is_alone or in_use(folder / "messaging"):
            click.echo(
                f"error: another server uses {folder}\nhint: Stop it with Ctrl-C, or open its status page.", err=True
            )
            return 1
        return _serve(folder, clock, any_ports)


def _serve(folder: Path, clock: Clock, any_ports: bool) -> int:
    """Serve the sample until a signal; return an exit code."""
    store, _ = unpack(folder, clock)
    _furnish(store, clock)
    settings = folder / "tms.yaml"
    ports = (
        dict.fromkeys(("rest", "thrift", "page"), 0) if any_ports else {"rest": 11015, "thrift": 15165, "page": 9847}
    )
    settings.write_text(SETTINGS.format(**ports), encoding="utf-8")
    configure("text" if sys.stderr.isatty() else "auto", sys.stderr)
    shown = f"--config {settings.relative_to(Path.cwd()) if settings.is_relative_to(Path.cwd()) else settings}"
    # The store is adopted before the first sweep, so that the first sweep does not print an error.
    # Its output suggests a run as the next command, which the tour makes itself.
    with redirect_stdout(StringIO()):
        if execute(["adopt", "--config", str(settings)], clock):
            return 1
    try:
        with serving(settings, os.environ, {}, clock=clock) as started:
            _visit(started, shown)
    except TmsError as error:
        click.echo(f"error: {error.message} [{error.code}]\nhint: {error.hint}", err=True)
        return 1
    _say("all accepted messages are written, and the store is closed")
    return 0


def _visit(started: RunningServer, arguments: str) -> None:
    """Run customers and workers against the server until a signal, and print the events."""
    janitor = cast(Embedded, started.companions["janitor"])
    _say(
        "A messaging server with the janitor inside, on a store that CDAP wrote. Try these in another terminal:\n"
        f"  .venv/bin/janitor status {arguments}\n"
        f"  .venv/bin/janitor plan {arguments}\n"
        f"  .venv/bin/tms tx list --tx-server {started.transactions}\n"
        f"  curl {started.url}/v1/namespaces/demo/topics\n"
        "Ctrl-C stops it."
    )
    _say(f"Status page: {janitor.url}")
    stop, narrator = Event(), Narrator(_say)
    with (
        handle_signals(stop.set, hangup=janitor.daemon.sweep_now),
        Customers(started, _say) as customers,
        Workers(started, _say) as workers,
    ):
        janitor.daemon.sweep_now()
        for step in count():
            if stop.wait(STEP_SECONDS):
                return
            customers.act(step)
            workers.look()
            narrator.print_news(janitor.daemon.status(), janitor.daemon.runs(RECENT_RUNS))
            if step == APPROVE_AT:
                _say(f"the change was intended, so the tour approves it with: janitor approve {ORDERS} {arguments}")
                janitor.daemon.approve((str(ORDERS),))
                janitor.daemon.sweep_now()


class Workers:
    """A consumer group of three processes, one of which the tour kills.

    Args:
        started: the server.
        say: prints a sentence.
    """

    def __init__(self, started: RunningServer, say: Callable[[str], None]) -> None:
        self._client = Client(started.url, transactions=cast(str, started.transactions))
        self._typed = [sys.executable, "-m", "examples.worker", started.url, cast(str, started.transactions)]
        self._say = say
        self._workers: list[subprocess.Popen[bytes]] = []
        self._killed = self._done = False

    def __enter__(self) -> Workers:
        for topic in (worker.EVENTS, worker.COUNTED):
            self._client.create_topic(topic, ttl=TICKS_TTL_SECONDS * 360)
        self._client.publish(worker.EVENTS, [b"event %d" % number for number in range(EVENTS)])
        quiet = subprocess.DEVNULL
        # Ctrl-C reaches only the server, which then stops the workers.
        self._workers = [
            subprocess.Popen(self._typed, cwd=ROOT, stdout=quiet, stderr=quiet, start_new_session=True)  # noqa: S603
            for _ in range(WORKERS)
        ]
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._workers:
            process.terminate()
        for process in self._workers:
            process.wait()
        self._client.close()

    def look(self) -> None:
        """Kill one worker after the first counted events, and report when all events are counted."""
        if self._done:
            return
        with self._client.transaction() as tx:
            counted = [message.payload for message in tx.poll(worker.COUNTED)]
        if counted and not self._killed:
            self._killed = True
            self._workers[0].kill()
            self._say(f"{WORKERS} workers of a group count {EVENTS} events; the tour kills one of them")
        if len(counted) >= EVENTS:
            self._done = True
            once = len(set(counted)) == len(counted) == EVENTS
            self._say(f"all {EVENTS} events are counted, {'each exactly once' if once else 'some of them twice'}")


class Customers:
    """Publishers and readers, over REST and Thrift like any other client.

    Args:
        started: the server.
        say: prints a sentence.
    """

    def __init__(self, started: RunningServer, say: Callable[[str], None]) -> None:
        self._address = urlsplit(started.url).netloc
        self._transactions = TransactionClient(cast(str, started.transactions), _TIMEOUT_SECONDS)
        self._say = say
        for topic, ttl_seconds in ((TICKS, TICKS_TTL_SECONDS), (PAYMENTS, PAYMENTS_TTL_SECONDS)):
            self._ask("PUT", topic, "", {"ttl": str(ttl_seconds)})

    def __enter__(self) -> Customers:
        return self

    def __exit__(self, *_: object) -> None:
        self._transactions.close()

    def act(self, step: int) -> None:
        """Do the actions of this step."""
        self._ask("POST", TICKS, "/publish", {"messages": [f"tick {step}"]})
        if step == COMMIT_AT:
            self._commit()
        elif step == ROLL_BACK_AT:
            self._roll_back()
        elif step == LEAVE_AT:
            self._leave()
        elif step == SHORTEN_AT:
            self._ask("PUT", ORDERS, "/properties", {"ttl": str(MISTAKEN_TTL_SECONDS)})
            self._say(
                f"the ttl of {ORDERS} is shortened to {MISTAKEN_TTL_SECONDS} s, as if by mistake: "
                "most of its messages expire at once"
            )
        elif step == READ_AT:
            self._read()

    def _commit(self) -> None:
        transaction = self._transactions.start_short()
        self._pay(transaction.write_pointer, "paid")
        self._transactions.can_commit(transaction.transaction_id, [])
        self._transactions.commit(transaction.transaction_id)
        self._say(f"published a message to {PAYMENTS} in a transaction that commits")

    def _roll_back(self) -> None:
        transaction = self._transactions.start_short()
        self._ask("POST", PAYMENTS, "/rollback", self._pay(transaction.write_pointer, "changed my mind"))
        self._transactions.abort(transaction)
        self._say("published a message in a transaction that is rolled back")

    def _leave(self) -> None:
        transaction = self._transactions.start_short(LEFT_SECONDS)
        self._pay(transaction.write_pointer, "whose client is gone")
        self._say("published a message in a transaction whose client disappears: the transaction becomes invalid")

    def _read(self) -> None:
        transaction = self._transactions.start_short()
        packed = base64.b64encode(encode_transaction(transaction)).decode()
        plain, transactional = (
            len(self._ask("POST", PAYMENTS, "/poll", body)) for body in ({}, {"transaction": packed})
        )
        self._transactions.abort(transaction)
        self._say(
            f"in {PAYMENTS} a reader outside transactions sees {plain} messages, one in a transaction {transactional}"
        )

    def _pay(self, pointer: int, words: str) -> Any:
        return self._ask("POST", PAYMENTS, "/publish", {"transactionWritePointer": str(pointer), "messages": [words]})

    def _ask(self, method: str, topic: TopicId, path: str, body: Any) -> Any:
        """Send one request; return the response's JSON, or None without a body."""
        with closing(HTTPConnection(self._address, timeout=_TIMEOUT_SECONDS)) as connection:
            target = f"/v1/namespaces/{topic.namespace}/topics/{topic.topic}{path}"
            connection.request(method, target, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != 200:
                raise RuntimeError(f"{method} {target} returned {answer.status}: {text}")
            return json.loads(text) if text else None


class Narrator:
    """A printer of the janitor's events, which prints each event once.

    Args:
        say: prints a sentence.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._reported: set[str] = set()
        self._held: set[str] = set()

    def print_news(self, status: Status, runs: Sequence[RunRecord]) -> None:
        """Print newly held topics, and the runs that have finished since the last call."""
        finished = [run for run in reversed(runs) if run.finished_ms is not None and run.id not in self._reported]
        self._reported.update(run.id for run in finished)
        for run in finished:
            parts = (
                (run.expired, "expired"),
                (run.old_generation, "of old generations"),
                (run.processed, "processed by all consumers"),
                (run.invalid_transaction, "of invalid transactions, inverted"),
            )
            text = ", ".join(f"{number:,} {what}" for number, what in parts if number)
            if text:
                self._say(f"swept: {text}")
        for held in status.held:
            if held.topic not in self._held and held.rows:
                self._say(f"held: {held.rows:,} rows of {held.topic}; release them with: {held.command}")
        self._held = {held.topic for held in status.held if held.rows}


@contextmanager
def lock(folder: Path) -> Iterator[bool]:
    """Hold the working folder during the block; yield whether no other tour holds it.

    The lock is on the parent folder, because a tour deletes its folder and creates it again.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder.parent, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_alone = True
    except BlockingIOError:
        is_alone = False
    try:
        yield is_alone
    finally:
        os.close(handle)


def in_use(path: Path) -> bool:
    """Return whether another process has this store open."""
    try:
        LevelDBStore(path).close()
    except StoreBusy:
        return True
    except StoreError:
        return False
    return False


def _furnish(path: Path, clock: Clock) -> None:
    """Write orders of the last hour, in CDAP's format."""
    now_ms = clock.now_ms()
    with LevelDBStore(path) as store:
        value = encode_properties({"generation": "1", "ttl": str(ORDERS_TTL_SECONDS)})
        store.metadata.compare_and_set(ORDERS.prefix, None, value)
        keys = [MessageKey(ORDERS, 1, ms, 0).pack() for ms in range(now_ms - 3_600_000, now_ms, 1000)]
        store.message.put([(key, MessageValue(None, b"order")) for key in keys])


def _say(text: str) -> None:
    click.secho(text, bold=True)


if __name__ == "__main__":
    sys.exit(main())
