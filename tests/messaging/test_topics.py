"""Topics: create, describe, update, delete, and create again."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from itertools import count
from pathlib import Path

import pytest

from tests.builders import MINUTE, NOW_MS, Call, watch
from tests.builders import topic as topic_of
from tests.kit.messaging import Kit, P, leveldb, named
from tests.support import each_raises
from tms_core.errors import BadRequest, MetadataError, TopicNotFound, Unavailable
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import INT_MAX, TopicId, TopicMetadata

WEEK = str(7 * 24 * 3600)


def raw(kit: Kit, name: str = "orders") -> bytes | None:
    return kit.store.metadata.get(named(name).prefix)


def write(kit: Kit, value: bytes, name: str = "orders") -> None:
    assert kit.store.metadata.compare_and_set(named(name).prefix, raw(kit, name), value)


def test_create_without_properties_writes_the_bytes_of_cdap(kit: Kit) -> None:
    assert raw(kit) == b'{"generation":"1","ttl":"604800"}'
    assert kit.service.topic(named("orders")) == {"generation": "1", "ttl": WEEK}


def test_create_puts_properties_over_defaults_and_escapes_them(kit: Kit) -> None:
    kit.create("other", ttl="60", generation="17", zeta="a<b", alpha="x=y")
    assert raw(kit, "other") == b'{"alpha":"x\\u003dy","generation":"1","ttl":"60","zeta":"a\\u003cb"}'


@pytest.mark.parametrize(
    "properties",
    [
        *({"ttl": ttl} for ttl in ("0", "-1", "1.5", "", str(2**31))),
        *({"retention": retention} for retention in ("", "Consumed", "0")),
        *({"hold": hold} for hold in ("", "none")),
    ],
)
def test_topic_with_a_bad_ttl_retention_or_hold_is_rejected(kit: Kit, properties: dict[str, str]) -> None:
    with pytest.raises(BadRequest):
        kit.create("other", **properties)
    with pytest.raises(BadRequest):
        kit.service.update_topic(named("orders"), properties)
    assert kit.service.topics("default") == ["orders"]


@pytest.mark.parametrize("generation", ["0", "x", str(2**31), str(-(2**31))])
def test_create_with_an_invalid_generation_is_rejected(kit: Kit, generation: str) -> None:
    with pytest.raises(BadRequest):
        kit.create("other", generation=generation)


@pytest.mark.parametrize(
    "topic",
    [TopicId("default", "a.b"), TopicId("de-fault", "a"), TopicId("", "a"), TopicId("a", ""), TopicId("ä", "b")],
)
def test_invalid_topic_name_is_rejected(kit: Kit, topic: TopicId) -> None:
    each_raises(
        BadRequest,
        lambda: kit.service.create_topic(topic),
        lambda: kit.service.topic(topic),
        lambda: kit.service.publish(topic, [b"a"]),
    )


def test_update_resets_omitted_properties_to_their_defaults(kit: Kit) -> None:
    kit.create("other", ttl="60", colour="red")
    kit.service.update_topic(named("other"), {"shape": "round"})
    assert kit.service.topic(named("other")) == {"generation": "1", "shape": "round", "ttl": WEEK}


def test_deleted_topic_is_not_found_and_keeps_its_row(kit: Kit) -> None:
    kit.create("other", ttl="60", colour="red")
    kit.service.delete_topic(named("other"))
    assert raw(kit, "other") == b'{"colour":"red","generation":"-1","ttl":"60"}'
    each_raises(
        TopicNotFound,
        lambda: kit.service.topic(named("other")),
        lambda: kit.service.update_topic(named("other"), {}),
        lambda: kit.service.delete_topic(named("other")),
        lambda: kit.publish("other", b"a"),
        lambda: kit.put("other", 10**18 * 2, b"a"),
        lambda: kit.fetch("other"),
    )


def test_create_of_a_deleted_topic_has_new_properties_and_generation(kit: Kit) -> None:
    kit.create("other", ttl="60", colour="red")
    for generation in range(2, 12):
        kit.publish("other", b"old")
        kit.service.delete_topic(named("other"))
        kit.create("other", ttl="70")
        assert kit.service.topic(named("other")) == {"generation": str(generation), "ttl": "70"}
        assert kit.fetch("other") == []


def test_create_beyond_the_highest_generation_is_rejected(kit: Kit) -> None:
    write(kit, b'{"generation":"-%d","ttl":"60"}' % INT_MAX)
    with pytest.raises(BadRequest, match="the highest generation"):
        kit.create("orders")


def test_list_of_topics_has_undeleted_topics_in_key_order(kit: Kit) -> None:
    for name in ("t1", "t1-x", "t10", "gone", "damaged"):
        kit.create(name)
    kit.service.create_topic(TopicId("zoo", "lion"))
    kit.service.delete_topic(named("gone"))
    write(kit, b"{}", "damaged")
    assert kit.store.metadata.compare_and_set(b"no topic", None, b"{}")
    assert kit.service.topics("default") == ["orders", "t1-x", "t10", "t1"]
    assert kit.service.topics("zoo") == ["lion"]
    assert kit.service.topics("none") == []


def test_deleted_topics_keep_no_properties_in_memory(tmp_path: Path) -> None:
    number, size = 20, 50_000
    with closing(leveldb(tmp_path)) as kit:
        tracemalloc.start()
        try:
            for name in (f"t{at}" for at in range(number)):
                kit.create(name, note="x" * size)
                assert kit.service.topic(named(name))["note"]
                kit.service.delete_topic(named(name))
            assert kit.service.topics("default") == []
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert kept < number * size / 2


def test_row_formatted_unlike_gson_can_be_changed(kit: Kit) -> None:
    write(kit, b'{ "ttl": "60", "generation": "3", "name": "a=b" }')
    kit.service.update_topic(named("orders"), {"ttl": "61"})
    assert raw(kit) == b'{"generation":"3","ttl":"61"}'
    write(kit, b'{ "ttl": "60", "generation": "3", "name": "a=b" }')
    kit.service.delete_topic(named("orders"))
    assert raw(kit) == b'{"generation":"-3","name":"a\\u003db","ttl":"60"}'


def test_damaged_row_is_a_metadata_error_and_stays(kit: Kit) -> None:
    write(kit, b"damaged")
    each_raises(
        MetadataError,
        lambda: kit.create("orders"),
        lambda: kit.service.topic(named("orders")),
        lambda: kit.service.update_topic(named("orders"), {}),
        lambda: kit.service.delete_topic(named("orders")),
        lambda: kit.publish("orders", b"a"),
    )
    assert raw(kit) == b"damaged"


def test_update_with_a_concurrent_change_is_retried(kit: Kit) -> None:
    others = iter([b'{"generation":"1","ttl":"1"}', b'{"generation":"1","ttl":"2"}'])

    def change(call: Call) -> None:
        if call.name == "metadata.compare_and_set" and (value := next(others, None)):
            write(kit, value)

    watch(kit.store, before=change)
    kit.service.update_topic(named("orders"), {"ttl": "9"})
    assert raw(kit) == b'{"generation":"1","ttl":"9"}'


@pytest.mark.parametrize("generation", [1, -1])
def test_change_with_endless_concurrent_changes_is_unavailable(kit: Kit, generation: int) -> None:
    write(kit, b'{"generation":"%d","ttl":"1"}' % generation)
    ttl = count(2)

    def change(call: Call) -> None:
        if call.name == "metadata.compare_and_set":
            write(kit, b'{"generation":"%d","ttl":"%d"}' % (generation, next(ttl)))

    watch(kit.store, before=change)
    uses: list[Callable[[], object]] = [lambda: kit.create("orders")]
    if generation > 0:
        uses = [
            lambda: kit.service.update_topic(named("orders"), {}),
            lambda: kit.service.delete_topic(named("orders")),
        ]
    for use in uses:
        with pytest.raises(Unavailable):
            use()


def test_update_of_a_topic_that_changed_since_it_was_read_fails(kit: Kit) -> None:
    kit.create("bills", ttl="60")
    registry = kit.service._topics
    previous = registry.get(named("bills"))
    kit.service.update_topic(named("bills"), {"ttl": "90"})
    with pytest.raises(Unavailable):
        registry.update(named("bills"), {"ttl": "30"}, expected=previous)
    assert kit.service.topic(named("bills"))["ttl"] == "90"


# --- new topics ------------------------------------------------------------------------------------------------------


def test_topic_created_without_rows_counts_as_empty_until_it_changes(kit: Kit) -> None:
    def was_created_empty() -> bool:
        value = kit.store.metadata.get(name.prefix)
        assert value is not None
        return kit.service.was_created_empty(TopicMetadata.parse(name.prefix, value))

    name = kit.create("new", ttl="60")
    assert was_created_empty()
    kit.publish("new", b"a")
    assert was_created_empty()
    kit.service.update_topic(name, {"ttl": "1"})
    assert not was_created_empty()
    kit.service.update_topic(name, {"ttl": "60"})
    kit.service.delete_topic(name)
    assert not was_created_empty()
    kit.create("new", ttl="60")
    assert not was_created_empty()


def test_was_created_empty_waits_for_a_concurrent_creation(kit: Kit) -> None:
    name, futures = named("new"), list[Future[bool]]()

    def ask(call: Call) -> None:
        if call.name == "message.keys" and not futures:
            futures.append(threads.submit(kit.service.was_created_empty, TopicMetadata(name, 1, 60)))
            with pytest.raises(TimeoutError):
                futures[0].result(0.05)

    watch(kit.store, before=ask)
    with ThreadPoolExecutor(1) as threads:
        kit.create("new", ttl="60")
        assert [one.result() for one in futures] == [True]


@pytest.mark.parametrize("table", ["message", "payload"])
def test_topic_created_over_existing_rows_was_not_created_empty(kit: Kit, table: str) -> None:
    name = named("found")
    if table == "message":
        kit.store.message.put([(MessageKey(name, 2, NOW_MS, 0).pack(), MessageValue(None, b"a"))])
    else:
        kit.store.payload.put([(PayloadKey(name, 1, P, NOW_MS, 0).pack(), b"a")])
    kit.create("found", ttl="60")
    assert not kit.service.was_created_empty(TopicMetadata(name, 1, 60))
    kit.create("found-too", ttl="60")
    assert kit.service.was_created_empty(TopicMetadata(named("found-too"), 1, 60))


def test_topic_of_an_earlier_process_was_not_created_empty(kit: Kit) -> None:
    name = kit.create("old", ttl="60")
    kit.restart()
    assert not kit.service.was_created_empty(TopicMetadata(name, 1, 60))


def test_create_with_a_name_above_255_bytes_is_rejected(kit: Kit) -> None:
    longest = TopicId("n" * 255, "t" * 255)
    kit.service.create_topic(longest)
    assert kit.service.topics("n" * 255) == ["t" * 255]
    for topic in (TopicId("n" * 256, "t"), TopicId("n", "t" * 256)):
        with pytest.raises(BadRequest, match="255"):
            kit.service.create_topic(topic)
        with pytest.raises(TopicNotFound):
            kit.service.topic(topic)


def test_topic_with_more_than_64_kb_of_properties_is_rejected(kit: Kit) -> None:
    rest = len(b'{"a":"","generation":"1","ttl":"604800"}') - len(b',"generation":"1"')
    kit.create("other", a="x" * (65536 - rest))
    with pytest.raises(BadRequest, match="65536"):
        kit.create("another", a="x" * (65537 - rest))
    with pytest.raises(BadRequest, match="65536"):
        kit.service.update_topic(named("other"), {str(number): "ä" * 300 for number in range(120)})
    assert set(kit.service.topics("default")) == {"orders", "other"}


def test_topic_with_property_names_encoded_alike_is_rejected(kit: Kit) -> None:
    # Half of a surrogate pair is written as a question mark, as in Java.
    kit.service.update_topic(named("orders"), {"\ud800": "1"})
    for names in (("\ud800", "\udfff"), ("?", "\udfff")):
        properties = dict.fromkeys(names, "1")
        with pytest.raises(BadRequest, match=r"'\?'"):
            kit.service.create_topic(named("other"), properties)
        with pytest.raises(BadRequest, match=r"'\?'"):
            kit.service.update_topic(named("orders"), properties)
    assert kit.service.topic(named("orders")) == {"?": "1", "generation": "1", "ttl": WEEK}
    assert kit.service.topics("default") == ["orders"]


def test_longer_topic_of_cdap_is_read_changed_and_deleted(kit: Kit) -> None:
    topic = TopicId("default", "t" * 1000)
    row = b'{"generation":"1","more":"%s","ttl":"60"}' % (b"x" * 100_000)
    assert kit.store.metadata.compare_and_set(topic.prefix, None, row)
    kit.service.publish(topic, [b"a"])
    assert len(kit.service.topic(topic)["more"]) == 100_000
    kit.service.update_topic(topic, {"ttl": "5"})
    kit.service.delete_topic(topic)
    assert kit.service.topics("default") == ["orders"]


def test_update_of_a_ttl_keeps_the_facts_about_clock_and_payloads(kit: Kit) -> None:
    kit.publish("orders", pointer=P)
    kit.put("orders", P, b"a")
    kit.service.update_topic(named("orders"), {"ttl": "120"})
    with pytest.raises(BadRequest, match="are not published"):
        kit.publish("orders", b"b", pointer=P)
    # The rows of the process do not prove that the wall clock is right: it jumps by an hour in this process.
    kit.clock.step(-30 * MINUTE)
    assert kit.payloads("orders") == [b"a"]
    kit.clock.step(60 * MINUTE + 1)
    assert kit.payloads("orders") == [b"a"]


def test_shorter_ttl_reports_how_many_messages_it_hides(kit: Kit, monkeypatch: pytest.MonkeyPatch) -> None:
    orders = topic_of(kit.store, "default:orders", ttl_seconds=100)
    for age in (150, 90, 60, 50, 10):
        orders.plain(NOW_MS - age * 1000)
    # One has expired; one is as old as its TTL.
    assert kit.service.count_ages(named("orders"), 60) == (4, 1, False, None)
    assert kit.service.count_ages(named("orders"), 5) == (4, 4, False, None)
    monkeypatch.setattr("tms_core.messaging.topics.catalog._COUNTED_PAGE", 2)
    monkeypatch.setattr("tms_core.messaging.topics.catalog._MAX_COUNTED", 2)
    assert kit.service.count_ages(named("orders"), 20) == (2, 2, True, None)


def test_topic_on_leveldb_is_read_again_only_after_a_change_of_the_table(tmp_path: Path) -> None:
    topic = named("orders")
    with LevelDBStore(tmp_path, create=True) as store:
        registry = TopicRegistry(store.metadata, 60)
        registry.create(topic, {})
        reads = [_reads(store, registry, topic) for _ in range(3)]
        # A janitor in this process has its own tables over the same folder.
        TopicRegistry(store.with_own_counter().metadata, 60).update(topic, {"ttl": "5"})
        reads += [_reads(store, registry, topic) for _ in range(2)]
        assert registry.get(topic).ttl_seconds == 5
    assert reads == [1, 0, 0, 1, 0]


def test_topic_that_changes_while_it_is_read_is_read_again(tmp_path: Path) -> None:
    topic = named("orders")
    with LevelDBStore(tmp_path, create=True) as store:
        registry, other = TopicRegistry(store.metadata, 60), TopicRegistry(store.with_own_counter().metadata, 60)
        registry.create(topic, {})
        changing = [True]

        def change(call: Call) -> None:
            if call.name == "metadata.get" and changing.pop():
                changing.append(False)
                other.delete(topic)

        watch(store, after=change)
        assert registry.get(topic).generation == 1
        with pytest.raises(TopicNotFound):
            registry.get(topic)


def _reads(store: Store, registry: TopicRegistry, topic: TopicId) -> int:
    before = store.calls["get"]
    registry.get(topic)
    return store.calls["get"] - before
