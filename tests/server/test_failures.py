"""What goes wrong below, or with a client, and what the others see of it."""

from __future__ import annotations

import gzip
import json
import logging
import select
import threading
from pathlib import Path

import pytest

from tests.builders import NOW_MS, Call, fail_at, watch
from tests.server.client import AVRO, Client, TopicClient
from tests.server.conftest import serving
from tests.server.test_avro import decoded
from tests.server.test_messages import EVERYTHING, NOW_POINTER, avro, reading
from tests.support import PATIENCE_SECONDS, raising, wait_until
from tms_core.clock import ManualClock
from tms_core.errors import StoreError, StoreFull, StoreUnavailable
from tms_core.messaging import fetcher
from tms_core.server.memory import Memory
from tms_core.server.rest import poll
from tms_core.tables.base import KEYS
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.tables.memory import MemoryStore


def test_given_a_write_that_has_not_returned_when_published_then_nothing_is_answered_yet() -> None:
    store, entered, go_on = MemoryStore(), threading.Event(), threading.Event()

    def slow(call: Call) -> None:
        if call.name == "message.put":
            entered.set()
            assert go_on.wait(timeout=120)

    with serving(store=store) as server, Client(server.port) as client, Client(server.port) as other:
        topic = TopicClient(client, "t").create()
        watch(store, before=slow)
        client.send("POST", f"{topic.path}/publish", avro(b"a"), content_type=AVRO)
        assert entered.wait(timeout=120)
        # Others are served meanwhile, and see nothing of it.
        assert TopicClient(other, "t").poll() == []
        assert server.service.workers.requests == 1
        assert select.select([client.socket], [], [], 0) == ([], [], [])
        go_on.set()
        assert client.answer().status == 200
        assert TopicClient(other, "t").poll() == ["a"]


def test_given_batches_one_after_the_other_when_published_then_each_costs_one_synced_write(tmp_path: Path) -> None:
    with LevelDBStore(tmp_path, create=True) as store, serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish("first")
        before = store.calls.copy()
        for _ in range(10):
            topic.publish(*"abc")
        used = store.calls - before
        assert {name: used[name] for name in ("put", "set", "delete", "invert", "sync") if used[name]} == {"put": 10}


def test_given_a_client_that_leaves_before_its_answer_when_it_published_then_the_message_is_written() -> None:
    store, entered, go_on = MemoryStore(), threading.Event(), threading.Event()

    def slow(call: Call) -> None:
        if call.name == "message.put":
            entered.set()
            assert go_on.wait(timeout=120)

    with serving(store=store) as server, Client(server.port) as other:
        with Client(server.port) as client:
            topic = TopicClient(client, "t").create()
            watch(store, before=slow)
            client.send("POST", f"{topic.path}/publish", avro(b"a"), content_type=AVRO)
            assert entered.wait(timeout=120)
        go_on.set()
        while (found := TopicClient(other, "t").poll()) != ["a"]:
            assert found == []


def test_given_a_client_that_leaves_in_the_middle_of_its_request_then_nothing_is_written(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as server, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        with Client(server.port) as client:
            body = avro(b"a")
            client.send("POST", f"{topic.path}/publish", body[:-1], content_type=AVRO, content_length=str(len(body)))
        gone = {"route": "publish", "code": "499"}
        while server.metrics.registry.get_sample_value("tms_requests_total", gone) is None:
            assert topic.poll() == []
    assert not caplog.records


@pytest.mark.parametrize("error", [StoreError("The disk is full."), StoreUnavailable("No Thrift server answers.")])
def test_given_a_store_that_fails_when_published_then_500_with_its_reason(
    error: StoreError, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        watch(store, before=fail_at("message.put", error))
        answer = topic.post("publish", {"messages": ["a"]})
    assert answer.status == 500
    assert error.message in answer.text
    assert error.message in caplog.text


def test_given_a_full_disk_when_many_publish_then_each_is_told_503_and_one_line_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = MemoryStore()
    full = StoreFull("No space left on device.", "Free some space.")
    with serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        watch(store, before=fail_at("message.put", full))
        answers = [topic.post("publish", {"messages": ["a"]}) for _ in range(5)]
    assert [answer.status for answer in answers] == [503] * 5
    assert "Free some space" in answers[0].text
    [line] = caplog.records
    assert "No space left" in line.message
    assert line.exc_info is None


def test_given_a_clock_that_jumped_when_published_then_503_and_nothing_is_written() -> None:
    clock = ManualClock(NOW_MS)
    with serving(clock=clock) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish("a")
        clock.step(3_600_000)
        answer = topic.post("publish", {"messages": ["b"]})
        assert answer.status == 503
        clock.step(-3_600_000)
        assert topic.poll() == ["a"]
        topic.publish("b")
        assert topic.poll() == ["a", "b"]


@pytest.mark.parametrize("off_ms", [3_600_000, -3_600_000])
def test_given_a_clock_that_was_wrong_for_a_while_when_it_is_right_again_then_publishing_goes_on_by_itself(
    off_ms: int,
) -> None:
    clock = ManualClock(NOW_MS)
    with serving(clock=clock) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        clock.step(off_ms)
        topic.post("publish", {"messages": ["a"]})
        clock.advance(60_000)
        clock.step(-off_ms)
        assert topic.post("publish", {"messages": ["b"]}).status == 200
        assert topic.poll()[-1] == "b"


def test_given_a_store_that_fails_in_the_middle_of_an_answer_then_the_answer_is_cut_short(
    caplog: pytest.LogCaptureFixture,
) -> None:
    store, late = MemoryStore(), b""
    with serving(store=store, cache_bytes=0) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        for _ in range(4):
            topic.post("publish", avro(*[b"x" * 1000] * 2000), content_type=AVRO)
        keys = store.message.read(KEYS, b"", None, 10_000).items
        late = keys[6000]
        watch(
            store,
            before=fail_at("message.rows", StoreError("The disk is gone."), lambda call: late < call.arguments[0]),
        )
        with pytest.raises(EOFError):
            topic.post("poll", EVERYTHING, content_type=AVRO)
    assert "The disk is gone." in caplog.text
    assert "RuntimeError" not in caplog.text


def test_given_a_store_that_fails_at_once_when_polled_then_500(caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore()
    with serving(store=store, cache_bytes=0) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish("a")
        watch(store, before=fail_at("message.rows", StoreError("The disk is gone.")))
        answer = topic.post("poll")
    assert (answer.status, answer.text) == (500, "The disk is gone.")
    assert "The disk is gone." in caplog.text


def test_given_a_mistake_of_ours_when_asked_then_500_says_nothing_and_the_log_all(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with serving() as server, Client(server.port) as client:
        monkeypatch.setattr(server.service, "topics", raising(ZeroDivisionError("secret")))
        answer = client.ask("GET", "/v1/namespaces/default/topics")
    assert (answer.status, answer.text) == (500, "Internal Server Error")
    assert "secret" in caplog.text


def test_given_a_large_body_when_published_then_it_is_read_like_any_other() -> None:
    with serving() as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        body = gzip.compress(bytes(range(256)) * 5000, compresslevel=0)
        assert len(body) > 1_000_000
        answer = topic.post("publish", body, content_type=AVRO, content_encoding="gzip")
        assert answer.status == 400
        assert topic.post("publish", avro(*[b"x" * 1000] * 1500), content_type=AVRO).status == 200
        assert len(topic.poll(limit=2000)) == 1500


def test_given_the_access_log_when_asked_then_method_path_and_code_are_in_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tms_core.access")
    with serving(access_log=True) as server, Client(server.port) as client:
        client.ask("GET", "/nothing")
    assert [record.getMessage().rsplit(" ", 2)[0] for record in caplog.records] == ["127.0.0.1 GET /nothing 404"]


def test_given_an_address_that_others_reach_when_asked_by_any_name_then_it_answers() -> None:
    with serving(loopback=False) as server, Client(server.port) as client:
        assert client.ask("GET", "/ping", host="tms.example.com").status == 200


def test_publish_in_a_transaction_that_is_too_old_is_409_and_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        for verb in ("publish", "store"):
            answer = topic.post(verb, avro(b"a", pointer=5), content_type=AVRO)
            assert (answer.status, "Start another one" in answer.text) == (409, True)
        assert topic.client.ask("GET", topic.path).status == 200
    assert caplog.text == ""


# --- clients that do not read ----------------------------------------------------------------------------------------


def test_given_a_client_that_does_not_read_when_others_need_the_room_then_it_is_cut_off_and_they_get_all() -> None:
    with serving(memory=Memory(10 << 20, 0.2)) as server, Client(server.port) as stalled, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        for _ in range(20):
            topic.post("publish", avro(bytes(1_000_000)), content_type=AVRO)
        stalled.send("POST", f"{topic.path}/poll", EVERYTHING, content_type=AVRO)
        assert stalled.socket.recv(1)
        for _ in range(2):
            answer = topic.post("poll", EVERYTHING, content_type=AVRO)
            assert len(decoded(answer.body)) == 20
        with pytest.raises((EOFError, ConnectionError)):
            _read_all(stalled)


def _read_all(client: Client) -> None:
    """Read without end.

    Raises:
        EOFError: it ended.
    """
    while client.socket.recv(1 << 20):
        pass
    raise EOFError


# --- clients that leave ----------------------------------------------------------------------------------------------


def test_given_a_poll_that_finds_nothing_when_its_client_has_left_then_no_more_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher, "MAX_PAGE_ROWS", 5)
    monkeypatch.setattr(poll, "STEP_SECONDS", 0.0)
    store, reads, left = MemoryStore(), [], threading.Event()

    def counting(call: Call) -> None:
        if call.name == "message.rows":
            reads.append(call)
            left.wait(PATIENCE_SECONDS)

    with serving(store=store, cache_bytes=0) as server, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        written = topic.publish(*["x"] * 20_000, transactionWritePointer=str(NOW_POINTER))
        topic.post("rollback", written.body)
        watch(store, before=counting)
        body = json.dumps({"transaction": reading(NOW_POINTER, own=NOW_POINTER + 1)}).encode()
        with Client(server.port) as leaving:
            leaving.send("POST", f"{topic.path}/poll", body, content_type="application/json")
            wait_until(lambda: reads)
        left.set()
        wait_until(lambda: 'code="499",route="poll"' in other.ask("GET", "/metrics").text)
        assert 0 < len(reads) < 4000


@pytest.mark.parametrize("kind", [StoreError, StoreFull])
@pytest.mark.parametrize("folder", ["/srv/store", "/srv/the store, v2 (a:b)/it's"])
def test_error_of_a_store_shows_its_path_in_the_log_only(
    kind: type[StoreError], folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        failing = kind(f"{folder}: IO error: {folder}/000012.log: Input/output error.", "Restore '/srv/store'.")
        watch(store, before=fail_at("message.put", failing))
        answer = topic.post("publish", {"messages": ["a"]})
    assert answer.status >= 500
    assert answer.text == "…: IO error: …: Input/output error. Restore '…'."
    assert folder in caplog.text
