"""The offsets of a stream in Spark's checkpoint, which Spark reads again after a crash.

An offset describes the whole batch that ends at it: the first and last positions of its ranges, and their message
counts. Therefore the batch can be read again from this offset single, and its reader detects missing messages. Spark
requests the initial offset again until the first batch is done. Therefore the initial offset is empty, and the first
batch stores the resolved ``startingPosition``. An offset costs a few hundred bytes per batch and partition.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from tms_core.client.protocol.messages import time_at
from tms_core.errors import FormatError, KeyFormatError, Refused, quoted
from tms_core.rowkey import LONG_MAX, MessageId

#: The format versions of an offset: of an unpartitioned topic, and of a partitioned topic.
VERSION, PARTITIONED_VERSION = 1, 2
#: The offset before the first batch.
START_OFFSET = {"version": VERSION, "at": "start"}

_POSITION = re.compile(r"earliest|time:(?P<ms>\d{1,19})|(?P<how>from|after):(?P<id>[0-9a-fA-F]{40})")


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position from which a read continues.

    Attributes:
        at: a message id, a time in milliseconds, or None for the start of the topic.
        inclusive: whether the read includes the message with this id.
    """

    at: MessageId | int | None = None
    inclusive: bool = True

    @classmethod
    def after_message(cls, message: MessageId) -> Self:
        """Return the position after a message."""
        return cls(message, inclusive=False)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text of :meth:`__str__`.

        Raises:
            FormatError: the text is not a position.
        """
        match = _POSITION.fullmatch(text)
        if match is None:
            raise FormatError(f"{quoted(text)} is not a position in a topic")
        if match["id"]:
            return cls(MessageId.from_hex(match["id"]), match["how"] == "from")
        return cls(int(match["ms"]) if match["ms"] else None)

    def __str__(self) -> str:
        if self.at is None:
            return "earliest"
        if isinstance(self.at, int):
            return f"time:{self.at}"
        return f"{'from' if self.inclusive else 'after'}:{self.at}"

    @property
    def start(self) -> MessageId | datetime | None:
        """Return the position as the argument ``start`` of a poll."""
        return time_at(self.at) if isinstance(self.at, int) else self.at

    @property
    def ms(self) -> int:
        """Return a time before which no message after the position was published."""
        if isinstance(self.at, MessageId):
            return self.at.publish_ms
        return self.at or 0


#: The start of a topic.
EARLIEST = StreamPosition()


@dataclass(frozen=True, slots=True)
class Stretch:
    """A range of consecutive messages, which one task reads.

    Attributes:
        first: the position before the first message.
        last: the id of the last message.
        messages: the number of messages.
    """

    first: StreamPosition
    last: MessageId
    messages: int


@dataclass(frozen=True, slots=True)
class Offset:
    """The position of a stream in one topic or partition, and the part of the batch before it.

    Attributes:
        topic, generation: the topic or partition.
        at: the start of the next batch.
        checked_ms: a time before which the stream has read all visible messages.
        following: the id of the next message; None: unknown.
        stretches: the ranges of the batch, in order.
    """

    topic: str
    generation: int
    at: StreamPosition
    checked_ms: int
    following: MessageId | None = None
    stretches: tuple[Stretch, ...] = ()

    @classmethod
    def parse(cls, offset: Mapping[str, Any]) -> Self:
        """Parse the result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError, FormatError, KeyFormatError: the mapping is not an offset.
        """
        following = offset["next"]
        return cls(
            offset["topic"],
            int(offset["generation"]),
            StreamPosition.parse(offset["at"]),
            min(int(offset["checked_ms"]), LONG_MAX),
            None if following is None else MessageId.from_hex(following),
            tuple(
                Stretch(StreamPosition.parse(first), MessageId.from_hex(last), int(messages))
                for first, last, messages in offset["batch"]
            ),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the value for the checkpoint."""
        return {
            "version": VERSION,
            "topic": self.topic,
            "generation": self.generation,
            "at": str(self.at),
            "checked_ms": self.checked_ms,
            "next": None if self.following is None else str(self.following),
            "batch": [[str(part.first), str(part.last), part.messages] for part in self.stretches],
        }


@dataclass(frozen=True, slots=True)
class StreamOffset:
    """The progress of a stream in its topic or all partitions, and the batch that reached it.

    Attributes:
        topic, generation: the topic of the stream.
        parts: the offset of the topic itself, or of each partition in order.
    """

    topic: str
    generation: int
    parts: tuple[Offset, ...]

    @classmethod
    def parse(cls, offset: Mapping[str, Any], topic: str) -> Self | None:
        """Parse the result of :meth:`to_json`; return None for the offset before the first batch.

        Raises:
            Refused: the checkpoint is damaged, belongs to another topic, or is of an unsupported version.
        """
        if offset == START_OFFSET:
            return None
        try:
            found = cls._parse(offset)
        except (KeyError, TypeError, ValueError, FormatError, KeyFormatError) as error:
            raise Refused(f"The checkpoint has an offset that cannot be read: {offset}.", _HINT) from error
        if found is None:
            raise Refused(
                f"The checkpoint has offsets of version {offset['version']}, not {VERSION} or {PARTITIONED_VERSION}.",
                _HINT,
            )
        if found.topic != topic:
            raise Refused(f"The checkpoint belongs to a stream of {found.topic}, not of {topic}.", _HINT)
        return found

    @classmethod
    def _parse(cls, offset: Mapping[str, Any]) -> Self | None:
        if offset["version"] == VERSION:
            single = Offset.parse(offset)
            return cls(single.topic, single.generation, (single,))
        if offset["version"] != PARTITIONED_VERSION:
            return None
        return cls(offset["topic"], int(offset["generation"]), tuple(map(Offset.parse, offset["parts"])))

    def to_json(self) -> dict[str, Any]:
        """Return the value for the checkpoint; for a topic without partitions, the format of its :class:`Offset`."""
        parts = [part.to_json() for part in self.parts]
        if [part.topic for part in self.parts] == [self.topic]:
            return parts[0]
        header = {"version": PARTITIONED_VERSION, "topic": self.topic, "generation": self.generation}
        return {**header, "parts": parts}

    def before(self, part: Offset) -> Offset | None:
        """Return this offset's part of the same topic and generation; None: it has none."""
        same = (one for one in self.parts if (one.topic, one.generation) == (part.topic, part.generation))
        return next(same, None)


_HINT = "Give the query a separate checkpointLocation."
