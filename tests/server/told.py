"""What the server was told, and what readers have to get: the model that the stateful test holds it against.

It knows payloads, times and transactions, and no row. Two things it leaves open, because both answers are right. A
message that was expired under a ttl that has since been raised is there or not (:attr:`Verdict.MAYBE`). A reader who
began before a transaction became invalid stops at its messages, or goes on behind them once the janitor has inverted
them (:attr:`Verdict.STOP_OR_SKIP`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import pairwise

from tests.builders import MINUTE, SECOND
from tms_core.client import Message, MessageId, RollbackRange, Transaction
from tms_core.consumers.claims import rank


class Verdict(Enum):
    """What a message is to a reader."""

    SHOWN = auto()
    HIDDEN = auto()
    MAYBE = auto()
    STOP = auto()
    STOP_OR_SKIP = auto()


@dataclass(eq=False)
class Tx:
    """A transaction, and what became of it: ``open``, ``committed``, ``aborted`` or ``invalid``."""

    transaction: Transaction
    expires_ms: int
    fate: str = "open"
    published: list[tuple[Topic, RollbackRange]] = field(default_factory=list)
    stored: dict[Topic, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class Reader:
    """Who reads in a transaction: which others had not ended when it began, and which were invalid."""

    transaction: Transaction
    undecided: frozenset[Tx]
    invalid: frozenset[Tx]

    def verdict(self, sent: Sent) -> Verdict:
        tx = sent.tx
        if tx is None:
            return Verdict.SHOWN
        if sent.taken_back or tx in self.invalid:
            return Verdict.HIDDEN
        if tx in self.undecided or tx.transaction.transaction_id > self.transaction.transaction_id:
            return Verdict.STOP_OR_SKIP if tx.fate == "invalid" else Verdict.STOP
        return Verdict.SHOWN


@dataclass(eq=False)
class Sent:
    payload: bytes
    published_ms: int
    ttl_ms: int | None = None
    tx: Tx | None = None
    was_expired: bool = False
    taken_back: bool = False
    id: MessageId | None = None
    failures: int = 0


@dataclass(eq=False)
class Topic:
    """One life of a topic."""

    name: str
    ttl_ms: int
    sent: list[Sent] = field(default_factory=list)
    positions: dict[str, MessageId] = field(default_factory=dict)
    #: When the group failed last, and how long it waits after that.
    failed_ms: int = 0
    wait_ms: int = 0

    def add(self, payloads: Sequence[bytes], now_ms: int, *, ttl_ms: int | None = None, tx: Tx | None = None) -> None:
        self.sent += [Sent(payload, now_ms, ttl_ms, tx) for payload in payloads]

    def tell_time(self, now_ms: int) -> None:
        for sent in self.sent:
            sent.was_expired |= self._expired(sent, now_ms)

    def _expired(self, sent: Sent, now_ms: int) -> bool:
        age_ms = now_ms - sent.published_ms
        return age_ms > self.ttl_ms or (sent.ttl_ms is not None and age_ms > sent.ttl_ms)

    def expected(self, reader: Reader | None, now_ms: int) -> Iterator[tuple[Sent, Verdict]]:
        """What each message is to a reader; None: one outside transactions."""
        for sent in self.sent:
            if self._expired(sent, now_ms):
                continue
            verdict = Verdict.SHOWN if reader is None else reader.verdict(sent)
            if sent.was_expired and verdict is Verdict.SHOWN:
                verdict = Verdict.MAYBE
            elif sent.was_expired and verdict is Verdict.STOP:
                # It may be gone, and then nobody stops at it.
                verdict = Verdict.STOP_OR_SKIP
            yield sent, verdict

    def check(
        self, read: Sequence[Message], reader: Reader | None, now_ms: int, *, behind: MessageId | None = None
    ) -> None:
        """See that a reader got what it has to get.

        Args:
            behind: after which message it began; None: at the beginning.
        """
        left = list(read)
        for sent, verdict in self.expected(reader, now_ms):
            if behind is not None and not _behind(sent, behind):
                continue
            here = bool(left) and left[0].payload == sent.payload
            if verdict is Verdict.SHOWN:
                assert here, f"{sent.payload!r} is missing, or others stand before it"
            if verdict is Verdict.STOP or (verdict is Verdict.STOP_OR_SKIP and not left):
                break
            if here:
                assert verdict in (Verdict.SHOWN, Verdict.MAYBE), f"{sent.payload!r} is shown"
                message = left.pop(0)
                assert sent.id in (None, message.id), "a message has changed its id"
                sent.id = message.id
        assert left == [], "there is more than there should be"
        ids = [message.id for message in read]
        assert all(one < other for one, other in pairwise(ids)), "ids do not increase"

    def fail(self, read: Sequence[Message], now_ms: int) -> None:
        """Note that the group was given messages and rolled back.

        Each attempt reads all that is there, so the first message has failed most often, and the group waits for it:
        1 s, and twice as long each time, up to a minute.
        """
        ids = {message.id for message in read}
        failed = [sent for sent in self.sent if sent.id in ids]
        for sent in failed:
            sent.failures += 1
        if failed:
            doublings = max(sent.failures for sent in failed) - 1
            self.failed_ms, self.wait_ms = now_ms, min(MINUTE, SECOND << doublings)

    def check_group(self, read: Sequence[Message], reader: Reader, now_ms: int, *, behind: MessageId | None) -> None:
        """See that a group got what it has to get: nothing while it waits, for up to a quarter longer than promised."""
        waited_ms = now_ms - self.failed_ms
        if waited_ms < self.wait_ms:
            assert read == [], "messages that failed come before their wait is over"
        elif read or waited_ms >= self.wait_ms * 5 / 4:
            self.check(read, reader, now_ms, behind=behind)

    def passed_over(self, after: MessageId, position: MessageId, now_ms: int) -> list[Sent]:
        """The messages between two ids that a committed reader sees, or may see later."""
        return [
            sent
            for sent in self.sent
            if sent.id is not None
            and _behind(sent, after)
            and not _behind(sent, position)
            and not (self._expired(sent, now_ms) or sent.was_expired or sent.taken_back)
            and (sent.tx is None or sent.tx.fate in ("open", "committed"))
        ]

    def unread(self, position: MessageId, now_ms: int) -> tuple[int, int]:
        """How many messages a consumer has not read: at least, and at most."""
        behind = [(sent, verdict) for sent, verdict in self.expected(None, now_ms) if _behind(sent, position)]
        return sum(verdict is Verdict.SHOWN for _, verdict in behind), len(behind)


def _behind(sent: Sent, position: MessageId) -> bool:
    # One that nobody has read yet was sent after everything that somebody has.
    return sent.id is None or rank(sent.id) > rank(position)
