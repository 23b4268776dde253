"""The requests to a server, each as a value with a function that reads its response; without I/O.

Both clients send these values, so each route, status code and body is defined once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Generic, TypeVar

from tms_core.client.protocol.messages import (
    AVRO,
    JSON,
    Start,
    decode_published,
    decode_published_json,
    encode_poll,
    encode_publish,
    encode_publish_json,
    encode_rollback,
    payloads_of,
    seconds,
)
from tms_core.errors import (
    BadRequest,
    Forbidden,
    FormatError,
    MessagingError,
    PartitionsChanged,
    ProducerFenced,
    QuotaExceeded,
    ServerFailed,
    TopicExists,
    TopicNotFound,
    TransactionEnded,
    Unanswered,
    Unauthorized,
    Unavailable,
)
from tms_core.messaging.model import Ages, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction

T_co = TypeVar("T_co", covariant=True)

#: A topic, or its name: ``namespace:topic``.
Topic = TopicId | str

#: Headers of a poll: the longest wait for a message; in the response the position, whether the server has waited in
#: vain, and whether it has limited the response (docs/reference/rest.md, "Long polling").
WAIT, POSITION, WAITED, LIMITED = "x-tms-wait-seconds", "x-tms-position", "x-tms-waited", "x-tms-limited"
#: Response headers of topics with partitions: the topic is sealed; another partition must be read first.
SEALED, EARLIER_PARTITION = "x-tms-sealed", "x-tms-behind"
#: A response header: the code of an error.
CODE = "x-tms-error"
#: The content type of an error in JSON (RFC 9457).
PROBLEM = "application/problem+json"

_OK = 200
_MISSING = 404
_CONFLICT = 409
#: How many characters of an unrecognized response an error shows.
_REASON_CHARS = 300
#: The most digits of a number of seconds.
_MAX_DIGITS = 9


@dataclass(frozen=True, slots=True)
class Call(Generic[T_co]):
    """A request.

    Attributes:
        method, path: the method, and the path after the server's URL.
        read: converts the body of the response.
        body, content_type: the body, and its type.
        again: whether the request is idempotent, so that the client repeats it after an unknown outcome.
        missing: the error for 404.
        conflict: the error for 409.
        headers: further request headers.
        writes: whether it writes messages, so that a producer numbers it.
        messages, payload_bytes: the number of sent messages, and their size.
    """

    method: str
    path: str
    read: Callable[[bytes], T_co]
    body: bytes = b""
    content_type: str = JSON
    again: bool = False
    missing: type[MessagingError] = TopicNotFound
    conflict: type[MessagingError] = TopicExists
    headers: Mapping[str, str] = field(default_factory=dict)
    writes: bool = False
    messages: int = 0
    payload_bytes: int = 0

    @property
    def topic(self) -> TopicId:
        """Return the topic that the path names."""
        _, _, _, namespace, _, topic, *_ = self.path.split("/")
        return TopicId(namespace, topic)

    def __str__(self) -> str:
        return f"{self.method} {self.path}"

    def result(self, body: bytes) -> T_co:
        """Return the value of a response's body.

        Raises:
            Unanswered: the body cannot be read.
        """
        try:
            return self.read(body)
        except (FormatError, ValueError, KeyError, TypeError) as error:
            raise Unanswered(f"The response to {self} cannot be read: {error}.", _WRONG_SERVER) from error


_WRONG_SERVER = "Check that the URL is the address of tms serve."


def topic_id(topic: Topic) -> TopicId:
    """Return a topic by its name.

    Raises:
        BadRequest: the name is invalid.
    """
    if isinstance(topic, TopicId):
        return topic
    if not isinstance(topic, str):
        raise BadRequest(f"{topic!r} is not a topic.", "Write it as namespace:topic.")
    try:
        return TopicId.parse(topic)
    except ValueError as error:
        raise BadRequest(f"{error}.") from error


# --- topics ----------------------------------------------------------------------------------------------------------


def ping() -> Call[None]:
    return Call("GET", "/ping", nothing, again=True)


def create_topic(topic: Topic, ttl: timedelta | int | str | None, properties: Mapping[str, str] | None) -> Call[None]:
    return Call("PUT", path_of(topic), nothing, _properties(ttl, properties))


def update_topic(topic: Topic, ttl: timedelta | int | str | None, properties: Mapping[str, str] | None) -> Call[None]:
    return Call("PUT", path_of(topic, "properties"), nothing, _properties(ttl, properties), again=True)


def show_topic(topic: Topic) -> Call[TopicMetadata]:
    found = topic_id(topic)
    return Call("GET", path_of(topic), lambda body: TopicMetadata.parse(found.prefix, body), again=True)


def ages(topic: Topic, older_than: timedelta | int | str) -> Call[Ages]:
    def read(body: bytes) -> Ages:
        found = json.loads(body)
        return Ages(found["messages"], found["older"], found["atLeast"], found.get("holdSeconds"))

    return Call("GET", f"{path_of(topic, 'ages')}?olderThanSeconds={seconds(older_than)}", read, again=True)


def list_topics(namespace: str | None) -> Call[list[TopicId]]:
    if namespace is None:
        return Call("GET", "/v1/topics", lambda body: [TopicId.parse(name) for name in array(body)], again=True)
    found = topic_id(f"{namespace}:topics").namespace

    def read(body: bytes) -> list[TopicId]:
        return [TopicId.parse(f"{found}:{name}") for name in array(body)]

    return Call("GET", f"/v1/namespaces/{found}/topics", read, again=True)


def delete_topic(topic: Topic) -> Call[None]:
    return Call("DELETE", path_of(topic), nothing)


# --- messages --------------------------------------------------------------------------------------------------------


def publish(topic: Topic, payloads: Sequence[bytes], ttl: timedelta | int | str | None) -> Call[None]:
    path, messages = path_of(topic, "publish"), payloads_of(payloads)
    if ttl is None:
        return _writing(path, messages, nothing, encode_publish(None, messages), AVRO)
    return _writing(path, messages, nothing, encode_publish_json(None, messages, seconds(ttl)))


def publish_in(
    topic: Topic, payloads: Sequence[bytes], pointer: int, ttl: timedelta | int | str | None
) -> Call[RollbackRange]:
    path, messages = path_of(topic, "publish"), payloads_of(payloads)
    if ttl is None:
        return _writing(path, messages, decode_published, encode_publish(pointer, messages), AVRO)
    return _writing(path, messages, decode_published_json, encode_publish_json(pointer, messages, seconds(ttl)))


def store(topic: Topic, payloads: Sequence[bytes], pointer: int) -> Call[None]:
    messages = payloads_of(payloads)
    return _writing(path_of(topic, "store"), messages, nothing, encode_publish(pointer, messages), AVRO)


def rollback(topic: Topic, published: RollbackRange | int) -> Call[None]:
    if isinstance(published, int):
        body = json.dumps({"transactionWritePointer": str(published)}).encode()
        return Call("POST", path_of(topic, "rollback"), nothing, body, again=True, conflict=TransactionEnded)
    body = encode_rollback(published)
    return Call("POST", path_of(topic, "rollback"), nothing, body, AVRO, again=True, conflict=TransactionEnded)


def poll(
    topic: Topic,
    start: Start,
    limit: int | None,
    transaction: Transaction | None,
    *,
    inclusive: bool,
    wait_seconds: int = 0,
) -> Call[None]:
    body = encode_poll(start, limit, transaction, inclusive=inclusive)
    headers = {WAIT: str(wait_seconds)} if wait_seconds else {}
    return Call("POST", path_of(topic, "poll"), nothing, body, AVRO, again=True, headers=headers)


#: Makes a request of a poll from the last received message (None: the start of the poll) and a limit.
PollRequest = Callable[[MessageId | None, int | None], Call[None]]


def poll_on(
    topic: Topic, start: Start, limit: int | None, transaction: Transaction | None, *, inclusive: bool
) -> PollRequest:
    """Return a function that makes the requests of a poll: the first one, and one after each limited response.

    Raises:
        BadRequest: the limit or the start is invalid.
    """
    # Raise for invalid arguments now, not with the first message.
    poll(topic, start, limit, transaction, inclusive=inclusive)

    def ask(last: MessageId | None, limit: int | None) -> Call[None]:
        if last is None:
            return poll(topic, start, limit, transaction, inclusive=inclusive)
        return poll(topic, last, limit, transaction, inclusive=False)

    return ask


# --- what went wrong -------------------------------------------------------------------------------------------------

#: Errors that share their status with others, as that of a missing topic when a consumer is asked for.
_BY_CODE: Mapping[str, type[MessagingError]] = {
    kind.code: kind for kind in (TopicNotFound, ProducerFenced, PartitionsChanged)
}
_REFUSED: Mapping[int, type[MessagingError]] = {
    401: Unauthorized,
    403: Forbidden,
    429: QuotaExceeded,
    503: Unavailable,
}


def retry_after_seconds(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After`` (RFC 9110, 10.2.3), at least 0; None: the header is missing or invalid.

    A date is compared with the server's own clock (``Date``).
    """
    value = headers.get("retry-after", "").strip()
    if value.isdecimal() and len(value) <= _MAX_DIGITS:
        return float(value)
    try:
        moments = (parsedate_to_datetime(value), parsedate_to_datetime(headers.get("date", "")))
        return max(0.0, (moments[0] - moments[1]).total_seconds())
    except (ValueError, TypeError):
        return None


def check(call: Call[object], status: int, body: bytes, headers: Mapping[str, str]) -> None:
    """Check that a response reports success.

    Raises:
        MessagingError: it reports an error (docs/reference/rest.md, "Routes"); the message is the server's.
    """
    if status == _OK:
        return
    by_status = {_MISSING: call.missing, _CONFLICT: call.conflict, **_REFUSED}
    kind = _BY_CODE.get(headers.get(CODE, "")) or by_status.get(status)
    text, hint = _reason(body, headers)
    if status == _MISSING and CODE not in headers:
        # Another HTTP server has this address: every 404 of tms serve has a code.
        text, hint = f"{call} was answered with {status}: {text}", _WRONG_SERVER
    if kind is not None and issubclass(kind, Unavailable):
        raise kind(text, hint, retry_after_seconds=retry_after_seconds(headers))
    if kind is not None:
        raise kind(text, hint)
    if 300 <= status < 500:
        raise BadRequest(f"{call} was refused with {status}: {text}", hint)
    text = f"{text} {hint}" if hint else text
    raise ServerFailed(
        f"{call} failed with {status}: {text}", "It is not known whether the server carried out the request."
    )


def _reason(body: bytes, headers: Mapping[str, str]) -> tuple[str, str]:
    """Return message and hint of an error response; a response that is not a JSON problem has no hint."""
    if headers.get("content-type") == PROBLEM:
        try:
            found = json.loads(body)
            return str(found["detail"])[:_REASON_CHARS], str(found.get("hint", ""))[:_REASON_CHARS]
        except (ValueError, KeyError, TypeError, AttributeError):
            pass
    return body[: 4 * _REASON_CHARS].decode(errors="replace").strip()[:_REASON_CHARS] or "it gave no reason.", ""


def _writing(
    path: str, payloads: Sequence[bytes], read: Callable[[bytes], T_co], body: bytes, content_type: str = JSON
) -> Call[T_co]:
    return Call(
        "POST",
        path,
        read,
        body,
        content_type,
        conflict=TransactionEnded,
        writes=True,
        messages=len(payloads),
        payload_bytes=sum(map(len, payloads)),
    )


def path_of(topic: Topic, verb: str = "") -> str:
    """Return the path of a topic, or of one of its subresources."""
    found = topic_id(topic)
    path = f"/v1/namespaces/{found.namespace}/topics/{found.topic}"
    return f"{path}/{verb}" if verb else path


def _properties(ttl: timedelta | int | str | None, properties: Mapping[str, str] | None) -> bytes:
    fields = dict(properties or {})
    if ttl is not None:
        fields["ttl"] = str(seconds(ttl))
    return json.dumps(fields).encode()


def array(body: bytes) -> list[Any]:
    found = json.loads(body)
    if not isinstance(found, list):
        raise FormatError("it is not an array")
    return found


def nothing(_: bytes) -> None:
    """Ignore the body of a response."""
