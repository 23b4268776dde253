"""HTTP connections of the client: errors of the library, tokens and certificates."""

from __future__ import annotations

import logging
import re
import socket
import ssl
import traceback
from pathlib import Path
from typing import Any

import pytest

from tests.client.faults import SOON
from tests.kit.sockets import SocketServer
from tests.server.conftest import serving
from tests.support import free_port, in_event_loop
from tms_core.client import (
    AsyncClient,
    Client,
    ConfigurationError,
    Limits,
    Options,
    Timeouts,
    TopicNotFound,
    Unanswered,
    Unauthorized,
    Unavailable,
)
from tms_core.client.protocol.endpoint import Token

TOPIC = "default:orders"
SECRET = "s3cret-t0ken"  # noqa: S105 it opens nothing
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: avro/binary\r\ntransfer-encoding: chunked\r\n\r\n"


class CannedServer(SocketServer):
    """A server that sends the same bytes in response to every request.

    Args:
        response: the bytes.
        hangs: whether the connection stays open after the response.

    Attributes:
        requests: the first bytes of each connection.
    """

    def __init__(self, response: bytes = b"", *, hangs: bool = False) -> None:
        super().__init__()
        self.requests: list[bytes] = []
        self._response = response
        self._hangs = hangs

    def serve(self, connection: socket.socket) -> None:
        self.requests.append(connection.recv(65536))
        connection.sendall(self._response)
        if self._hangs:
            self.over.wait()


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}"


# --- errors ----------------------------------------------------------------------------------------------------------


def test_refused_connection_is_unavailable_without_tracebacks_of_the_library() -> None:
    with (
        Client(url(free_port()), options=Options(retry=SOON)) as client,
        pytest.raises(Unavailable, match="cannot be reached") as caught,
    ):
        client.publish(TOPIC, [b"x"])
    shown = "".join(traceback.format_exception(caught.value))
    assert "refused" in str(caught.value)
    assert "httpx2" not in shown
    assert "direct cause" not in shown


def test_response_of_another_http_server_names_request_and_hint() -> None:
    other = b"HTTP/1.1 404 Not Found\r\ncontent-type: text/plain\r\ncontent-length: 7\r\n\r\nno page"
    with CannedServer(other) as server, Client(url(server.port)) as client, pytest.raises(TopicNotFound) as refused:
        client.topic(TOPIC)
    assert re.search(r"GET /v1/namespaces/default/topics/orders .*404: no page$", refused.value.message)
    assert "tms serve" in refused.value.hint


def test_https_to_a_server_without_tls_is_a_clear_error() -> None:
    with (
        serving() as server,
        Client(f"https://127.0.0.1:{server.port}", options=Options(retry=SOON)) as client,
        pytest.raises(Unavailable) as refused,
    ):
        client.topic(TOPIC)
    assert "http://" in refused.value.hint


def test_closed_connection_is_described_in_one_sentence() -> None:
    with CannedServer() as server, Client(url(server.port)) as client, pytest.raises(Unanswered) as refused:
        client.publish(TOPIC, [b"x"])
    assert refused.value.message.endswith("without sending a response.")
    assert ".." not in refused.value.message


def test_silent_server_is_unanswered_after_the_timeout() -> None:
    options = Options(timeouts=Timeouts(answer_seconds=0.01))
    with CannedServer(hangs=True) as server, Client(url(server.port), options=options) as client:
        with pytest.raises(Unanswered, match="in time"):
            client.publish(TOPIC, [b"x"])
        assert len(server.requests) == 1


@in_event_loop
async def test_async_client_distinguishes_failures() -> None:
    async with AsyncClient(url(free_port()), options=Options(retry=SOON)) as client:
        with pytest.raises(Unavailable):
            await client.publish(TOPIC, [b"x"])
    item = b"\x02\x28" + bytes(20) + b"\x04hi"
    with CannedServer(HEAD + b"%x\r\n%s\r\n" % (len(item), item)) as server:
        async with AsyncClient(url(server.port)) as client:
            messages = client.poll(TOPIC)
            assert (await anext(messages)).payload == b"hi"
            with pytest.raises(Unanswered):
                await anext(messages)


def test_poll_of_a_truncated_response_over_http_is_unanswered() -> None:
    item = b"\x02\x28" + bytes(20) + b"\x04hi"
    with CannedServer(HEAD + b"%x\r\n%s\r\n" % (len(item), item)) as server, Client(url(server.port)) as client:
        messages = client.poll(TOPIC)
        assert next(messages).payload == b"hi"
        with pytest.raises(Unanswered):
            next(messages)


def test_request_without_a_free_connection_does_nothing() -> None:
    busy = Limits(connections=1)
    impatient = Timeouts(free_connection_seconds=0.01)
    with (
        serving() as server,
        Client(url(server.port), options=Options(limits=busy, timeouts=impatient, retry=SOON)) as client,
    ):
        client.create_topic(TOPIC)
        client.publish(TOPIC, [bytes(100_000)] * 20)
        with client.poll(TOPIC) as messages:
            next(messages)
            with pytest.raises(Unavailable):
                client.topics()
        # An unread rest of a response does not keep its connection.
        client.topics()


# --- URLs and addresses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "wrong", "shown"),
    [
        *(("url", wrong, r"http://127\.0\.0\.1:11015") for wrong in ("", "127.0.0.1:11015", "ftp://host", "http://")),
        *(("url", f"http://host{end}", r"http://127\.0\.0\.1:11015") for end in (":x", "/?a=b", "/#a")),
        *(("transactions", wrong, r"127\.0\.0\.1:15165") for wrong in ("", "host", "host:", "host:x", "::1:15165")),
        ("transactions", ":15165", r"127\.0\.0\.1:15165"),
    ],
)
def test_bad_url_or_address_is_rejected_with_an_example(argument: str, wrong: str, shown: str) -> None:
    given: dict[str, Any] = {argument: wrong}
    with pytest.raises(ConfigurationError, match=shown):
        Client(**given)


def test_client_accepts_an_ipv6_address() -> None:
    Client(transactions="[::1]:15165").close()


def test_url_with_a_password_is_rejected_without_showing_it() -> None:
    with pytest.raises(ConfigurationError) as caught:
        Client(f"http://me:{SECRET}@host")
    assert SECRET not in str(caught.value)


def test_request_goes_to_the_path_of_the_url_and_past_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", url(free_port()))
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n[]"
    with CannedServer(answer) as server, Client(url(server.port) + "/tms/") as client:
        assert client.topics() == []
        assert server.requests[0].startswith(b"GET /tms/v1/namespaces/default/topics HTTP/1.1")


def test_client_accepts_a_tls_context() -> None:
    context = ssl.create_default_context()
    port = free_port()
    with (
        Client(f"https://127.0.0.1:{port}", options=Options(tls=context, retry=SOON)) as client,
        pytest.raises(Unavailable),
    ):
        client.topics()


# --- the token -------------------------------------------------------------------------------------------------------

REFUSAL = b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 10\r\n\r\nNo token."


def authorization(request: bytes) -> list[bytes]:
    return [line for line in request.split(b"\r\n") if line.lower().startswith(b"authorization:")]


def test_token_is_sent_with_the_request_and_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with (
        CannedServer(REFUSAL + b"!") as server,
        Client(url(server.port), token=SECRET, options=Options(retry=SOON)) as client,
    ):
        with pytest.raises(Unauthorized) as caught:
            client.publish(TOPIC, [b"x"])
        assert authorization(server.requests[0]) == [f"authorization: Bearer {SECRET}".encode()]
        assert SECRET not in repr(client) + repr(vars(client)) + repr(caught.value)
        assert SECRET not in caplog.text


def test_token_file_that_is_replaced_counts_for_the_next_request(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    with CannedServer(REFUSAL + b"!") as server, Client(url(server.port), token_file=file) as client:
        for token in ("first", "second"):
            file.write_text(f"{token}\n")
            with pytest.raises(Unauthorized):
                client.topics()
        assert [authorization(request) for request in server.requests] == [
            [b"authorization: Bearer first"],
            [b"authorization: Bearer second"],
        ]


def test_function_of_a_token_is_called_for_each_request() -> None:
    tokens = iter(["a", "b"])
    token = Token(lambda: next(tokens))
    assert [token.headers(), token.headers()] == [{"authorization": "Bearer a"}, {"authorization": "Bearer b"}]


def test_token_without_a_value_adds_no_header() -> None:
    assert Token().headers() == {}
    assert (repr(Token()), repr(Token(SECRET))) == ("<no Token>", "<Token>")


@pytest.mark.parametrize("wrong", ["", "two words", "line\nfeed", f"{SECRET}ä"])
def test_invalid_token_is_rejected_without_showing_it(wrong: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        Token(wrong).headers()
    assert SECRET not in str(caught.value)


def test_unreadable_token_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="token"):
        Token(file=tmp_path / "token").headers()
    (tmp_path / "token").write_bytes(b"\xff")
    with pytest.raises(ConfigurationError, match="it is not text"):
        Token(file=tmp_path / "token").headers()
    with pytest.raises(ConfigurationError, match="is not valid"):
        Token(file="/dev/zero").headers()


def test_client_with_token_and_token_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="one of them"):
        Client(token=SECRET, token_file=tmp_path)
