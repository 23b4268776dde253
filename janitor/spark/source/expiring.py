"""Messages with a ttl of their own (rule L6), by the page: what a row does not say itself stands beside the store.

It is asked after a page was read, since a server writes it down before the message: so of no message that was read
it is missing. In HBase what is written down carries no salt, so a task also reads that of the other salts' messages.
"""

from __future__ import annotations

import numpy as np

from janitor.spark.columns import NEVER_MS, Longs
from tms_core.tables.side import Expiries

#: Moments read at once.
_ROWS = 8192


def expiring(expiries: Expiries | None, keys: list[bytes]) -> Longs | None:
    """When a ttl of its own takes each message; ``NEVER_MS`` without one.

    Args:
        expiries: None: there are none.
        keys: of messages, in key order.

    Returns:
        None where no message has one.

    Raises:
        StoreError: what is beside the store could not be read.
    """
    found: dict[bytes, int] = {}
    start = keys[0] if expiries is not None and keys else None
    while expiries is not None and start is not None:
        page = expiries.between(start, keys[-1] + b"\x00", _ROWS)
        found.update(page.items)
        start = page.resume
    if not found:
        return None
    return np.array([min(found.get(key, NEVER_MS), NEVER_MS) for key in keys], dtype=np.int64)
