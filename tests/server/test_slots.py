"""Slots: assignment to servers, hand-over and hand-back, and agreement on their number."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from typing import Any
from uuid import UUID

import pytest

from tests.builders import NOW_MS
from tests.kit.servers import DELAY_SECONDS, SECONDS, SlotServer, SlotServers
from tests.support import each_raises, raising
from tms_core.errors import BadRequest, StoreError, StoreUnavailable, Unavailable
from tms_core.messaging.groups.claims import GroupBatch, GroupPoll
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import ProducerName
from tms_core.rowkey import MessageId, generation_prefix
from tms_core.server.ha.leadership import REACH_MS
from tms_core.server.ha.slot_assignment import slot_of
from tms_core.server.rest.forward import _topic
from tms_core.settings.models import LeaderSettings
from tms_core.tables.base import KEYS
from tms_core.tables.lease import LeaseRecord
from tms_core.topic import TopicId
from tms_core.transaction.model import Transaction

SLOTS = 4
Pair = tuple[SlotServer, SlotServer]
#: A topic of each slot.
TOPICS = {slot_of(topic.prefix, SLOTS): topic for topic in (TopicId("default", f"t{number}") for number in range(40))}
TOPIC = TOPICS[1]


def wanted(slots: int = SLOTS, servers: int = 2) -> LeaderSettings:
    return LeaderSettings(
        advertise="http://here:1", slots=slots, servers=servers, seconds=SECONDS, fencing_delay_seconds=DELAY_SECONDS
    )


@pytest.fixture
def cluster() -> Iterator[SlotServers]:
    with closing(SlotServers()) as made:
        yield made


@pytest.fixture
def pair(cluster: SlotServers) -> Pair:
    """Start two servers that lead their slots; create a topic in each slot."""
    one, other = cluster.start(0, wanted()), cluster.start(1, wanted())
    cluster.check_leases(one, other, seconds=2)
    for topic in TOPICS.values():
        one.service.create_topic(topic)
    return one, other


TAKE_OVER = SECONDS + DELAY_SECONDS + 3


# --- assignment of slots ---------------------------------------------------------------------------------------------


def test_a_topic_s_slot_is_the_crc_32_of_its_name() -> None:
    # The check value of CRC-32/ISO-HDLC.
    assert slot_of(b"123456789:", 64) == 0xCBF43926 % 64


@pytest.mark.parametrize(
    ("path", "topic"),
    [
        ("/v1/namespaces/default/topics/orders", b"default:orders:"),
        ("/v1/namespaces/default/topics/orders/consumers/billing/poll", b"default:orders:"),
        ("/v1/namespaces/default/topics", b""),
        ("/ping", b""),
    ],
)
def test_path_of_a_request_names_its_topic(path: str, topic: bytes) -> None:
    assert _topic(path) == topic


def test_two_servers_lead_and_answer_for_their_own_slots(pair: Pair) -> None:
    one, other = pair
    assert (one.led, other.led) == ([0, 2], [1, 3])
    for slot, topic in TOPICS.items():
        leader, follower = (one, other) if slot in one.led else (other, one)
        leader.service.publish(topic, [b"a"])
        leader.service.consumers.put(topic, "billing", MessageId(0, 0))
        assert leader.payloads(topic) == [b"a"]
        found = follower.slots.leaderships[slot].leader
        assert found is not None
        assert found.address == f"http://{found.holder}" == f"http://server {slot % 2} of {slot % 2}"
        each_raises(
            Unavailable,
            partial(follower.service.publish, topic, [b"b"]),
            partial(follower.payloads, topic),
            partial(follower.service.consumers.get, topic, "billing"),
        )


def test_leases_that_cannot_be_read_are_renewed(
    cluster: SlotServers, pair: Pair, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = pair
    monkeypatch.setattr(cluster.leases, "rows", raising(StoreError("HBase is away.")))
    with caplog.at_level(logging.WARNING):
        cluster.check_leases(one, other, seconds=2 * SECONDS)
    assert (one.led, other.led) == ([0, 2], [1, 3])
    assert caplog.text.count("HBase is away") == 2, "each server has said it once"


# --- handover --------------------------------------------------------------------------------------------------------


def test_server_that_is_back_gets_its_slots_and_loses_nothing(cluster: SlotServers, pair: Pair) -> None:
    one, other = pair
    other.service.publish(TOPIC, [b"1"])
    cluster.check_leases(one, seconds=TAKE_OVER)
    assert one.led == [0, 1, 2, 3]
    one.service.publish(TOPIC, [b"2"])
    again = cluster.start(1, wanted())
    # Two checks see the server, and no write is in progress, so the slots change.
    cluster.check_leases(one, again, seconds=2)
    assert (one.led, again.led) == ([0, 2], [1, 3])
    again.service.publish(TOPIC, [b"3"])
    assert again.payloads(TOPIC) == [b"1", b"2", b"3"]
    with pytest.raises(Unavailable):
        one.service.publish(TOPIC, [b"4"])


def test_spare_server_hands_slots_back(cluster: SlotServers) -> None:
    spare = cluster.start(2, wanted())
    cluster.check_leases(spare, seconds=2 * TAKE_OVER)
    assert spare.led == [0, 1, 2, 3]
    assert not [key for key, _ in cluster.leases.rows(b"l", b"m", 10).items if key[2:3] == b"\xff"], "it has each slot"
    again = cluster.start(0, wanted())
    cluster.check_leases(spare, again, seconds=4)
    assert (spare.led, again.led) == ([1, 3], [0, 2])


def test_hand_over_of_a_slot_waits_for_a_write(cluster: SlotServers, pair: Pair) -> None:
    one, _ = pair
    cluster.check_leases(one, seconds=TAKE_OVER)
    again = cluster.start(1, wanted())

    def concurrent_action() -> None:
        cluster.check_leases(one, again, seconds=4)
        assert (one.led, again.led) == ([0, 2], []) or (one.led, again.led) == ([0, 2], [3])
        with pytest.raises(Unavailable):
            one.payloads(TOPIC)

    one.interrupt_write(concurrent_action)
    one.service.publish(TOPIC, [b"1"])
    cluster.check_leases(one, again, seconds=3)
    assert again.led == [1, 3]
    again.service.publish(TOPIC, [b"2"])
    assert again.payloads(TOPIC) == [b"1", b"2"]


def test_late_rows_of_a_former_slot_leader_are_never_seen(cluster: SlotServers, pair: Pair) -> None:
    one, other = pair
    other.service.publish(TOPIC, [b"1"])
    again = cluster.start(1, wanted())
    seen: list[list[bytes]] = []

    def concurrent_action() -> None:
        # The server between them does not use the topic, so only the last leader has to know the rows.
        cluster.check_leases(one, seconds=TAKE_OVER)
        cluster.check_leases(one, again, seconds=4)
        assert again.led == [1, 3]
        again.service.publish(TOPIC, [b"2"])
        seen.append(again.payloads(TOPIC))

    other.interrupt_write(concurrent_action)
    with pytest.raises(StoreUnavailable):
        other.service.publish(TOPIC, [b"late"])
    assert len(cluster.store.message.read(KEYS, TOPIC.prefix, None, 10).items) == 3
    assert seen == [[b"1", b"2"]] == [again.payloads(TOPIC)]


def test_ttl_that_another_server_changed_drops_cached_messages(cluster: SlotServers, pair: Pair) -> None:
    one, other = pair
    other.service.publish(TOPIC, [b"1"])
    assert other.payloads(TOPIC) == [b"1"]
    one.service.update_topic(TOPIC, {"ttl": "10"})
    cluster.check_leases(one, other, seconds=20)
    cluster.store.message.delete(cluster.store.message.read(KEYS, TOPIC.prefix, None, 10).items)
    one.service.update_topic(TOPIC, {"ttl": "600"})
    assert other.payloads(TOPIC) == []


# --- producers -------------------------------------------------------------------------------------------------------


def test_producer_publishes_to_topics_of_its_slot_only(pair: Pair) -> None:
    one, other = pair
    known = one.service.producers.register(TOPICS[0], "importer", UUID(int=7))
    sent = Sent(TOPICS[0], "importer", known.generation, 1)
    one.service.publish(TOPICS[0], [b"1"], sent=sent)
    for leader, slot in ((other, 1), (one, 2)):
        with pytest.raises(BadRequest, match="in another slot"):
            leader.service.publish(TOPICS[slot], [b"2"], sent=sent)
        assert leader.payloads(TOPICS[slot]) == []


def test_producer_is_deleted_by_the_leader_of_its_slot_only(cluster: SlotServers, pair: Pair) -> None:
    one, other = pair
    # More producers than one read returns.
    others = [ProducerName(TOPICS[0], 1, f"p{number}").request_key(TOPICS[0].prefix) for number in range(1001)]
    cluster.side.put([(key, b"") for key in others])
    for slot, topic in TOPICS.items():
        leader, follower = (one, other) if slot in one.led else (other, one)
        known = leader.service.producers.register(topic, "importer", UUID(int=7))
        leader.service.publish(topic, [b"1"], sent=Sent(topic, "importer", known.generation, 1))
        with pytest.raises(StoreUnavailable):
            follower.service.producers.delete(topic, "importer")
        leader.service.producers.delete(topic, "importer")
        assert leader.service.producers.of(topic) == []
    assert [key for key, _ in cluster.side.rows(b"q", b"r", 2000).items] == sorted(others)


def test_producer_of_a_topic_reaches_partitions_of_its_slot_only(pair: Pair) -> None:
    whole = TopicId("default", "visits")
    pair[0].service.create_topic(whole, {"partitions": "8"})
    home = slot_of(whole.prefix, SLOTS)
    refused = 0
    for part in (TopicId("default", f"visits-{number}") for number in range(8)):
        slot = slot_of(part.prefix, SLOTS)
        service = pair[slot % 2].service
        known = pair[home % 2].service.producers.register(whole, part.topic, UUID(int=7))
        sent = Sent(whole, part.topic, known.generation, 1)
        if slot == home:
            service.publish(part, [b"1"], sent=sent)
            continue
        with pytest.raises(BadRequest, match=r"server\.leader\.slots"):
            service.publish(part, [b"1"], sent=sent)
        known = service.producers.register(part, "importer", UUID(int=7))
        service.publish(part, [b"1"], sent=Sent(part, "importer", known.generation, 1))
        refused += 1
    assert 0 < refused < 8


def test_registration_ignores_old_requests_to_topics_of_other_slots(cluster: SlotServers, pair: Pair) -> None:
    producer = ProducerName(TOPIC, 1, "importer")
    requests = [producer.request_key(generation_prefix(topic.prefix, 1)) for topic in TOPICS.values()]
    cluster.side.put([(key, LastRequest(1, 1, 0, 1).pack()) for key in requests])
    assert pair[1].service.producers.register(TOPIC, "importer", UUID(int=7)).generation > 1


# --- number of slots -------------------------------------------------------------------------------------------------


def slots_after(cluster: SlotServers, server: SlotServer, seconds: int = 3) -> list[int]:
    cluster.check_leases(server, seconds=seconds)
    return server.led


def test_group_set_back_by_another_server_is_noticed(pair: Pair, cluster: SlotServers) -> None:
    whole = TopicId("default", "orders")
    pair[0].service.create_topic(whole, {"partitions": "1"})
    old = TopicId("default", "orders-0")
    own = next(server for server in pair if server.slots.of(old.prefix).leads)
    own.service.publish(old, [b"1"])
    pair[0].service.update_topic(whole, {"partitions": "8"})
    other = next(server for server in pair if server is not own)
    parts = (TopicId("default", f"orders-f2-{number}") for number in range(8))
    new = next(part for part in parts if other.slots.of(part.prefix).leads)
    pointers = iter(range(1, 100))

    def poll_group(server: SlotServer, topic: TopicId) -> GroupBatch:
        pointer = (NOW_MS + next(pointers)) * 1_000_000
        return server.service.groups.poll(topic, "billing", GroupPoll(Transaction(pointer, pointer, pointer), 10))

    own.service.consumers.put(old, "billing", MessageId(0, 0))
    other.service.consumers.put(new, "billing", MessageId(0, 0))
    for undo in (lambda: own.service.consumers.put(old, "billing", MessageId(0, 0)), None):
        assert poll_group(other, new).earlier_partition == old
        assert [message.payload for message in poll_group(own, old).messages] == [b"1"]
        assert poll_group(own, old).drained
        assert poll_group(other, new).earlier_partition is None
        if undo is not None:
            undo()
            cluster.check_leases(*pair, seconds=6)


@pytest.mark.parametrize(("previous", "slots"), [(1, 4), (4, 1), (4, 2), (2, 8)])
def test_another_number_of_slots_counts_after_the_servers_ended(
    cluster: SlotServers, previous: int, slots: int
) -> None:
    old, new = cluster.start(0, wanted(previous, 1)), cluster.start(0, wanted(slots, 1))
    all_old, all_new = list(range(previous)), list(range(slots))
    cluster.check_leases(old)
    assert old.led == all_old
    cluster.check_leases(old, new, seconds=3 * SECONDS)
    assert (old.led, new.led) == (all_old, [])
    old.assignment.resign()
    assert slots_after(cluster, new) == all_new
    cluster.check_leases(old, new, seconds=3 * SECONDS)
    assert (old.led, new.led) == ([], all_new)


def test_new_number_of_slots_waits_for_a_dead_server(cluster: SlotServers, caplog: pytest.LogCaptureFixture) -> None:
    old, new = cluster.start(0, wanted(1, 1)), cluster.start(0, wanted(4, 1))
    cluster.check_leases(old)
    with caplog.at_level(logging.WARNING):
        assert slots_after(cluster, new, 2 * SECONDS) == []
    assert "did not shut down cleanly" in caplog.text
    cluster.clock.advance(REACH_MS)
    assert slots_after(cluster, new) == [0, 1, 2, 3]


def test_unfinished_change_of_slots_is_settled_first(cluster: SlotServers, monkeypatch: pytest.MonkeyPatch) -> None:
    old = cluster.start(0, wanted(4, 1))
    cluster.check_leases(old)
    old.assignment.resign()
    dies, swap = cluster.start(0, wanted(2, 1)), cluster.leases.exchange
    with monkeypatch.context() as patched:
        written: list[bytes] = []

        def fail_second(key: bytes, *rest: Any) -> bool:
            if key == b"l":
                written.append(key)
                if len(written) == 2:
                    raise StoreError("HBase is away.")
            return swap(key, *rest)

        patched.setattr(cluster.leases, "exchange", fail_second)
        cluster.check_leases(dies)
    record = LeaseRecord.parse(cluster.leases.get(b"l"))
    assert record is not None
    assert record.holder.startswith("4 slots, to be 2 by")
    other = cluster.start(0, wanted(4, 1))
    cluster.check_leases(old, other)
    assert (old.led, other.led) == ([], [])
    cluster.clock.advance(REACH_MS)
    assert slots_after(cluster, other, 2 * SECONDS) == [0, 1, 2, 3]
    assert slots_after(cluster, dies) == []
