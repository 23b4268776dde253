"""The delay between the publish and the first read of messages."""

from __future__ import annotations

from tests.builders import MINUTE, NOW_MS
from tests.kit.messaging import Kit, P
from tms_core.messaging.publish.open_topics import BOUNDS_MS
from tms_core.rowkey import MessageId


def count_delays(kit: Kit) -> dict[int, int]:
    """Return the number of delays by upper bound; 0 stands for delays above all bounds."""
    counts = kit.service.first_reads.delays.counts
    bounds = [*BOUNDS_MS, 0]
    return {
        bound: count - before
        for bound, before, count in zip(bounds, (0, *counts), counts, strict=False)
        if count > before
    }


def test_first_read_of_a_message_counts_its_age_once(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.clock.advance(50)
    for _ in range(3):
        assert kit.payloads() == [b"a"]
        kit.clock.advance(MINUTE)
    assert count_delays(kit) == {50: 1}
    assert kit.service.first_reads.delays.sum_ms == 50


def test_first_read_of_a_page_counts_its_oldest_unread_message(kit: Kit) -> None:
    kit.publish("orders", b"a")
    assert kit.payloads() == [b"a"]
    kit.clock.advance(MINUTE)
    kit.publish("orders", b"b")
    kit.clock.advance(51)
    kit.publish("orders", b"c")
    assert kit.payloads() == [b"a", b"b", b"c"]
    assert count_delays(kit) == {1: 1, 100: 1}
    assert kit.service.first_reads.delays.sum_ms == 51


def test_first_read_skips_messages_before_the_start_of_a_reader(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.clock.advance(MINUTE)
    kit.publish("orders", b"b")
    assert kit.payloads(start=NOW_MS + MINUTE) == [b"b"]
    assert kit.payloads() == [b"a", b"b"]
    assert count_delays(kit) == {1: 1}


def test_first_read_after_a_restart_ignores_older_messages(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.restart()
    kit.clock.advance(MINUTE)
    assert kit.payloads() == [b"a"]
    kit.publish("orders", b"b")
    assert kit.payloads() == [b"a", b"b"]
    assert count_delays(kit) == {1: 1}


def test_first_read_of_stored_payloads_counts_from_their_publish(kit: Kit) -> None:
    kit.put("orders", P, b"a", b"b")
    kit.clock.advance(MINUTE)
    kit.publish("orders", pointer=P)
    kit.clock.advance(2)
    assert kit.payloads(start=MessageId(NOW_MS + MINUTE, 0)) == [b"a", b"b"]
    assert count_delays(kit) == {2: 1}


def test_first_read_after_a_clock_step_back_has_no_delay(kit: Kit) -> None:
    kit.publish("orders", b"a")
    kit.clock.step(-MINUTE)
    assert kit.payloads() == [b"a"]
    assert (count_delays(kit), kit.service.first_reads.delays.sum_ms) == ({1: 1}, 0)
