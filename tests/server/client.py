"""A raw HTTP client: one connection, no added headers, and visible chunks."""

from __future__ import annotations

import base64
import gzip
import json
import socket
from dataclasses import dataclass, field
from typing import Any, Self

from tests.kit.avro import POLL_ALL, decoded
from tests.support import PATIENCE_SECONDS
from tms_core.transaction.codec.thrift import encode_transaction
from tms_core.transaction.model import Transaction

AVRO, JSON = "avro/binary", "application/json"


@dataclass(frozen=True)
class Answer:
    """A response; ``chunks`` are empty if it has a length."""

    status: int
    headers: dict[str, str]
    body: bytes
    chunks: list[bytes] = field(default_factory=list)

    @property
    def text(self) -> str:
        return self.body.decode()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def unzipped(self) -> bytes:
        assert self.headers["content-encoding"] == "gzip"
        return gzip.decompress(self.body)


class Client:
    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A small window, so that unread bytes stay at the server.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.socket.close()

    def ask(self, method: str, path: str, body: bytes = b"", **headers: str) -> Answer:
        """Send a request with headers (``content_type`` for ``Content-Type``); return the response."""
        self.send(method, path, body, **headers)
        return self.answer()

    def send(self, method: str, path: str, body: bytes = b"", **headers: str) -> None:
        named = {"host": "localhost", "content-length": str(len(body))}
        named |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in named.items())
        self.socket.sendall(f"{method} {path} HTTP/1.1\r\n{lines}\r\n".encode() + body)

    def answer(self, *, head: bool = False) -> Answer:
        """Read a response; the response to HEAD has no body.

        Raises:
            EOFError: the connection ended before the end of the response.
        """
        status = int(self._line().split(b" ", 2)[1])
        headers = {}
        while line := self._line():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        if head:
            return Answer(status, headers, b"")
        if headers.get("transfer-encoding") != "chunked":
            return Answer(status, headers, self._exactly(int(headers["content-length"])))
        chunks = []
        while size := int(self._line(), 16):
            chunks.append(self._exactly(size))
            self._line()
        self._line()
        return Answer(status, headers, b"".join(chunks), chunks)

    def _line(self) -> bytes:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise EOFError
        return line.rstrip(b"\r\n")

    def _exactly(self, size: int) -> bytes:
        found = self._stream.read(size)
        if len(found) < size:
            raise EOFError
        return found


class TopicClient:
    def __init__(self, client: Client, name: str, namespace: str = "default") -> None:
        self.client = client
        self.path = f"/v1/namespaces/{namespace}/topics/{name}"

    def create(self, **properties: str) -> Self:
        answer = self.client.ask("PUT", self.path, json.dumps(properties).encode())
        assert answer.status == 200, answer.text
        return self

    def post(self, verb: str, body: object = None, **headers: str) -> Answer:
        data = body if isinstance(body, bytes) else json.dumps({} if body is None else body).encode()
        return self.client.ask("POST", f"{self.path}/{verb}", data, **{"content_type": JSON, **headers})

    def publish(self, *messages: str, **fields: object) -> Answer:
        answer = self.post("publish", {"messages": messages, **fields})
        assert answer.status == 200, answer.text
        return answer

    def poll(self, **fields: object) -> list[str]:
        answer = self.post("poll", fields)
        assert answer.status == 200, answer.text
        return [message["payload"] for message in answer.json]

    def payloads(self, body: bytes = POLL_ALL) -> list[bytes]:
        """Poll in Avro."""
        answer = self.post("poll", body, content_type=AVRO)
        assert (answer.status, answer.headers["content-type"]) == (200, AVRO)
        return [payload for _, payload in decoded(answer.body)]


def encode_for_json(tx: Transaction) -> str:
    """Return a transaction as a string for a body in JSON."""
    return base64.b64encode(encode_transaction(tx)).decode()
