"""A separate janitor on a store with registered consumers: holds, status and release."""

from __future__ import annotations

import pytest

from janitor.state.records import Note
from janitor.state.sqlite.state import SqliteState
from tests.builders import DAY, MINUTE, NOW_MS
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tms_core.consumers.positions import Position, Positions
from tms_core.rowkey import MessageId
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.side import LevelDBSide, side_path
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId, TopicMetadata

ORDERS = TopicMetadata(TopicId("default", "orders"), 1, 86400)
#: The older of the two expired messages is read, the other is unread.
READ, UNREAD = MessageId(NOW_MS - 3 * DAY, 0), MessageId(NOW_MS - 2 * DAY, 1)
HOLD_SECONDS = 2 * 86400


@pytest.fixture
def consumer(kit: CommandKit) -> CommandKit:
    """Return a store with a consumer whose unread messages are held."""
    read(kit, READ)
    kit.set(f"{SETTINGS}server: {{consumers: {{floor: true, max_hold_seconds: {HOLD_SECONDS}}}}}\n")
    return kit


def read(kit: CommandKit, message: MessageId) -> None:
    with LevelDBSide(side_path(kit.store)) as side:
        Positions(side).put(ORDERS, Position("billing", message, NOW_MS, 0))


def messages(kit: CommandKit) -> list[int]:
    with LevelDBStore(kit.store) as store:
        return [
            int.from_bytes(key[-10:-2], "big") for key in store.message.read(KEYS, b"default:orders:", b"e", 10).items
        ]


def test_plan_and_run_hold_unread_messages_and_show_them(consumer: CommandKit) -> None:
    planned = consumer.janitor("plan --format json").json
    assert [(entry["rows"], entry["held"]) for entry in planned["topics"] if entry["rule"] == "expired"] == [
        (1, "consumer"),
        (1, "first_contact"),
    ]
    shown = consumer.janitor("run --once --adopt").out
    assert "for a consumer" in shown
    assert (
        "consumer: default:orders keeps messages that consumer billing has not read, for up to 172800 s after "
        "their ttl" in shown
    )
    assert messages(consumer) == [NOW_MS - 2 * DAY, NOW_MS - 3 * 60 * MINUTE, NOW_MS - MINUTE]
    [held] = consumer.janitor("status --format json").json["held"]
    until_ms = UNREAD.publish_ms + (86400 + HOLD_SECONDS) * 1000 + 1
    assert (held["topic"], held["reason"], held["rows"], held["until_ms"]) == (
        "default:orders",
        "consumer",
        1,
        until_ms,
    )
    assert "1 rows (consumer); until 2023-11-15 22:13:20 UTC (in 1 d)" in consumer.janitor("status").out


def test_why_of_a_held_message_shows_the_end_of_its_hold(consumer: CommandKit) -> None:
    consumer.janitor("run --once --adopt")
    shown = consumer.janitor(f"why default:orders {UNREAD}").out
    assert "held until 2023-11-15 22:13:20 UTC at the latest, because a consumer of its topic has not read it" in shown
    [found] = consumer.janitor(f"why default:orders {UNREAD} --format json").json["found"]
    until_ms = UNREAD.publish_ms + (86400 + HOLD_SECONDS) * 1000 + 1
    assert (found["hold"], found["until_ms"], found["goes_ms"]) == ("consumer", until_ms, until_ms)
    [living] = consumer.janitor(f"why default:orders {MessageId(NOW_MS - MINUTE, 2)} --format json").json["found"]
    assert (living["hold"], living["goes_ms"]) == (None, NOW_MS - MINUTE + DAY + 1)
    consumer.clock.advance(until_ms - NOW_MS)
    [due] = consumer.janitor(f"why default:orders {UNREAD} --format json").json["found"]
    assert due["action"] == "delete"


def test_run_without_consumers_holds_nothing_and_makes_no_file(kit: CommandKit) -> None:
    kit.set(f"{SETTINGS}server: {{consumers: {{floor: true}}}}\n")
    assert kit.janitor("run --once --adopt --format json").json["totals"]["expired"] == 2
    assert not side_path(kit.store).exists()


def test_run_without_a_floor_ignores_consumers(consumer: CommandKit) -> None:
    consumer.set(SETTINGS)
    assert consumer.janitor("run --once --adopt --format json").json["totals"]["expired"] == 2


FIGURES = {
    "tms_namespace": "default",
    "topic": "orders",
    "generation": 1,
    "position_ms": 0,
    "updated_ms": NOW_MS,
    "lag_messages": 4,
    "oldest_unread_ms": NOW_MS - MINUTE,
    "expired": False,
    "counted_ms": NOW_MS,
}


def test_status_and_topic_of_groups_with_claims_show_open_and_redelivered(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    with SqliteState(kit.folder / "data/janitor") as state:
        groups = [
            {**FIGURES, "consumer": "before", "open_claims": 0, "redelivered": 0},
            {**FIGURES, "consumer": "one", "open_claims": 1, "redelivered": 0},
            {**FIGURES, "consumer": "two", "open_claims": 1200, "redelivered": 1},
        ]
        state.save_note(Note.CONSUMERS, groups)
    lag = "lag 4 messages, the oldest 1 min old; counted 2023-11-14 22:13:20 UTC (0 s ago)"
    shown = kit.janitor("status").out
    for line in (f"before of default:orders; {lag}\n", f"{lag}; 1 open claim\n"):
        assert line in shown
    assert f"two of default:orders; {lag}; 1,200 open claims, 1 redelivered\n" in shown
    detail = kit.janitor("topic default:orders").out
    read_at = "last read 2023-11-14 22:13:20 UTC (0 s ago)"
    assert f"before: lag 4 messages, the oldest 1 min old; {read_at}\n" in detail
    assert f"two: lag 4 messages, the oldest 1 min old; {read_at}; 1,200 open claims, 1 redelivered\n" in detail
    for line in ("status", "topic default:orders"):
        found = kit.janitor(f"{line} --format json").json["consumers"]
        assert [(one["open_claims"], one["redelivered"]) for one in found] == [(0, 0), (1, 0), (1200, 1)]
