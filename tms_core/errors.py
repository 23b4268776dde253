"""The errors that the project raises, as one tree below :class:`TmsError`.

``docs/reference/errors.md`` lists the codes. A command catches the root and prints the failure and the next step::

    try:
        report = run_once(...)
    except TmsError as error:
        print(error)
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

#: Longest quotation of a name or key in a message, in characters: stored keys can have megabytes.
QUOTED = 200
_LONG_WORD = re.compile(rf"\S{{{QUOTED + 1},}}")


def quoted(name: object) -> str:
    """Return a name, a key or a value as Python writes it, cut after :data:`QUOTED` characters."""
    text = repr(name[:QUOTED] if isinstance(name, (str, bytes)) else name)
    is_cut = len(text) > QUOTED or (isinstance(name, (str, bytes)) and len(name) > QUOTED)
    return f"{text[:QUOTED]}…" if is_cut else text


def shortened(text: str) -> str:
    """Return a text with each word cut after :data:`QUOTED` characters."""
    return _LONG_WORD.sub(lambda word: f"{word[0][:QUOTED]}…", text)


#: Regular expressions of a character in a path without blanks, and of such a path.
_LETTER = r"""[^\s'",;:)]"""
_PATH = rf"""(?<![^\s'"(])/{_LETTER}+"""


def without_paths(error: TmsError) -> tuple[str, str]:
    """Return message and hint of an error for clients: without the paths of this machine, which its log has."""
    path = error.path if isinstance(error, StoreError) else ""
    # The path of a store may contain blanks.
    paths = f"{re.escape(path)}{_LETTER}*|{_PATH}" if path else _PATH
    return re.sub(paths, "…", error.message), re.sub(paths, "…", error.hint)


#: Codes of errors without a class in the tree: wrong usage of a command, defects, and requests without a route.
USAGE, INTERNAL, NO_ROUTE, METHOD_NOT_ALLOWED = "TMS-USAGE", "TMS-INTERNAL", "TMS-NO-ROUTE", "TMS-METHOD-NOT-ALLOWED"


def code_of_status(status: int) -> str:
    """Return the error code of an HTTP response that has a status only."""
    return _STATUS_CODES.get(status, INTERNAL if status >= 500 else BadRequest.code)


def code_of_guard(guard: str) -> str:
    """Return the code of a guard's finding."""
    return f"TMS-GUARD-{guard.upper()}"


def hint_for_extra(name: str) -> str:
    """Return the hint for a missing extra; it installs from files, because no package index has the project yet."""
    return f"Install the extra {name}: in a checkout pip install '.[{name}]', with a wheel pip install 'WHEEL[{name}]'."


class TmsError(Exception):
    """Root of the tree.

    Args:
        message: one sentence with the failure and its place.
        hint: one sentence with the next step, or an empty string.

    Attributes:
        code: identifies the kind of error in output, logs and ``docs/reference/errors.md``; never changes.
    """

    code: ClassVar[str] = "TMS-ERROR"

    def __init__(self, message: str, hint: str = "") -> None:
        # Embedded reasons from libraries and other processes end with a period or without. An ellipsis stays.
        if message.endswith("..") and not message.endswith("..."):
            message = message[:-1]
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(
        self,
    ) -> tuple[Callable[..., TmsError], tuple[type[TmsError], tuple[object, ...], dict[str, object]]]:
        # By default pickle calls the class with ``args``, which has the message only.
        return _rebuild_error, (type(self), self.args, self.__dict__)


def _rebuild_error(kind: type[TmsError], args: tuple[object, ...], attributes: dict[str, object]) -> TmsError:
    """Return the copy of an error, for ``copy`` and ``pickle``."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigurationError(TmsError):
    """A setting is missing, unknown or has an impossible value."""

    code = "TMS-CONFIGURATION"


class LoginFailed(TmsError):
    """Kerberos issued no ticket, or a service rejected it; a retry may succeed."""

    code = "TMS-LOGIN-FAILED"


class FormatError(TmsError):
    """Bytes do not have the layout they must have."""

    code = "TMS-FORMAT"


class KeyFormatError(FormatError):
    """A row key does not have the length, the separators or the grammar of a TMS key."""

    code = "TMS-FORMAT-KEY"


class MetadataError(FormatError):
    """A topic's stored properties do not parse (``docs/reference/formats/rows.md``, metadata table)."""

    code = "TMS-FORMAT-METADATA"


class SnapshotError(FormatError):
    """A transaction snapshot is truncated, corrupt or otherwise unusable."""

    code = "TMS-SNAPSHOT"


class UnsupportedSnapshotVersion(SnapshotError):
    """A snapshot's leading version number is not 1, 2, 3 or 4."""

    code = "TMS-SNAPSHOT-VERSION"


class NoSnapshot(TmsError):
    """A source has no readable snapshot."""

    code = "TMS-SNAPSHOT-NOT-FOUND"


class StoreError(TmsError):
    """The store failed to open, read or write.

    Args:
        path: the file or folder in the message, or empty.
    """

    code = "TMS-STORE"

    def __init__(self, message: str, hint: str = "", path: Path | str = "") -> None:
        super().__init__(message, hint)
        self.path = str(path)


class StoreBusy(StoreError):
    """Another process holds the store; LevelDB allows one process at a time."""

    code = "TMS-STORE-BUSY"


class LeaseHeld(StoreBusy):
    """Another process has the lease on the store (invariant S12)."""

    code = "TMS-LEASE-HELD"


class StoreNotFound(StoreError):
    """The configured path has no store."""

    code = "TMS-STORE-NOT-FOUND"


class StoreUnavailable(StoreError):
    """The store is unreachable or timed out; a change may or may not have been applied."""

    code = "TMS-STORE-UNAVAILABLE"


class WriteRefused(StoreError):
    """The store rejects all writes now (no space, over quota, read-only), whatever their topic."""

    code = "TMS-STORE-READ-ONLY"


class StoreFull(WriteRefused):
    """The disk is full or mounted read-only. The write was not executed, and a retry may succeed."""

    code = "TMS-STORE-FULL"


def is_full(error: OSError) -> bool:
    """Return whether a write failed for lack of space or quota, or on a read-only file system."""
    return error.errno in _FULL


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class StoreLayoutError(StoreError):
    """A LevelDB folder has a layout of CDAP 6, which is not supported."""

    code = "TMS-STORE-LAYOUT"


class StateError(TmsError):
    """The janitor's state could not be opened, read or written, independent of the store and its topics."""

    code = "TMS-STATE"


class StateBusy(StateError):
    """Another process is writing the state, or holds its lease."""

    code = "TMS-STATE-BUSY"


#: The errors while another process holds the store or the state.
BUSY: tuple[type[TmsError], ...] = (StoreBusy, StateBusy)


class StateUnavailable(StateError):
    """The storage of the janitor's state is unreachable; a change may or may not have been applied."""

    code = "TMS-STATE-UNAVAILABLE"


class ArchiveError(TmsError):
    """Rows could not be archived before their deletion, or an archive could not be read."""

    code = "TMS-ARCHIVE"


class MessagingError(TmsError):
    """A request for a topic or its messages was rejected or failed."""

    code = "TMS-MESSAGING"


class BadRequest(MessagingError):
    """The request is invalid: a TTL of 0, a limit below 1, a message without a payload."""

    code = "TMS-BAD-REQUEST"


class TopicNotFound(MessagingError):
    """The topic does not exist, or was deleted."""

    code = "TMS-TOPIC-NOT-FOUND"


class TopicExists(MessagingError):
    """A topic with this name exists already."""

    code = "TMS-TOPIC-EXISTS"


class PartitionsChanged(MessagingError):
    """The topic stores its messages in partitions, or is sealed; nothing was changed. The properties of the topic with
    partitions name the partitions that accept messages.
    """

    code = "TMS-PARTITIONS-CHANGED"


class TooLarge(StoreError, BadRequest):
    """A message is larger than the store accepts. Nothing of the request was written."""

    code = "TMS-TOO-LARGE"


class ConsumerNotFound(MessagingError):
    """The topic exists, but has no consumer with this name."""

    code = "TMS-CONSUMER-NOT-FOUND"


class ConsumerConflict(MessagingError):
    """The state of a consumer does not allow the request: it exists already, it has open claims, or the claiming
    transaction has ended. Nothing was changed.
    """

    code = "TMS-CONSUMER-CONFLICT"


class ProducerNotFound(MessagingError):
    """The topic exists, but has no producer with this name."""

    code = "TMS-PRODUCER-NOT-FOUND"


class ProducerFenced(MessagingError):
    """A newer instance of the producer was registered, or the producer is unknown; nothing was changed.

    The error is final: the server also rejects all later requests of this instance.
    """

    code = "TMS-PRODUCER-FENCED"


class TransactionExpired(MessagingError):
    """The transaction is past its maximum lifetime, so its writes might never be cleaned."""

    code = "TMS-TRANSACTION-EXPIRED"


class Unauthorized(MessagingError):
    """The request has no token, or the token is unknown, wrong or expired; nothing was changed."""

    code = "TMS-UNAUTHORIZED"


class Forbidden(MessagingError):
    """The caller lacks the permission; nothing was changed. The response does not reveal whether the topic exists."""

    code = "TMS-FORBIDDEN"


class Unanswered(MessagingError):
    """The server's response is missing or unreadable, so the request may have been executed."""

    code = "TMS-UNANSWERED"


class ServerFailed(Unanswered):
    """The server reported a failure (500); the request may have been executed."""

    code = "TMS-SERVER-FAILED"


class ClientClosed(MessagingError):
    """The client was closed, so it sends no requests."""

    code = "TMS-CLIENT-CLOSED"


class BufferFull(MessagingError):
    """A message was rejected, because the buffer is full."""

    code = "TMS-BUFFER-FULL"


class NotPublished(MessagingError):
    """Queued messages were not published.

    Args:
        message, hint: as of all errors.
        messages: the number of the messages.
    """

    code = "TMS-NOT-PUBLISHED"

    def __init__(self, message: str, hint: str = "", messages: int = 0) -> None:
        super().__init__(message, hint)
        self.messages = messages


class Unavailable(MessagingError):
    """The request cannot be executed now; nothing was changed, and a retry may succeed.

    Args:
        message, hint: as of all errors.
        retry_after_seconds: the delay before a retry, if the server sent one (``Retry-After``).
    """

    code = "TMS-UNAVAILABLE"

    def __init__(self, message: str, hint: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message, hint)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(Unavailable):
    """A principal has exceeded its quota; a retry may succeed."""

    code = "TMS-QUOTA-EXCEEDED"


class ClockJumped(Unavailable):
    """The wall clock is ahead of the clocks that check it (invariant S7)."""

    code = "TMS-CLOCK-JUMPED"


class TransactionError(TmsError):
    """A transaction manager rejected a request."""

    code = "TMS-TRANSACTION"


class NotInProgress(TransactionError):
    """The transaction is not in progress."""

    code = "TMS-TRANSACTION-NOT-IN-PROGRESS"


class TransactionEnded(NotInProgress, MessagingError):
    """The transaction is finished or never started, so it accepts no writes; late writes are not visible."""

    code = "TMS-TRANSACTION-ENDED"


class Conflict(TransactionError):
    """Another transaction committed a change key of this transaction after this transaction started.

    Args:
        message: as of all errors.
        transaction_id: the transaction that cannot commit.
        key: the change key, written as Tephra writes it.
        client: the client of the other transaction, or empty.
    """

    code = "TMS-TRANSACTION-CONFLICT"

    def __init__(self, message: str, transaction_id: int, key: str, client: str) -> None:
        super().__init__(message)
        self.transaction_id = transaction_id
        self.key = key
        self.client = client


class Invalidated(TransactionError):
    """The transaction is invalid: its writes never become visible, so it may be repeated."""

    code = "TMS-TRANSACTION-INVALIDATED"


class PostCommitFailed(TransactionError):
    """The transaction is committed, but a step after the commit failed; a repetition would apply it twice."""

    code = "TMS-TRANSACTION-POST-COMMIT"


class BadArgument(TransactionError):
    """An argument of a transaction is invalid: a timeout below 1 (Java's ``IllegalArgumentException``)."""

    code = "TMS-TRANSACTION-ARGUMENT"


class ChangesTooLarge(TransactionError):
    """A transaction has too many change keys, or too many bytes of them."""

    code = "TMS-TRANSACTION-CHANGES"


class TruncateTimeError(TransactionError):
    """The invalid list cannot be truncated up to a time after which a transaction in progress started."""

    code = "TMS-TRANSACTION-TRUNCATE-TIME"


class CannotSnapshot(TransactionError):
    """The transaction state could not be copied."""

    code = "TMS-TRANSACTION-SNAPSHOT"


class Interrupted(TmsError):
    """A run was stopped between two batches; completed batches remain."""

    code = "TMS-RUN-INTERRUPTED"


class StopRequested(Interrupted):
    """The run received a stop request: a signal, or the exit of its process."""

    code = "TMS-RUN-STOPPED"


class LeaseLost(Interrupted):
    """Another process holds the lease now, so this process must not write (invariant S12)."""

    code = "TMS-LEASE-LOST"


class Refused(TmsError):
    """The request is valid, but unsafe to execute; nothing was changed."""

    code = "TMS-REFUSED"


class NotAdopted(Refused):
    """The store was never adopted by this janitor's state (invariants S8, S13)."""

    code = "TMS-NOT-ADOPTED"


class GuardTripped(Refused):
    """A guard (clock, identity) stopped the run before it wrote anything (invariants S7, S13)."""

    code = "TMS-GUARD"


class PlanRefused(Refused):
    """``apply`` found that a condition of the plan has changed since the plan was made."""

    code = "TMS-PLAN-REFUSED"


_STATUS_CODES = {403: Forbidden.code, 404: NO_ROUTE, 405: METHOD_NOT_ALLOWED, 413: TooLarge.code, 503: Unavailable.code}
