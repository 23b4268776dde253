"""What all routes share: the service, the limits, the threads, the polls that wait, how a request becomes a topic."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any, ParamSpec, TypeVar

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
from tms_core.topic import TopicId, remembered
from tms_core.web.protocol import abort_of

P = ParamSpec("P")
T = TypeVar("T")

#: From this size on a body is taken apart in a thread, so that the other requests need not wait for it. As many
#: messages without a payload take a few milliseconds.
_LARGE_BYTES = 250_000
#: Under this name a request has what counts bytes for the quota of its principal, if it has one.
SPENDS = "spends"
#: How many large bodies are taken apart at once: only one can be at a time, and more would keep the event loop waiting.
_DECODING = 1
#: Topics whose largest message is remembered.
_KNOWN_TOPICS = 10_000
#: What the body of a poll may have beside its transaction, in bytes.
_POLL_BYTES = 16 << 10
#: What an id of a transaction takes in the body of a poll, in bytes: eight, and a third more where it is base64.
_ID_BYTES = 11


@dataclass(frozen=True, slots=True)
class PollLimit:
    """The limits of a poll's response.

    Attributes:
        messages: how many; None: as many as it asks for.
        bytes: how many of messages, with what each takes beside its payload; None: as many as there are.
    """

    messages: int | None = None
    bytes: int | None = None


class Sizes:
    """The largest message of each topic that was published or read here lately, as far as it matters."""

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
    """The polls of a server that wait.

    Args:
        most_each: how many of one principal may; None: any number.

    Attributes:
        closed: whether none may wait any more.
        polls: for each of them a function that wakes it, which any thread may call.
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
        """Stop all of them, and start none; may be called by any thread."""
        self.closed = True
        for wake in list(self.polls):
            wake()


def waking(came: asyncio.Future[None]) -> Callable[[], None]:
    """Return a function that wakes a waiter of a future of the running loop; any thread may call it, and more than
    once.
    """
    loop = asyncio.get_running_loop()

    def wake() -> None:
        with suppress(RuntimeError):  # the loop has ended, and with it who waited
            loop.call_soon_threadsafe(_settle, came)

    return wake


@dataclass(frozen=True)
class ServerContext:
    """What all routes share.

    Args:
        max_request_bytes: the largest body, before and after decompression.
        gate: the rules; None: everybody may do everything.
        poll_threads: where polls read the store, so that nothing else waits for them; None: in ``threads`` too.
        transaction_ids: how many ids the transaction of a poll may carry (``server.max_transaction_ids``).
        present_ids: how many ids a transaction of the manager in this process would carry now; a poll may carry as
            many and a tenth more, whatever the setting says.
        hold_seconds: how long the janitor in this process holds rows after a ttl was shortened; None without one.
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
        """Return the language of a request.

        Raises:
            BadRequest: it is none of ours. For CDAP's it has to be named exactly, as CDAP has it.
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
            share: the memory share of the request; it grows with the body, and with what becomes of it.
            limit: how large the body may be; None: as a request may be (``server.max_request_mb``).
            cost: how much memory ``decode`` takes at most.

        Raises:
            HTTPException: it is too large, or compressed in a way that is not served.
            BadRequest: it cannot be decoded.
            Unavailable: there is no memory for it.
        """
        longest = BodyLimit(self.max_request_bytes, "server.max_request_mb")
        limit = limit or longest
        body = await read_body(headers, receive, limit, share)
        if is_packed(headers):
            held = share.size
            await share.take(unpacked_bytes(len(body), limit))
            async with self._decoding:
                packed, body = len(body), await self.in_thread(unpacked, body, limit)
            spend(scope, len(body) - packed)
            share.shrink(held + len(body))
        if len(body) > FREE_BYTES:
            await share.take(cost(body))
        if len(body) < _LARGE_BYTES:
            return decode(body)
        async with self._decoding:
            return await self.in_thread(decode, body)

    async def body_of(self, request: Request, decode: Callable[[bytes], T], limit: BodyLimit) -> T:
        """Return a small body as values."""
        with self.memory.share(abort_of(request.scope)) as share:
            return await self.read(
                request.scope, headers_of(request.scope), request.receive, decode, share, limit=limit
            )

    @property
    def poll_body(self) -> BodyLimit:
        """Return how large the body of a poll may be."""
        # As many as were there when the transaction began may be gone by now, but not all that many.
        by_list = _POLL_BYTES + _ID_BYTES * (self.present_ids() * 11 // 10)
        by_setting = min(_POLL_BYTES + _ID_BYTES * self.transaction_ids, self.max_request_bytes)
        return BodyLimit(max(by_list, by_setting), "server.max_transaction_ids")

    def in_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call something that may wait."""
        return asyncio.get_running_loop().run_in_executor(self.threads, partial(function, *args, **kwargs))

    def in_poll_thread(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]:
        """Call something that reads messages."""
        threads = self.poll_threads or self.threads
        return asyncio.get_running_loop().run_in_executor(threads, partial(function, *args, **kwargs))


class ContextRoute:
    """A route that answers requests with what all routes share."""

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
    """Return the topic a request is about.

    Raises:
        BadRequest: its name is none.
    """
    names = scope["path_params"]
    return named_topic(names["namespace"], names["topic"])


@remembered(4096)
def named_topic(namespace: str, topic: str) -> TopicId:
    """Return a topic by its two names.

    Raises:
        BadRequest: one of them is no name.
    """
    try:
        return TopicId.parse(f"{namespace}:{topic}")
    except ValueError as error:
        raise BadRequest(f"{error}.") from error


async def outcome(wanted: Answer[T]) -> T:
    """Wait for a future that another thread completes; a cancelled wait does not stop that thread.

    An accepted message is written even if its client has disconnected.
    """
    if not wanted.done():
        done = asyncio.get_running_loop().create_future()
        when_done(wanted, partial(_settle, done))
        await done
    return wanted.result()


def when_done(wanted: Answer[T], call: Callable[[], object]) -> None:
    """Have the running loop call something as soon as an answer is there, whichever thread has settled it."""
    wanted.when_done(partial(_call_in, asyncio.get_running_loop(), get_ident(), call))


def _call_in(loop: asyncio.AbstractEventLoop, thread: int, call: Callable[[], object]) -> None:
    if get_ident() == thread:
        call()
        return
    with suppress(RuntimeError):  # the loop has ended, and no request waits any more
        loop.call_soon_threadsafe(harmless, call)


def _settle(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


async def answer(
    send: Send, status: int, body: bytes = b"", content_type: bytes = b"", *more: tuple[bytes, bytes]
) -> None:
    """Send a whole answer, with ``more`` headers."""
    headers = [(b"content-length", b"%d" % len(body)), *more]
    if content_type:
        headers.append((b"content-type", content_type))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def headers_of(scope: Scope) -> Headers:
    """Return a request's headers by their names in lower case; of two with one name the last."""
    found: dict[Any, Any] = dict(scope["headers"])
    return found
