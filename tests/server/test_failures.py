"""Failures of the store or of a client, and their effects on other clients."""

from __future__ import annotations

import json
import select
import threading

import pytest

from tests.builders import Call, fail_at, hold_call, watch
from tests.kit.avro import POLL_ALL, decoded, publish_body
from tests.server.client import AVRO, Client, TopicClient
from tests.server.conftest import serving
from tests.server.test_messages import NOW_POINTER, reading
from tests.support import PATIENCE_SECONDS, raising, wait_until
from tms_core.errors import FormatError, StoreError, StoreFull, TmsError
from tms_core.messaging import fetcher
from tms_core.server.memory import Memory
from tms_core.server.rest import poll
from tms_core.tables.base import KEYS
from tms_core.tables.memory import MemoryStore


def test_publish_gets_its_response_only_after_its_write() -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as client, Client(server.port) as other:
        topic = TopicClient(client, "t").create()
        with hold_call(store) as writing:
            client.send("POST", f"{topic.path}/publish", publish_body(b"a"), content_type=AVRO)
            assert writing.wait(PATIENCE_SECONDS)
            # The server serves other clients at the same time, and they see no effect.
            assert TopicClient(other, "t").poll() == []
            assert server.service.workers.requests == 1
            assert select.select([client.socket], [], [], 0) == ([], [], [])
        assert client.answer().status == 200
        assert TopicClient(other, "t").poll() == ["a"]


def test_publish_of_a_client_that_leaves_is_written() -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        with hold_call(store) as writing, Client(server.port) as client:
            client.send("POST", f"{topic.path}/publish", publish_body(b"a"), content_type=AVRO)
            assert writing.wait(PATIENCE_SECONDS)
        while (found := topic.poll()) != ["a"]:
            assert found == []


def test_client_that_leaves_during_its_request_writes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        body = publish_body(b"a")
        with Client(server.port) as leaving:
            leaving.send("POST", f"{topic.path}/publish", body[:-1], content_type=AVRO, content_length=str(len(body)))
        gone = {"route": "publish", "code": "499"}
        wait_until(lambda: server.metrics.registry.get_sample_value("tms_requests_total", gone) is not None)
        assert topic.poll() == []
    assert not caplog.records


@pytest.mark.parametrize(("kind", "status"), [(StoreFull, 503), (FormatError, 500)])
def test_publish_that_fails_is_logged_once_without_a_traceback(
    caplog: pytest.LogCaptureFixture, kind: type[TmsError], status: int
) -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        watch(store, before=fail_at("message.put", kind("/srv/x cannot be used.", "Look there.")))
        answers = [topic.post("publish", {"messages": ["a"]}) for _ in range(5)]
    assert [answer.status for answer in answers] == [status] * 5
    assert "… cannot be used. Look there." in answers[0].text
    [line] = caplog.records
    assert "/srv/x cannot be used." in line.message
    assert line.exc_info is None


def test_poll_that_fails_in_the_middle_is_cut_short(caplog: pytest.LogCaptureFixture) -> None:
    store, late = MemoryStore(), b""
    with serving(store=store, cache_bytes=0) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        for _ in range(4):
            topic.post("publish", publish_body(*[b"x" * 1000] * 2000), content_type=AVRO)
        keys = store.message.read(KEYS, b"", None, 10_000).items
        late = keys[6000]
        watch(
            store,
            before=fail_at("message.rows", StoreError("The disk is gone."), lambda call: late < call.arguments[0]),
        )
        with pytest.raises(EOFError):
            topic.post("poll", POLL_ALL, content_type=AVRO)
    assert "The disk is gone." in caplog.text
    assert "RuntimeError" not in caplog.text


def test_defect_is_500_and_shown_in_the_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, Client(server.port) as client:
        monkeypatch.setattr(server.service, "topics", raising(ZeroDivisionError("secret")))
        answer = client.ask("GET", "/v1/namespaces/default/topics")
    assert (answer.status, answer.text) == (500, "Internal Server Error")
    assert "secret" in caplog.text


# --- clients that do not read ----------------------------------------------------------------------------------------


def test_client_that_does_not_read_is_cut_off_when_others_need_the_room() -> None:
    with serving(memory=Memory(10 << 20, 0.2)) as server, Client(server.port) as stalled, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        for _ in range(20):
            topic.post("publish", publish_body(bytes(1_000_000)), content_type=AVRO)
        stalled.send("POST", f"{topic.path}/poll", POLL_ALL, content_type=AVRO)
        assert stalled.socket.recv(1)
        for _ in range(2):
            assert len(decoded(topic.post("poll", POLL_ALL, content_type=AVRO).body)) == 20
        with pytest.raises((EOFError, ConnectionError)):
            read_to_the_end(stalled)


def read_to_the_end(client: Client) -> None:
    while client.socket.recv(1 << 20):
        pass
    raise EOFError


def test_address_that_others_reach_answers_to_any_name() -> None:
    with serving(loopback=False) as server, Client(server.port) as client:
        assert client.ask("GET", "/ping", host="tms.example.com").status == 200


# --- clients that leave ----------------------------------------------------------------------------------------------


def test_poll_of_a_client_that_left_reads_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetcher, "MAX_PAGE_ROWS", 5)
    monkeypatch.setattr(poll, "STEP_SECONDS", 0.0)
    store, reads, left = MemoryStore(), [], threading.Event()

    def record_read(call: Call) -> None:
        if call.name == "message.rows":
            reads.append(call)
            left.wait(PATIENCE_SECONDS)

    with serving(store=store, cache_bytes=0) as server, Client(server.port) as other:
        topic = TopicClient(other, "t").create()
        written = topic.publish(*["x"] * 20_000, transactionWritePointer=str(NOW_POINTER))
        topic.post("rollback", written.body)
        watch(store, before=record_read)
        body = json.dumps({"transaction": reading(NOW_POINTER, own=NOW_POINTER + 1)}).encode()
        with Client(server.port) as leaving:
            leaving.send("POST", f"{topic.path}/poll", body, content_type="application/json")
            wait_until(lambda: reads)
        left.set()
        wait_until(lambda: 'code="499",route="poll"' in other.ask("GET", "/metrics").text)
        assert 0 < len(reads) < 4000


@pytest.mark.parametrize("folder", ["/srv/store", "/srv/my (new) store"])
@pytest.mark.parametrize("kind", [StoreError, StoreFull])
def test_error_of_a_store_shows_its_path_in_the_log_only(
    kind: type[StoreError], folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    with serving(store=store) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        failing = kind(f"{folder}/000012.log: Input/output error.", f"Restore '{folder}', or /old.", folder)
        watch(store, before=fail_at("message.put", failing))
        answer = topic.post("publish", {"messages": ["a"]})
    assert answer.status >= 500
    assert "…: Input/output error. Restore '…', or …" in answer.text
    assert folder in caplog.text
