"""P8: the time to read a snapshot with a million invalid ids, relative to a plain decoding loop, and the memory.

Both read the same bytes in one process, in turns; the figure compares the medians. The plain loop decodes bytes in
memory into a list of ids; the product reads a file, checks the order of the ids and stores them in an array. Memory is
the peak resident size of a fresh process that reads the file, minus its size before.

``python -m benchmarks.p8_snapshot`` prints one JSON line, whose bar is met if both bars are met.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable
from pathlib import Path

from benchmarks.figure import Figure, report
from tms_core.transaction.codec.snapshot import read_complete_visibility, write_snapshot
from tms_core.transaction.model import Snapshot, VisibilityState

IDS = 1_000_000
RUNS = 5
MAX_RATIO = 1.2
MAX_MEMORY_MB = 32
FIRST_ID = 1_600_000_000_000 * 1_000_000
#: The mean distance of failed transactions: 3 ms, as in a busy cluster.
MEAN_GAP = 3_000_000


def main() -> None:
    if len(sys.argv) > 1:
        print(peak_bytes(Path(sys.argv[1])))
        return
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "snapshot.1600000000000"
        write(path)
        report(measure(path))


def write(path: Path) -> None:
    """Write a snapshot with a million ids, the same in every run."""
    chance = random.Random(8)
    invalid, pointer = array("q"), FIRST_ID
    for _ in range(IDS):
        pointer += chance.randrange(1, 2 * MEAN_GAP)
        invalid.append(pointer)
    with path.open("wb") as stream:
        write_snapshot(stream, Snapshot(VisibilityState(1_600_000_000_000, pointer, pointer, invalid)))


def measure(path: Path) -> Figure:
    data = path.read_bytes()
    ids, state = plain_loop(data), load(path)
    assert array("q", ids) == state.invalid
    del ids, state
    plain_seconds, decode_seconds = in_turn(lambda: plain_loop(data), lambda: load(path))
    child = [sys.executable, "-m", "benchmarks.p8_snapshot", str(path)]
    grown = subprocess.run(child, cwd=Path(__file__).parents[1], check=True, capture_output=True, text=True)
    ratio, memory_mb = decode_seconds / plain_seconds, int(grown.stdout) / 2**20
    details = {
        "ratio": round(ratio, 3),
        "memory_mb": round(memory_mb, 1),
        "bars": {"ratio": MAX_RATIO, "memory_mb": MAX_MEMORY_MB},
        "met": ratio <= MAX_RATIO and memory_mb <= MAX_MEMORY_MB,
        "ids": IDS,
        "runs": RUNS,
        "plain_seconds": round(plain_seconds, 4),
        "decode_seconds": round(decode_seconds, 4),
    }
    name = "time to read a snapshot of a million invalid ids ÷ a plain decoding loop"
    return Figure("P8", name, round(ratio, 3), at_most=MAX_RATIO, details=details)


def plain_loop(data: bytes) -> list[int]:
    """Return the invalid ids of a snapshot, decoded byte by byte."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return (value >> 1) ^ -(value & 1)

    for _ in range(4):
        varint()
    ids: list[int] = []
    while count := varint():
        position, append = at, ids.append
        for _ in range(count):
            value = shift = 0
            while True:
                byte = data[position]
                position += 1
                value |= (byte & 0x7F) << shift
                shift += 7
                if not byte & 0x80:
                    break
            append((value >> 1) ^ -(value & 1))
        at = position
    return ids


def load(path: Path) -> VisibilityState:
    with path.open("rb", buffering=0) as stream:
        return read_complete_visibility(stream)


def in_turn(*candidates: Callable[[], object]) -> list[float]:
    """Return the median seconds of each candidate; the candidates take turns."""
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(RUNS):
        for candidate, taken in zip(candidates, seconds, strict=True):
            start = time.perf_counter()
            candidate()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]


def peak_bytes(path: Path) -> int:
    """Return the growth of this process's peak memory while it reads the file."""
    before = _status_kb("VmRSS")
    state = load(path)
    assert len(state.invalid) == IDS
    return (_status_kb("VmHWM") - before) * 1024


def _status_kb(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0])
    raise LookupError(f"/proc/self/status has no {field}")


if __name__ == "__main__":
    main()
