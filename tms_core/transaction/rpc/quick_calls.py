"""Calls that the event loop of the transaction service executes itself, as soon as their bytes arrive.

A handover to a worker takes longer than a sync of the log, and a read from a stream in a task takes longer than the
call. Therefore the loop executes starts and commits itself while they arrive one by one and the local disk is fast. A
disk that has become slow blocks the loop once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

from tms_core.errors import FormatError
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.connection import LENGTH

#: The prefixes of quick calls and their offset; and the limits of a quick call: its bytes, the ids on the invalid list,
#: the number of earlier calls that arrived one by one, and the duration of the last call in seconds.
_NAMES, _NAME_AT = (b"start", b"canCommit", b"commit"), 8
MAX_BYTES, MAX_IDS, AFTER, MAX_SECONDS = 4096, 1000, 8, 0.002
#: The prefix of names of calls that do not wait for the disk.
_NO_SYNC = b"canCommit"


class QuickCalls:
    """The decision which calls the event loop executes itself; for the loop's thread, except :meth:`execute`.

    Args:
        call: returns the response to a call, both without their lengths.
        is_local: whether the manager is in this process.

    Attributes:
        under_way: the number of running calls.
        arrivals: the number of arrivals of bytes, on any connection.
        awaiting: the connections that wait for bytes, and the start of the wait; the longest wait first.
    """

    def __init__(self, manager: TransactionManager, call: Callable[[bytes], bytes], *, is_local: bool) -> None:
        self._manager = manager
        self._call = call
        self._is_local = is_local
        self.under_way = self.arrivals = 0
        self.awaiting: dict[asyncio.Task[None], float] = {}
        self._alone = 0
        self._was_quick = True

    def is_quick(self, frame: bytes) -> bool:
        """Return whether a call takes no longer than a sync of the log, which is on this machine."""
        return (
            self._is_local
            and len(frame) <= MAX_BYTES
            and frame.startswith(_NAMES, _NAME_AT)
            and self._manager.listed_ids <= MAX_IDS
            and self._manager.is_running
        )

    @property
    def can_execute_in_loop(self) -> bool:
        """Return whether quick calls arrive one by one and the disk was fast, so that the loop executes the next."""
        return self._was_quick and self._alone >= AFTER and not self.under_way

    def note(self) -> None:
        """Count a quick call."""
        self._alone = 0 if self.under_way else self._alone + 1

    def execute(self, frame: bytes) -> bytes:
        """Execute a quick call, in any thread."""
        started = time.perf_counter()
        found = self._call(frame)
        is_quick = time.perf_counter() - started < MAX_SECONDS
        # canCommit does not wait for the disk, so its duration says nothing about the disk.
        if not (is_quick and frame.startswith(_NO_SYNC, _NAME_AT)):
            self._was_quick = is_quick
        return found


class QuickConnection(asyncio.StreamReaderProtocol):
    """A connection that reads calls from a stream, except quick calls that arrive completely and one by one.

    Attributes:
        task: the task that reads the stream.
    """

    def __init__(
        self,
        quick: QuickCalls,
        accepted: Callable[[asyncio.StreamReader, asyncio.StreamWriter], None],
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        super().__init__(asyncio.StreamReader(loop=loop), accepted, loop)
        self._quick = quick
        self._event_loop = loop
        self.task: asyncio.Task[None] | None = None
        #: The stream's bytes without a response; whether at least one call has arrived and all have responses.
        self._unanswered, self._between_calls = 0, False
        #: A call for the event loop, and the number of its arrival.
        self._held, self._held_as = b"", 0

    def note_response(self, size: int) -> None:
        """Note that a call, of ``size`` bytes of the stream, has a response."""
        self._unanswered -= size
        self._between_calls = not self._unanswered

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``, as for the other methods of this class."""
        self._socket = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Hold a quick call for the rest of this loop iteration; calls that arrive in it share a sync with the call."""
        quick = self._quick
        quick.arrivals += 1
        if self._between_calls and not self._held and quick.can_execute_in_loop and self._is_quick(data):
            self._held, self._held_as = data, quick.arrivals
            quick.under_way += 1
            self._event_loop.call_soon(self._execute_held)
            return
        self._feed_held()
        self._feed(data)

    def eof_received(self) -> bool | None:
        """Forward the held bytes to the stream, then close the stream."""
        self._feed_held()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forward the held bytes to the stream, then the loss of the connection."""
        self._feed_held()
        super().connection_lost(exc)

    def _is_quick(self, data: bytes) -> bool:
        """Return whether the data is exactly one quick call, and the client has read all responses."""
        size = len(data) - LENGTH.size
        return (
            size > 0
            and LENGTH.unpack_from(data)[0] == size
            and self._quick.is_quick(data[LENGTH.size :])
            and not self._socket.get_write_buffer_size()
        )

    def _feed(self, data: bytes) -> None:
        self._unanswered += len(data)
        self._between_calls = False
        super().data_received(data)

    def _feed_held(self) -> None:
        """Forward the held call to the stream."""
        if self._held:
            data, self._held = self._held, b""
            self._quick.under_way -= 1
            self._feed(data)

    def _execute_held(self) -> None:
        """Execute the held call, or pass it to the stream if other bytes have arrived since."""
        quick = self._quick
        if quick.arrivals != self._held_as:
            self._feed_held()
        if not self._held:
            return
        data, self._held = self._held, b""
        quick.under_way -= 1
        quick.note()
        try:
            answer = quick.execute(data[LENGTH.size :])
        except FormatError:
            self._feed(data)
            return
        except BaseException:
            self._socket.abort()
            raise
        task = cast("asyncio.Task[None]", self.task)
        del quick.awaiting[task]
        quick.awaiting[task] = self._event_loop.time()
        self._socket.write(LENGTH.pack(len(answer)) + answer)
