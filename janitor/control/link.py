"""The server's end of one connection.

Whoever asks must never hold up the work: a client may be stopped by its terminal, or gone. So progress is said only
where it can be said at once, and is dropped where not; only the answer waits for the client to take it, and not long.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Lock
from typing import Any, Self

from janitor.control import wire
from tms_core.errors import StoreError, TmsError
from tms_core.topic import TopicId

#: How long a client may be silent before its request is complete, in seconds.
REQUEST_SECONDS = 10.0
#: How long a client may take to read its answer, in seconds; it does nothing else meanwhile.
ANSWER_SECONDS = 30.0
#: Progress is said so often at most, in seconds: as often as a terminal shows it.
PROGRESS_SECONDS = 0.1


class Link:
    """One client.

    Args:
        connection: as it was accepted.
        request_seconds: how long to wait for each part of its request.
    """

    def __init__(self, connection: socket.socket, *, request_seconds: float = REQUEST_SECONDS) -> None:
        connection.settimeout(request_seconds)
        self._connection = connection
        self._sending = Lock()
        self._asked = False
        self._rows = 0
        self._next = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._sending:
            self._connection.close()

    def request(self) -> dict[str, Any] | None:
        """What the client wants; None where it said nothing, or broke off.

        Raises:
            TmsError: it is not one of our requests.
        """
        try:
            request = next(wire.lines(self._connection), None)
        except ValueError as error:
            raise TmsError(f"The request was not understood: {error}.") from error
        except OSError:
            return None
        # With a time limit, Python would wait before it says that it would have to wait.
        self._connection.settimeout(None)
        self._asked = True
        return request

    def observe(self, phase: str, topic: TopicId | None, rows: int) -> None:
        """An observer that tells the client, ten times a second at most."""
        self._rows += rows
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        if self.tell({"phase": phase, "topic": topic and str(topic), "rows": self._rows}):
            self._rows = 0

    def tell(self, progress: dict[str, Any]) -> bool:
        """Say how far the work is, if that can be done at once; returns whether it was."""
        if not self._sending.acquire(blocking=False):
            return False
        try:
            line = wire.encode({"progress": progress})
            # So short a line goes as a whole or not at all.
            return self._asked and self._connection.send(line, socket.MSG_DONTWAIT) == len(line)
        except OSError:
            return False
        finally:
            self._sending.release()

    def is_gone(self) -> bool:
        """Whether the client has hung up, or we have."""
        try:
            return not self._connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def answer(self, message: dict[str, Any]) -> None:
        """Send the answer; a client that is gone, or does not take it, goes without."""
        try:
            line = wire.encode(message)
        except StoreError as error:
            line = wire.encode({"error": wire.pack_error(error)})
        with self._sending, suppress(OSError):
            self._asked = False
            self._connection.settimeout(ANSWER_SECONDS)
            self._connection.sendall(line)

    def refuse(self, error: TmsError) -> None:
        """Send a client away."""
        with self:
            self.answer({"error": wire.pack_error(error)})

    def hang_up(self) -> None:
        """Wake whoever waits for more of the request; an answer under way can still be sent."""
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RD)
