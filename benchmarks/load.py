"""Publishers that send requests by a schedule, regardless of the server's speed.

A client that waits for a response before its next request sends fewer requests to a slow server, and therefore hides
its latency (coordinated omission). Here requests are due by a schedule, and latency counts from the due time: if a
server stalls for a second, all requests of that second are late. One thread of the benchmark's process sends the
requests on persistent raw sockets; the server is a separate process.
"""

from __future__ import annotations

import math
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import NamedTuple, Self

from tests.kit.avro import block
from tests.server.client import AVRO
from tests.support import PATIENCE_SECONDS

#: The number of connections, which is the maximum number of concurrent requests.
CONNECTIONS = 16
#: The topic of all messages.
TOPIC = "load"

_HEAD = "POST /v1/namespaces/default/topics/{}/publish HTTP/1.1\r\nHost: localhost\r\nContent-Type: {}\r\n"


class Sample(NamedTuple):
    """The times when a request was due and when its response arrived, in seconds of ``time.monotonic``."""

    due: float
    responded: float

    @property
    def seconds(self) -> float:
        """Return the latency in seconds."""
        return self.responded - self.due


def publish_request(payload: bytes, messages: int = 1) -> bytes:
    """Return a request that publishes a payload several times."""
    body = b"\x02" + block([payload] * messages) + b"\0"
    return f"{_HEAD.format(TOPIC, AVRO)}Content-Length: {len(body)}\r\n\r\n".encode() + body


def measure_top_rate(port: int, request: bytes, requests: int) -> float:
    """Return the requests per second with one concurrent request on each connection."""
    started = time.monotonic()
    send_on_schedule(port, lambda _: request, math.inf, requests)
    return requests / (time.monotonic() - started)


def send_on_schedule(port: int, request: Callable[[float], bytes], per_second: float, requests: int) -> list[Sample]:
    """Send requests when they are due, and return after all responses.

    Args:
        port: the server's port.
        request: returns the request for a due time.
        per_second: the scheduled rate; ``math.inf``: all requests are due now.
        requests: the number of requests.

    Raises:
        RuntimeError: the server rejected a request.
        TimeoutError: the server has stopped responding.
    """
    with Publishers(port) as publishers:
        return publishers.run(request, 1 / per_second, requests)


class Publishers:
    """Connections to a server, each idle or waiting for a response.

    Args:
        port: the server's port.
    """

    def __init__(self, port: int) -> None:
        self._idle: list[socket.socket] = []
        self._due: dict[socket.socket, float] = {}
        with ExitStack() as stack:
            # Unlike epoll, select can wait for less than a millisecond.
            self._selector = stack.enter_context(selectors.SelectSelector())
            for _ in range(CONNECTIONS):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._selector.register(connection, selectors.EVENT_READ, connection)
                self._idle.append(connection)
            self._open = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def run(self, request: Callable[[float], bytes], step_seconds: float, requests: int) -> list[Sample]:
        """Send requests as :func:`send_on_schedule` does."""
        samples: list[Sample] = []
        started = time.monotonic()
        sent = 0
        while len(samples) < requests:
            due, now = started + sent * step_seconds, time.monotonic()
            if not self._idle or sent == requests:
                samples += self._wait(PATIENCE_SECONDS)
                if time.monotonic() - now >= PATIENCE_SECONDS:
                    raise TimeoutError(f"the server has not responded for {PATIENCE_SECONDS} s")
            elif due > now:
                samples += self._wait(due - now)
            else:
                # Use the connections in rotation, because a server closes idle connections.
                connection = self._idle.pop(0)
                self._due[connection] = due
                connection.sendall(request(due))
                sent += 1
                samples += self._wait(0)
        return samples

    def _wait(self, seconds: float) -> list[Sample]:
        """Return the available responses, or wait for the first; empty after the timeout."""
        ready = self._selector.select(seconds)
        now = time.monotonic()
        return [Sample(self._read_response(key.data), now) for key, _ in ready]

    def _read_response(self, connection: socket.socket) -> float:
        """Read a response; return the due time of its request."""
        answer = connection.recv(65536)
        if not (answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n")):
            raise RuntimeError(f"the server responded {answer!r}")
        self._idle.append(connection)
        return self._due.pop(connection)


def percentile_ms(samples: Iterable[Sample], percent: int) -> float:
    """Return a percentile of latencies, in milliseconds."""
    latencies = sorted(sample.seconds for sample in samples)
    return latencies[max(0, math.ceil(len(latencies) * percent / 100) - 1)] * 1000
