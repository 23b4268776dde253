"""How long after they were published messages are first read."""

from __future__ import annotations

from tests.builders import MINUTE, NOW_MS
from tests.messaging.desk import Desk, P, named
from tms_core.messaging.fetcher import PAGE_BYTES
from tms_core.messaging.model import FetchRequest
from tms_core.messaging.publish.open_topics import BOUNDS_MS
from tms_core.rowkey import MessageId


def noted(desk: Desk) -> dict[int, int]:
    """How many delays there are by their upper bounds; 0: above all of them."""
    counts = desk.service.first_reads.delays.counts
    bounds = [*BOUNDS_MS, 0]
    return {
        bound: count - before
        for bound, before, count in zip(bounds, (0, *counts), counts, strict=False)
        if count > before
    }


def test_given_a_message_when_first_read_then_its_age_counts_and_never_again(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.clock.advance(50)
    for _ in range(3):
        assert desk.payloads() == [b"a"]
        desk.clock.advance(MINUTE)
    assert noted(desk) == {50: 1}
    assert desk.service.first_reads.delays.sum_ms == 50


def test_given_some_that_were_read_when_more_come_then_the_oldest_unread_of_the_page_counts(desk: Desk) -> None:
    desk.publish("orders", b"a")
    assert desk.payloads() == [b"a"]
    desk.clock.advance(MINUTE)
    desk.publish("orders", b"b")
    desk.clock.advance(51)
    desk.publish("orders", b"c")
    assert desk.payloads() == [b"a", b"b", b"c"]
    assert noted(desk) == {1: 1, 100: 1}
    assert desk.service.first_reads.delays.sum_ms == 51


def test_given_a_reader_who_begins_behind_when_read_then_what_nobody_will_read_any_more_does_not_count(
    desk: Desk,
) -> None:
    desk.publish("orders", b"a")
    desk.clock.advance(MINUTE)
    desk.publish("orders", b"b")
    assert desk.payloads(start=NOW_MS + MINUTE) == [b"b"]
    assert desk.payloads() == [b"a", b"b"]
    assert noted(desk) == {1: 1}


def test_given_several_pages_when_first_read_then_each_counts(desk: Desk) -> None:
    desk.publish("orders", bytes(PAGE_BYTES))
    desk.clock.advance(5)
    desk.publish("orders", bytes(PAGE_BYTES))
    pages = list(desk.service.fetch(named("orders"), FetchRequest()))
    assert len(pages) == 2
    assert noted(desk) == {1: 1, 5: 1}


def test_given_messages_of_before_the_start_when_read_then_they_do_not_count(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.restart()
    desk.clock.advance(MINUTE)
    assert desk.payloads() == [b"a"]
    desk.publish("orders", b"b")
    assert desk.payloads() == [b"a", b"b"]
    assert noted(desk) == {1: 1}


def test_given_stored_payloads_when_first_read_then_the_time_of_their_publish_counts(desk: Desk) -> None:
    desk.put("orders", P, b"a", b"b")
    desk.clock.advance(MINUTE)
    desk.publish("orders", pointer=P)
    desk.clock.advance(2)
    assert desk.payloads(start=MessageId(NOW_MS + MINUTE, 0)) == [b"a", b"b"]
    assert noted(desk) == {2: 1}


def test_given_a_clock_that_steps_back_when_read_then_the_delay_is_none_and_not_negative(desk: Desk) -> None:
    desk.publish("orders", b"a")
    desk.clock.step(-MINUTE)
    assert desk.payloads() == [b"a"]
    assert (noted(desk), desk.service.first_reads.delays.sum_ms) == ({1: 1}, 0)
