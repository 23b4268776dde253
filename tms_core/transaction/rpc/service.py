"""The transaction service: Tephra's Thrift server in a separate thread.

An idle connection needs no thread, so a Java client may keep its pool of fifty connections open. A few worker threads
execute the calls, and concurrent calls share one sync of the log. As in Tephra, a connection's calls run in sequence.

The service disconnects a client that sends an invalid call or a frame above the limit, that sends no request, or that
does not complete a frame. If memory is short, it disconnects the client with the oldest unread response. At the limit
of connections, a new connection replaces one that has been idle for long.

Tephra's protocol has no authentication: every client of the port can abort any transaction. Therefore the service can
require a token, which a client sends in an additional first call. Tephra's client cannot send a token.
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
from tms_core.errors import ConfigurationError, FormatError, TmsError, Unavailable, without_paths
from tms_core.logs.audit import BoundedAudit, Event
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.security import files
from tms_core.security.tls import ServerCertificate
from tms_core.settings.models import split_address
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Failure, MessageKind, RpcMessage
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.calls import answer, failure
from tms_core.transaction.rpc.connection import (
    AUTHENTICATE,
    EXECUTE_HERE,
    LENGTH,
    NOT_ADMINISTRATIVE,
    NOT_MANAGED_HERE,
    TLS_ONLY,
    TOKEN_UNREADABLE,
    UNAUTHORIZED,
    ServiceUnavailable,
)
from tms_core.transaction.rpc.quick_calls import QuickCalls, QuickConnection
from tms_core.web.failed_attempts import MAX_WAITING, FailedAttempts
from tms_core.web.thread import open_port

#: The largest request, in bytes (``data.tx.thrift.max.read.buffer``).
MAX_FRAME_BYTES = 16 * 1024 * 1024
#: The allowance in the request limit for each invalid or running transaction, in bytes: Tephra's clients send the ids
#: in their snapshot back when they request a checkpoint or finish the transaction.
LISTED_ID_BYTES = 10
#: The maximum number of connections, and the number of files that the process must be allowed to open for each of them.
MAX_CONNECTIONS, FILES_EACH = 1_000, 4
#: The maximum number of large requests that the service receives at the same time; others wait. A request is large
#: above LARGE_BYTES. LARGE_SECONDS limits the time for each further LARGE_BYTES of it.
LARGE_REQUESTS, LARGE_BYTES, LARGE_SECONDS = 4, 64 * 1024, 5
#: The time limit from the connection to the start of its first request, and from the start of a request to its end, in
#: seconds.
REQUEST_SECONDS = 60
#: The idle time after which a new connection may replace another, in seconds: before its first response, and after it.
NEW_SILENT_SECONDS, SILENT_SECONDS = 1.0, 60.0
#: The maximum size of the unread responses of all connections, in bytes; a single response may be larger.
MAX_UNREAD_BYTES = 256 * 1024 * 1024
#: The number of concurrent calls (``data.tx.server.threads``).
WORKERS = 20
#: The time limit for running requests when the service stops, in seconds.
STOP_SECONDS = 10
#: The time limit of a TLS handshake, or of a plain call to a service with a certificate, in seconds; and the first byte
#: of a handshake.
HANDSHAKE_SECONDS, HANDSHAKE = 10, b"\x16"
#: The interval for expiring timed-out transactions, in seconds. CDAP's 10 (``data.tx.cleanup.interval``) would delay
#: the redelivery of a dead worker's messages by up to 10 seconds.
CLEANUP_SECONDS = 1
_BACKLOG = 128
#: An upper bound for the size of an ``answerYourself`` call, in bytes.
_SMALL_CALL_BYTES = 128

#: Calls that change or show the state of all clients; they require the administrator's permissions.
ADMINISTRATIVE = ("truncateInvalidTx", "truncateInvalidTxBefore", "resetState", "getSnapshot")
NO_MEMORY = "Requests use all the memory that server.memory allows"
#: The offsets of a call's name in a frame, with and without a version before it; the name's length precedes the name.
_NAME_OFFSETS = (8, 4)
_MAX_NAME_BYTES = 64
#: The memory of a short string, in bytes: the object, and its references in a list and a set.
_STRING_BYTES = 150

#: Reserves bytes of memory while its block runs, and yields a function that reports that the request is complete.
#: Until then, it may call the given function, in any thread, to disconnect a client that delays others.
Room = Callable[[int, Callable[[], None]], AbstractAsyncContextManager[Callable[[], None]]]

T = TypeVar("T")


class Level(Enum):
    """The permissions of a connection."""

    NONE = "nothing"
    CLIENT = "calls of clients"
    ADMIN = "everything"


logger = get_logger(__name__)


class CallRouter(Protocol):
    """A router to the server that manages the transactions, among several servers."""

    @property
    def log_name(self) -> str:
        """Return the identity of the manager's log; empty: this server does not manage the transactions now."""
        ...

    def forward_call(self, frame: bytes) -> bytes:
        """Forward a call to the responsible service.

        Raises:
            ServiceUnavailable: the call was not executed.
            OSError, EOFError, FormatError: the call may have been executed.
        """
        ...


class TransactionService:
    """A server for a transaction manager; it also runs the manager's periodic jobs.

    Args:
        manager: the manager that executes the calls; the service does not close it.
        address: ``HOST:PORT`` to listen on; with port 0, the start sets :attr:`port` to a free port.
        cleanup_seconds: the interval for expiring transactions.
        snapshot_seconds: the interval of snapshots (``transactions.snapshot_interval_seconds``).
        tokens: for each level with a token, a function that returns the token. If ``ADMIN`` has no token, the clients'
            token permits all calls; if ``CLIENT`` has no token, only :data:`ADMINISTRATIVE` calls require one.
        router: the router to the responsible server; None: this server is the only one.
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
        router: CallRouter | None = None,
        certificate: ServerCertificate | None = None,
    ) -> None:
        self._certificate = certificate
        self._tokens = tokens
        self._router = router
        self._manager = manager
        self._host, self.port = split_address(address)
        self._jobs = ((cleanup_seconds, manager.expire), (snapshot_seconds, manager.take_snapshot))
        self._workers = ThreadPoolExecutor(WORKERS, "transactions")
        # Separate threads, because forwarded calls may block for long, and two servers may forward to each other.
        self._forwarders = ThreadPoolExecutor(WORKERS, "transactions-elsewhere")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self._quick = QuickCalls(manager, lambda frame: answer(manager, frame), is_local=router is None)
        #: Connections that wait for bytes, with the start of the wait; the longest wait first.
        self._awaiting = self._quick.awaiting
        #: Connections that have not yet received a response.
        self._new: set[asyncio.Task[None]] = set()
        self._limiter = RateLimitedLogger(logger)
        self._audit = BoundedAudit(SystemClock().monotonic_ms)
        #: Slows down connections with a wrong or missing token.
        self.failed = FailedAttempts(SystemClock(), min(MAX_WAITING, _connection_limit() // 10))
        self._large = asyncio.Semaphore(LARGE_REQUESTS)
        #: Reserves memory for a large request, shared with the server's other requests; None: unlimited.
        self.room: Room | None = None
        self._unread: dict[asyncio.StreamWriter, int] = {}

    @property
    def address(self) -> str:
        """Return ``HOST:PORT``."""
        return f"[{self._host}]:{self.port}" if ":" in self._host else f"{self._host}:{self.port}"

    def start(self) -> None:
        """Listen, and return once the service executes calls.

        Raises:
            ConfigurationError: the address or the port is not available.
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
        """Finish running calls and close the port; a second call does nothing."""
        if self._thread is None or self._loop is None:
            return
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()
        self._workers.shutdown()
        self._forwarders.shutdown()
        self._thread = None

    async def _serve(self, listener: socket.socket, started: threading.Event) -> None:
        self._loop = asyncio.get_running_loop()
        closing = await self._start_accepting(listener)
        jobs = [asyncio.create_task(self._run_periodically(*job)) for job in self._jobs]
        started.set()
        await self._stopping.wait()
        closing()
        for task in (*jobs, *self._awaiting):
            task.cancel()
        if self._connections:
            _, late = await asyncio.wait(self._connections, timeout=STOP_SECONDS)
            for connection in late:
                connection.cancel()

    async def _start_accepting(self, listener: socket.socket) -> Callable[[], object]:
        """Start accepting connections, and return a function that stops it."""
        certificate = self._certificate
        if certificate is None:
            server = await asyncio.get_running_loop().create_server(self._connection, sock=listener)
            return server.close
        accepting = asyncio.create_task(self._accept_tls(listener, certificate.context))
        renewing = asyncio.create_task(self._renew_certificate(certificate))

        def close() -> None:
            accepting.cancel()
            renewing.cancel()
            listener.close()

        return close

    def _connection(self) -> QuickConnection:
        return QuickConnection(self._quick, self._accepted, asyncio.get_running_loop())

    async def _accept_tls(self, listener: socket.socket, context: ssl.SSLContext) -> None:
        """Accept TLS connections; asyncio's own server would not limit connections during their handshake."""
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        handshakes: dict[asyncio.Task[None], None] = {}
        try:
            while True:
                try:
                    peer, name = await loop.sock_accept(listener)
                except OSError as error:
                    self._limiter.log(logging.WARNING, "a connection could not be accepted: %s", error)
                    await asyncio.sleep(1)
                    continue
                if len(handshakes) >= _connection_limit():
                    # Clients that connect and send nothing must not block others, so cancel the oldest handshake.
                    oldest = next(iter(handshakes))
                    del handshakes[oldest]
                    oldest.cancel()
                task = asyncio.create_task(self._start_tls(peer, name, context))
                handshakes[task] = None
                task.add_done_callback(lambda done: handshakes.pop(done, None))
        finally:
            for task in handshakes:
                task.cancel()

    async def _start_tls(self, peer: socket.socket, name: object, context: ssl.SSLContext) -> None:
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
                    # Leave the byte in the socket, because the TLS handshake reads it.
                    if peer.recv(1, socket.MSG_PEEK) == HANDSHAKE:
                        await loop.connect_accepted_socket(self._connection, peer, ssl=context)
                        refused.pop_all()
                        return
                    await _refuse_plain(peer)
                text = "%s is disconnected: it does not use TLS (transactions.tls)"
                self._limiter.log(logging.WARNING, text, name)
            except EOFError as error:
                logger.debug("%s is gone: %s", name, error)
            except TimeoutError:
                logger.info("%s is disconnected: no TLS handshake within the time limit", name)
            except (OSError, FormatError) as error:
                self._limiter.log(logging.WARNING, "%s is disconnected: the TLS handshake failed: %s", name, error)

    async def _renew_certificate(self, certificate: ServerCertificate) -> None:
        """Use a renewed certificate for new connections."""
        while True:
            await asyncio.sleep(files.LOOK_SECONDS)
            certificate.renew()

    def _accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= _connection_limit() and not self._close_idle_connection():
            text = "a connection was rejected: the limit of %d connections is reached"
            self._limiter.log(logging.WARNING, text, len(self._connections))
            writer.close()
            return
        protocol = cast(QuickConnection, writer.transport.get_protocol())
        connection = protocol.task = asyncio.create_task(self._serve_connection(reader, writer, protocol))
        for known in (self._connections, self._new):
            known.add(connection)
            connection.add_done_callback(known.discard)

    def _close_idle_connection(self) -> bool:
        """Close the longest-idle connection, preferably before its first response; return whether one was closed."""
        now = asyncio.get_running_loop().time()
        new = ((task, since + NEW_SILENT_SECONDS) for task, since in self._awaiting.items() if task in self._new)
        others = ((task, since + SILENT_SECONDS) for task, since in self._awaiting.items())
        for task, until in chain(islice(new, 1), islice(others, 1)):
            if until <= now:
                task.cancel()
                self._connections.discard(task)
                return True
        return False

    async def _serve_connection(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, protocol: QuickConnection
    ) -> None:
        """Execute the requests of a connection until either side closes it."""
        wait_seconds: float | None = REQUEST_SECONDS
        level = self._level_without_token()
        direct = False
        try:
            while not self._stopping.is_set():
                size = await self._read_size(
                    reader, wait_seconds, LARGE_BYTES if level is Level.NONE else self._request_limit()
                )
                frame = await self._await_bytes(reader.readexactly(min(size, LARGE_BYTES)), REQUEST_SECONDS)
                async with self._reserve(size, writer) as received:
                    if received is None:
                        data = await self._refuse_large(reader, frame, size)
                    else:
                        frame = await self._read_all(reader, frame, size, received)
                        level, direct, data = await self._reply(frame, level, direct, _host(writer))
                    del frame
                if level is Level.NONE:
                    await self.failed.delay(_host(writer))
                    await self._send(writer, data)
                    raise FormatError("it is not authenticated (transactions.token_file)")
                await self._send(writer, data)
                wait_seconds = None
                protocol.note_response(LENGTH.size + size)
                self._new.discard(cast("asyncio.Task[None]", asyncio.current_task()))
        except FormatError as error:
            self._limiter.log(logging.WARNING, "%s is disconnected: %s", writer.get_extra_info("peername"), error)
        except TimeoutError:
            peer = writer.get_extra_info("peername")
            logger.info("%s is disconnected: no complete request within the time limit", peer)
        except (OSError, EOFError) as error:
            logger.debug("%s is gone: %s", writer.get_extra_info("peername"), error)
        finally:
            writer.close()

    async def _reply(self, frame: bytes, level: Level, direct: bool, address: str) -> tuple[Level, bool, bytes]:
        """Return the connection's new permission level and forwarding state, and the response to a frame."""
        if self._tokens and _is_call(frame, (AUTHENTICATE,)):
            granted, data = await self._run_in_worker(self._authenticate, frame)
            if granted is Level.NONE:
                self._record_refusal(Event.UNAUTHORIZED, AUTHENTICATE, address)
            return level if granted is None else granted, direct, data
        if refused := self._refuse_forbidden(frame, level, address):
            return level, direct, refused
        found, direct = await self._execute(frame, direct, address)
        return level, direct, await self._forward(frame) if found is None else found

    async def _execute(self, frame: bytes, direct: bool, address: str) -> tuple[bytes | None, bool]:
        """Execute a call in a worker and return the result of :meth:`_answer_call`."""
        if not self._quick.is_quick(frame):
            return await self._run_in_worker(self._answer_call, frame, direct, address)
        self._quick.note()
        return await self._run_in_worker(self._quick.execute, frame), direct

    def _refuse_forbidden(self, frame: bytes, level: Level, address: str) -> bytes | None:
        """Return the error response to a call that the level does not permit; None: the call is permitted."""
        if level is Level.NONE:
            event, reason = Event.UNAUTHORIZED, UNAUTHORIZED
        elif level is Level.CLIENT and _is_call(frame, ADMINISTRATIVE):
            event, reason = Event.FORBIDDEN, NOT_ADMINISTRATIVE
        else:
            return None
        request = wire.read_message(frame)
        self._record_refusal(event, request.name, address)
        return _refusal(request, reason)

    def _record_refusal(self, event: Event, call: str, address: str) -> None:
        """Write a refused call to the audit log; only the event loop calls this."""
        self._audit.record(event, principal=None, address=address, verb=call, object_="")

    def _answer_call(self, frame: bytes, direct: bool, address: str) -> tuple[bytes | None, bool]:
        """Return the response to a frame, and whether the service must execute all calls of its connection itself.

        A response of None means that the call must be forwarded.
        """
        router = self._router
        if router is None:
            return answer(self._manager, frame, address), direct
        if len(frame) <= _SMALL_CALL_BYTES and (request := wire.read_message(frame)).name == EXECUTE_HERE:
            if request.fields.get(1) == router.log_name.encode() != b"":
                return wire.message(MessageKind.REPLY, request.name, request.number), True
            return _refusal(request, NOT_MANAGED_HERE), True
        if router.log_name:
            return answer(self._manager, frame, address), direct
        if direct:
            return _refusal(wire.read_message(frame), NOT_MANAGED_HERE), direct
        return None, direct

    async def _forward(self, frame: bytes) -> bytes:
        router = cast("CallRouter", self._router)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._forwarders, router.forward_call, frame)
        except ServiceUnavailable as error:
            return _refusal(wire.read_message(frame), " ".join(filter(None, without_paths(error))))

    def _level_without_token(self) -> Level:
        """Return the permissions of a connection without a token."""
        if Level.CLIENT in self._tokens:
            return Level.NONE
        return Level.CLIENT if Level.ADMIN in self._tokens else Level.ADMIN

    def _authenticate(self, frame: bytes) -> tuple[Level | None, bytes]:
        """Return the permissions that the token in a frame grants, and the response.

        The permissions are None if no token matches and a token of the service is unreadable: this is not a failed
        attempt of the client.
        """
        request = wire.read_message(frame)
        token = request.fields.get(1)
        highest = Level.CLIENT if Level.ADMIN in self._tokens else Level.ADMIN
        is_unreadable = False
        for demands, level in ((Level.ADMIN, Level.ADMIN), (Level.CLIENT, highest)):
            demanded = self._tokens.get(demands)
            try:
                is_good = demanded is not None and isinstance(token, bytes) and compare_digest(token, demanded())
            except TmsError as error:
                # The error has a path, which is only for the log.
                self._limiter.log(logging.ERROR, "%s", error)
                is_good, is_unreadable = False, True
            if is_good:
                return level, wire.message(MessageKind.REPLY, request.name, request.number)
        if is_unreadable:
            return None, _refusal(request, TOKEN_UNREADABLE)
        return Level.NONE, _refusal(request, UNAUTHORIZED)

    def _request_limit(self) -> int:
        """Return the size limit of a request: a transaction with all listed ids, and a margin for new ids."""
        return max(MAX_FRAME_BYTES, LARGE_BYTES + LISTED_ID_BYTES * self._manager.listed_ids)

    async def _read_size(self, reader: asyncio.StreamReader, seconds: float | None, limit: int) -> int:
        """Read the size of the next frame."""
        (size,) = LENGTH.unpack(await self._await_bytes(reader.readexactly(LENGTH.size), seconds))
        if not 0 <= size <= limit:
            raise FormatError(f"a frame of {size} bytes, above the limit of {limit} bytes")
        return int(size)

    @asynccontextmanager
    async def _reserve(self, size: int, writer: asyncio.StreamWriter) -> AsyncIterator[Callable[[], None] | None]:
        """Wait for one of the places for large requests, and reserve memory for the decoded request.

        Yields a function to call when the request is complete, or None if memory is short.
        """
        if size <= LARGE_BYTES:
            yield _do_nothing
            return
        async with self._large:
            if self.room is None:
                yield _do_nothing
                return
            loop = asyncio.get_running_loop()

            def abort() -> None:
                with suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(writer.transport.abort)

            async with AsyncExitStack() as stack:
                received = None
                with suppress(Unavailable):
                    received = await stack.enter_async_context(self.room(_request_memory(size), abort))
                yield received

    async def _read_all(self, reader: asyncio.StreamReader, head: bytes, size: int, done: Callable[[], None]) -> bytes:
        """Return the complete request; a large request must arrive steadily, because others wait for its place."""
        if size <= LARGE_BYTES:
            return head
        found = bytearray(head)
        await self._read_rest(reader, size - len(head), found.extend)
        done()
        return bytes(found)

    async def _refuse_large(self, reader: asyncio.StreamReader, head: bytes, size: int) -> bytes:
        """Return the error response to a large request if memory is short; discard the rest of the request."""
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
        """Wait for bytes of a request; until they arrive, a new connection may replace this one."""
        connection = cast("asyncio.Task[None]", asyncio.current_task())
        self._awaiting[connection] = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(seconds):
                return await reading
        finally:
            self._awaiting.pop(connection, None)

    async def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Send a response; if unread responses take too much memory, close the connections with the oldest ones."""
        self._unread[writer] = len(data)
        writer.write(LENGTH.pack(len(data)) + data)
        while len(self._unread) > 1 and sum(self._unread.values()) > MAX_UNREAD_BYTES:
            slowest = next(iter(self._unread))
            del self._unread[slowest]
            peer = slowest.get_extra_info("peername")
            self._limiter.log(logging.WARNING, "%s is disconnected: it does not read its response", peer)
            slowest.transport.abort()
        try:
            await writer.drain()
        finally:
            self._unread.pop(writer, None)

    def _is_managing(self) -> bool:
        """Return whether the manager of this process serves calls: it is exclusive, or this server leads."""
        return self._router is None or bool(self._router.log_name)

    async def _run_periodically(self, seconds: float, work: Callable[[], object]) -> None:
        limiter = RateLimitedLogger(logger)
        while True:
            await asyncio.sleep(seconds)
            if not self._is_managing():
                continue
            try:
                await self._run_in_worker(work)
            except TmsError as error:
                if self._is_managing():
                    limiter.log(logging.ERROR, "%s", error)
                else:
                    # The error is a part of the change of leader.
                    limiter.log(logging.INFO, "the term of this server ended during a periodic task: %s", error)
            except Exception as error:  # noqa: BLE001 without the next turn, transactions would never time out
                limiter.log(logging.ERROR, "a periodic task of the transactions failed: %r", error, exc_info=error)

    async def _run_in_worker(self, work: Callable[..., T], *arguments: object) -> T:
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
        return open_port(host, port, _BACKLOG)
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


def _do_nothing() -> None:
    """Do nothing, because no reservation has to be reported."""


def _request_memory(size: int) -> int:
    """Return the maximum memory of a request: its bytes while they arrive, complete and decoded, and its strings."""
    return 3 * size + _STRING_BYTES * min(size // LENGTH.size, wire.MAX_STRINGS)


def _is_call(frame: bytes, names: Collection[str]) -> bool:
    """Return whether a frame calls one of the named methods, without parsing its arguments."""
    for start in _NAME_OFFSETS:
        size = int.from_bytes(frame[start - LENGTH.size : start], "big")
        if 0 < size <= _MAX_NAME_BYTES and frame[start : start + size].decode(errors="replace") in names:
            return True
    return False


def _host(writer: asyncio.StreamWriter) -> str:
    """Return the host of a connection; for a forwarded call, the host of the forwarding server."""
    name = writer.get_extra_info("peername")
    return str(name[0]) if name else ""


def _refusal(request: RpcMessage, text: str) -> bytes:
    """Return the response to a call that was not executed."""
    return failure(request, Failure.PROTOCOL_ERROR, text)


def _connection_limit() -> int:
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if files == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, max(1, files // FILES_EACH))
