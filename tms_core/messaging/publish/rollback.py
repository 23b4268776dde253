"""Rollback of rows of the message table by their write pointer."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from tms_core.messaging.ids import tail
from tms_core.rowkey import GENERATION_BYTES, generation_prefix
from tms_core.tables.base import CELLS, MessageTable, pages
from tms_core.topic import TopicMetadata

#: The maximum number of cells in one read.
_CELLS = 1000


def roll_back(table: MessageTable, prefix: bytes, first: int, last: int, pointer: int) -> int:
    """Invert a pointer in the rows between two positions, inclusive; rows with other pointers stay unchanged.

    Returns:
        The number of inverted rows.

    Raises:
        StoreError: the store failed; some rows may be inverted.
    """
    done = 0
    for page in pages(partial(table.read, CELLS), prefix + tail(first), prefix + tail(last) + b"\0", _CELLS):
        cells = [cell for cell in page.items if cell.pointer == pointer]
        if cells:
            done += sum(table.invert(cells, page.origin))
    return done


def earlier_generations(table: MessageTable, topic: TopicMetadata) -> Iterator[bytes]:
    """Yield the key prefix of each old generation of a topic that has rows, with one read per generation.

    Raises:
        StoreError: the store failed.
    """
    prefix = topic.topic.prefix
    start, stop = (generation_prefix(prefix, generation) for generation in (1, topic.generation))
    while start < stop and (key := table.first(start, stop)) is not None:
        # An unrecognized key may end inside the generation number.
        generation = int.from_bytes(key[len(prefix) : len(start)].ljust(GENERATION_BYTES, b"\0"), "big")
        yield generation_prefix(prefix, generation)
        start = generation_prefix(prefix, generation + 1)
