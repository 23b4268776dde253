"""Statuses for tests of the page: a busy janitor, a first contact, and one with every problem.

The last one has hostile names: clients choose the names of topics, and errors quote other texts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from janitor.state.base import CounterKey, Pause, RunRecord, State
from janitor.state.figures import BlockedReaders, GuardNote, StatisticsFigures
from janitor.state.sqlite.state import SqliteState
from janitor.status.status import (
    BoundaryFigures,
    HeldTopic,
    OpenTransaction,
    Overdue,
    Quarantined,
    Running,
    SnapshotFigures,
    Status,
    TopicFigures,
)
from tests.builders import DAY, HOUR, MINUTE, SECOND, pointer

#: A name that becomes an element, a request and a script in a page that does not escape it.
HOSTILE = "x'\"><img src=/injected-image onerror=\"document.title='injected'\"><script src=/injected-script></script>"


@dataclass
class FixedViews:
    """Status views with the values of their attributes, which count their requests."""

    shown: Status
    runs: Sequence[RunRecord] = ()
    prepare: Callable[[State], object] = lambda _: None
    body: bytes = b"tms_janitor_heartbeat_timestamp_seconds 1\n"
    not_alive: str = ""
    not_ready: str = ""
    requests: list[str] = field(default_factory=list)

    def status(self) -> Status:
        self.requests.append("status")
        return self.shown

    @contextmanager
    def past(self) -> Iterator[State]:
        self.requests.append("past")
        with SqliteState.in_memory() as state:
            for run in reversed(self.runs):
                state.begin_run(RunRecord(run.id, run.mode, run.started_ms))
                if run.finished_ms is not None:
                    state.finish_run(run)
            self.prepare(state)
            yield state

    def metrics(self, accept: str | None = None) -> tuple[bytes, str]:
        self.requests.append("metrics")
        return self.body, "text/plain; version=0.0.4; charset=utf-8"

    def alive(self) -> str:
        return self.not_alive

    def ready(self) -> str:
        return self.not_ready


def running(now_ms: int, **figures: Any) -> Status:
    """Return the status of a janitor that has the lease and sweeps every minute."""
    status = Status("0.1.0", "leveldb data/messaging", "running", "apply", "every 60 s", now_ms)
    return replace(status, leader=True, lease_holder="host-7:4711", **figures)


def empty(now_ms: int) -> Status:
    """Return the status of a janitor that has just started on an empty store that is not adopted."""
    return running(
        now_ms,
        started_ms=now_ms - 3 * SECOND,
        heartbeat_ms=now_ms,
        next_run_ms=now_ms + 57 * SECOND,
        snapshot=SnapshotFigures(problem="not_configured", message="No transaction snapshots are configured."),
    )


def full(now_ms: int) -> Status:
    """Return a healthy status with values in every part and a run in progress."""
    still_open = "younger transactions could still write when the pass over all keys started"
    return running(
        now_ms,
        started_ms=now_ms - 11 * DAY - 4 * HOUR,
        heartbeat_ms=now_ms - SECOND,
        next_run_ms=now_ms + 42 * SECOND,
        history_since_ms=now_ms - 60 * DAY,
        adopted_ms=now_ms - 60 * DAY,
        running=Running("r-20481", now_ms - 6 * SECOND, now_ms - SECOND, "payload", "default:orders", 182_340),
        last_run=runs(now_ms)[0],
        last_success_ms={"message": now_ms - 64 * SECOND, "payload": now_ms - 62 * SECOND},
        held=(HeldTopic("finance:ledger", "protected", 12_400, 48_000_000, now_ms - 40 * DAY, None, ""),),
        overdue=(Overdue("message", "expired", 640, now_ms - 9 * MINUTE - 7 * DAY),),
        kept={"referenced": 1_204, "undecided": 37, "held": 12_400, "unrecognized": 0},
        guards=(GuardNote("clock", False, "the clock is 2 s behind the machine's monotonic clock since the last run"),),
        snapshot=SnapshotFigures(
            now_ms - 38 * SECOND, f"snapshot.{now_ms - 38 * SECOND}", "", "", 1_731, 3, 12, _open(now_ms)
        ),
        boundary=BoundaryFigures(
            str(pointer(now_ms - 26 * HOUR)),
            now_ms - 5 * HOUR,
            "r-20180",
            (
                (str(pointer(now_ms - 26 * HOUR)), still_open),
                (str(pointer(now_ms - 3 * HOUR)), f"snapshot {now_ms - 5 * HOUR}, used for all keys"),
            ),
        ),
        statistics=StatisticsFigures(
            *(now_ms - 5 * HOUR, 900_000, 100_000, 2 << 30, {"expired": 20_000, "old_generation": 5_000}, 17, 0),
            *(str(pointer(now_ms - 6 * HOUR)), "default:orders, generation 3", now_ms - 6 * HOUR),
        ),
        skew_seconds={"monotonic": -2.1, "store": 0.0},
        topics=topics(now_ms),
        counters={CounterKey("sweeps_total", (("result", "done"),)): 20_480.0},
    )


def wrong(now_ms: int) -> Status:
    """Return a status with every problem and hostile names."""
    hostile = f"default:{HOSTILE}"
    hour_ago_ms, oldest_ms, old_ms = now_ms - HOUR, now_ms - 20 * DAY, now_ms - 9 * DAY
    return Status(
        *("0.1.0", f"leveldb data/{HOSTILE}", "down", "plan_only", "every 60 s", now_ms),
        heartbeat_ms=now_ms - 3 * HOUR,
        history_since_ms=now_ms - 2 * DAY,
        adopted_ms=now_ms - 2 * DAY,
        lease_holder=f"host-9:{HOSTILE}",
        last_run=RunRecord(
            "r-77",
            "apply",
            now_ms - 3 * HOUR,
            now_ms - 3 * HOUR + 2 * SECOND,
            "failed",
            duration_seconds=2.25,
            phase_seconds={"message": 1.9},
            errors=(f"default:orders: reading failed: {HOSTILE}", "default:audit: no space left on device"),
            error="the disk is full: no space left on device",
        ),
        last_success_ms={"message": now_ms - 26 * HOUR},
        paused=(Pause("*:*", now_ms - HOUR), Pause("team's:*", now_ms - DAY)),
        quarantined=(
            Quarantined(hostile, now_ms - 2 * HOUR, 4, f"corrupted block {HOSTILE}", now_ms + HOUR),
            Quarantined("default:audit", now_ms - HOUR, 3, "no space left on device", now_ms + 25 * MINUTE),
        ),
        held=(
            HeldTopic(hostile, "frontier", 41_000, 9_300_000, oldest_ms, now_ms + 20 * MINUTE, _approve(hostile)),
            HeldTopic("default:orders", "frontier", 1, 29, now_ms - 3 * DAY, None, _approve("default:orders")),
            HeldTopic("default:new", "first_contact", 12, 340, hour_ago_ms, now_ms + HOUR, _approve("default:new")),
            HeldTopic("default:audit", "quarantined", 70_000, 81_000_000, old_ms, None, ""),
        ),
        overdue=(
            Overdue("message", "expired", 111_013, oldest_ms),
            Overdue("payload", "old_generation", 8_100, now_ms - 30 * DAY),
            Overdue("message", "invalid_transaction", 3, hour_ago_ms),
        ),
        kept={"unknown_topic": 9, "newer_generation": 4, "unrecognized": 2},
        guards=(
            GuardNote("clock", True, "the clock is 7200 s ahead of the machine's monotonic clock since the last run"),
            GuardNote("identity", False, f"pointers of another system in {HOSTILE}"),
        ),
        snapshot=SnapshotFigures(
            *(now_ms - 4 * HOUR, HOSTILE, "stale", f"it is older than twice its interval: {HOSTILE}"),
            *(9, 1, 0, _open(now_ms)[:1]),
        ),
        boundary=BoundaryFigures(obstacles=("no complete pass has covered the message table yet", HOSTILE)),
        statistics=StatisticsFigures(now_ms, overdue={"expired": 0, "old_generation": 0}, missing=3),
        skew_seconds={HOSTILE: 7_200.0},
        late=(
            BlockedReaders(
                *("1699990000000000001", f"import@{HOSTILE}", now_ms - 2 * HOUR, (hostile, "default:audit"), 3),
                "tms tx invalidate 1699990000000000001",
            ),
        ),
        topics=(
            TopicFigures("default", HOSTILE, 3, 3600, 41_000, 9_300_000, oldest_ms, now_ms, now_ms, 41_000, oldest_ms),
            TopicFigures("default", "audit", -2, 86_400, 70_000, 81_000_000, old_ms, now_ms, now_ms, 70_000, old_ms),
            TopicFigures("default", "orders", 1, 86_400),
        ),
    )


def topics(now_ms: int, number: int = 64) -> tuple[TopicFigures, ...]:
    """Return topics by name with decreasing sizes; two of them are overdue, and one is not counted."""
    names = ("orders", "audit", "metadata", "program.status", "time.events", "preview")
    found = []
    for index in range(number):
        messages = 9_400_000 // (index + 1) ** 2
        found.append(
            TopicFigures(
                "default" if index % 4 else "system",
                names[index] if index < len(names) else f"tenant-{index:02d}.events",
                1 + index % 3,
                7 * 86_400 if index % 2 else 86_400,
                messages,
                messages * 212,
                now_ms - (7 * DAY if index % 2 else DAY) + index * MINUTE,
                now_ms - index * 7 * SECOND,
                now_ms - 4 * MINUTE,
                *(
                    (480, now_ms - 9 * MINUTE - 7 * DAY)
                    if index == 1
                    else (160, now_ms - 3 * MINUTE - DAY)
                    if index == 4
                    else (0, None)
                ),
            )
        )
    found.append(TopicFigures("default", "brand-new", 1, 3_600))
    return tuple(sorted(found, key=lambda topic: topic.name))


def runs(now_ms: int, number: int = 180) -> tuple[RunRecord, ...]:
    """Return a run per minute, newest first, with a daily wave, a deleted topic, inverted rows, a failure and a gap."""
    past = []
    for age in range(number):
        if 60 <= age < 78:
            continue
        started_ms = now_ms - MINUTE * (age + 1) - 4 * SECOND
        failed = age == 78
        expired = 0 if failed else 1_400 + 60 * ((age * 7) % 13) + 900 * (age % 47 > 38)
        past.append(
            RunRecord(
                f"r-{20_480 - age}",
                "apply",
                started_ms,
                started_ms + 1_400,
                "failed" if failed else "done",
                expired,
                5_200 if age in (24, 25) else 0,
                invalid_transaction=210 + age % 5 if age % 11 < 4 else 0,
                held=12_400,
                duration_seconds=1.4 + 0.1 * (age % 3),
                phase_seconds={"message": 0.61, "invert": 0.18, "payload": 0.42, "sync": 0.011, "compact": 0.2},
                full=age % 60 == 30,
                error="the store could not be read: input/output error" if failed else "",
            )
        )
    return tuple(past)


def _open(now_ms: int) -> tuple[OpenTransaction, ...]:
    ages = (31 * HOUR, 9 * HOUR, 40 * MINUTE)
    return tuple(OpenTransaction(str(pointer(now_ms - age)), now_ms - age, now_ms - age + MINUTE) for age in ages)


def _approve(topic: str) -> str:
    return f"janitor approve '{topic}' --config janitor.yaml"
