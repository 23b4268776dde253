"""The context that all routes share: service, limits, threads, waiting polls, and decoded requests."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest, Unavailable
from tms_core.logs.loggers import harmless
from tms_core.messaging.publish.workers import PublishFuture
from tms_core.messaging.service import MessagingService
from tms_core.server.auth.gate import Gate
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import MESSAGE_BYTES, Codec
from tms_core.server.codec.json_text import JsonCodec, memory_of_fields
from tms_core.server.memory import FREE_BYTES, Memory, Share
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.body import BodyLimit, Headers, decompress_body, decompressed_bytes, is_compressed, read_body
from tms_core.topic import TopicId, cache_names
from tms_core.web.protocol import abort_of

P = ParamSpec("P")
T = TypeVar("T")

#: Bodies of at least this size are decoded in a thread, so that other requests do not wait. Decoding such a body with
#: empty messages takes a few milliseconds.
_LARGE_BYTES = 250_000
#: The key in a request's scope of the function that counts bytes for the principal's quota.
SPENDS = "spends"
#: The number of large bodies that are decoded concurrently. The interpreter lock admits only one, and more threads
#: would delay the event loop.
_DECODING = 1
#: The number of topics whose largest message is cached.
_KNOWN_TOPICS = 10_000
#: The maximum size of a poll's body without its transaction, in bytes.
_POLL_BYTES = 16 << 10
#: The size of a transaction id in the body of a poll in bytes: eight bytes, as base64.
_ID_BYTES = 11


@dataclass(frozen=True, slots=True)
class PollLimit:
    """The limits of a poll's response.

    Attributes:
        messages: the maximum number of messages; None: the poll's own limit applies.
        bytes: the maximum size of the messages, including their overhead; None: unlimited.
    """

    messages: int | None = None
    bytes: int | None = None


class Sizes:
    """The largest known message of each topic that was published or read in this process."""

    def __init__(self) -> None:
        self._largest: dict[TopicId, int] = {}

    def of(self, topic: TopicId) -> int | None:
        """Return the size of the largest known message of a topic in bytes; None: unknown."""
        return self._largest.get(topic)

    def learn(self, topic: TopicId, largest: int) -> None:
        """Record the size of a message of a topic."""
        known = self._largest.pop(topic, 0)
        self._largest[topic] = max(known, largest)
        if len(self._largest) > _KNOWN_TOPICS:
            self._largest.pop(next(iter(self._largest)), None)

    def note(self, topic: TopicId, messages: Sequence[bytes], size: int) -> None:
        """Record published messages; small requests, which reserve no memory, are skipped.

        Args:
            size: the reserved memory of the request in bytes.
        """
        if size and messages:
            self.learn(topic, max(map(len, messages)))


class WaitingPolls:
    """The waiting polls of a server.

    Args:
        connections: the number of connections. The polls of a principal wait on at most half of those that polls of
            other principals leave; None: unlimited.

    Attributes:
        closed: whether polls may no longer wait.
        polls: for each waiting poll a function that wakes it; thread-safe.
    """

    def __init__(self, connections: int | None = None) -> None:
        self.closed = False
        self._connections = connections
        self.polls: dict[Callable[[], None], None] = {}
        self._each: Counter[str | None] = Counter()

    @contextmanager
    def waiting(self, wake: Callable[[], None], principal: str | None) -> Iterator[None]:
        """Register a waiting poll while the block runs.

        Args:
            wake: wakes the poll; thread-safe.
            principal: the principal of the poll; None: clients are not authenticated, and there is no limit.

        Raises:
            Unavailable: the principal has too many waiting polls.
        """
        own = self._each[principal]
        left = None if self._connections is None else self._connections - (len(self.polls) - own)
        if principal is not None and left is not None and own >= max(1, left // 2):
            raise Unavailable(
                f"{own} polls of {principal} are waiting, half of the connections that other principals leave.",
                "Try again later, use fewer waiting polls, or increase server.max_connections.",
            )
        self.polls[wake] = None
        self._each[principal] += 1
        try:
            yield
        finally:
            del self.polls[wake]
            self._each[principal] -= 1
            if not self._each[principal]:
                del self._each[principal]

    def close(self) -> None:
        """Wake all waiting polls, and reject new waits; thread-safe."""
        self.closed = True
        for wake in list(self.polls):
            wake()


class ThreadShares:
    """A limit of the threads in a pool that each principal may use, for one event loop.

    A principal starts a call only while it uses fewer threads than are free. Therefore one principal uses at most half
    of the threads, and a second principal half of the rest. Further calls wait outside the pool in order of arrival, so
    that slow calls of a few principals do not block others.

    Args:
        threads: the number of threads in the pool; None: no limit.
    """

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads
        self._running: list[str] = []
        self._waiting: dict[asyncio.Future[None], str] = {}

    def of(self, principal: str | None) -> AbstractAsyncContextManager[None]:
        """Return a context that occupies one of a principal's threads while the block runs.

        Args:
            principal: the principal of the request; None: clients are not authenticated, and there is no limit.
        """
        return nullcontext() if principal is None or self._threads is None else self._turn(principal, self._threads)

    @asynccontextmanager
    async def _turn(self, principal: str, threads: int) -> AsyncIterator[None]:
        turn = asyncio.get_running_loop().create_future()
        self._waiting[turn] = principal
        self._start(threads)
        try:
            await turn
            yield
        finally:
            # A cancelled request may still wait, or may have got its turn before the cancellation.
            if self._waiting.pop(turn, None) is None:
                self._running.remove(principal)
                self._start(threads)

    def _start(self, threads: int) -> None:
        for turn, principal in list(self._waiting.items()):
            if self._running.count(principal) < threads - len(self._running) and not turn.done():
                del self._waiting[turn]
                self._running.append(principal)
                turn.set_result(None)


def make_wake(arrival: asyncio.Future[None]) -> Callable[[], None]:
    """Return a thread-safe function that completes a future of the running loop; it may be called repeatedly."""
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed, so nothing waits
            loop.call_soon_threadsafe(_settle, arrival)

    return wake


@dataclass(frozen=True)
class ServerContext:
    """The objects that all routes share.

    Args:
        max_request_bytes: the maximum size of a body, before and after decompression.
        gate: the access control; None: no restrictions.
        poll_threads: the threads in which polls read the store, so that other requests do not wait; None: ``threads``.
        thread_shares, poll_thread_shares: the limits of principals in ``threads`` and in ``poll_threads``.
        group_poll_shares: the limit of a principal's polls of groups that reserve memory and then wait for a thread.
        transaction_ids: the maximum number of ids in the transaction of a poll (``server.max_transaction_ids``).
        present_ids: the number of ids in a new transaction of this process's manager; a poll may have a tenth more,
            independent of the setting.
        hold_seconds: the hold of rows after a shortened TTL by the janitor in this process; None: no janitor.
    """

    service: MessagingService
    threads: Executor
    metrics: ServerMetrics
    max_request_bytes: int
    gate: Gate | None = None
    poll_threads: Executor | None = None
    memory: Memory = field(default_factory=Memory)
    poll_limit: PollLimit = field(default_factory=PollLimit)
    waiting: WaitingPolls = field(default_factory=WaitingPolls)
    thread_shares: ThreadShares = field(default_factory=ThreadShares)
    poll_thread_shares: ThreadShares = field(default_factory=ThreadShares)
    group_poll_shares: ThreadShares = field(default_factory=ThreadShares)
    sizes: Sizes = field(default_factory=Sizes)
    transaction_ids: int = 100_000
    present_ids: Callable[[], int] = lambda: 0
    hold_seconds: Callable[[], int | None] = lambda: None
    _decoding: asyncio.Semaphore = field(init=False, repr=False, default_factory=lambda: asyncio.Semaphore(_DECODING))
    _codecs: dict[bytes, Codec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        max_messages = self.max_request_bytes // MESSAGE_BYTES
        codecs: list[Codec] = [AvroCodec(max_messages), JsonCodec(max_messages)]
        object.__setattr__(self, "_codecs", {codec.content_type: codec for codec in codecs})

    def codec(self, headers: Headers) -> Codec:
        """Return the codec for a request's content type.

        Raises:
            BadRequest: the content type is not supported. CDAP's type must match exactly, as CDAP requires.
        """
        named = headers.get(b"content-type", b"")
        known = self._codecs.get(named) or self._codecs.get(json_name(named))
        if known is None:
            choices = " or ".join(name.decode() for name in self._codecs)
            raise BadRequest("The request has no supported Content-Type.", f"Send {choices}.")
        return known

    def share(self, scope: Scope) -> Share:
        """Return an empty share of the memory for a request."""
        return self.memory.share(abort_of(scope), scope.get("principal"))

    async def read(
        self,
        scope: Scope,
        headers: Headers,
        receive: Receive,
        decode: Callable[[bytes], T],
        share: Share,
        *,
        limit: BodyLimit | None = None,
        cost: Callable[[bytes], int] = len,
    ) -> T:
        """Read and decode the body of a request.

        Args:
            share: the memory share of the request; it grows with the body and the decoded values.
            limit: the maximum size of the body; None: ``server.max_request_mb``.
            cost: the maximum memory that ``decode`` needs for a body, in bytes.

        Raises:
            HTTPException: the body is too large, or has an unsupported compression.
            BadRequest: the body cannot be decoded.
            Unavailable: no memory became free in time.
        """
        longest = BodyLimit(self.max_request_bytes, "server.max_request_mb")
        limit = limit or longest
        body = await read_body(headers, receive, limit, share)
        if is_compressed(headers):
            held = share.size
            await share.take(decompressed_bytes(len(body), limit))
            async with self._decoding:
                packed, body = len(body), await _run_in(self.threads, partial(decompress_body, body, limit))
            spend(scope, len(body) - packed)
            share.shrink(held + len(body))
        if len(body) > FREE_BYTES:
            await share.take(cost(body))
        if len(body) < _LARGE_BYTES:
            return decode(body)
        # Without a turn of the principal: all principals wait for the one large body that is decoded.
        async with self._decoding:
            return await _run_in(self.threads, partial(decode, body))

    @asynccontextmanager
    async def body_of(self, request: Request, decode: Callable[[bytes], T], limit: BodyLimit) -> AsyncIterator[T]:
        """Yield the decoded body of a request; its memory is reserved during the block."""
        scope = request.scope
        with self.share(scope) as share:
            yield await self.read(
                scope, headers_of(scope), request.receive, decode, share, limit=limit, cost=memory_of_fields
            )

    @property
    def poll_body(self) -> BodyLimit:
        """Return the limit for the body of a poll."""
        # A tenth more than now, because ids may have left the list since the start of the transaction.
        by_list = _POLL_BYTES + _ID_BYTES * (self.present_ids() * 11 // 10)
        by_setting = min(_POLL_BYTES + _ID_BYTES * self.transaction_ids, self.max_request_bytes)
        return BodyLimit(max(by_list, by_setting), "server.max_transaction_ids")

    async def in_thread(self, scope: Scope, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a blocking function in a thread."""
        async with self.thread_shares.of(scope.get("principal")):
            return await _run_in(self.threads, partial(function, *args, **kwargs))

    async def in_poll_thread(self, scope: Scope, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads messages in a thread for polls."""
        async with self.poll_thread_shares.of(scope.get("principal")):
            return await _run_in(self.poll_threads or self.threads, partial(function, *args, **kwargs))


class ContextRoute:
    """A route that passes the shared context to its handler."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context


def spend(scope: Scope, size: int) -> None:
    """Count bytes for the quota of a request's principal, in addition to the transferred bytes."""
    spends = scope.get(SPENDS)
    if spends is not None:
        spends(size)


def json_name(content_type: bytes) -> bytes:
    """Return a content type without the parameters of JSON (``; charset=utf-8``)."""
    name, _, _ = content_type.lower().partition(b";")
    return name.strip() if name.strip() == JsonCodec.content_type else b""


def topic_of(scope: Scope) -> TopicId:
    """Return the topic of a request.

    Raises:
        BadRequest: the name is not a topic name.
    """
    names = scope["path_params"]
    return named_topic(names["namespace"], names["topic"])


@cache_names(4096)
def named_topic(namespace: str, topic: str) -> TopicId:
    """Return a topic by namespace and name.

    Raises:
        BadRequest: the namespace or the name is not valid.
    """
    try:
        return TopicId.parse(f"{namespace}:{topic}")
    except ValueError as error:
        raise BadRequest(f"{error}.") from error


async def outcome(future: PublishFuture[T]) -> T:
    """Wait for a future of another thread; a cancelled wait does not cancel the write of an accepted message."""
    if not future.done():
        done = asyncio.get_running_loop().create_future()
        when_done(future, partial(_settle, done))
        await done
    return future.result()


def _run_in(threads: Executor, call: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call)


def when_done(future: PublishFuture[T], call: Callable[[], object]) -> None:
    """Call a function in the running loop when the future is done, in whichever thread that happens."""
    future.when_done(partial(_call_in, asyncio.get_running_loop(), get_ident(), call))


def _call_in(loop: asyncio.AbstractEventLoop, thread: int, call: Callable[[], object]) -> None:
    if get_ident() == thread:
        call()
        return
    with suppress(RuntimeError):  # the loop is closed, so no request waits
        loop.call_soon_threadsafe(harmless, call)


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def respond(
    send: Send, status: int, body: bytes = b"", content_type: bytes = b"", *more: tuple[bytes, bytes]
) -> None:
    """Send a complete response, with additional headers."""
    headers = [(b"content-length", b"%d" % len(body)), *more]
    if content_type:
        headers.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def headers_of(scope: Scope) -> Headers:
    """Return a request's headers by lower-case names; if a name repeats, the last value counts."""
    found: dict[Any, Any] = dict(scope["headers"])
    return found
