"""The last request of a producer to a topic, and the announcements for the next ones.

Positions are those of :mod:`tms_core.messaging.ids`. The sequence numbers of a millisecond are divided into places,
which a producer's requests have by turns, so that where a request starts tells its number. Where several producers
announce at once each has a seat, a part of the sequence numbers of its own, and it is the seat that is divided.
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
#: How many requests one announcement is for at most, and how many producers may announce at once.
_PLACES, SEATS = 32, 32
#: How many bits of the sequence number are a place's where a producer is alone, and a seat's; and a place's in a seat.
_PLACE_BITS, _SEATED_BITS = SEQUENCE_BITS - 5, SEQUENCE_BITS - 10
#: What of a position is its sequence number.
_TAKEN = (1 << SEQUENCE_BITS) - 1
#: How many rows a request has at most whose producer has a seat.
SEATED_ROWS = 1 << _SEATED_BITS


class LastRequest(NamedTuple):
    """The last request of a producer to a topic, written down before its rows.

    It may be written down for the requests behind it as well, while producers alone write to the topic. Then all rows
    behind it and before a position, of its seat if it has one, are of these requests.

    Attributes:
        first: the position of its first row: of the message table, or of the transaction's stored payloads.
        number: how many rows it has.
        until: before which position the requests behind it are; 0: they are announced themselves.
        seat: which part of the sequence numbers they have, from 1; 0: all.
    """

    generation: int
    sequence: int
    first: int
    number: int
    until: int = 0
    seat: int = 0

    def pack(self) -> bytes:
        """Return its value."""
        first = self.first.to_bytes(MESSAGE_TAIL_BYTES, "big")
        value = _VALUE.pack(self.generation, self.sequence, first, self.number)
        if self.until:
            value += self.until.to_bytes(MESSAGE_TAIL_BYTES, "big")
            if self.seat:
                value += bytes([self.seat])
        return value

    @classmethod
    def parse(cls, value: bytes) -> LastRequest:
        """Read a value.

        Raises:
            FormatError: it is none.
        """
        until, seat = value[_VALUE.size :][:MESSAGE_TAIL_BYTES], value[_VALUE.size + MESSAGE_TAIL_BYTES :]
        if len(value) < _VALUE.size or len(until) not in (0, MESSAGE_TAIL_BYTES) or len(seat) > 1:
            raise FormatError(f"a producer's last request has {len(value)} bytes, not {_VALUE.size}")
        generation, sequence, first, number = _VALUE.unpack(value[: _VALUE.size])
        return cls(
            generation,
            sequence,
            int.from_bytes(first, "big"),
            number,
            int.from_bytes(until, "big"),
            int.from_bytes(seat, "big"),
        )

    @property
    def stop(self) -> int:
        """Return the first position behind all that it announces."""
        return max(self.first + self.number, self.until)

    def announces(self, generation: int, sequence: int) -> bool:
        """Return whether it is also for a request with a higher number."""
        return self.until > 0 and generation == self.generation and 0 < sequence - self.sequence < _PLACES

    def next(self, generation: int, sequence: int, at: int, number: int) -> LastRequest | None:
        """Return a request behind it, from a position on; None: it is not announced by this."""
        seat, until = self.seat, self.until
        if not self.announces(generation, sequence) or number > (SEATED_ROWS if seat else 1 << _PLACE_BITS):
            return None
        first = placed(seat, sequence, at)
        return _request((generation, sequence, first, number, 0, 0)) if first + number <= until else None

    def found(self, positions: Sequence[int]) -> LastRequest:
        """Return the last one that was written, by the positions of the rows that there are behind it."""
        if self.seat:
            positions = [at for at in positions if (at >> _PLACE_BITS) % SEATS == self.seat - 1]
        if not positions:
            return self
        bits = _place_bits(self.seat)
        place = positions[-1] >> bits
        sequence = self.sequence + (place - self.sequence) % _PLACES
        number = sum(at >> bits == place for at in positions)
        return LastRequest(self.generation, sequence, place << bits, number)


#: One of its parts, without a call in between.
_request = partial(tuple.__new__, LastRequest)


def placed(seat: int, sequence: int, at: int) -> int:
    """Return where a request starts that has a place, from a position on.

    Args:
        seat: of its producer; 0: it is alone.
    """
    place = sequence % _PLACES << (_SEATED_BITS if seat else _PLACE_BITS)
    if seat:
        place += seat - 1 << _PLACE_BITS
    taken = at & _TAKEN
    first = at - taken + place
    return first if taken <= place else first + position(1)


def _place_bits(seat: int) -> int:
    return _SEATED_BITS if seat else _PLACE_BITS


@dataclass(slots=True)
class RememberedRequest:
    """A last request, and whether its rows exist.

    Attributes:
        value: the request as it is written down, or an earlier one that announces it.
        is_written: whether its rows are known to exist.
        since: the first position of the rows by which it was found; None: it was not searched for.
    """

    value: bytes
    request: LastRequest
    is_written: bool = False
    since: int | None = None
