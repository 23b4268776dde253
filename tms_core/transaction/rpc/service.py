"""The transaction service: Tephra's Thrift server in a separate thread.

An idle connection costs nothing, so a Java client may keep its pool of fifty connections open. A few workers execute
calls and wait for the disk together. Calls of one connection are executed one after the other, as in Tephra's server.

The service disconnects a client that sends an invalid call or a frame above the limit, that sends nothing at all, or
that does not complete a frame. If memory is short, it disconnects the client that has left its response unread for
longest. With too many connections, a new one replaces one that was idle for long.

Tephra's protocol has no authentication: every client of the port can abort any transaction. Therefore a token can be
required, which a client sends in an additional first call; Tephra's client cannot send one.
"""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, ExitStack, asynccontextmanager, suppress
from enum import Enum
from hmac import compare_digest
from itertools import chain, islice
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

import uvloop

from tms_core.clock import SystemClock
from tms_core.errors import ConfigurationError, FormatError, TmsError, Unavailable
from tms_core.logs.audit import BoundedAudit, Event
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.security import files
from tms_core.security.tls import ServerCertificate
from tms_core.settings.models import split_address
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Failure, MessageKind, RpcMessage
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.calls import answer, failure
from tms_core.transaction.rpc.line import ANSWER_YOURSELF, AUTHENTICATE, LENGTH, NOT_HERE, TLS_ONLY, ServiceUnavailable
from tms_core.transaction.rpc.quick_calls import QuickCalls, QuickConnection
from tms_core.web.failed_attempts import MAX_WAITING, FailedAttempts

#: The largest request, in bytes (``data.tx.thrift.max.read.buffer``).
MAX_FRAME_BYTES = 16 * 1024 * 1024
#: The allowance of a request for each listed id, in bytes: Tephra's clients send a transaction with all its ids back
#: when they request a checkpoint or finish it.
LISTED_ID_BYTES = 10
#: The most connections; and at most one for this many files that the process may open.
MAX_CONNECTIONS, FILES_EACH = 1_000, 4
#: The most requests above a size, in bytes, that are received at once, counted after so many of their bytes have
#: arrived; other requests wait. Then the time limit for the next so many bytes, in seconds.
LARGE_REQUESTS, LARGE_BYTES, LARGE_SECONDS = 4, 64 * 1024, 5
#: The time limit from the connection to the start of its first request, and for each request to be complete, in
#: seconds.
REQUEST_SECONDS = 60
#: The silence after which a new connection replaces this one, in seconds: without a response so far, and otherwise.
NEW_SILENT_SECONDS, SILENT_SECONDS = 1.0, 60.0
#: The most bytes of unread responses of all connections together, unless one response alone is larger.
MAX_UNREAD_BYTES = 256 * 1024 * 1024
#: The number of concurrent calls (``data.tx.server.threads``).
WORKERS = 20
#: The time limit for running requests when the service stops, in seconds.
STOP_SECONDS = 10
#: The time limit of a TLS handshake, or of a plain call to a service with a certificate, in seconds; and the first byte
#: of a handshake.
HANDSHAKE_SECONDS, HANDSHAKE = 10, b"\x16"
#: The interval at which timed-out transactions are expired, in seconds. With CDAP's 10 (``data.tx.cleanup.interval``),
#: messages of a dead worker would be delivered again that much later.
CLEANUP_SECONDS = 1
_BACKLOG = 128
#: An upper bound for the call with which another server starts a forwarding connection, in bytes.
_SHORT_BYTES = 128

#: Calls that change or show the state of all clients.
ADMINISTRATIVE = ("truncateInvalidTx", "truncateInvalidTxBefore", "resetState", "getSnapshot")
NOT_ADMINISTRATIVE = "This call needs the administrative token (transactions.admin_token_file)"
NO_MEMORY = "Requests use all the memory that server.memory allows"
_DEMANDED = "This transaction service demands a token"
#: The position of a call's name, after the version or without one, and of its length.
_NAMES_AT = (8, 4)
_LONGEST_NAME = 64
#: The memory of a short string, in bytes: as an object, in a list and in a set.
_STRING_BYTES = 150

#: Reserves memory while its block runs. It calls a function, in any thread, that disconnects a client that delays
#: others, and yields a function that reports that the request is complete.
Room = Callable[[int, Callable[[], None]], AbstractAsyncContextManager[Callable[[], None]]]

T = TypeVar("T")


class Level(Enum):
    """The permissions of a connection."""

    NONE = "nothing"
    CLIENT = "calls of clients"
    ADMIN = "everything"


logger = get_logger(__name__)


class ManagerOfSeveral(Protocol):
    """The choice of the responsible service among several servers."""

    @property
    def log_name(self) -> str:
        """Return the identity of the manager's log; empty: this service must not answer now."""
        ...

    def pass_on(self, frame: bytes) -> bytes:
        """Forward a call to the responsible service.

        Raises:
            ServiceUnavailable: the call was not executed.
            OSError, EOFError, FormatError: the call may have been executed.
        """
        ...


class TransactionService:
    """A server for a transaction manager, which also does the manager's periodic work.

    Args:
        manager: executes the calls; it is not closed with the service.
        address: ``HOST:PORT`` to listen on; with port 0, :attr:`port` is a free port after the start.
        cleanup_seconds: the interval for expiring transactions.
        snapshot_seconds: the interval of snapshots (``transactions.snapshot_interval_seconds``).
        tokens: returns the token that a connection must send first, for each level that requires one. Without a token
            for ``ADMIN``, the clients' token allows all calls; without one for ``CLIENT``, only :data:`ADMINISTRATIVE`
            calls require a token.
        several: selects the responsible service; None: this service is the only one.
        certificate: the TLS certificate; None: no TLS.
    """

    def __init__(
        self,
        manager: TransactionManager,
        address: str = "127.0.0.1:15165",
        *,
        cleanup_seconds: float = CLEANUP_SECONDS,
        snapshot_seconds: float = 60,
        tokens: Mapping[Level, Callable[[], bytes]] = MappingProxyType({}),
        several: ManagerOfSeveral | None = None,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._certificate = certificate
        self._tokens = tokens
        self._several = several
        self._manager = manager
        self._host, self.port = split_address(address)
        self._jobs = ((cleanup_seconds, manager.expire), (snapshot_seconds, manager.take_snapshot))
        self._workers = ThreadPoolExecutor(WORKERS, "transactions")
        # Separate threads: calls that wait for another server may wait long, and that server may wait for this one.
        self._passing = ThreadPoolExecutor(WORKERS, "transactions-elsewhere")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._quick = QuickCalls(manager, lambda frame: answer(manager, frame), is_local=several is None)
        #: Connections with an incomplete request, each with its start; the longest-waiting comes first.
        self._awaiting = self._quick.awaiting
        #: Connections without a response so far.
        self._new: set[asyncio.Task[None]] = set()
        self._seldom = RateLimitedLogger(logger)
        self._bounded = BoundedAudit(SystemClock().monotonic_ms)
        #: Slows down connections with a wrong or missing token.
        self.failed = FailedAttempts(SystemClock(), min(MAX_WAITING, _most_connections() // 10))
        self._large = asyncio.Semaphore(LARGE_REQUESTS)
        #: Reserves memory for a large request, shared with the server's other requests; None: unlimited.
        self.room: Room | None = None
        self._unread: dict[asyncio.StreamWriter, int] = {}

    @property
    def address(self) -> str:
        """Return ``HOST:PORT``."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def start(self) -> None:
        """Start to listen; calls are executed from the return on.

        Raises:
            ConfigurationError: the address, the port or the certificate cannot be used.
        """
        listener = listen(self.address)
        self.port = listener.getsockname()[1]
        started = threading.Event()
        self._thread = threading.Thread(
            target=uvloop.run, args=[self._serve(listener, started)], name="transaction-service", daemon=True
        )
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """Finish running calls and close the port; no effect on a stopped service."""
        if self._thread is None or self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._workers.shutdown()
        self._passing.shutdown()
        self._thread = None

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        closing = await self._begin(listener)
        jobs = [asyncio.create_task(self._repeat(*job)) for job in self._jobs]
        started.set()
        await self._stopping.wait()
        closing()
        for task in (*jobs, *self._awaiting):
            task.cancel()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=STOP_SECONDS)
            for connection in late:
                connection.cancel()

    async def _begin(self, listener: socket.socket) -> Callable[[], object]:
        """Start to accept connections; return a function that stops it."""
        certificate = self._certificate
        if certificate is None:
            server = await asyncio.get_running_loop().create_server(self._connection, sock=listener)
            return server.close
        accepting = asyncio.create_task(self._accept(listener, certificate.context))
        renewing = asyncio.create_task(self._renew(certificate))

        def close() -> None:
            accepting.cancel()
            renewing.cancel()
            listener.close()

        return close

    def _connection(self) -> QuickConnection:
        return QuickConnection(self._quick, self._accepted, asyncio.get_running_loop())

    async def _accept(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept connections over TLS; the loop's own server would not count connections during their handshake."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        handshakes: dict[asyncio.Task[None], None] = {}
        try:
            while True:
                try:
                    peer, name = await loop.sock_accept(listener)
                except OSError as error:
                    self._seldom.log(logging.WARNING, "no connection can be accepted: %s", error)
                    await asyncio.sleep(1)
                    continue
                if len(handshakes) >= _most_connections():
                    # Clients that connect and send nothing must not block others: drop the oldest handshake.
                    oldest = next(iter(handshakes))
                    del handshakes[oldest]
                    oldest.cancel()
                task = asyncio.create_task(self._shake_hands(peer, name, context))
                handshakes[task] = None
                task.add_done_callback(lambda done: handshakes.pop(done, None))
        finally:
            for task in handshakes:
                task.cancel()

    async def _shake_hands(self, peer: socket.socket, name: object, context: ssl.SSLContext) -> None:
        """Start TLS with a client, or respond that TLS is required."""
        loop, readable = asyncio.get_running_loop(), asyncio.Event()
        with ExitStack() as refused:
            refused.callback(peer.close)
            try:
                peer.setblocking(False)
                peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(HANDSHAKE_SECONDS):
                    loop.add_reader(peer, readable.set)
                    try:
                        await readable.wait()
                    finally:
                        loop.remove_reader(peer)
                    # Only look at the byte: the TLS handshake reads it again.
                    if peer.recv(1, socket.MSG_PEEK) == HANDSHAKE:
                        await loop.connect_accepted_socket(self._connection, peer, ssl=context)
                        refused.pop_all()
                        return
                    await _refuse_plain(peer)
                text = "%s is disconnected: it does not use TLS (transactions.tls)"
                self._seldom.log(logging.WARNING, text, name)
            except EOFError as error:
                logger.debug("%s is gone: %s", name, error)
            except TimeoutError:
                logger.info("%s is disconnected: no TLS handshake within the time limit", name)
            except (OSError, FormatError) as error:
                self._seldom.log(logging.WARNING, "%s is disconnected: the TLS handshake failed: %s", name, error)

    async def _renew(self, certificate: ServerCertificate) -> None:
        """Use a renewed certificate for new connections."""
        while True:
            await asyncio.sleep(files.LOOK_SECONDS)
            certificate.renew()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _most_connections() and not self._take_a_place():
            text = "a connection was rejected: the limit of %d connections is reached"
            self._seldom.log(logging.WARNING, text, len(self._connections))
            writer.close()
            return
        protocol = cast(QuickConnection, writer.transport.get_protocol())
        connection = protocol.task = asyncio.create_task(self._converse(reader, writer, protocol))
        for known in (self._connections, self._new):
            known.add(connection)
            connection.add_done_callback(known.discard)

    def _take_a_place(self) -> bool:
        """Close the longest idle connection, preferably without a response so far; return whether one was closed."""
        now = asyncio.get_running_loop().time()
        new = ((one, since + NEW_SILENT_SECONDS) for one, since in self._awaiting.items() if one in self._new)
        others = ((one, since + SILENT_SECONDS) for one, since in self._awaiting.items())
        for one, until in chain(islice(new, 1), islice(others, 1)):
            if until <= now:
                one.cancel()
                self._connections.discard(one)
                return True
        return False

    async def _converse(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: QuickConnection
    ) -> None:
        """Serve the requests of one connection until either side closes it."""
        wait_seconds: float | None = REQUEST_SECONDS
        level = self._level_without_token()
        direct = False
        try:
            while not self._stopping.is_set():
                size = await self._size(
                    reader, wait_seconds, LARGE_BYTES if level is Level.NONE else self._request_limit()
                )
                frame = await self._await_bytes(reader.readexactly(min(size, LARGE_BYTES)), REQUEST_SECONDS)
                async with self._place(size, writer) as received:
                    if received is None:
                        data = await self._refuse_large(reader, frame, size)
                    else:
                        frame = await self._whole(reader, frame, size, received)
                        level, direct, data = await self._reply(frame, level, direct, _host(writer))
                    del frame
                if level is Level.NONE:
                    await self.failed.delay(_host(writer))
                    await self._send(writer, data)
                    raise FormatError("it has not sent the required token (transactions.token_file)")
                await self._send(writer, data)
                wait_seconds = None
                protocol.note_response(LENGTH.size + size)
                self._new.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        except FormatError as error:
            self._seldom.log(logging.WARNING, "%s is disconnected: %s", writer.get_extra_info("peername"), error)
        except TimeoutError:
            peer = writer.get_extra_info("peername")
            logger.info("%s is disconnected: no complete request within the time limit", peer)
        except (OSError, EOFError) as error:
            logger.debug("%s is gone: %s", writer.get_extra_info("peername"), error)
        finally:
            writer.close()

    async def _reply(self, frame: bytes, level: Level, direct: bool, address: str) -> tuple[Level, bool, bytes]:
        """Return the response to a frame, and the new permission level and forwarding state of its connection."""
        if self._tokens and _is_of(frame, (AUTHENTICATE,)):
            level, data = await self._work(self._authenticate, frame)
            if level is Level.NONE:
                self._record_refusal(Event.UNAUTHORIZED, AUTHENTICATE, address)
            return level, direct, data
        if refused := self._forbidden(frame, level, address):
            return level, direct, refused
        found, direct = await self._done(frame, direct, address)
        return level, direct, await self._passed_on(frame) if found is None else found

    async def _done(self, frame: bytes, direct: bool, address: str) -> tuple[bytes | None, bool]:
        """Return the result of :meth:`_answer_call` from a worker."""
        if not self._quick.is_quick(frame):
            return await self._work(self._answer_call, frame, direct, address)
        self._quick.note()
        return await self._work(self._quick.execute, frame), direct

    def _forbidden(self, frame: bytes, level: Level, address: str) -> bytes | None:
        """Return the response to a call above a permission level; None if the call is allowed."""
        if level is Level.NONE:
            event, reason = Event.UNAUTHORIZED, _DEMANDED
        elif level is Level.CLIENT and _is_of(frame, ADMINISTRATIVE):
            event, reason = Event.FORBIDDEN, NOT_ADMINISTRATIVE
        else:
            return None
        request = wire.read_message(frame)
        self._record_refusal(event, request.name, address)
        return _refusal(request, reason)

    def _record_refusal(self, event: Event, call: str, address: str) -> None:
        """Write a refused call to the audit log; only the event loop calls this."""
        self._bounded.record(event, principal=None, address=address, verb=call, object_="")

    def _answer_call(self, frame: bytes, direct: bool, address: str) -> tuple[bytes | None, bool]:
        """Return the response to a frame, and whether later calls of its connection are never forwarded.

        A response of None means that the call has to be forwarded.
        """
        several = self._several
        if several is None:
            return answer(self._manager, frame, address), direct
        if len(frame) <= _SHORT_BYTES and (request := wire.read_message(frame)).name == ANSWER_YOURSELF:
            if request.fields.get(1) == several.log_name.encode() != b"":
                return wire.message(MessageKind.REPLY, request.name, request.number), True
            return _refusal(request, NOT_HERE), True
        if several.log_name:
            return answer(self._manager, frame, address), direct
        if direct:
            return _refusal(wire.read_message(frame), NOT_HERE), direct
        return None, direct

    async def _passed_on(self, frame: bytes) -> bytes:
        several = cast("ManagerOfSeveral", self._several)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._passing, several.pass_on, frame)
        except ServiceUnavailable as error:
            return _refusal(wire.read_message(frame), str(error))

    def _level_without_token(self) -> Level:
        """Return the permissions of a connection without a token."""
        if Level.CLIENT in self._tokens:
            return Level.NONE
        return Level.CLIENT if Level.ADMIN in self._tokens else Level.ADMIN

    def _authenticate(self, frame: bytes) -> tuple[Level, bytes]:
        """Return the permissions by the token of a frame, and the response."""
        request = wire.read_message(frame)
        token = request.fields.get(1)
        highest = Level.CLIENT if Level.ADMIN in self._tokens else Level.ADMIN
        for demands, level in ((Level.ADMIN, Level.ADMIN), (Level.CLIENT, highest)):
            demanded = self._tokens.get(demands)
            try:
                is_good = demanded is not None and isinstance(token, bytes) and compare_digest(token, demanded())
            except TmsError as error:
                logger.error("%s", error)
                text = "This transaction service cannot read its token"
                return Level.NONE, failure(request, Failure.PROTOCOL_ERROR, text)
            if is_good:
                return level, wire.message(MessageKind.REPLY, request.name, request.number)
        return Level.NONE, failure(request, Failure.PROTOCOL_ERROR, _DEMANDED)

    def _request_limit(self) -> int:
        """Return the size limit of a request: a transaction with all listed ids, and a margin for new ones."""
        return max(MAX_FRAME_BYTES, LARGE_BYTES + LISTED_ID_BYTES * self._manager.listed_ids)

    async def _size(self, reader: asyncio.StreamReader, seconds: float | None, most: int) -> int:
        """Return the size of the next frame."""
        (size,) = LENGTH.unpack(await self._await_bytes(reader.readexactly(LENGTH.size), seconds))
        if not 0 <= size <= most:
            raise FormatError(f"a frame of {size} bytes, above the limit of {most} bytes")
        return int(size)

    @asynccontextmanager
    async def _place(self, size: int, writer: asyncio.StreamWriter) -> AsyncIterator[Callable[[], None] | None]:
        """Reserve a place among the large requests, and memory for the decoded request.

        Yields a function to call when the request is complete, or None without memory.
        """
        if size <= LARGE_BYTES:
            yield _nothing
            return
        async with self._large:
            if self.room is None:
                yield _nothing
                return
            loop = asyncio.get_running_loop()

            def abort() -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(writer.transport.abort)

            async with AsyncExitStack() as stack:
                received = None
                with suppress(Unavailable):
                    received = await stack.enter_async_context(self.room(_memory_of(size), abort))
                yield received

    async def _whole(self, reader: asyncio.StreamReader, head: bytes, size: int, received: Callable[[], None]) -> bytes:
        """Return the complete request; a large request must arrive steadily, because others wait for its place."""
        if size <= LARGE_BYTES:
            return head
        found = bytearray(head)
        await self._read_rest(reader, size - len(head), found.extend)
        received()
        return bytes(found)

    async def _refuse_large(self, reader: asyncio.StreamReader, head: bytes, size: int) -> bytes:
        """Return the answer to a large request without memory; the rest of the request is read and dropped."""
        await self._read_rest(reader, size - len(head), len)
        return _refusal(wire.read_head(head), NO_MEMORY)

    async def _read_rest(self, reader: asyncio.StreamReader, size: int, use: Callable[[bytes], object]) -> None:
        """Read the rest of a large request in parts, and process each part as it arrives."""
        async with asyncio.timeout(REQUEST_SECONDS):
            while size:
                part = await self._await_bytes(reader.readexactly(min(size, LARGE_BYTES)), LARGE_SECONDS)
                size -= len(part)
                use(part)

    async def _await_bytes(self, reading: Coroutine[None, None, bytes], seconds: float | None) -> bytes:
        """Wait for the bytes of a request; the connection may be closed until they are complete."""
        connection = cast("asyncio.Task[None]", asyncio.current_task())
        self._awaiting[connection] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds):
                return await reading
        finally:
            self._awaiting.pop(connection, None)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send a response; close the connections that have left responses unread for longest."""
        self._unread[writer] = len(data)
        writer.write(LENGTH.pack(len(data)) + data)
        while len(self._unread) > 1 and sum(self._unread.values()) > MAX_UNREAD_BYTES:
            slowest = next(iter(self._unread))
            del self._unread[slowest]
            peer = slowest.get_extra_info("peername")
            self._seldom.log(logging.WARNING, "%s is disconnected: it does not read its response", peer)
            slowest.transport.abort()
        try:
            await writer.drain()
        finally:
            self._unread.pop(writer, None)

    async def _repeat(self, seconds: float, work: Callable[[], object]) -> None:
        seldom = RateLimitedLogger(logger)
        while True:
            await asyncio.sleep(seconds)
            if self._several is not None and not self._several.log_name:
                continue
            try:
                await self._work(work)
            except TmsError as error:
                seldom.log(logging.ERROR, "%s", error)

    async def _work(self, work: Callable[..., T], *arguments: object) -> T:
        self._quick.under_way += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._workers, work, *arguments)
        finally:
            self._quick.under_way -= 1


def listen(address: str) -> socket.socket:
    """Return a socket that listens on ``HOST:PORT``.

    Raises:
        ConfigurationError: the address or the port is not available.
    """
    host, port = split_address(address)
    try:
        [(family, _, _, _, found), *_] = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        return socket.create_server(found[:2], family=family, backlog=_BACKLOG)
    except OSError as error:
        raise ConfigurationError(
            f"transactions.thrift is {address}, which cannot be listened on: {error.strerror}.",
            "Stop the program that listens there, or set another address: TMS_TRANSACTIONS__THRIFT=HOST:PORT.",
        ) from error


async def _refuse_plain(peer: socket.socket) -> None:
    """Respond to the first call of a connection without TLS that TLS is required, and close the connection."""
    reader, writer = await asyncio.open_connection(sock=peer)
    try:
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if not 0 <= size <= LARGE_BYTES:
            raise FormatError("neither TLS nor a call")
        data = _refusal(wire.read_message(await reader.readexactly(size)), TLS_ONLY)
        writer.write(LENGTH.pack(len(data)) + data)
        await writer.drain()
    finally:
        writer.close()


def _nothing() -> None:
    """Do nothing: no caller waits."""


def _memory_of(size: int) -> int:
    """Return the largest memory of a request: its bytes as they arrive, complete and decoded, and its strings."""
    return 3 * size + _STRING_BYTES * min(size // LENGTH.size, wire.MAX_STRINGS)


def _is_of(frame: bytes, names: Collection[str]) -> bool:
    """Return whether a frame is one of some calls, without parsing its arguments."""
    for at in _NAMES_AT:
        size = int.from_bytes(frame[at - LENGTH.size : at], "big")
        if 0 < size <= _LONGEST_NAME and frame[at : at + size].decode(errors="replace") in names:
            return True
    return False


def _host(writer: asyncio.StreamWriter) -> str:
    """Return the host of a connection; for a forwarded call, the host of the forwarding server."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


def _refusal(request: RpcMessage, text: str) -> bytes:
    """Return the response to a call that was not executed."""
    return failure(request, Failure.PROTOCOL_ERROR, text)


def _most_connections() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, files // FILES_EACH))
