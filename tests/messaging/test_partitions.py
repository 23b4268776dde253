"""Topics with partitions in the service: rejected changes change nothing, and parts follow their topic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from threading import Event, Thread, Timer
from typing import Any
from uuid import UUID

import pytest

from tests.builders import DAY, NOW_MS
from tests.kit.messaging import CrashingStore, named, read_payloads
from tests.support import act_after, act_before
from tms_core.clock import ManualClock
from tms_core.errors import (
    BadRequest,
    ConsumerNotFound,
    Forbidden,
    MetadataError,
    PartitionsChanged,
    StoreError,
    TmsError,
    TopicExists,
    Unavailable,
)
from tms_core.messaging.groups.claims import GroupPoll
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.publish.pipeline import MessageWriteBatch, PayloadWriteBatch
from tms_core.messaging.service import MessagingService
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.messaging.topics.partitions import MAX_FAMILIES, Family, Layout, hash_key, layout_of
from tms_core.rowkey import MessageId
from tms_core.tables.base import KEYS
from tms_core.tables.side import MemorySide
from tms_core.topic import TopicId
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage

ORDERS, GROUP = named("orders"), "billing"
ROUTES = '{"users": 2, "pages": 1}'


@pytest.fixture
def store() -> CrashingStore:
    return CrashingStore()


@pytest.fixture
def service(store: CrashingStore) -> Iterator[MessagingService]:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    manager = TransactionManager(MemoryStorage(), clock)
    with MessagingService(store, clock, side=MemorySide(), transactions=manager) as made:
        made.manager = manager  # type: ignore[attr-defined]
        yield made
    manager.close()


def seen(service: MessagingService) -> dict[str, Mapping[str, str]]:
    return {name: service.topic(named(name)) for name in service.topics("default")}


def poll(service: MessagingService, topic: str, group: str = GROUP, *, commit: bool = True, **options: Any) -> Any:
    manager: TransactionManager = service.manager  # type: ignore[attr-defined]
    tx = manager.start_short()
    given = service.groups.poll(named(topic), group, GroupPoll(tx, 100, **options))
    if commit:
        manager.commit(tx.transaction_id)
    return given


# --- rejections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "properties",
    [
        *({"partitions": wrong} for wrong in ("0", "-1", "10000", "1001", "text", "", "1.5", "٣", " 2", "08")),
        *(
            {"routes": wrong}
            for wrong in ("", "[]", "{}", "2", '{"a": 0}', '{"a": 10000}', '{"a": "x"}', '{"a": null}')
        ),
        *({"routes": f'{{"{wrong}": 2}}'} for wrong in ("", "0", "f2", "dead", "a b", "é", "a:b")),
        {"routes": '{"a": 1, "a": 2}', "partitions": "2"},
        {"routes": "{" + ", ".join(f'"r{at}": 1' for at in range(17)) + "}"},
        {"partitions": "2", "ttl": "0"},
        {"partitions": "2", "retention": "often"},
    ],
    ids=str,
)
def test_bad_partitions_or_routes_change_no_topic(service: MessagingService, properties: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        service.create_topic(ORDERS, properties)
    assert seen(service) == {}
    for kind in ({}, {"partitions": "2"}, {"routes": ROUTES}):
        service.create_topic(ORDERS, kind)
        before = seen(service)
        with pytest.raises(BadRequest):
            service.update_topic(ORDERS, properties)
        assert seen(service) == before
        service.delete_topic(ORDERS)


def test_topic_ignores_properties_that_only_the_server_writes(service: MessagingService) -> None:
    own = {"families": "1:9", "part_of": "orders", "sealed": "1"}
    service.create_topic(ORDERS, own)
    service.update_topic(ORDERS, own)
    assert set(service.topic(ORDERS)) == {"generation", "ttl"}
    service.publish(ORDERS, [b"1"])


def test_partitions_with_too_long_names_change_no_topic(service: MessagingService) -> None:
    with pytest.raises(BadRequest, match="255"):
        service.create_topic(named("x" * 253), {"partitions": "11"})
    assert seen(service) == {}
    service.create_topic(named("x" * 253), {"partitions": "10"})
    before = seen(service)
    with pytest.raises(BadRequest, match="255"):
        service.update_topic(named("x" * 253), {"partitions": "11"})
    assert seen(service) == before


def test_partitions_with_the_name_of_a_topic_are_rejected(service: MessagingService) -> None:
    service.create_topic(named("orders-1"))
    for properties in ({"partitions": "2"}, {"routes": ROUTES}):
        service.create_topic(named("orders-users")) if "routes" in properties else None
        before = seen(service)
        with pytest.raises(TopicExists):
            service.create_topic(ORDERS, properties)
        assert seen(service) == before
    service.create_topic(ORDERS, {"partitions": "1"})
    service.create_topic(named("orders-f2-1"))
    before = seen(service)
    with pytest.raises(TopicExists, match="f2-1"):
        service.update_topic(ORDERS, {"partitions": "2"})
    assert seen(service) == before
    with pytest.raises(TopicExists):
        service.create_topic(ORDERS, {"partitions": "3"})


@pytest.mark.parametrize("name", ["orders", "orders-1"])
def test_create_with_partitions_keeps_a_concurrently_created_topic(
    store: CrashingStore, service: MessagingService, name: str
) -> None:
    get, reads = store.metadata.get, iter((False, True))

    def create_between(key: bytes) -> bytes | None:
        # The second read follows the check of all names.
        if key == named("orders-0").prefix and next(reads, False):
            service.create_topic(named(name))
            service.publish(named(name), [b"kept"])
        return get(key)

    store.metadata.get = create_between  # type: ignore[method-assign]
    with pytest.raises(TopicExists):
        service.create_topic(ORDERS, {"partitions": "2"})
    assert read_payloads(service, named(name)) == [b"kept"]


def interrupt_deletion(store: CrashingStore, service: MessagingService) -> None:
    """Create a topic with partitions, and delete it until the store fails after the first write."""
    service.create_topic(ORDERS, {"partitions": "2"})
    store.writes_left = 1
    with pytest.raises(StoreError):
        service.delete_topic(ORDERS)
    store.writes_left = None


def test_delete_after_an_interrupted_delete_keeps_a_new_topic_of_a_parts_name(
    store: CrashingStore, service: MessagingService
) -> None:
    interrupt_deletion(store, service)
    service.create_topic(named("orders-0"))
    service.delete_topic(ORDERS)
    assert set(seen(service)) == {"orders-0"}


@pytest.mark.parametrize("properties", [{"ttl": "7"}, {"partitions": "3"}])
def test_update_after_an_interrupted_deletion_keeps_a_new_topic_with_a_parts_name(
    store: CrashingStore, service: MessagingService, properties: dict[str, str]
) -> None:
    interrupt_deletion(store, service)
    service.create_topic(named("orders-0"), {"ttl": "60"})
    service.consumers.put(named("orders-0"), GROUP, MessageId(0, 0))
    before = service.topic(named("orders-0"))
    with pytest.raises(TopicExists):
        service.update_topic(ORDERS, properties)
    assert service.topic(named("orders-0")) == before
    for new in set(service.topics("default")) - {"orders", "orders-0", "orders-1"}:
        with pytest.raises(ConsumerNotFound):
            service.consumers.get(named(new), GROUP)


@pytest.mark.parametrize("replaced", ["orders-0", "orders"])
@pytest.mark.parametrize("change", ["update", "delete", "partitions"])
def test_topic_change_keeps_a_concurrently_recreated_topic_or_part(
    store: CrashingStore, service: MessagingService, change: str, replaced: str
) -> None:
    service.create_topic(ORDERS, {"partitions": "2"})
    service.publish(named("orders-0"), [b"a"])
    changes: dict[str, Callable[[], None]] = {
        "update": lambda: service.update_topic(ORDERS, {"ttl": "7"}),
        "delete": lambda: service.delete_topic(ORDERS),
        "partitions": lambda: service.update_topic(ORDERS, {"partitions": "3"}),
    }
    write, clients = store.metadata.compare_and_set, iter([TopicRegistry(store.metadata, 60)])

    def replace_between(key: bytes, expected: bytes | None, value: bytes) -> bool:
        if key == named(replaced).prefix and (client := next(clients, None)):
            client.delete(named(replaced))
            client.create(named(replaced), {"owner": "ada"})
        return write(key, expected, value)

    store.metadata.compare_and_set = replace_between  # type: ignore[method-assign]
    with pytest.raises(Unavailable):
        changes[change]()
    assert service.topic(named(replaced)) == {"ttl": "60", "generation": "2", "owner": "ada"}
    if replaced != "orders":
        with suppress(TopicExists):
            changes[change]()
        assert service.topic(named(replaced)) == {"ttl": "60", "generation": "2", "owner": "ada"}


def test_update_during_a_change_of_another_server_keeps_its_partitions(
    store: CrashingStore, service: MessagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.create_topic(ORDERS)

    def update_elsewhere() -> None:
        with MessagingService(store, ManualClock(NOW_MS, monotonic_ms=DAY), side=MemorySide()) as other:
            other.update_topic(ORDERS, {"partitions": "2"})

    act_before(monkeypatch, store.metadata, "compare_and_set", update_elsewhere)
    service.update_topic(ORDERS, {"ttl": "9"})
    assert seen(service).keys() == {"orders", "orders-0", "orders-1"}
    assert {one["ttl"] for one in seen(service).values()} == {"9"}
    layout = layout_of(ORDERS, service.topic(ORDERS))
    assert layout is not None
    assert layout.families[-1].partitions == 2


@pytest.mark.parametrize("properties", [{"partitions": "2"}, {"routes": ROUTES}], ids=str)
def test_part_is_changed_and_deleted_with_its_whole_only(service: MessagingService, properties: dict[str, str]) -> None:
    service.create_topic(ORDERS, properties)
    before = seen(service)
    for topic in [topic for topic in before if topic != "orders"]:
        for refused in (service.delete_topic, lambda topic: service.update_topic(topic, {"ttl": "60"})):
            with pytest.raises(BadRequest, match=rf"default:{topic} .*default:orders"):
                refused(named(topic))
    assert seen(service) == before


def test_update_adds_and_changes_routes_but_deletes_none(service: MessagingService) -> None:
    service.create_topic(ORDERS, {"routes": '{"users": 2}', "ttl": "60"})
    service.update_topic(ORDERS, {"routes": ROUTES, "ttl": "90"})
    assert set(seen(service)) == {
        "orders", "orders-users", "orders-users-0", "orders-users-1", "orders-pages", "orders-pages-0",
    }  # fmt: skip
    assert {properties["ttl"] for properties in seen(service).values()} == {"90"}
    service.update_topic(ORDERS, {"routes": '{"users": 1, "pages": 1}'})
    assert service.topic(named("orders-users"))["partitions"] == "1"
    before = seen(service)
    for wrong in ({"routes": '{"users": 1}'}, {"partitions": "2"}):
        with pytest.raises(BadRequest):
            service.update_topic(ORDERS, wrong)
    service.create_topic(named("plain"))
    with pytest.raises(BadRequest, match=r"default:plain .*routes"):
        service.update_topic(named("plain"), {"routes": ROUTES})
    service.delete_topic(named("plain"))
    assert seen(service) == before


@pytest.mark.parametrize("refused", ["users", "pages"])
def test_routes_with_a_part_that_is_not_permitted_change_nothing(service: MessagingService, refused: str) -> None:
    service.create_topic(ORDERS, {"routes": '{"users": 1}'})
    before = seen(service)

    def permit(topic: TopicId) -> None:
        if refused in topic.topic:
            raise Forbidden("This topic is not permitted.")

    with pytest.raises(Forbidden):
        service.update_topic(ORDERS, {"routes": ROUTES}, permit=permit)
    assert seen(service) == before


# --- parts and their whole -------------------------------------------------------------------------------------------


def test_delete_of_a_topic_keeps_topics_with_similar_names(service: MessagingService) -> None:
    others = ("orders-", "orders-02", "orders-2", "orders-backup", "orders-f2", "orders2-0")
    for other in others:
        service.create_topic(named(other))
    service.create_topic(ORDERS, {"partitions": "2"})
    service.update_topic(ORDERS, {"partitions": "1"})
    service.delete_topic(ORDERS)
    assert sorted(seen(service)) == sorted(others)


def test_fetch_of_a_topic_with_messages_from_before_its_partitions_returns_them(service: MessagingService) -> None:
    service.create_topic(ORDERS)
    service.publish(ORDERS, [b"old"])
    service.update_topic(ORDERS, {"partitions": "2"})
    assert read_payloads(service, ORDERS) == [b"old"]


def test_update_of_a_topic_changes_its_parts_and_keeps_their_number(service: MessagingService) -> None:
    service.create_topic(ORDERS, {"partitions": "2", "ttl": "60", "owner": "ada"})
    service.update_topic(ORDERS, {"ttl": "90"})
    found = seen(service)
    assert {name: one.get("owner") for name, one in found.items()} == dict.fromkeys(found)
    assert {one["ttl"] for one in found.values()} == {"90"}
    assert (found["orders"]["partitions"], found["orders"]["families"]) == ("2", "1:2")
    service.create_topic(named("again"), {"partitions": "2"})
    service.publish(named("again-0"), [b"old"])
    service.delete_topic(named("again"))
    service.create_topic(named("again"), {"partitions": "1"})
    service.consumers.put(named("again-0"), GROUP, MessageId(0, 0))
    assert poll(service, "again-0").messages == []


@pytest.mark.parametrize("operation", ["create", "update", "delete"])
def test_interrupted_topic_change_is_finished_by_a_repeat(
    store: CrashingStore, service: MessagingService, operation: str
) -> None:
    def ask() -> None:
        if operation == "create":
            service.create_topic(ORDERS, {"partitions": "2"})
        elif operation == "update":
            service.update_topic(ORDERS, {"partitions": "3", "ttl": "60"})
        else:
            service.delete_topic(ORDERS)

    wanted: dict[str, set[str]] = {
        "create": {"orders", "orders-0", "orders-1"},
        "update": {"orders", "orders-0", "orders-1", "orders-f2-0", "orders-f2-1", "orders-f2-2"},
        "delete": set(),
    }
    for after in range(20):
        if operation != "create":
            service.create_topic(ORDERS, {"partitions": "2"})
            service.publish(named("orders-0"), [b"1"])
        store.writes_left = after
        try:
            ask()
        except TmsError:
            store.writes_left = None
            ask()
        else:
            assert after > 2
            break
        assert set(seen(service)) == wanted[operation], after
        if operation == "update":
            assert layout_of(ORDERS, service.topic(ORDERS)) == Layout(ORDERS, (Family(1, 2, NOW_MS), Family(2, 3)))
        if operation != "delete":
            service.delete_topic(ORDERS)


# --- changes of the number of partitions -----------------------------------------------------------------------------


def test_partition_change_seals_old_partitions_which_groups_read_first(service: MessagingService) -> None:
    service.create_topic(ORDERS, {"partitions": "2"})
    service.consumers.put(named("orders-0"), GROUP, MessageId(0, 0))
    service.consumers.put(named("orders-1"), GROUP, MessageId(0, 0))
    service.publish(named("orders-1"), [b"old"])
    service.update_topic(ORDERS, {"partitions": "1"})
    for refused in ("orders", "orders-0", "orders-1"):
        with pytest.raises(PartitionsChanged):
            service.publish(named(refused), [b"late"])
    service.publish(named("orders-f2-0"), [b"new"])
    # The group is registered there, so its unread messages are not considered processed.
    assert service.consumers.get(named("orders-f2-0"), GROUP).id == MessageId(0, 0)
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-0")
    assert poll(service, "orders-0").drained
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-1")
    held = poll(service, "orders-1", commit=False)
    assert [one.payload for one in held.messages] == [b"old"]
    assert (held.sealed, held.drained) == (True, False)
    other = poll(service, "orders-1")
    assert (other.messages, other.drained, other.held is None) == ([], False, False)
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-1")
    service.manager.commit(other.held)  # type: ignore[attr-defined]
    assert poll(service, "orders-1").drained
    assert [one.payload for one in poll(service, "orders-f2-0").messages] == [b"new"]


def test_request_of_a_producer_is_repeated_after_its_partition_was_sealed(service: MessagingService) -> None:
    service.create_topic(ORDERS, {"partitions": "1"})
    service.create_topic(named("bills"))
    known = service.producers.register(named("bills"), "importer", UUID(int=1))
    first, second = (Sent(named("bills"), "importer", known.generation, number, "") for number in (1, 2))
    service.publish(named("orders-0"), [b"1"], sent=first)
    service.update_topic(ORDERS, {"partitions": "2"})
    service.publish(named("orders-0"), [b"1"], sent=first)
    with pytest.raises(PartitionsChanged):
        service.publish(named("orders-0"), [b"2"], sent=second)
    service.publish(named("orders-f2-0"), [b"2"], sent=second._replace(sequence=3))
    service.consumers.put(named("orders-0"), GROUP, MessageId(0, 0))
    assert [one.payload for one in poll(service, "orders-0").messages] == [b"1"]


def test_group_of_old_partitions_must_register_for_a_new_partition(service: MessagingService) -> None:
    service.create_topic(ORDERS, {"partitions": "1", "retention": "consumed"})
    service.publish(named("orders-0"), [b"1"])
    service.update_topic(ORDERS, {"partitions": "2", "retention": "consumed"})
    service.consumers.put(named("orders-0"), GROUP, MessageId(0, 0))
    with pytest.raises(ConsumerNotFound):
        poll(service, "orders-f2-0")
    service.consumers.put(named("orders-f2-0"), GROUP, MessageId(0, 0))
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-0")


@pytest.mark.parametrize("stored", [False, True])
def test_two_partition_changes_keep_a_partition_that_is_being_written(
    store: CrashingStore, service: MessagingService, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    service.create_topic(ORDERS, {"partitions": "1"})
    manager: TransactionManager = service.manager  # type: ignore[attr-defined]
    tx, table = manager.start_short(), store.payload if stored else store.message
    batch = PayloadWriteBatch if stored else MessageWriteBatch
    waits = Event()
    settle = service._families._wait_for_writes

    def change() -> None:
        service.update_topic(ORDERS, {"partitions": "2"})
        service.update_topic(ORDERS, {"partitions": "3"})
        waits.set()

    def change_and_wait() -> None:
        changing.start()
        waits.wait()

    def settle_after_wait(topic: TopicId) -> None:
        # With a delay: without a wait for the write, the change would end before the write.
        Timer(0.05, waits.set).start()
        settle(topic)

    changing = Thread(target=change)
    act_before(monkeypatch, batch, "commit", change_and_wait)
    service._families._wait_for_writes = settle_after_wait
    if stored:
        service.store(named("orders-0"), [b"a"], pointer=tx.write_pointer)
    else:
        service.publish(named("orders-0"), [b"a"])
    changing.join()
    assert any(table.read(KEYS, b"", None, 10).items)
    assert service.topic(named("orders-0"))["part_of"] == "orders"


def test_change_of_partitions_deletes_families_without_messages(
    store: CrashingStore, service: MessagingService
) -> None:
    service.create_topic(ORDERS, {})
    service.publish(ORDERS, [b"0"])
    for number in range(1, MAX_FAMILIES):
        service.update_topic(ORDERS, {"partitions": str(1 + number % 2)})
        service.publish(named(("orders" if number == 1 else f"orders-f{number}") + "-0"), [b"1"])
    before = seen(service)
    with pytest.raises(BadRequest, match="have expired"):
        service.update_topic(ORDERS, {"partitions": "9"})
    assert seen(service) == before
    store.message.delete(store.message.read(KEYS, b"", None, 1000).items)
    service.update_topic(ORDERS, {"partitions": "9"})
    layout = layout_of(ORDERS, service.topic(ORDERS))
    assert layout is not None
    assert [family.partitions for family in layout.families] == [2, 9]
    assert set(seen(service)) == {"orders", *(one.topic for one in layout.parts)}


# --- partitions that a group has read completely ---------------------------------------------------------------------


def create_changed_topic(service: MessagingService, *groups: str) -> None:
    """Create a topic with changed partitions, a message before and after the change, and groups at its start."""
    service.create_topic(ORDERS, {"partitions": "1"})
    for group in groups:
        service.consumers.put(named("orders-0"), group, MessageId(0, 0))
    service.publish(named("orders-0"), [b"old"])
    service.update_topic(ORDERS, {"partitions": "2"})
    service.publish(named("orders-f2-0"), [b"new"])


def drain_old_partition(service: MessagingService) -> None:
    assert payloads(poll(service, "orders-0")) == [b"old"]
    assert poll(service, "orders-0").drained


def payloads(given: Any) -> list[bytes]:
    return [message.payload for message in given.messages]


def test_groups_that_drain_a_partition_both_continue(
    service: MessagingService, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_changed_topic(service, "billing", "audit")
    for group in ("billing", "audit"):
        assert payloads(poll(service, "orders-0", group)) == [b"old"]

    def drain_concurrently() -> None:
        assert poll(service, "orders-0", "audit").drained

    act_before(monkeypatch, service._families, "_wait_for_writes", drain_concurrently)
    assert poll(service, "orders-0", "billing").drained
    for group in ("billing", "audit"):
        assert payloads(poll(service, "orders-f2-0", group)) == [b"new"], group


def test_poll_of_a_new_partition_waits_for_the_last_reader_of_the_old(service: MessagingService) -> None:
    manager: TransactionManager = service.manager  # type: ignore[attr-defined]
    service.create_topic(ORDERS, {"partitions": "2"})
    service.publish(named("orders-0"), [b"a"])
    service.publish(named("orders-1"), [b"b"])
    service.update_topic(ORDERS, {"partitions": "3"})
    for topic in ("orders-0", "orders-1", "orders-f2-0"):
        service.consumers.put(named(topic), GROUP, MessageId(0, 0))

    def read(topic: str) -> None:
        assert poll(service, topic).messages
        assert poll(service, topic).drained

    read("orders-0")
    early = manager.start_short()
    read("orders-1")
    assert service.groups.poll(named("orders-f2-0"), GROUP, GroupPoll(early, 1)).earlier_partition == named("orders-1")
    assert poll(service, "orders-f2-0").earlier_partition is None


def test_poll_of_a_new_partition_after_a_restart_waits_for_earlier_reads(
    service: MessagingService, store: CrashingStore
) -> None:
    manager: TransactionManager = service.manager  # type: ignore[attr-defined]
    service.create_topic(ORDERS, {"partitions": "1"})
    service.consumers.put(named("orders-0"), GROUP, MessageId(0, 0))
    service.publish(named("orders-0"), [b"old"])
    early = manager.start_short()
    for found in ([b"old"], []):
        assert payloads(poll(service, "orders-0")) == found
    with MessagingService(store, ManualClock(NOW_MS), side=service.side, transactions=manager) as restarted:
        restarted.manager = manager  # type: ignore[attr-defined]
        restarted.update_topic(ORDERS, {"partitions": "2"})
        restarted.publish(named("orders-f2-0"), [b"new"])
        assert poll(restarted, "orders-0").drained
        given = restarted.groups.poll(named("orders-f2-0"), GROUP, GroupPoll(early, 1))
        assert (given.earlier_partition, payloads(given)) == (named("orders-0"), [])
        assert payloads(poll(restarted, "orders-f2-0")) == [b"new"]


def test_group_that_is_registered_again_reads_the_sealed_partition_first(service: MessagingService) -> None:
    create_changed_topic(service, GROUP)
    rows = len(service.side.rows(b"", None, 100).items)
    drain_old_partition(service)
    assert payloads(poll(service, "orders-f2-0")) == [b"new"]
    for topic in ("orders-0", "orders-f2-0"):
        service.consumers.delete(named(topic), GROUP)
        service.consumers.put(named(topic), GROUP, MessageId(0, 0))
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-0")
    assert len(service.side.rows(b"", None, 100).items) == rows
    drain_old_partition(service)
    assert payloads(poll(service, "orders-f2-0")) == [b"new"]


def test_position_set_during_a_poll_is_not_drained(service: MessagingService, monkeypatch: pytest.MonkeyPatch) -> None:
    create_changed_topic(service, GROUP)
    drain_old_partition(service)
    set_position = partial(service.consumers.put, named("orders-0"), GROUP, MessageId(0, 0))
    act_after(monkeypatch, service._families, "drained", set_position)
    poll(service, "orders-f2-1")
    assert poll(service, "orders-f2-1").earlier_partition == named("orders-0")


def test_group_of_a_recreated_topic_has_drained_no_partition(service: MessagingService) -> None:
    create_changed_topic(service, GROUP)
    drain_old_partition(service)
    service.delete_topic(ORDERS)
    create_changed_topic(service, GROUP)
    assert poll(service, "orders-f2-0").earlier_partition == named("orders-0")


# --- rules -----------------------------------------------------------------------------------------------------------


def test_hash_key_is_the_crc_of_its_bytes() -> None:
    assert hash_key("ä") == hash_key("ä".encode())
    assert hash_key(b"123456789") == 0xCBF43926


def test_topic_with_unreadable_families_is_damaged() -> None:
    many = " ".join(f"{number}:1" for number in range(MAX_FAMILIES + 1))
    for wrong in ("", "1", "1:2 ", "a:2", "1:2:x", "1:0", "1:1001", "1:999999999", f"1:2:{'9' * 5000}", many):
        with pytest.raises(MetadataError):
            layout_of(ORDERS, {"families": wrong})


@pytest.mark.parametrize("routes", [{}, {"routes": "{"}, {"routes": '{"users": 0}'}])
def test_topic_with_unreadable_routes_is_damaged(routes: dict[str, str]) -> None:
    with pytest.raises(MetadataError):
        layout_of(ORDERS, {"families": "routes", **routes})
