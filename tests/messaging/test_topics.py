"""Topics: made, described, changed, deleted, and made again."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from tests.builders import NOW_MS, Call, watch
from tests.builders import topic as topic_of
from tests.messaging.desk import Desk, P, named
from tms_core.errors import BadRequest, MetadataError, TopicExists, TopicNotFound, Unavailable
from tms_core.messaging.topics.catalog import TopicRegistry
from tms_core.rowkey import MessageKey, PayloadKey
from tms_core.tables.base import MessageValue, Store
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore
from tms_core.topic import INT_MAX, TopicId, TopicMetadata

WEEK = str(7 * 24 * 3600)


def raw(desk: Desk, name: str = "orders") -> bytes | None:
    return desk.store.metadata.get(named(name).prefix)


def write(desk: Desk, value: bytes, name: str = "orders") -> None:
    assert desk.store.metadata.compare_and_set(named(name).prefix, raw(desk, name), value)


def test_given_no_properties_when_created_then_the_bytes_are_those_of_cdap(desk: Desk) -> None:
    assert raw(desk) == b'{"generation":"1","ttl":"604800"}'
    assert desk.service.topic(named("orders")) == {"generation": "1", "ttl": WEEK}


def test_given_properties_when_created_then_they_lie_over_the_defaults_and_are_escaped(desk: Desk) -> None:
    desk.create("other", ttl="60", generation="17", zeta="a<b", alpha="x=y")
    assert raw(desk, "other") == b'{"alpha":"x\\u003dy","generation":"1","ttl":"60","zeta":"a\\u003cb"}'


@pytest.mark.parametrize(
    "properties",
    [
        *({"ttl": ttl} for ttl in ("0", "-1", "1.5", "", str(2**31))),
        *({"retention": retention} for retention in ("", "Consumed", "0")),
        *({"hold": hold} for hold in ("", "none")),
    ],
)
def test_given_a_ttl_a_retention_or_a_hold_that_is_none_when_created_or_updated_then_it_is_a_bad_request(
    desk: Desk, properties: dict[str, str]
) -> None:
    with pytest.raises(BadRequest):
        desk.create("other", **properties)
    with pytest.raises(BadRequest):
        desk.service.update_topic(named("orders"), properties)
    assert desk.service.topics("default") == ["orders"]


@pytest.mark.parametrize("generation", ["0", "x", str(2**31), str(-(2**31))])
def test_given_a_generation_that_is_none_when_created_then_it_is_a_bad_request(desk: Desk, generation: str) -> None:
    with pytest.raises(BadRequest):
        desk.create("other", generation=generation)


@pytest.mark.parametrize(
    "topic",
    [TopicId("default", "a.b"), TopicId("de-fault", "a"), TopicId("", "a"), TopicId("a", ""), TopicId("ä", "b")],
)
def test_given_a_name_no_topic_has_when_used_then_it_is_a_bad_request(desk: Desk, topic: TopicId) -> None:
    with pytest.raises(BadRequest):
        desk.service.create_topic(topic)
    with pytest.raises(BadRequest):
        desk.service.topic(topic)
    with pytest.raises(BadRequest):
        desk.service.publish(topic, [b"a"])


def test_given_a_topic_when_created_again_then_it_is_refused_and_stays_as_it_is(desk: Desk) -> None:
    with pytest.raises(TopicExists):
        desk.create("orders", ttl="5")
    assert desk.service.topic(named("orders"))["ttl"] == WEEK


def test_given_a_topic_when_updated_then_what_is_left_out_is_the_default_again(desk: Desk) -> None:
    desk.create("other", ttl="60", colour="red")
    desk.service.update_topic(named("other"), {"shape": "round"})
    assert desk.service.topic(named("other")) == {"generation": "1", "shape": "round", "ttl": WEEK}


def test_given_a_deleted_topic_when_asked_for_then_there_is_none_and_its_row_stays(desk: Desk) -> None:
    desk.create("other", ttl="60", colour="red")
    desk.service.delete_topic(named("other"))
    assert raw(desk, "other") == b'{"colour":"red","generation":"-1","ttl":"60"}'
    uses: list[Callable[[], object]] = [
        lambda: desk.service.topic(named("other")),
        lambda: desk.service.update_topic(named("other"), {}),
        lambda: desk.service.delete_topic(named("other")),
        lambda: desk.publish("other", b"a"),
        lambda: desk.put("other", 10**18 * 2, b"a"),
        lambda: desk.fetch("other"),
    ]
    for use in uses:
        with pytest.raises(TopicNotFound):
            use()


def test_given_a_deleted_topic_when_created_again_then_the_new_properties_count_and_the_generation_is_one_above(
    desk: Desk,
) -> None:
    desk.create("other", ttl="60", colour="red")
    for generation in range(2, 12):
        desk.publish("other", b"old")
        desk.service.delete_topic(named("other"))
        desk.create("other", ttl="70")
        assert desk.service.topic(named("other")) == {"generation": str(generation), "ttl": "70"}
        assert desk.fetch("other") == []


def test_given_the_last_generation_when_created_again_then_it_is_refused(desk: Desk) -> None:
    write(desk, b'{"generation":"-%d","ttl":"60"}' % INT_MAX)
    with pytest.raises(BadRequest, match="too often"):
        desk.create("orders")


def test_given_topics_when_listed_then_the_living_come_in_key_order(desk: Desk) -> None:
    for name in ("t1", "t1-x", "t10", "gone", "damaged"):
        desk.create(name)
    desk.service.create_topic(TopicId("zoo", "lion"))
    desk.service.delete_topic(named("gone"))
    write(desk, b"{}", "damaged")
    assert desk.store.metadata.compare_and_set(b"no topic", None, b"{}")
    assert desk.service.topics("default") == ["orders", "t1-x", "t10", "t1"]
    assert desk.service.topics("zoo") == ["lion"]
    assert desk.service.topics("none") == []


def test_given_a_row_gson_would_write_otherwise_when_changed_then_that_is_possible(desk: Desk) -> None:
    write(desk, b'{ "ttl": "60", "generation": "3", "name": "a=b" }')
    desk.service.update_topic(named("orders"), {"ttl": "61"})
    assert raw(desk) == b'{"generation":"3","ttl":"61"}'
    write(desk, b'{ "ttl": "60", "generation": "3", "name": "a=b" }')
    desk.service.delete_topic(named("orders"))
    assert raw(desk) == b'{"generation":"-3","name":"a\\u003db","ttl":"60"}'


def test_given_a_damaged_row_when_used_then_that_is_said_and_nothing_is_written(desk: Desk) -> None:
    write(desk, b"damaged")
    uses: list[Callable[[], object]] = [
        lambda: desk.create("orders"),
        lambda: desk.service.topic(named("orders")),
        lambda: desk.service.update_topic(named("orders"), {}),
        lambda: desk.service.delete_topic(named("orders")),
        lambda: desk.publish("orders", b"a"),
    ]
    for use in uses:
        with pytest.raises(MetadataError):
            use()
    assert raw(desk) == b"damaged"


def test_given_another_change_in_between_when_changed_then_it_is_tried_again(desk: Desk) -> None:
    others = iter([b'{"generation":"1","ttl":"1"}', b'{"generation":"1","ttl":"2"}'])

    def change(call: Call) -> None:
        if call.name == "metadata.compare_and_set" and (value := next(others, None)):
            write(desk, value)

    watch(desk.store, before=change)
    desk.service.update_topic(named("orders"), {"ttl": "9"})
    assert raw(desk) == b'{"generation":"1","ttl":"9"}'


@pytest.mark.parametrize("generation", [1, -1])
def test_given_changes_without_end_in_between_when_changed_then_it_is_given_up(desk: Desk, generation: int) -> None:
    write(desk, b'{"generation":"%d","ttl":"1"}' % generation)
    ttl = count(2)

    def change(call: Call) -> None:
        if call.name == "metadata.compare_and_set":
            write(desk, b'{"generation":"%d","ttl":"%d"}' % (generation, next(ttl)))

    watch(desk.store, before=change)
    uses: list[Callable[[], object]] = [lambda: desk.create("orders")]
    if generation > 0:
        uses = [
            lambda: desk.service.update_topic(named("orders"), {}),
            lambda: desk.service.delete_topic(named("orders")),
        ]
    for use in uses:
        with pytest.raises(Unavailable):
            use()


# --- new topics ------------------------------------------------------------------------------------------------------


def test_given_a_topic_made_with_nothing_in_it_then_it_is_new_until_it_is_changed_or_deleted(desk: Desk) -> None:
    def is_newborn() -> bool:
        value = desk.store.metadata.get(name.prefix)
        assert value is not None
        return desk.service.is_newborn(TopicMetadata.parse(name.prefix, value))

    name = desk.create("new", ttl="60")
    assert is_newborn()
    desk.publish("new", b"a")
    assert is_newborn()
    desk.service.update_topic(name, {"ttl": "1"})
    assert not is_newborn()
    desk.service.update_topic(name, {"ttl": "60"})
    desk.service.delete_topic(name)
    assert not is_newborn()
    desk.create("new", ttl="60")
    assert not is_newborn()


def test_given_a_topic_that_is_there_but_is_still_being_made_when_asked_whether_it_is_new_then_the_answer_waits(
    desk: Desk,
) -> None:
    name, asked = named("new"), list[Future[bool]]()

    def ask(call: Call) -> None:
        if call.name == "message.keys" and not asked:
            asked.append(threads.submit(desk.service.is_newborn, TopicMetadata(name, 1, 60)))
            with pytest.raises(TimeoutError):
                asked[0].result(0.05)

    watch(desk.store, before=ask)
    with ThreadPoolExecutor(1) as threads:
        desk.create("new", ttl="60")
        assert [one.result() for one in asked] == [True]


@pytest.mark.parametrize("table", ["message", "payload"])
def test_given_a_topic_made_where_rows_of_that_name_are_then_it_is_not_new(desk: Desk, table: str) -> None:
    name = named("found")
    if table == "message":
        desk.store.message.put([(MessageKey(name, 2, NOW_MS, 0).pack(), MessageValue(None, b"a"))])
    else:
        desk.store.payload.put([(PayloadKey(name, 1, P, NOW_MS, 0).pack(), b"a")])
    desk.create("found", ttl="60")
    assert not desk.service.is_newborn(TopicMetadata(name, 1, 60))
    desk.create("found-too", ttl="60")
    assert desk.service.is_newborn(TopicMetadata(named("found-too"), 1, 60))


def test_given_a_topic_made_before_the_start_then_it_is_not_new(desk: Desk) -> None:
    name = desk.create("old", ttl="60")
    desk.restart()
    assert not desk.service.is_newborn(TopicMetadata(name, 1, 60))


def test_given_a_name_longer_than_255_bytes_when_created_then_it_is_a_bad_request(desk: Desk) -> None:
    longest = TopicId("n" * 255, "t" * 255)
    desk.service.create_topic(longest)
    assert desk.service.topics("n" * 255) == ["t" * 255]
    for topic in (TopicId("n" * 256, "t"), TopicId("n", "t" * 256)):
        with pytest.raises(BadRequest, match="255 are the most"):
            desk.service.create_topic(topic)
        with pytest.raises(TopicNotFound):
            desk.service.topic(topic)


def test_given_more_than_64_kb_of_properties_when_created_or_updated_then_it_is_a_bad_request(desk: Desk) -> None:
    rest = len(b'{"a":"","generation":"1","ttl":"604800"}') - len(b',"generation":"1"')
    desk.create("other", a="x" * (65536 - rest))
    with pytest.raises(BadRequest, match="65536 are the most"):
        desk.create("another", a="x" * (65537 - rest))
    with pytest.raises(BadRequest, match="65536 are the most"):
        desk.service.update_topic(named("other"), {str(number): "ä" * 300 for number in range(120)})
    assert set(desk.service.topics("default")) == {"orders", "other"}


def test_given_names_that_would_be_the_same_once_written_when_created_or_updated_then_it_is_a_bad_request(
    desk: Desk,
) -> None:
    # Half a surrogate pair is written as a question mark, as Java does it.
    desk.service.update_topic(named("orders"), {"\ud800": "1"})
    for names in (("\ud800", "\udfff"), ("?", "\udfff")):
        properties = dict.fromkeys(names, "1")
        with pytest.raises(BadRequest, match="the same name"):
            desk.service.create_topic(named("other"), properties)
        with pytest.raises(BadRequest, match="the same name"):
            desk.service.update_topic(named("orders"), properties)
    assert desk.service.topic(named("orders")) == {"?": "1", "generation": "1", "ttl": WEEK}
    assert desk.service.topics("default") == ["orders"]


def test_given_what_cdap_wrote_longer_when_used_then_it_is_read_changed_and_deleted(desk: Desk) -> None:
    topic = TopicId("default", "t" * 1000)
    row = b'{"generation":"1","more":"%s","ttl":"60"}' % (b"x" * 100_000)
    assert desk.store.metadata.compare_and_set(topic.prefix, None, row)
    desk.service.publish(topic, [b"a"])
    assert len(desk.service.topic(topic)["more"]) == 100_000
    desk.service.update_topic(topic, {"ttl": "5"})
    desk.service.delete_topic(topic)
    assert desk.service.topics("default") == ["orders"]


def test_given_messages_of_several_ages_then_a_shorter_ttl_is_told_what_it_hides(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = topic_of(desk.store, "default:orders", ttl_seconds=100)
    for age in (150, 90, 60, 50, 10):
        orders.plain(NOW_MS - age * 1000)
    assert desk.service.count_ages(named("orders"), 60) == (4, 1, False, None)  # one is gone; one exactly as old lives
    assert desk.service.count_ages(named("orders"), 5) == (4, 4, False, None)
    monkeypatch.setattr("tms_core.messaging.topics.catalog._COUNTED_PAGE", 2)
    monkeypatch.setattr("tms_core.messaging.topics.catalog._MOST_COUNTED", 2)
    assert desk.service.count_ages(named("orders"), 20) == (2, 2, True, None)


def test_topic_on_leveldb_is_read_again_only_after_a_change_of_the_table(tmp_path: Path) -> None:
    topic = named("orders")
    with LevelDBStore(tmp_path, create=True) as store:
        registry = TopicRegistry(store.metadata, 60)
        registry.create(topic, {})
        reads = [_reads(store, registry, topic) for _ in range(3)]
        # A janitor in this process has tables of its own over the same folder.
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


def test_topic_in_a_table_without_versions_is_read_each_time() -> None:
    store = MemoryStore()
    registry = TopicRegistry(store.metadata, 60)
    registry.create(named("orders"), {})
    assert [_reads(store, registry, named("orders")) for _ in range(3)] == [1, 1, 1]


def _reads(store: Store, registry: TopicRegistry, topic: TopicId) -> int:
    """Return how often the row of a topic is read when it is needed."""
    before = store.calls["get"]
    registry.get(topic)
    return store.calls["get"] - before
