"""Where transactions have published that were begun before this process was.

From its start on a server notes what is published in transactions. What was published before is searched for, among so
many rows and no more: a server must not be late for a figure that people look at.
"""

from __future__ import annotations

from tms_core.messaging.ids import id_parts, position, tail
from tms_core.rowkey import MESSAGE_TAIL_BYTES, NEGATIVE, generation_prefix
from tms_core.tables.base import Reads
from tms_core.topic import living_topics
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.model import transaction_ms

#: How many rows are searched, and how many of them at once.
MOST_ROWS, PAGE_ROWS = 200_000, 2_000


def find_undecided(store: Reads, manager: TransactionManager, allowance_ms: int) -> None:
    """Tell the manager where its transactions in progress have published.

    Args:
        store: is only read.
        allowance_ms: how far the clocks of several machines differ.

    Raises:
        StoreError: the store could not be read.
    """
    began, left = manager.visibility().open_pointers, MOST_ROWS
    if not began:
        return
    first = tail(position(max(0, transaction_ms(min(began)) - allowance_ms)))
    for topic in living_topics(store.metadata.rows()):
        prefix = generation_prefix(topic.topic.prefix, topic.generation)
        start: bytes | None = prefix + first
        while start is not None and left > 0:
            page = store.message.cells(start, prefix + NEGATIVE, PAGE_ROWS)
            left, start = left - PAGE_ROWS, page.resume
            for cell in page.items:
                if cell.pointer in began and len(cell.key) == len(prefix) + MESSAGE_TAIL_BYTES:
                    publish_ms, _ = id_parts(int.from_bytes(cell.key[len(prefix) :], "big"))
                    manager.note_published(cell.pointer, str(topic.topic), publish_ms)


def may_have_undecided(store: Reads) -> bool:
    """Whether there may be messages that only a transaction manager's state can tell to be committed or not.

    Args:
        store: is only read.

    Returns:
        False: there is none with a write pointer. True also where there are more rows than are searched.

    Raises:
        StoreError: the store could not be read.
    """
    start: bytes | None = b""
    left = MOST_ROWS
    while start is not None and left > 0:
        page = store.message.cells(start, None, PAGE_ROWS)
        if any(cell.pointer > 0 for cell in page.items):
            return True
        left, start = left - PAGE_ROWS, page.resume
    return start is not None
