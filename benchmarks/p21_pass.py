"""P21: a complete pass of the janitor, compared with CDAP's prune of the same store.

The store has a million messages; 467 per thousand are expired and 18 belong to invalid transactions. The janitor's time
covers ``run_once``: adoption, a full search of all transactional rows, inversions, the commit of the state, and
compaction. CDAP's prune only deletes expired rows of generation 1. Both run on copies of one store, in turns; the
figure is the ratio of the rows deleted or inverted per second, the janitor's by CDAP's.

The details have the limit of plyvel in one thread without decisions (``bare_plyvel``, also relative to CDAP): a loop
that lists and deletes the expired keys, lists the live rows, and inverts invalid write pointers, without compaction.

``python -m benchmarks.p21_pass`` prints one JSON line. It needs Java and Maven.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from array import array
from collections import deque
from collections.abc import Collection, Iterator
from itertools import islice
from pathlib import Path

from benchmarks.figure import Figure, report
from benchmarks.java_prune import prune_copy
from benchmarks.p1_sweep import BenchClock
from benchmarks.stores import BATCH_ROWS, BODY, NOW_MS, TTL_SECONDS, engine, topic_names
from janitor.rules.policy import Rule
from tests.support import size
from tms_core.rowkey import MessageKey, generation_prefix, time_prefix
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb.library import build, plyvel
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, encode_properties
from tms_core.transaction.codec.snapshot import write_snapshot
from tms_core.transaction.model import TX_PER_MS, Snapshot, VisibilityState
from tms_core.transaction.source.source import DirectorySource

ROWS = size("TMS_BENCH_ROWS", 1_000_000)
TURNS = size("TMS_BENCH_TURNS", 3)
TOPICS = 10
EXPIRED_SHARE, INVALID_SHARE = 0.467, 0.018
#: The messages of a transaction.
BATCH = 100
BAR = 1.3
#: The value when the janitor read all cells of each page of found rows and inverted each page in a separate batch.
BEFORE = 0.4


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="p21-") as scratch:
        source, snapshots = Path(scratch) / "source", Path(scratch) / "tx"
        invalid = fill(source)
        snapshots.mkdir()
        save_snapshot(snapshots, invalid)
        ours: list[float] = []
        theirs: list[float] = []
        least: list[float] = []
        phases: dict[str, float] = {}
        for turn in range(TURNS + 1):
            copy = shutil.copytree(source, Path(scratch) / "copy")
            rate, phases = janitor_rate(copy, snapshots)
            shutil.rmtree(copy)
            copy = shutil.copytree(source, Path(scratch) / "copy")
            bare = bare_rate(copy, invalid)
            shutil.rmtree(copy)
            cdap = float(prune_copy(source, NOW_MS)["rows_per_second"])
            if turn:
                ours.append(rate)
                theirs.append(cdap)
                least.append(bare)
    ratio, floor = (
        statistics.median(one / their for one, their in zip(rates, theirs, strict=True)) for rates in (ours, least)
    )
    details = {
        "before": BEFORE,
        "bare_plyvel": round(floor, 3),
        "leveldb": f"{build().binding}, LevelDB {build().leveldb}",
        "rows": ROWS,
        "rows_per_second": round(statistics.median(ours)),
        "cdap_rows_per_second": round(statistics.median(theirs)),
        "phase_seconds": {name: round(seconds, 3) for name, seconds in phases.items()},
    }
    name = "one whole pass, rows deleted or inverted per second ÷ CDAP's own prune's"
    report(Figure("P21", name, round(ratio, 3), at_least=BAR, details=details))


def fill(folder: Path) -> list[int]:
    """Write the store; return the invalid write pointers."""
    invalid: list[int] = []
    with LevelDBStore(folder, create=True) as store:
        for topic in topic_names(TOPICS):
            properties = {"generation": "1", "ttl": str(TTL_SECONDS)}
            store.metadata.compare_and_set(topic.prefix, None, encode_properties(properties))
            rows = _rows(topic, ROWS // TOPICS, invalid)
            while batch := list(islice(rows, 10_000)):
                store.message.put(batch)
    return invalid


def _rows(topic: TopicId, count: int, invalid: list[int]) -> Iterator[tuple[bytes, MessageValue]]:
    """Yield expired rows, then transactions of a hundred messages each, some of them invalid."""
    cutoff_ms = NOW_MS - TTL_SECONDS * 1000
    expired = int(count * EXPIRED_SHARE)
    plain = MessageValue(None, BODY)
    for number in range(expired):
        yield MessageKey(topic, 1, cutoff_ms - expired + number, 0).pack(), plain
    every = round((1 - EXPIRED_SHARE) / INVALID_SHARE)
    for number in range(count - expired):
        transaction, place = divmod(number, BATCH)
        publish_ms = cutoff_ms + 1 + transaction
        pointer = (publish_ms - 1) * TX_PER_MS + int(topic.topic[1:])
        if place == 0 and transaction % every == 0:
            invalid.append(pointer)
        yield MessageKey(topic, 1, publish_ms, place).pack(), MessageValue(pointer, BODY)


def save_snapshot(folder: Path, invalid: list[int]) -> None:
    newest = NOW_MS * TX_PER_MS
    view = VisibilityState(NOW_MS, newest, newest, array("q", sorted(invalid)))
    with (folder / f"snapshot.{NOW_MS}").open("wb") as stream:
        write_snapshot(stream, Snapshot(view))


def janitor_rate(store_folder: Path, snapshots: Path) -> tuple[float, dict[str, float]]:
    """Return the rows deleted or inverted per second by a pass, and the seconds of each phase."""
    with LevelDBStore(store_folder) as store:
        started = time.perf_counter()
        done = engine(store, BenchClock(), source=DirectorySource(snapshots)).run_once(adopt=True)
        seconds = time.perf_counter() - started
    rows = done.total(Rule.EXPIRED) + done.total(Rule.INVALID_TRANSACTION)
    wanted = int(ROWS // TOPICS * EXPIRED_SHARE) * TOPICS
    if done.total(Rule.EXPIRED) != wanted or done.total(Rule.INVALID_TRANSACTION) < ROWS * INVALID_SHARE * 0.8:
        raise RuntimeError(f"{rows} rows deleted or inverted of {wanted} expired, {INVALID_SHARE * ROWS:.0f} invalid")
    return rows / seconds, dict(done.phase_seconds)


def bare_rate(store_folder: Path, invalid: Collection[int]) -> float:
    """Return the rows deleted or inverted per second by plain loops over plyvel."""
    wanted = {pointer.to_bytes(8, "big") for pointer in invalid}
    rows = 0
    database = plyvel.DB(str(store_folder / "system.tms.message"), paranoid_checks=True)
    started = time.perf_counter()
    for topic in topic_names(TOPICS):
        first = generation_prefix(topic.prefix, 1)
        live, stop = time_prefix(topic.prefix, 1, NOW_MS - TTL_SECONDS * 1000), generation_prefix(topic.prefix, 2)
        with database.iterator(
            start=first, stop=live, include_value=False, fill_cache=False, verify_checksums=True
        ) as keys:
            while page := list(islice(keys, BATCH_ROWS)):
                batch = database.write_batch()
                deque(map(batch.delete, page), maxlen=0)
                batch.write()
                rows += len(page)
        with database.iterator(start=live, stop=stop, fill_cache=False, verify_checksums=True) as cells:
            while found := list(islice(cells, BATCH_ROWS)):
                batch = database.write_batch()
                for key, value in [row for row in found if row[1][1:9] in wanted]:
                    pointer = -int.from_bytes(value[1:9], "big")
                    batch.put(key, value[:1] + pointer.to_bytes(8, "big", signed=True) + value[9:])
                    rows += 1
                batch.write()
    database.write_batch(sync=True).write()
    seconds = time.perf_counter() - started
    database.close()
    return rows / seconds


if __name__ == "__main__":
    main()
