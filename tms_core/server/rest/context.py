"""The context of all routes: service, limits, threads, waiting polls, and the conversion of a request to a topic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, ParamSpec, TypeVar
from weakref import WeakValueDictionary

from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from tms_core.errors import BadRequest, Unavailable
from tms_core.logs.loggers import harmless
from tms_core.messaging.publish.workers import Answer
from tms_core.messaging.service import MessagingService
from tms_core.server.auth.gate import Gate
from tms_core.server.codec.avro import AvroCodec
from tms_core.server.codec.bodies import MESSAGE_BYTES, Codec
from tms_core.server.codec.json_text import JsonCodec
from tms_core.server.memory import FREE_BYTES, Memory, Share
from tms_core.server.metrics import ServerMetrics
from tms_core.server.rest.body import BodyLimit, Headers, is_packed, read_body, unpacked, unpacked_bytes
from tms_core.topic import TopicId, cache_names
from tms_core.web.protocol import abort_of

P = ParamSpec("P")
T = TypeVar("T")

#: Bodies of this size or more are decoded in a thread, so that other requests do not wait. Decoding that many messages
#: without payloads takes a few milliseconds.
_LARGE_BYTES = 250_000
#: The key in a request's state of the function that counts bytes for the principal's quota.
SPENDS = "spends"
#: The number of large bodies that are decoded at once. The interpreter decodes only one at a time, and more would delay
#: the event loop.
_DECODING = 1
#: The number of topics whose largest message is remembered.
_KNOWN_TOPICS = 10_000
#: The largest part of a poll's body outside its transaction, in bytes.
_POLL_BYTES = 16 << 10
#: The size of a transaction id in the body of a poll, in bytes: eight, and a third more in base64.
_ID_BYTES = 11


@dataclass(frozen=True, slots=True)
class PollLimit:
    """The limits of a poll's response.

    Attributes:
        messages: the most messages; None: as many as the poll requests.
        bytes: the most bytes of messages, including the overhead of each; None: unlimited.
    """

    messages: int | None = None
    bytes: int | None = None


class Sizes:
    """The largest recent message of each topic that was published or read here, if it matters."""

    def __init__(self) -> None:
        self._largest: dict[TopicId, int] = {}

    def of(self, topic: TopicId) -> int | None:
        """Return the largest known message of a topic in bytes; None: unknown."""
        return self._largest.get(topic)

    def learn(self, topic: TopicId, largest: int) -> None:
        """Note that a topic has a message of this size."""
        known = self._largest.pop(topic, 0)
        self._largest[topic] = max(known, largest)
        if len(self._largest) > _KNOWN_TOPICS:
            self._largest.pop(next(iter(self._largest)), None)

    def note(self, topic: TopicId, messages: Sequence[bytes], size: int) -> None:
        """Note published messages; a request below the threshold has no large messages.

        Args:
            size: the size of the request in bytes.
        """
        if size and messages:
            self.learn(topic, max(map(len, messages)))


class Waiting:
    """The waiting polls of a server.

    Args:
        most_each: the most waiting polls of one principal; None: unlimited.

    Attributes:
        closed: whether polls may no longer wait.
        polls: a function for each poll that wakes it; any thread may call it.
    """

    def __init__(self, most_each: int | None = None) -> None:
        self.closed = False
        self._most_each = most_each
        self.polls: dict[Callable[[], None], None] = {}
        self._each: Counter[str | None] = Counter()

    @contextmanager
    def waiting(self, wake: Callable[[], None], principal: str | None) -> Iterator[None]:
        """Count a waiting poll while the block runs.

        Args:
            wake: wakes the poll; any thread may call it.
            principal: the principal of the poll; None: authentication is off, and there is no limit.

        Raises:
            Unavailable: the principal has too many waiting polls.
        """
        most = self._most_each
        if principal is not None and most is not None and self._each[principal] >= most:
            raise Unavailable(
                f"{most} polls of {principal} wait here, half of the connections that this server takes.",
                "Try again later, wait with fewer at a time, or raise server.max_connections.",
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
        """Stop all waiting polls, and refuse new ones; any thread may call it."""
        self.closed = True
        for wake in list(self.polls):
            wake()


class Turns:
    """The turns of principals in a pool of threads.

    Calls of other principals must not wait until all slow calls of one principal are done. Therefore its further calls
    wait outside the pool, in the order of their arrival. For one event loop.

    Args:
        most_each: the most threads that one principal uses at a time; None: unlimited.
    """

    def __init__(self, most_each: int | None = None) -> None:
        self._most_each = most_each
        self._each: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    def of(self, principal: str | None) -> AbstractAsyncContextManager[None]:
        """Return a context that waits for a turn of a principal, and holds it while the block runs.

        Args:
            principal: the principal of the request; None: authentication is off, and there is no limit.
        """
        if principal is None or self._most_each is None:
            return nullcontext()
        return self._each.setdefault(principal, asyncio.Semaphore(self._most_each))


def waking(came: asyncio.Future[None]) -> Callable[[], None]:
    """Return a function that wakes a waiter of a future of the running loop; any thread may call it, and more than
    once.
    """
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop is closed, and so is the waiter
            loop.call_soon_threadsafe(_settle, came)

    return wake


@dataclass(frozen=True)
class ServerContext:
    """The objects that all routes share.

    Args:
        max_request_bytes: the largest body, before and after decompression.
        gate: the access control; None: no restrictions.
        poll_threads: the threads in which polls read the store, so that other requests do not wait; None: ``threads``.
        turns, poll_turns: the turns of principals in ``threads`` and in ``poll_threads``.
        transaction_ids: the most ids in the transaction of a poll (``server.max_transaction_ids``).
        present_ids: the number of ids in a present transaction of this process's manager; a poll may have a tenth more,
            whatever the setting is.
        hold_seconds: how long the janitor in this process holds rows after a shortened TTL; None: there is no janitor.
    """

    service: MessagingService
    threads: Executor
    metrics: ServerMetrics
    max_request_bytes: int
    gate: Gate | None = None
    poll_threads: Executor | None = None
    memory: Memory = field(default_factory=Memory)
    poll_limit: PollLimit = field(default_factory=PollLimit)
    waiting: Waiting = field(default_factory=Waiting)
    turns: Turns = field(default_factory=Turns)
    poll_turns: Turns = field(default_factory=Turns)
    sizes: Sizes = field(default_factory=Sizes)
    transaction_ids: int = 100_000
    present_ids: Callable[[], int] = lambda: 0
    hold_seconds: Callable[[], int | None] = lambda: None
    _decoding: asyncio.Semaphore = field(init=False, repr=False, default_factory=lambda: asyncio.Semaphore(_DECODING))
    _codecs: dict[bytes, Codec] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        most = self.max_request_bytes // MESSAGE_BYTES
        codecs: list[Codec] = [AvroCodec(most), JsonCodec(most)]
        object.__setattr__(self, "_codecs", {codec.content_type: codec for codec in codecs})

    def codec(self, headers: Headers) -> Codec:
        """Return the codec for a request's content type.

        Raises:
            BadRequest: the content type is not supported. CDAP's type must match exactly, as in CDAP.
        """
        named = headers.get(b"content-type", b"")
        known = self._codecs.get(named) or self._codecs.get(json_name(named))
        if known is None:
            choices = " or ".join(name.decode() for name in self._codecs)
            raise BadRequest("The request has no supported Content-Type.", f"Send {choices}.")
        return known

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
        """Return a request's body as values.

        Args:
            share: the memory share of the request; it grows with the body and the decoded values.
            limit: the largest body; None: ``server.max_request_mb``.
            cost: the largest memory that ``decode`` takes.

        Raises:
            HTTPException: the body is too large, or has an unsupported compression.
            BadRequest: the body cannot be decoded.
            Unavailable: there is no memory for it.
        """
        longest = BodyLimit(self.max_request_bytes, "server.max_request_mb")
        limit = limit or longest
        body = await read_body(headers, receive, limit, share)
        if is_packed(headers):
            held = share.size
            await share.take(unpacked_bytes(len(body), limit))
            async with self._decoding:
                packed, body = len(body), await _called(self.threads, partial(unpacked, body, limit))
            spend(scope, len(body) - packed)
            share.shrink(held + len(body))
        if len(body) > FREE_BYTES:
            await share.take(cost(body))
        if len(body) < _LARGE_BYTES:
            return decode(body)
        # Without a turn of the principal: all principals wait for the one large body that is decoded.
        async with self._decoding:
            return await _called(self.threads, partial(decode, body))

    async def body_of(self, request: Request, decode: Callable[[bytes], T], limit: BodyLimit) -> T:
        """Return a small body as values."""
        with self.memory.share(abort_of(request.scope)) as share:
            return await self.read(
                request.scope, headers_of(request.scope), request.receive, decode, share, limit=limit
            )

    @property
    def poll_body(self) -> BodyLimit:
        """Return the limit for the body of a poll."""
        # A few ids may have left the list since the start of the transaction.
        by_list = _POLL_BYTES + _ID_BYTES * (self.present_ids() * 11 // 10)
        by_setting = min(_POLL_BYTES + _ID_BYTES * self.transaction_ids, self.max_request_bytes)
        return BodyLimit(max(by_list, by_setting), "server.max_transaction_ids")

    async def in_thread(self, scope: Scope, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that may wait."""
        async with self.turns.of(scope.get("principal")):
            return await _called(self.threads, partial(function, *args, **kwargs))

    async def in_poll_thread(self, scope: Scope, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call a function that reads messages."""
        async with self.poll_turns.of(scope.get("principal")):
            return await _called(self.poll_threads or self.threads, partial(function, *args, **kwargs))


class ContextRoute:
    """A route that passes the shared context to its handler."""

    def __init__(self, context: ServerContext) -> None:
        self._context = context


def spend(scope: Scope, size: int) -> None:
    """Count bytes that a request costs its principal in addition to its packed body."""
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
        BadRequest: one of them is not a valid name.
    """
    try:
        return TopicId.parse(f"{namespace}:{topic}")
    except ValueError as error:
        raise BadRequest(f"{error}.") from error


async def outcome(answer: Answer[T]) -> T:
    """Wait for a future that another thread completes; a cancelled wait does not stop that thread.

    An accepted message is written even if its client has disconnected.
    """
    if not answer.done():
        done = asyncio.get_running_loop().create_future()
        when_done(answer, partial(_settle, done))
        await done
    return answer.result()


def _called(threads: Executor, call: Callable[[], T]) -> asyncio.Future[T]:
    return asyncio.get_running_loop().run_in_executor(threads, call)


def when_done(answer: Answer[T], call: Callable[[], object]) -> None:
    """Call a function in the running loop as soon as a result exists, whichever thread has set it."""
    answer.when_done(partial(_call_in, asyncio.get_running_loop(), get_ident(), call))


def _call_in(loop: asyncio.AbstractEventLoop, thread: int, call: Callable[[], object]) -> None:
    if get_ident() == thread:
        call()
        return
    with suppress(RuntimeError):  # the loop is closed, so no request waits
        loop.call_soon_threadsafe(harmless, call)


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def answer(
    send: Send, status: int, body: bytes = b"", content_type: bytes = b"", *more: tuple[bytes, bytes]
) -> None:
    """Send a complete response, with additional headers."""
    headers = [(b"content-length", b"%d" % len(body)), *more]
    if content_type:
        headers.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def headers_of(scope: Scope) -> Headers:
    """Return a request's headers by lower-case names; the last one wins if a name repeats."""
    found: dict[Any, Any] = dict(scope["headers"])
    return found
