"""A model of topics: the messages that the server has accepted, and the messages that readers must get.

The model knows payloads, times and transactions, but no rows. In two cases, two results are valid. A message that
expired under a TTL that was increased later may or may not exist (:attr:`Verdict.OPTIONAL`). A reader that started
before a transaction became invalid stops at its messages, or skips them after the janitor has inverted them
(:attr:`Verdict.STOP_OR_SKIP`).
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
    """The visibility of a message for a reader."""

    VISIBLE = auto()
    HIDDEN = auto()
    OPTIONAL = auto()
    STOP = auto()
    STOP_OR_SKIP = auto()


@dataclass(eq=False)
class Tx:
    """A transaction and its state: ``open``, ``committed``, ``aborted`` or ``invalid``."""

    transaction: Transaction
    expires_ms: int
    state: str = "open"
    published: list[tuple[Topic, RollbackRange]] = field(default_factory=list)
    stored: dict[Topic, list[bytes]] = field(default_factory=dict)


@dataclass(eq=False)
class Reader:
    """A reading transaction, and the transactions that were undecided or invalid at its start."""

    transaction: Transaction
    undecided: frozenset[Tx]
    invalid: frozenset[Tx]

    def verdict(self, sent: SentMessage) -> Verdict:
        tx = sent.tx
        if tx is None:
            return Verdict.VISIBLE
        if sent.rolled_back or tx in self.invalid:
            return Verdict.HIDDEN
        if tx in self.undecided or tx.transaction.transaction_id > self.transaction.transaction_id:
            return Verdict.STOP_OR_SKIP if tx.state == "invalid" else Verdict.STOP
        return Verdict.VISIBLE


@dataclass(eq=False)
class SentMessage:
    payload: bytes
    published_ms: int
    ttl_ms: int | None = None
    tx: Tx | None = None
    was_expired: bool = False
    rolled_back: bool = False
    id: MessageId | None = None
    failures: int = 0


@dataclass(eq=False)
class Topic:
    """One generation of a topic."""

    name: str
    ttl_ms: int
    sent: list[SentMessage] = field(default_factory=list)
    positions: dict[str, MessageId] = field(default_factory=dict)
    #: The time of the group's last failure, and the delay of its next delivery.
    failed_ms: int = 0
    delay_ms: int = 0

    def add(self, payloads: Sequence[bytes], now_ms: int, *, ttl_ms: int | None = None, tx: Tx | None = None) -> None:
        self.sent += [SentMessage(payload, now_ms, ttl_ms, tx) for payload in payloads]

    def note_expired(self, now_ms: int) -> None:
        """Record which messages have expired by now; call this after each change of the time or of the TTL."""
        for sent in self.sent:
            sent.was_expired |= self._is_expired(sent, now_ms)

    def _is_expired(self, sent: SentMessage, now_ms: int) -> bool:
        age_ms = now_ms - sent.published_ms
        return age_ms > self.ttl_ms or (sent.ttl_ms is not None and age_ms > sent.ttl_ms)

    def verdicts(self, reader: Reader | None, now_ms: int) -> Iterator[tuple[SentMessage, Verdict]]:
        """Yield the unexpired messages with their verdicts; None: a reader outside transactions."""
        for sent in self.sent:
            if self._is_expired(sent, now_ms):
                continue
            verdict = Verdict.VISIBLE if reader is None else reader.verdict(sent)
            if sent.was_expired and verdict is Verdict.VISIBLE:
                verdict = Verdict.OPTIONAL
            elif sent.was_expired and verdict is Verdict.STOP:
                # The message may be deleted; then readers do not stop at it.
                verdict = Verdict.STOP_OR_SKIP
            yield sent, verdict

    def check(
        self, read: Sequence[Message], reader: Reader | None, now_ms: int, *, after: MessageId | None = None
    ) -> None:
        """Check that a reader got the expected messages.

        Args:
            after: the message after which the reader started; None: it started at the first message.
        """
        remaining = list(read)
        for sent, verdict in self.verdicts(reader, now_ms):
            if after is not None and not _is_after(sent, after):
                continue
            is_next = bool(remaining) and remaining[0].payload == sent.payload
            if verdict is Verdict.VISIBLE:
                assert is_next, f"{sent.payload!r} is missing, or follows other messages"
            if verdict is Verdict.STOP or (verdict is Verdict.STOP_OR_SKIP and not remaining):
                break
            if is_next:
                assert verdict in (Verdict.VISIBLE, Verdict.OPTIONAL), f"{sent.payload!r} is visible"
                message = remaining.pop(0)
                assert sent.id in (None, message.id), "the id of a message has changed"
                sent.id = message.id
        assert remaining == [], "the reader got unexpected messages"
        ids = [message.id for message in read]
        assert all(one < other for one, other in pairwise(ids)), "the ids do not increase"

    def note_failure(self, read: Sequence[Message], now_ms: int) -> None:
        """Record that the group rolled back a batch.

        Each attempt reads all messages from the position on. Therefore the first message has failed most often, and
        determines the delay: 1 s after the first failure, then twice as long each time, up to a minute.
        """
        ids = {message.id for message in read}
        failed = [sent for sent in self.sent if sent.id in ids]
        for sent in failed:
            sent.failures += 1
        if failed:
            doublings = max(sent.failures for sent in failed) - 1
            self.failed_ms, self.delay_ms = now_ms, min(MINUTE, SECOND << doublings)

    def check_group(self, read: Sequence[Message], reader: Reader, now_ms: int, *, after: MessageId | None) -> None:
        """Check that a group got the expected messages: none during the delay, which may last a quarter longer."""
        elapsed_ms = now_ms - self.failed_ms
        if elapsed_ms < self.delay_ms:
            assert read == [], "failed messages are delivered before the end of their delay"
        elif read or elapsed_ms >= self.delay_ms * 5 / 4:
            self.check(read, reader, now_ms, after=after)

    def skipped(self, after: MessageId, position: MessageId, now_ms: int) -> list[SentMessage]:
        """Return the messages between two ids that readers in transactions see now or may see later."""
        return [
            sent
            for sent in self.sent
            if sent.id is not None
            and _is_after(sent, after)
            and not _is_after(sent, position)
            and not (self._is_expired(sent, now_ms) or sent.was_expired or sent.rolled_back)
            and (sent.tx is None or sent.tx.state in ("open", "committed"))
        ]

    def unread_bounds(self, position: MessageId, now_ms: int) -> tuple[int, int]:
        """Return the lowest and the highest valid number of messages that a consumer has not read."""
        unread = [(sent, verdict) for sent, verdict in self.verdicts(None, now_ms) if _is_after(sent, position)]
        return sum(verdict is Verdict.VISIBLE for _, verdict in unread), len(unread)


def _is_after(sent: SentMessage, position: MessageId) -> bool:
    # A message without a known id was never read, so it was sent after all messages that were read.
    return sent.id is None or rank(sent.id) > rank(position)
