"""Every error the project raises on purpose, as one tree below :class:`TmsError`.

``docs/reference/errors.md`` lists the codes. A command catches the root and prints one sentence::

    try:
        report = run_once(...)
    except TmsError as error:
        print(error)          # what happened, then what to do next
"""

from __future__ import annotations

import errno
import re
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

#: How much of a name or a key is quoted, in characters: a store may have one of megabytes.
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


#: Codes of errors that no class of the tree stands for: wrong usage of a command, requests that no route answers,
#: defects, and the findings of guards.
USAGE, INTERNAL, NO_ROUTE, METHOD_NOT_ALLOWED = "TMS-USAGE", "TMS-INTERNAL", "TMS-NO-ROUTE", "TMS-METHOD-NOT-ALLOWED"


def code_of_status(status: int) -> str:
    """Return the code of an HTTP error response that was not made from an error of the tree."""
    return _STATUS_CODES.get(status, INTERNAL if status >= 500 else BadRequest.code)


def code_of_guard(guard: str) -> str:
    """Return the code of a guard's finding."""
    return f"TMS-GUARD-{guard.upper()}"


def hint_for_extra(name: str) -> str:
    """Return the hint of an error for a missing extra; no package index has the project yet."""
    return f"Install the extra {name}: in a checkout pip install '.[{name}]', with a wheel pip install 'WHEEL[{name}]'."


class TmsError(Exception):
    """Root of the tree.

    Args:
        message: one sentence with the failure and its place.
        hint: one sentence saying what to do next, or an empty string.

    Attributes:
        code: identifies the kind of error in output, logs and ``docs/reference/errors.md``; never changes.
    """

    code: ClassVar[str] = "TMS-ERROR"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message

    def __reduce__(
        self,
    ) -> tuple[Callable[..., TmsError], tuple[type[TmsError], tuple[object, ...], dict[str, object]]]:
        # By default the class would be called with ``args``, which is the message alone.
        return _again, (type(self), self.args, self.__dict__)


def _again(kind: type[TmsError], args: tuple[object, ...], attributes: dict[str, object]) -> TmsError:
    """Return an error that was copied, or sent to another process."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class ConfigurationError(TmsError):
    """A setting is missing, unknown or has an impossible value."""

    code = "TMS-CONFIGURATION"


class LoginFailed(TmsError):
    """Kerberos gives no ticket, or a service refuses it; another try may succeed."""

    code = "TMS-LOGIN-FAILED"


class FormatError(TmsError):
    """Bytes do not have the layout they must have."""

    code = "TMS-FORMAT"


class KeyFormatError(FormatError):
    """The length, the separators or the grammar of a row key are not those of a TMS row."""

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
    """A source holds no snapshot that can be read."""

    code = "TMS-SNAPSHOT-NOT-FOUND"


class StoreError(TmsError):
    """The store failed to open, read or write.

    Args:
        path: the file or folder that the error names; empty: it names none.
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
    """No store at the configured place."""

    code = "TMS-STORE-NOT-FOUND"


class StoreUnavailable(StoreError):
    """The store cannot be reached, or could not do it in time; whether a change was made may be unknown."""

    code = "TMS-STORE-UNAVAILABLE"


class WriteRefused(StoreError):
    """The store accepts no write now: no space, over quota, read-only. No topic is to blame."""

    code = "TMS-STORE-READ-ONLY"


class StoreFull(WriteRefused):
    """The disk has no room, or is mounted read-only. The write was not executed, and may succeed later."""

    code = "TMS-STORE-FULL"


def is_full(error: OSError) -> bool:
    """Return whether a file could not be written for want of space or quota, or on a read-only file system."""
    return error.errno in _FULL


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG})


class StoreLayoutError(StoreError):
    """A LevelDB folder in a layout of CDAP 6, which is not served."""

    code = "TMS-STORE-LAYOUT"


class StateError(TmsError):
    """The janitor's state could not be opened, read or written; no store and no topic is the cause."""

    code = "TMS-STATE"


class StateBusy(StateError):
    """Another process is writing the state, or has the lease under which it is written."""

    code = "TMS-STATE-BUSY"


class StateUnavailable(StateError):
    """Where the state is kept cannot be reached; whether a change was made may be unknown."""

    code = "TMS-STATE-UNAVAILABLE"


class ArchiveError(TmsError):
    """Rows could not be archived before they were to be deleted, or an archive could not be read."""

    code = "TMS-ARCHIVE"


class MessagingError(TmsError):
    """A request for a topic or its messages was refused or failed; the text says why."""

    code = "TMS-MESSAGING"


class BadRequest(MessagingError):
    """The request is wrong in itself: a ttl of 0, a limit below 1, a message without a payload."""

    code = "TMS-BAD-REQUEST"


class TopicNotFound(MessagingError):
    """There is no such topic, or it was deleted."""

    code = "TMS-TOPIC-NOT-FOUND"


class TopicExists(MessagingError):
    """A topic of that name exists already."""

    code = "TMS-TOPIC-EXISTS"


class PartitionsChanged(MessagingError):
    """The topic has its messages in partitions, or is sealed; nothing was done. The properties of the whole topic name
    the partitions that take messages.
    """

    code = "TMS-PARTITIONS-CHANGED"


class TooLarge(StoreError, BadRequest):
    """A message is larger than the store accepts. Nothing of the request was written."""

    code = "TMS-TOO-LARGE"


class ConsumerNotFound(MessagingError):
    """The topic is there, and has no consumer of that name."""

    code = "TMS-CONSUMER-NOT-FOUND"


class ConsumerConflict(MessagingError):
    """The state of a consumer does not allow the request: it exists already, it has open claims, or the claiming
    transaction has ended. Nothing was done.
    """

    code = "TMS-CONSUMER-CONFLICT"


class ProducerNotFound(MessagingError):
    """The topic is there, and has no producer of that name."""

    code = "TMS-PRODUCER-NOT-FOUND"


class ProducerFenced(MessagingError):
    """A newer instance of the producer was registered, or the producer is unknown; nothing was done.

    It is final: the server rejects all later requests of this instance, too.
    """

    code = "TMS-PRODUCER-FENCED"


class TransactionExpired(MessagingError):
    """The transaction is past its maximum lifetime, so its writes might never be cleaned."""

    code = "TMS-TRANSACTION-EXPIRED"


class Unauthorized(MessagingError):
    """The request has no token, or the token is unknown, wrong or expired; nothing was done."""

    code = "TMS-UNAUTHORIZED"


class Forbidden(MessagingError):
    """The sender of the request may not do this; the answer does not reveal whether the topic exists. Nothing was
    done.
    """

    code = "TMS-FORBIDDEN"


class Unanswered(MessagingError):
    """A server's answer did not come, or makes no sense, so the request may have been executed."""

    code = "TMS-UNANSWERED"


class ServerFailed(Unanswered):
    """The server says that it failed (500); whether something was done is not known."""

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
        messages: how many.
    """

    code = "TMS-NOT-PUBLISHED"

    def __init__(self, message: str, hint: str = "", messages: int = 0) -> None:
        super().__init__(message, hint)
        self.messages = messages


class Unavailable(MessagingError):
    """This cannot be done now; nothing was done, and the same request may succeed later.

    Args:
        message, hint: as of all errors.
        retry_after_seconds: when to try again, where the server says so (``Retry-After``).
    """

    code = "TMS-UNAVAILABLE"

    def __init__(self, message: str, hint: str = "", retry_after_seconds: float | None = None) -> None:
        super().__init__(message, hint)
        self.retry_after_seconds = retry_after_seconds


class QuotaExceeded(Unavailable):
    """A principal is above its quota; the same request may succeed later."""

    code = "TMS-QUOTA-EXCEEDED"


class ClockJumped(Unavailable):
    """The wall clock is ahead of the clocks it is checked against (invariant S7)."""

    code = "TMS-CLOCK-JUMPED"


class TransactionError(TmsError):
    """A transaction manager refused a request."""

    code = "TMS-TRANSACTION"


class NotInProgress(TransactionError):
    """The transaction is not in progress."""

    code = "TMS-TRANSACTION-NOT-IN-PROGRESS"


class TransactionEnded(NotInProgress, MessagingError):
    """The transaction is over, or never started, so nothing is written in it; late writes are not visible."""

    code = "TMS-TRANSACTION-ENDED"


class Conflict(TransactionError):
    """Another transaction has changed the same thing since this one started.

    Args:
        message: as of all errors.
        transaction_id: the transaction that cannot commit.
        key: the change key, written as Tephra writes it.
        client: who committed it, or empty.
    """

    code = "TMS-TRANSACTION-CONFLICT"

    def __init__(self, message: str, transaction_id: int, key: str, client: str) -> None:
        super().__init__(message)
        self.transaction_id = transaction_id
        self.key = key
        self.client = client


class Invalidated(TransactionError):
    """The transaction is invalid; nothing of it is visible, now or later, so it may be done again."""

    code = "TMS-TRANSACTION-INVALIDATED"


class PostCommitFailed(TransactionError):
    """The transaction is committed, but something that was to follow failed; doing it again would do it twice."""

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
    """A copy of the state could not be made."""

    code = "TMS-TRANSACTION-SNAPSHOT"


class Interrupted(TmsError):
    """A run was stopped between two batches; completed batches stand."""

    code = "TMS-RUN-INTERRUPTED"


class StopRequested(Interrupted):
    """The run received a stop request: a signal, or the exit of its process."""

    code = "TMS-RUN-STOPPED"


class LeaseLost(Interrupted):
    """Another process has the lease now, so this one may not write (invariant S12)."""

    code = "TMS-LEASE-LOST"


class Refused(TmsError):
    """Understood, and not safe to carry out; nothing was changed."""

    code = "TMS-REFUSED"


class NotAdopted(Refused):
    """The store was never adopted by this janitor's state (invariants S8, S13)."""

    code = "TMS-NOT-ADOPTED"


class GuardTripped(Refused):
    """A guard (clock, identity) stopped the run before it wrote anything (invariants S7, S13)."""

    code = "TMS-GUARD"


class PlanRefused(Refused):
    """``apply`` found that a basis of the plan has changed."""

    code = "TMS-PLAN-REFUSED"


_STATUS_CODES = {403: Forbidden.code, 404: NO_ROUTE, 405: METHOD_NOT_ALLOWED, 413: TooLarge.code, 503: Unavailable.code}
