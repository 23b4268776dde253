"""A process that forks crashing sweeps, for `test_crash.py`: python -m tests.faults.crashes CASE BATCH_ROWS

It imports everything once and then forks, so that a crash costs milliseconds. It never opens a store itself, because a
fork does not copy LevelDB's thread. First it prints the number of writes of a sweep to the store, the state or a file
of the store; a crash before a read equals a crash before the next write. For each number K on standard input, one child
sweeps a copy of the case's store and is killed at write K. A second child, the same for all, inspects the result and
finishes the work. Each crash prints one line of JSON.

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

#: Calls of store and state that only read.
READING = {
    *READS,
    *(f"state.{name}" for name in ("anchor", "boundary", "counts", "evidence", "frontiers", "intents", "known_ids")),
    *(f"state.{name}" for name in ("last_full_pass_ms", "lowest_open", "note", "pauses", "run", "store", "strikes")),
}

#: By key in hex: the digest of the value before and after, None after a delete.
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


class KillAtWrite:
    """A counter of writes that kills its process at the k-th write; 0: never."""

    def __init__(self, k: int) -> None:
        self.k = k
        self.done = 0

    def tick(self, call: Call | None = None) -> None:
        if call is not None and call.name in READING:
            return
        self.done += 1
        if self.done == self.k:
            os.kill(os.getpid(), signal.SIGKILL)

    def on_files(self, folder: Path) -> None:
        """Count file operations of Python, too: a corrected MANIFEST, renamed tables."""
        inside = str(folder)

        def audit(event: str, arguments: tuple[Any, ...]) -> None:
            if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
                return
            if event in ("open", "os.rename", "os.remove") and str(arguments[0]).startswith(inside):
                self.tick()

        sys.addaudithook(audit)


def sweep(folder: Path, batch_rows: int, k: int) -> int:
    """Adopt and sweep a store until killed."""
    doom = KillAtWrite(k)
    doom.on_files(folder / "messaging")
    with SqliteState(folder / "state") as state, LevelDBStore(folder / "messaging") as store:
        watch(store, before=doom.tick)
        watch_state(state, before=doom.tick, after=doom.tick)
        run(folder, store, state, batch_rows)
    return doom.done


def run(folder: Path, store: Store, state: SqliteState, batch_rows: int) -> list[str]:
    """Run one pass; return its problems."""
    record = state.store()
    report = janitor(folder, store, state, batch_rows).run_once(adopt=record is None or record.adopted_ms is None)
    return [*report.errors, *(note.message for note in report.guards if note.tripped)]


def janitor(folder: Path, store: Store, state: SqliteState, batch_rows: int) -> Engine:
    source, clock = DirectorySource(folder / "tx"), ManualClock(NOW_MS)
    return Engine(Deps(store, state, source, clock, replace(TERMS, batch_rows=batch_rows), token_hex=secrets.token_hex))


def inspect(folder: Path, batch_rows: int, fates: dict[str, Fates]) -> Iterator[str]:
    """Yield the defects of a store after a crash, and of the run that finishes the work."""
    with SqliteState(folder / "state") as state:
        with LevelDBStore(folder / "messaging") as store:
            found = read(store)
            yield from find_wrong_rows(found, fates, finished=False)
            yield from find_false_boundary(folder, store, state)
            yield from find_unclosed_runs(janitor(folder, store, state, batch_rows), state)
            yield from find_unrecorded(found, fates, state)
        yield from find_wrong_names(folder / "messaging")
        with LevelDBStore(folder / "messaging") as store:
            yield from run(folder, store, state, batch_rows)
            found = read(store)
            yield from find_wrong_rows(found, fates, finished=True)
            yield from find_false_boundary(folder, store, state)
            yield from find_unrecorded(found, fates, state)
        yield from find_wrong_names(folder / "messaging")
        if state.boundary() is None:
            yield "the next run proved nothing"
        if state.runs(1)[0].result != "done":
            yield "the next run is not recorded as done"


def find_wrong_rows(found: dict[str, dict[str, str]], fates: dict[str, Fates], *, finished: bool) -> Iterator[str]:
    for table, rows in found.items():
        for key, (before, after) in fates[table].items():
            allowed = {after} if finished else {before, after}
            if rows.get(key) not in allowed:
                yield f"{table} {key} is {rows.get(key)}, not one of {allowed}"
        yield from (f"{table} {key} was never written" for key in rows.keys() - fates[table].keys())


def find_false_boundary(folder: Path, store: Store, state: SqliteState) -> Iterator[str]:
    """Audit the recognized rows; clients do not read unrecognized rows (L0)."""
    proven = state.boundary()
    if proven is None:
        return
    snapshot = DirectorySource(folder / "tx").latest().snapshot
    for cell in store.message.read(CELLS, b"", None, 10**9).items:
        ours = MessageKey.parse(cell.key) is not None
        if ours and 0 < cell.pointer <= proven.bound and snapshot.is_invalid(cell.pointer):
            yield f"proven up to {proven.bound}, but {cell.key.hex()} carries {cell.pointer}"


def find_unclosed_runs(engine: Engine, state: SqliteState) -> Iterator[str]:
    """Check that the next holder closes the run of the killed holder exactly once (S10)."""
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


def find_unrecorded(found: dict[str, dict[str, str]], fates: dict[str, Fates], state: SqliteState) -> Iterator[str]:
    """Yield deleted rows outside the ranges of all ledger entries."""
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


def find_wrong_names(store: Path) -> Iterator[str]:
    for file in store.glob("*/*"):
        if not LEVELDB_FILE.fullmatch(file.name):
            yield f"{file.parent.name} holds {file.name}"


def run_in_child(work: Callable[[], object], answer: Path) -> int:
    """Run ``work`` in a child, which writes its result as JSON; return the status of ``os.waitpid``."""
    pid = os.fork()
    if not pid:
        _run_and_exit(work, answer)
    return os.waitpid(pid, 0)[1]


def _run_and_exit(work: Callable[[], object], answer: Path) -> NoReturn:
    try:
        answer.write_text(json.dumps(work()))
        os._exit(0)
    finally:
        traceback.print_exc()
        os._exit(1)


def answer_inspections(inspections: Connection, batch_rows: int, fates: dict[str, Fates]) -> None:
    """Reply to each received folder with its defects."""
    gc.enable()
    while True:
        folder: Path = inspections.recv()
        inspections.send(list(inspect(folder, batch_rows, fates)))


@contextmanager
def copy(case: Path, k: int) -> Iterator[Path]:
    """Copy a case. Finished tables are linked, because LevelDB never writes to them."""
    folder = case / f"copy-{os.getpid()}-{k}"
    shutil.copytree(case, folder, ignore=shutil.ignore_patterns("copy-*"), copy_function=_link_or_copy)
    yield folder
    shutil.rmtree(folder)


def _link_or_copy(source: str, target: str) -> None:
    if source.endswith((".sst", ".ldb")):
        os.link(source, target)
    else:
        shutil.copyfile(source, target)


def crash_once(case: Path, batch_rows: int, k: int, inspector: Connection) -> dict[str, object]:
    with copy(case, k) as folder:
        status = run_in_child(lambda: sweep(folder, batch_rows, k), folder / "answer.json")
        died = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        problems = [] if died or not status else [f"the sweep ended with status {status}, not by dying"]
        inspector.send(folder)
        problems += inspector.recv()
        return {"k": k, "died": died, "problems": problems[:5]}


def count_changes(case: Path, batch_rows: int) -> int:
    """Return the number of writes of a sweep; each is a crash point."""
    with copy(case, 0) as folder:
        answer = folder / "answer.json"
        if run_in_child(lambda: sweep(folder, batch_rows, 0), answer):
            raise SystemExit("the sweep failed without dying")
        return int(json.loads(answer.read_text()))


def print_json(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main(case: Path, batch_rows: int) -> None:
    # Compact small copies, too, to have crash points in the compaction.
    compaction.WORTHWHILE_ROWS = 10
    fates: dict[str, Fates] = json.loads((case / "expected.json").read_text())
    # A collection in a short-lived child would only copy the parent's memory.
    gc.disable()
    fork = get_context("fork")
    inspector, inspections = fork.Pipe()
    fork.Process(target=answer_inspections, args=(inspections, batch_rows, fates), daemon=True).start()
    # Detect the death of the second child.
    inspections.close()
    print_json(count_changes(case, batch_rows))
    for k in map(int, sys.stdin):
        print_json(crash_once(case, batch_rows, k, inspector))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
