"""The last request of a producer to a topic, and its announcement, which may cover future requests.

The sequence numbers of a millisecond (:mod:`tms_core.messaging.ids`) are divided into 32 places. The requests of a
producer use the places in turn, so the position of a request encodes its number modulo 32. If several producers
announce requests, each has a lane, a part of the sequence numbers, which is divided into places.
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
#: The number of places, and the number of lanes.
_PLACES, LANES = 32, 32
#: The bits of the sequence number within a place (or a lane), and within a place of a lane.
_PLACE_BITS, _LANE_BITS = SEQUENCE_BITS - 5, SEQUENCE_BITS - 10
#: A millisecond in positions, and the mask of the sequence number in a position.
_MILLISECOND = position(1)
_SEQUENCE_MASK = _MILLISECOND - 1
#: The maximum number of rows of a request whose producer has a lane.
LANE_ROWS = 1 << _LANE_BITS


class LastRequest(NamedTuple):
    """The last request of a producer to a topic, stored before its rows.

    While only producers write to the topic, it may also cover future requests. Then all rows after it and before
    ``until``, in its lane if it has one, belong to these requests.

    Attributes:
        first: the position of its first row, in the message table or among the transaction's stored payloads.
        number: the number of its rows.
        until: the end of the covered positions (exclusive); 0: future requests are not covered.
        lane: the lane of future requests, from 1; 0: they may use all sequence numbers.
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
            raise FormatError(f"the last request of a producer has {len(value)} bytes, not {_VALUE.size}")
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
        """Return whether it covers the future request with this number."""
        return self.until > 0 and generation == self.generation and 0 < sequence - self.sequence < _PLACES

    def next(self, generation: int, sequence: int, at: int, number: int) -> LastRequest | None:
        """Return a future request at its first possible position from ``at`` on; None: it is not covered."""
        # Unpacked for speed, because each request of a producer calls this.
        announced_generation, announced_sequence, _, _, until, lane = self
        if generation != announced_generation or not 0 < sequence - announced_sequence < _PLACES:
            return None
        if number > (LANE_ROWS if lane else 1 << _PLACE_BITS):
            return None
        first = place_request(lane, sequence, at)
        return _request((generation, sequence, first, number, 0, 0)) if first + number <= until else None

    def last_written(self, positions: Sequence[int]) -> LastRequest:
        """Return the last request that was written, given the positions of the covered rows after this request."""
        if self.lane:
            positions = [at for at in positions if (at >> _PLACE_BITS) % LANES == self.lane - 1]
        if not positions:
            return self
        bits = _LANE_BITS if self.lane else _PLACE_BITS
        # The place of the last row encodes the request's number modulo _PLACES, relative to this request.
        place = positions[-1] >> bits
        sequence = self.sequence + (place - self.sequence) % _PLACES
        number = sum(at >> bits == place for at in positions)
        return LastRequest(self.generation, sequence, place << bits, number)


#: Creates a LastRequest faster than its constructor.
_request = partial(tuple.__new__, LastRequest)


def place_request(lane: int, sequence: int, at: int) -> int:
    """Return the first position, from ``at`` on, that starts the place of a request.

    Args:
        lane: the lane of its producer; 0: the producer is alone.
    """
    place = sequence % _PLACES << (_LANE_BITS if lane else _PLACE_BITS)
    if lane:
        place += lane - 1 << _PLACE_BITS
    offset = at & _SEQUENCE_MASK
    first = at - offset + place
    return first if offset <= place else first + _MILLISECOND


@dataclass(slots=True)
class RememberedRequest:
    """A cached last request, and whether its rows exist.

    Attributes:
        value: the stored announcement of this request, or of an earlier request that covers it.
        is_written: whether the rows are known to exist.
        since: the start of the search that found the request; None: no search was needed.
    """

    value: bytes
    request: LastRequest
    is_written: bool = False
    since: int | None = None
