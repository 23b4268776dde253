"""A warm process that lets sweeps die, for `test_crash.py`: python -m tests.faults.crashes CASE BATCH_ROWS

It imports everything once and then forks, so that a death costs milliseconds. It never opens a store itself: LevelDB
keeps a thread, which a fork would not carry over. First it prints how many changes a sweep makes to a store, to the
state or to a file of the store; a death before what only reads leaves the same as one before the next change. For each
number K on standard input then one child sweeps its own copy of the case's store and is killed at the K-th; a second
child, the same for all, looks at what is left and finishes the work. Each death gives one line of JSON.

A case is a folder: ``messaging`` (a closed store), ``tx`` (snapshots) and ``expected.json`` (:data:`Fates` by table).
"""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from janitor.rules.ranges import Lifetime
from janitor.run.engine import Engine
from janitor.run.prepare import Deps
from janitor.state.sqlite.state import SqliteState
from janitor.sweep.run import Terms
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, READS, Call, every, watch, watch_state
from tms_core.clock import ManualClock
from tms_core.rowkey import MessageKey
from tms_core.tables import compaction
from tms_core.tables.base import CELLS, MESSAGES, PAYLOADS, Store
from tms_core.tables.leveldb.store import LevelDBStore, encode
from tms_core.transaction.source.source import DirectorySource

TERMS = Terms(3600, (), Lifetime(25 * HOUR, DAY, 5 * MINUTE), True, 1000)
LEVELDB_FILE = re.compile(r"\d+\.(sst|log)|CURRENT|LOCK|LOG(\.old)?|MANIFEST-\d+")

#: What a sweep asks a store and the state without a change of either.
ASKING = {
    *READS,
    *(f"state.{name}" for name in ("anchor", "boundary", "counts", "evidence", "frontiers", "intents", "known_ids")),
    *(f"state.{name}" for name in ("last_full_pass_ms", "lowest_open", "note", "pauses", "run", "store", "strikes")),
}

#: For each row's key in hex the digest of its value before, and after, or None where it is to go.
Fates = dict[str, tuple[str, str | None]]


@cache
def digest(value: bytes) -> str:
    return hashlib.sha256(value).hexdigest()


def read(store: Store) -> dict[str, dict[str, str]]:
    message = every(store.message, MESSAGES)
    payload = every(store.payload, PAYLOADS)
    return {
        "message": {key.hex(): digest(encode(value)) for key, value in message},
        "payload": {key.hex(): digest(value) for key, value in payload},
    }


class Doom:
    """Counts what is changed and kills this very process at the k-th change; 0 never does."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.done = 0

    def tick(self, call: Call | None = None) -> None:
        if call is not None and call.name in ASKING:
            return
        self.done += 1
        if self.done == self.k:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_files(self, folder: Path) -> None:
        """Count also what Python itself does to the store's files: a corrected MANIFEST, tables renamed."""
        inside = str(folder)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
            if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(inside):
                self.tick()

        sys.addaudithook(audit)


def sweep(folder: Path, batch_rows: int, k: int) -> int:
    """Adopt and sweep a store, and die on the way."""
    doom = Doom(k)
    doom.on_files(folder / "messaging")
    with SqliteState(folder / "state") as state, LevelDBStore(folder / "messaging") as store:
        watch(store, before=doom.tick)
        watch_state(state, before=doom.tick, after=doom.tick)
        run(folder, store, state, batch_rows)
    return doom.done


def run(folder: Path, store: Store, state: SqliteState, batch_rows: int) -> list[str]:
    """One pass; what it complains of."""
    record = state.store()
    report = janitor(folder, store, state, batch_rows).run_once(adopt=record is None or record.adopted_ms is None)
    return [*report.errors, *(note.message for note in report.guards if note.tripped)]


def janitor(folder: Path, store: Store, state: SqliteState, batch_rows: int) -> Engine:
    source, clock = DirectorySource(folder / "tx"), ManualClock(NOW_MS)
    return Engine(Deps(store, state, source, clock, replace(TERMS, batch_rows=batch_rows), token_hex=secrets.token_hex))


def inspect(folder: Path, batch_rows: int, fates: dict[str, Fates]) -> Iterator[str]:
    """What is wrong with a store whose sweep died, and with the run that finishes the work."""
    with SqliteState(folder / "state") as state:
        with LevelDBStore(folder / "messaging") as store:
            found = read(store)
            yield from wrong_rows(found, fates, finished=False)
            yield from find_false_boundary(folder, store, state)
            yield from not_closed(janitor(folder, store, state, batch_rows), state)
            yield from not_in_the_ledger(found, fates, state)
        yield from wrong_names(folder / "messaging")
        with LevelDBStore(folder / "messaging") as store:
            yield from run(folder, store, state, batch_rows)
            found = read(store)
            yield from wrong_rows(found, fates, finished=True)
            yield from find_false_boundary(folder, store, state)
            yield from not_in_the_ledger(found, fates, state)
        yield from wrong_names(folder / "messaging")
        if state.boundary() is None:
            yield "the next run proved nothing"
        if state.runs(1)[0].result != "done":
            yield "the next run is not recorded as done"


def wrong_rows(found: dict[str, dict[str, str]], fates: dict[str, Fates], *, finished: bool) -> Iterator[str]:
    for table, rows in found.items():
        for key, (before, after) in fates[table].items():
            allowed = {after} if finished else {before, after}
            if rows.get(key) not in allowed:
                yield f"{table} {key} is {rows.get(key)}, not one of {allowed}"
        yield from (f"{table} {key} came from nowhere" for key in rows.keys() - fates[table].keys())


def find_false_boundary(folder: Path, store: Store, state: SqliteState) -> Iterator[str]:
    """The audit, over all rows of ours; nobody reads what is none of ours (L0)."""
    proven = state.boundary()
    if proven is None:
        return
    snapshot = DirectorySource(folder / "tx").latest().snapshot
    for cell in store.message.read(CELLS, b"", None, 10**9).items:
        ours = MessageKey.parse(cell.key) is not None
        if ours and 0 < cell.pointer <= proven.bound and snapshot.is_invalid(cell.pointer):
            yield f"proven up to {proven.bound}, but {cell.key.hex()} carries {cell.pointer}"


def not_closed(engine: Engine, state: SqliteState) -> Iterator[str]:
    """Whether the next holder closes what the dead one left open, once (invariant S10)."""
    unfinished = [record.id for record in state.unfinished_runs()]
    if engine.recover() != unfinished or engine.recover() or state.unfinished_runs() or state.intents():
        yield "what the dead process left open was not closed"
    for run_id in unfinished:
        record = state.run(run_id)
        if record is None or record.result != "lost":
            yield f"run {run_id} is not recorded as lost"
    entries = state.ledger(10**6)
    if len({(entry.run_id, entry.table, entry.start, entry.rule) for entry in entries}) < len(entries):
        yield "the ledger has something twice"


def not_in_the_ledger(found: dict[str, dict[str, str]], fates: dict[str, Fates], state: SqliteState) -> Iterator[str]:
    """Rows that went, and no entry's range holds them."""
    entries = state.ledger(10**6)
    for table, rows in fates.items():
        ranges = iter(sorted((entry.start, entry.stop) for entry in entries if entry.table == table))
        covered = b""
        start, stop = next(ranges, (b"", b""))
        for key in sorted(map(bytes.fromhex, rows.keys() - found[table].keys())):
            while start <= key and stop:
                covered = max(covered, stop)
                start, stop = next(ranges, (b"", b""))
            if key >= covered:
                yield f"{table} {key.hex()} went, and the ledger does not say so"


def wrong_names(store: Path) -> Iterator[str]:
    for file in store.glob("*/*"):
        if not LEVELDB_FILE.fullmatch(file.name):
            yield f"{file.parent.name} holds {file.name}"


def forked(work: Callable[[], object], answer: Path) -> int:
    """Do something in a child, which leaves its result as JSON; returns how the child ended, as ``os.waitpid``."""
    pid = os.fork()
    if not pid:
        _live_and_exit(work, answer)
    return os.waitpid(pid, 0)[1]


def _live_and_exit(work: Callable[[], object], answer: Path) -> NoReturn:
    try:
        answer.write_text(json.dumps(work()))
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def look(asked: Connection, batch_rows: int, fates: dict[str, Fates]) -> None:
    """Answer for each folder that is sent what is wrong with it."""
    gc.enable()
    while True:
        folder: Path = asked.recv()
        asked.send(list(inspect(folder, batch_rows, fates)))


@contextmanager
def copy(case: Path, k: int) -> Iterator[Path]:
    """A case to spoil. Finished tables are linked, since LevelDB never writes to them."""
    folder = case / f"copy-{os.getpid()}-{k}"
    shutil.copytree(case, folder, ignore=shutil.ignore_patterns("copy-*"), copy_function=_link_or_copy)
    yield folder
    shutil.rmtree(folder)


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith((".sst", ".ldb")):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def one_death(case: Path, batch_rows: int, k: int, looking: Connection) -> dict[str, object]:
    with copy(case, k) as folder:
        status = forked(lambda: sweep(folder, batch_rows, k), folder / "answer.json")
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        problems = [] if died or not status else [f"the sweep ended with status {status}, not by dying"]
        looking.send(folder)
        problems += looking.recv()
        return {"k": k, "died": died, "problems": problems[:5]}


def count_changes(case: Path, batch_rows: int) -> int:
    """How many changes a sweep of the case makes; each is a moment to die at."""
    with copy(case, 0) as folder:
        answer = folder / "answer.json"
        if forked(lambda: sweep(folder, batch_rows, 0), answer):
            raise SystemExit("the sweep failed without dying")
        return int(json.loads(answer.read_text()))


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(case: Path, batch_rows: int) -> None:
    # Small copies are compacted too, so that dying in it is tried.
    compaction.WORTHWHILE_ROWS = 10
    fates: dict[str, Fates] = json.loads((case / "expected.json").read_text())
    # A child lives too short for anything to be collected, and to look for it would copy the parent's memory.
    gc.disable()
    fork = get_context("fork")
    looking, asked = fork.Pipe()
    fork.Process(target=look, args=(asked, batch_rows, fates), daemon=True).start()
    # So that a second child that dies is noticed.
    asked.close()
    say(count_changes(case, batch_rows))
    for k in map(int, sys.stdin):
        say(one_death(case, batch_rows, k, looking))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
