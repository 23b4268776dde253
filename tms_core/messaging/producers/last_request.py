"""The last request of a producer to a topic, and the announcements for the next requests.

Positions are defined in :mod:`tms_core.messaging.ids`. The sequence numbers of a millisecond are divided into places.
The requests of a producer use the places in turn, so the position of a request encodes its number. If several producers
announce requests, each has a lane, a part of the sequence numbers, and the lane is divided into places.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from tms_core.errors import FormatError
from tms_core.messaging.ids import SEQUENCE_BITS, position
from tms_core.rowkey import MESSAGE_TAIL_BYTES

_VALUE = struct.Struct(f">qq{MESSAGE_TAIL_BYTES}sI")
#: The most requests that an announcement covers, and the most producers that announce requests at the same time.
_PLACES, LANES = 32, 32
#: Bits of the sequence number within a place of a producer that is alone (or within a lane); and within a lane's place.
_PLACE_BITS, _LANE_BITS = SEQUENCE_BITS - 5, SEQUENCE_BITS - 10
#: A millisecond in positions, and the mask of the sequence number in a position.
_MILLISECOND = position(1)
_TAKEN = _MILLISECOND - 1
#: The most rows of a request whose producer has a lane.
LANE_ROWS = 1 << _LANE_BITS


class LastRequest(NamedTuple):
    """The last request of a producer to a topic, stored before its rows.

    While only producers write to the topic, it may also cover the next requests. Then all rows after it and before
    ``until``, in its lane if it has one, belong to these requests.

    Attributes:
        first: the position of its first row, in the message table or among the transaction's stored payloads.
        number: the number of its rows.
        until: the end of the covered positions (excluded); 0: the next requests have announcements of their own.
        lane: the part of the sequence numbers of the next requests, from 1; 0: all.
    """

    generation: int
    sequence: int
    first: int
    number: int
    until: int = 0
    lane: int = 0

    def pack(self) -> bytes:
        """Return the value of its row."""
        first = self.first.to_bytes(MESSAGE_TAIL_BYTES, "big")
        value = _VALUE.pack(self.generation, self.sequence, first, self.number)
        if self.until:
            value += self.until.to_bytes(MESSAGE_TAIL_BYTES, "big")
            if self.lane:
                value += bytes([self.lane])
        return value

    @classmethod
    def parse(cls, value: bytes) -> LastRequest:
        """Parse the value of a row.

        Raises:
            FormatError: the value has a wrong length.
        """
        until, lane = value[_VALUE.size :][:MESSAGE_TAIL_BYTES], value[_VALUE.size + MESSAGE_TAIL_BYTES :]
        if len(value) < _VALUE.size or len(until) not in (0, MESSAGE_TAIL_BYTES) or len(lane) > 1:
            raise FormatError(f"a producer's last request has {len(value)} bytes, not {_VALUE.size}")
        generation, sequence, first, number = _VALUE.unpack(value[: _VALUE.size])
        return cls(
            generation,
            sequence,
            int.from_bytes(first, "big"),
            number,
            int.from_bytes(until, "big"),
            int.from_bytes(lane, "big"),
        )

    @property
    def stop(self) -> int:
        """Return the first position after all announced positions."""
        return max(self.first + self.number, self.until)

    def announces(self, generation: int, sequence: int) -> bool:
        """Return whether it covers a request with a higher number."""
        return self.until > 0 and generation == self.generation and 0 < sequence - self.sequence < _PLACES

    def next(self, generation: int, sequence: int, at: int, number: int) -> LastRequest | None:
        """Return a later request at the first possible position from ``at`` on; None: this does not cover it."""
        # Unpacked, because each request of a producer comes this way.
        announced_generation, announced_sequence, _, _, until, lane = self
        if generation != announced_generation or not 0 < sequence - announced_sequence < _PLACES:
            return None
        if number > (LANE_ROWS if lane else 1 << _PLACE_BITS):
            return None
        first = place_request(lane, sequence, at)
        return _request((generation, sequence, first, number, 0, 0)) if first + number <= until else None

    def found(self, positions: Sequence[int]) -> LastRequest:
        """Return the last written request, by the positions of the rows after this one."""
        if self.lane:
            positions = [at for at in positions if (at >> _PLACE_BITS) % LANES == self.lane - 1]
        if not positions:
            return self
        bits = _LANE_BITS if self.lane else _PLACE_BITS
        # The last place shows the request: its number modulo the places, counted from this request on.
        place = positions[-1] >> bits
        sequence = self.sequence + (place - self.sequence) % _PLACES
        number = sum(at >> bits == place for at in positions)
        return LastRequest(self.generation, sequence, place << bits, number)


#: Makes a LastRequest without a call of its constructor.
_request = partial(tuple.__new__, LastRequest)


def place_request(lane: int, sequence: int, at: int) -> int:
    """Return the first position of a request's place from ``at`` on.

    Args:
        lane: the lane of its producer; 0: the producer is alone.
    """
    place = sequence % _PLACES << (_LANE_BITS if lane else _PLACE_BITS)
    if lane:
        place += lane - 1 << _PLACE_BITS
    offset = at & _TAKEN
    first = at - offset + place
    return first if offset <= place else first + _MILLISECOND


@dataclass(slots=True)
class RememberedRequest:
    """A last request, and whether its rows exist.

    Attributes:
        value: the stored announcement: of this request, or of an earlier one that covers it.
        is_written: whether its rows are known to exist.
        since: the first position of the search that found it; None: no search was needed.
    """

    value: bytes
    request: LastRequest
    is_written: bool = False
    since: int | None = None
