"""Publishing, storing, rolling back and polling over HTTP: bytes, codes, chunks and limits."""

from __future__ import annotations

import base64
import gzip
import json
import re
import time
from array import array

import pytest

from tests.builders import NOW_MS
from tests.kit.avro import POLL_ALL, block, decoded, long, publish_body
from tests.server.client import AVRO, JSON, Client, TopicClient, encode_for_json
from tests.server.conftest import MAX_REQUEST_BYTES, Serving, serving
from tests.support import wait_until
from tms_core.clock import ManualClock, SystemClock
from tms_core.server.codec.bodies import MESSAGE_BYTES
from tms_core.server.codec.json_text import POLL_MESSAGES
from tms_core.server.rest import poll as polling
from tms_core.server.rest.context import PollLimit
from tms_core.transaction.model import TX_PER_MS, Transaction

NOW_POINTER = SystemClock().now_ms() * TX_PER_MS


def reading(read_pointer: int, *, own: int, invalid: tuple[int, ...] = (), open_: tuple[int, ...] = ()) -> str:
    return encode_for_json(Transaction(read_pointer, own, own, array("q", invalid), array("q", open_)))


# --- publishing ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "body", "reason"),
    [
        ("publish", {}, "payload"),
        ("publish", {"messages": ["a"], "ttlSeconds": 0}, "ttl of 0"),
        ("publish", {"transactionWritePointer": "-5"}, "-5 "),
        ("store", {"messages": ["a"]}, "transaction"),
        ("store", {"transactionWritePointer": "5"}, "payload"),
        ("store", {"messages": ["a"], "transactionWritePointer": "5", "ttlSeconds": 5}, "ttlSeconds"),
        ("poll", {"limit": 0}, "limit of 0"),
        ("poll", {"startFrom": {"timeMs": "-1"}}, "-1 "),
        ("rollback", {}, "transactionWritePointer"),
        ("rollback", {"transactionWritePointer": "5", "rollbackRange": []}, "rollbackRange"),
    ],
)
def test_bad_request_is_400_with_the_reason(topic: TopicClient, verb: str, body: object, reason: str) -> None:
    answer = topic.post(verb, body)
    assert (answer.status, answer.headers["content-type"]) == (400, "text/plain; charset=utf-8")
    assert reason in answer.text


@pytest.mark.parametrize("verb", ["publish", "store", "poll"])
@pytest.mark.parametrize(
    "content_type", ["", "avro/binary; charset=utf-8", "Avro/Binary", "application/octet-stream", "text/plain"]
)
def test_unsupported_content_type_is_400_and_names_both_supported(
    topic: TopicClient, verb: str, content_type: str
) -> None:
    answer = topic.post(verb, publish_body(b"a"), content_type=content_type)
    assert answer.status == 400
    assert "avro/binary or application/json" in answer.text


ZIPPED = gzip.compress(publish_body(b"a"))

# --- sizes and compression -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", ["publish", "store", "poll", "rollback"])
def test_body_above_the_limit_is_413_and_keeps_the_connection(topic: TopicClient, verb: str) -> None:
    assert topic.post(verb, b"x" * (MAX_REQUEST_BYTES + 1)).status == 413
    assert topic.client.ask("GET", "/ping").status == 200


def test_chunked_body_above_the_limit_is_413(topic: TopicClient) -> None:
    head = f"POST {topic.path}/publish HTTP/1.1\r\nhost: localhost\r\ncontent-type: {AVRO}\r\n"
    topic.client.socket.sendall(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
    part = b"x" * 500_000
    for _ in range(MAX_REQUEST_BYTES // len(part) + 1):
        topic.client.socket.sendall(b"%x\r\n" % len(part) + part + b"\r\n")
    assert topic.client.answer().status == 413


MOST_MESSAGES = MAX_REQUEST_BYTES // MESSAGE_BYTES


@pytest.mark.parametrize("content_type", [AVRO, JSON])
def test_publish_of_the_most_messages_is_accepted(topic: TopicClient, content_type: str) -> None:
    messages = [b""] * MOST_MESSAGES
    body = publish_body(*messages) if content_type == AVRO else json.dumps({"messages": [""] * MOST_MESSAGES}).encode()
    assert topic.post("publish", body, content_type=content_type).status == 200
    assert topic.payloads() == messages


def test_body_of_the_largest_size_is_accepted(topic: TopicClient) -> None:
    body = publish_body(b"x" * (MAX_REQUEST_BYTES - 7))
    assert len(body) == MAX_REQUEST_BYTES
    assert topic.post("publish", body, content_type=AVRO).status == 200


@pytest.mark.parametrize(("verb", "size"), [("rollback", 20_000), ("properties", 500_000), ("consumers/one", 20_000)])
def test_body_that_is_too_large_for_its_kind_is_413(topic: TopicClient, verb: str, size: int) -> None:
    method = "POST" if verb == "rollback" else "PUT"
    answer = topic.client.ask(method, f"{topic.path}/{verb}", b" " * size, content_type=JSON)
    assert (answer.status, answer.headers["x-tms-error"]) == (413, "TMS-TOO-LARGE")
    assert re.search(r"\d+ bytes", answer.text)


def test_rollback_in_avro_needs_no_content_type(topic: TopicClient) -> None:
    published = topic.post("publish", publish_body(b"a", pointer=NOW_POINTER), content_type=AVRO)
    seen = {"transaction": reading(NOW_POINTER, own=NOW_POINTER + 1)}
    assert topic.poll(**seen) == ["a"]
    # CDAP does not check the content type here, and its client sends none.
    assert topic.client.ask("POST", f"{topic.path}/rollback", published.body).status == 200
    assert topic.poll(**seen) == []


def test_poll_that_its_limit_ends_has_no_position(topic: TopicClient) -> None:
    topic.publish("a", "b")
    assert "x-tms-position" not in topic.post("poll", {"limit": 1}).headers


def test_poll_in_json_without_a_limit_has_the_default_limit(topic: TopicClient) -> None:
    topic.publish(*["x"] * (POLL_MESSAGES + 10))
    assert len(topic.poll()) == POLL_MESSAGES
    assert len(topic.poll(limit=POLL_MESSAGES + 5)) == POLL_MESSAGES + 5


def test_poll_within_the_limit_of_the_server_is_not_called_limited() -> None:
    with serving(poll_limit=PollLimit(messages=3)) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish(*"abcd")
        answer = topic.post("poll", {"limit": 3})
        assert (len(answer.json), answer.headers.get("x-tms-limited")) == (3, None)


@pytest.mark.parametrize("verb", ["publish", "store"])
@pytest.mark.parametrize("parts", [[MOST_MESSAGES + 1], [MOST_MESSAGES, 1], [2_000_000]])
def test_publish_of_too_many_messages_is_413(topic: TopicClient, verb: str, parts: list[int]) -> None:
    blocks = b"".join(block([b""] * count) for count in parts)
    body = gzip.compress(b"\0" + long(NOW_POINTER) + blocks + b"\0")
    answer = topic.post(verb, body, content_type=AVRO, content_encoding="gzip")
    assert (answer.status, str(MOST_MESSAGES) in answer.text) == (413, True)
    assert topic.post(verb, {"messages": [""] * sum(parts), "transactionWritePointer": NOW_POINTER}).status == 413
    assert topic.payloads() == []


@pytest.mark.parametrize("content_type", ["application/json; charset=utf-8", "Application/JSON"])
def test_publish_of_json_by_another_name_is_read(topic: TopicClient, content_type: str) -> None:
    assert topic.post("publish", {"messages": ["a"]}, content_type=content_type).status == 200


def test_publish_of_a_gzipped_body_is_read(topic: TopicClient) -> None:
    for verb, body in (("publish", publish_body(b"x" * 1_000_000)), ("store", publish_body(b"y", pointer=NOW_POINTER))):
        assert topic.post(verb, gzip.compress(body), content_type=AVRO, content_encoding="gzip").status == 200
    assert topic.payloads() == [b"x" * 1_000_000]


@pytest.mark.parametrize(
    ("body", "encoding", "status", "message"),
    [
        (gzip.compress(b"x" * (MAX_REQUEST_BYTES + 1)), "gzip", 413, "server.max_request_mb"),
        (ZIPPED[:-1], "gzip", 400, "gzip"),
        (ZIPPED + b"x", "gzip", 400, "gzip"),
        (b"x" + ZIPPED, "gzip", 400, "gzip"),
        (publish_body(b"a"), "br", 415, "gzip"),
    ],
    ids=["decompressed above the limit", "truncated", "trailing bytes", "not gzip", "another compression"],
)
def test_publish_of_a_bad_compressed_body_is_rejected(
    topic: TopicClient, body: bytes, encoding: str, status: int, message: str
) -> None:
    answer = topic.post("publish", body, content_type=AVRO, content_encoding=encoding)
    assert (answer.status, message in answer.text) == (status, True)


@pytest.mark.parametrize("offer", ["gzip, deflate", "deflate, gzip;q=0.5", "GZIP"])
def test_poll_of_a_client_that_accepts_gzip_is_gzipped(topic: TopicClient, offer: str) -> None:
    topic.publish("a" * 100_000, "b")
    answer = topic.post("poll", POLL_ALL, content_type=AVRO, accept_encoding=offer)
    assert len(answer.body) < 10_000
    assert answer.headers["vary"] == "accept-encoding"
    assert [payload for _, payload in decoded(answer.unzipped)] == [b"a" * 100_000, b"b"]
    assert topic.post("poll", {}, accept_encoding=offer).unzipped.startswith(b"[")


@pytest.mark.parametrize("offer", ["", "identity", "deflate", "gzip;q=0", "gzip;q=0.0", "br"])
def test_poll_of_a_client_without_gzip_is_not_gzipped(topic: TopicClient, offer: str) -> None:
    topic.publish("a")
    answer = topic.post("poll", POLL_ALL, content_type=AVRO, accept_encoding=offer)
    assert "content-encoding" not in answer.headers
    assert len(decoded(answer.body)) == 1


# --- polling ---------------------------------------------------------------------------------------------------------


def test_poll_of_many_messages_returns_chunks_of_60000_bytes(topic: TopicClient) -> None:
    # a payload of 972 bytes counts as 1,000 bytes in CDAP
    message = b"x" * 972
    for _ in range(2):
        assert topic.post("publish", publish_body(*[message] * 500), content_type=AVRO).status == 200
    answer = topic.post("poll", POLL_ALL, content_type=AVRO)
    assert len(decoded(answer.body)) == 1000
    # The second publish is encoded separately, so that all readers share its encoding.
    each = [60] * 8 + [20]
    assert [len(decoded(chunk.removesuffix(b"\0") + b"\0")) for chunk in answer.chunks] == each * 2
    assert answer.chunks[-1].endswith(b"\0")
    assert len(json.loads(b"".join(topic.post("poll", {"limit": 1000}).chunks))) == 1000


def test_poll_of_a_consumer_that_leaves_stops_reading(shared: Serving, topic: TopicClient) -> None:
    for _ in range(8):
        assert topic.post("publish", publish_body(*[b"x" * 1000] * 2900), content_type=AVRO).status == 200
    fetched, ended = poll_counts(shared)
    topic.client.send("POST", f"{topic.path}/poll", POLL_ALL, content_type=AVRO)
    assert topic.client.socket.recv(100)
    topic.client.__exit__()
    while poll_counts(shared)[1] == ended:
        time.sleep(0.01)
    # the server has read only what fits into the buffers of the sockets, and two steps of pieces
    assert poll_counts(shared)[0] - fetched < 8 * 2900
    with Client(shared.port) as another:
        assert len(TopicClient(another, topic.path.rpartition("/")[2]).poll()) == POLL_MESSAGES


def poll_counts(server: Serving) -> tuple[float, float]:
    registry = server.metrics.registry
    ended = registry.get_sample_value("tms_requests_total", {"route": "poll", "code": "200"})
    return registry.get_sample_value("tms_messages_fetched_total") or 0, ended or 0


# --- next positions, waits and limits --------------------------------------------------------------------------------


def test_poll_of_hidden_messages_has_the_next_position(topic: TopicClient) -> None:
    for _ in range(3):
        written = topic.publish("a", "b", transactionWritePointer=str(NOW_POINTER))
        topic.post("rollback", written.body)
    view = {"transaction": reading(NOW_POINTER, own=NOW_POINTER + 1)}
    found = topic.post("poll", view)
    assert (found.json, len(found.headers["x-tms-position"])) == ([], 40)
    after_last = {"startFrom": {"id": found.headers["x-tms-position"]}, **view}
    again = topic.post("poll", after_last)
    assert (again.json, again.headers.get("x-tms-position")) == ([], None)
    topic.publish("new")
    assert topic.poll(**after_last) == ["new"]


def test_poll_before_an_undecided_message_has_its_position(topic: TopicClient) -> None:
    topic.publish("a")
    written = topic.publish("b", transactionWritePointer=str(NOW_POINTER)).json["rollbackRange"]
    found = topic.post("poll", {"transaction": reading(NOW_POINTER + 1, own=NOW_POINTER + 2, open_=(NOW_POINTER,))})
    assert [message["payload"] for message in found.json] == ["a"]
    assert int(found.headers["x-tms-position"][:16], 16) == int(written["startTimestamp"])
    later = reading(NOW_POINTER + 1, own=NOW_POINTER + 2)
    assert topic.poll(startFrom={"id": found.headers["x-tms-position"]}, transaction=later) == ["b"]


@pytest.mark.parametrize("language", ["avro", "json"])
def test_waiting_poll_returns_a_new_message(shared: Serving, topic: TopicClient, language: str) -> None:
    with Client(shared.port) as waiting:
        if language == "avro":
            headers = {"content_type": AVRO, "x_tms_wait_seconds": "60"}
            waiting.send("POST", f"{topic.path}/poll", POLL_ALL, **headers)
        else:
            waiting.send("POST", f"{topic.path}/poll", b'{"waitSeconds": 60}', content_type="application/json")
        wait_until(lambda: shared.context.waiting.polls)
        topic.publish("a")
        assert b"a" in waiting.answer().body
    assert not shared.context.waiting.polls


def test_poll_that_waits_ends_at_an_undecided_message(shared: Serving, topic: TopicClient) -> None:
    view = {"transaction": reading(NOW_POINTER, own=NOW_POINTER + 1, open_=(NOW_POINTER,)), "waitSeconds": 60}
    with Client(shared.port) as waiting:
        waiting.send("POST", f"{topic.path}/poll", json.dumps(view).encode(), content_type="application/json")
        wait_until(lambda: shared.context.waiting.polls)
        topic.publish("a", transactionWritePointer=str(NOW_POINTER))
        assert waiting.answer().json == []


def test_poll_that_waits_ends_with_its_client_or_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(polling, "_CHECK_SECONDS", 0.05)
    with serving() as server, Client(server.port) as client, Client(server.port) as staying:
        topic = TopicClient(client, "t").create()
        for one in (client, staying):
            one.send("POST", f"{topic.path}/poll", b'{"waitSeconds": 60}', content_type="application/json")
        wait_until(lambda: len(server.context.waiting.polls) == 2)
        client.__exit__()
        wait_until(lambda: len(server.context.waiting.polls) == 1)
        server.listener.stop()
        assert staying.answer().json == []


@pytest.mark.parametrize("wait", ["61", "-1", "1.5", "x"])
def test_poll_with_an_invalid_wait_is_400(topic: TopicClient, wait: str) -> None:
    answer = topic.client.ask("POST", f"{topic.path}/poll", POLL_ALL, content_type=AVRO, x_tms_wait_seconds=wait)
    assert (answer.status, "0 to 60" in answer.text) == (400, True)


@pytest.mark.parametrize("limit", [PollLimit(messages=3), PollLimit(bytes=500)], ids=["messages", "bytes"])
def test_poll_beyond_the_limit_of_the_server_is_cut_and_read_on(limit: PollLimit) -> None:
    with serving(poll_limit=limit) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish(*"abcdefgh")
        avro_answer = topic.post("poll", POLL_ALL, content_type=AVRO)
        json_answer = topic.post("poll")
        assert [payload for _, payload in decoded(avro_answer.body)] == [b"a", b"b", b"c"]
        assert [message["payload"] for message in json_answer.json] == ["a", "b", "c"]
        assert avro_answer.headers["x-tms-limited"] == json_answer.headers["x-tms-limited"] == "true"
        after_last = {"startFrom": {"id": json_answer.json[-1]["id"]}, "inclusive": False}
        assert topic.poll(**after_last) == ["d", "e", "f"]


@pytest.mark.parametrize("content_type", [AVRO, JSON])
def test_poll_with_more_ids_than_allowed_is_413(content_type: str) -> None:
    def body(ids: int) -> bytes:
        reads_in = base64.b64decode(reading(NOW_POINTER, own=NOW_POINTER, invalid=tuple(range(1, ids + 1))))
        if content_type == AVRO:
            return b"\x04\x01\x02\x00" + long(len(reads_in)) + reads_in
        return json.dumps({"transaction": base64.b64encode(reads_in).decode()}).encode()

    present = 0
    with serving(transaction_ids=5_000, present_ids=lambda: present) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        assert topic.post("poll", body(5_000), content_type=content_type).status == 200
        answer = topic.post("poll", body(10_000), content_type=content_type)
        assert (answer.status, "server.max_transaction_ids" in answer.text) == (413, True)
        packed = gzip.compress(body(10_000))
        assert topic.post("poll", packed, content_type=content_type, content_encoding="gzip").status == 413
        # The manager of the process has as many transactions.
        present = 10_000
        assert topic.post("poll", body(10_000), content_type=content_type).status == 200


def test_publish_in_avro_takes_the_ttl_of_its_header() -> None:
    clock = ManualClock(NOW_MS)
    with serving(clock=clock) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        path = f"{topic.path}/publish"
        assert client.ask("POST", path, publish_body(b"a"), content_type=AVRO, x_tms_ttl_seconds="60").status == 200
        assert client.ask("POST", path, publish_body(b"b"), content_type=AVRO).status == 200
        for value in ("", "-1", "1.5", "0", str(2**31), "9" * 20):
            assert (
                client.ask("POST", path, publish_body(b"c"), content_type=AVRO, x_tms_ttl_seconds=value).status == 400
            )
        twice = json.dumps({"messages": ["c"], "ttlSeconds": 5}).encode()
        answer = client.ask("POST", path, twice, content_type="application/json", x_tms_ttl_seconds="5")
        assert (answer.status, "ttl" in answer.text) == (400, True)
        assert topic.poll() == ["a", "b"]
        clock.advance(60_001)
        assert topic.poll() == ["b"]


def test_poll_in_json_after_a_time_skips_its_millisecond() -> None:
    clock = ManualClock(NOW_MS)
    with serving(clock=clock) as server, Client(server.port) as client:
        topic = TopicClient(client, "t").create()
        topic.publish("a")
        clock.advance(1)
        topic.publish("b")
        start = {"startFrom": {"timeMs": str(NOW_MS)}}
        assert [one["payload"] for one in topic.post("poll", start).json] == ["a", "b"]
        assert [one["payload"] for one in topic.post("poll", start | {"inclusive": False}).json] == ["b"]
