"""The root of the state in HBase: one cell whose replacement is the commit.

HBase changes one row atomically, and Thrift 1 compares and writes one cell. Therefore one cell, the root, decides about
all values. It contains small values. Large values are blocks: separate rows that never change and count only while the
root names them. A transaction writes new blocks, which are invisible, and then replaces the root by compare-and-set.
The change is atomic, whenever the process dies.

The root also contains the lease. Therefore a suspended holder that wakes after another process has acquired the lease
cannot replace the root, even right after its last check of the lease.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tms_core.errors import StateError

LAYOUT = 5
#: The maximum size of a packed value in the root itself, in bytes.
INLINE_BYTES = 256
#: The number of last commits whose tokens the root contains.
_RECENT = 16


@dataclass(frozen=True, slots=True)
class Root:
    """The contents of the root cell.

    Attributes:
        version: a number that each change increments.
        recent: the random tokens of the last changes, newest last.
        lease: the lease record as its holder wrote it.
        values: small values by name.
        blocks: the keys (in hex) of the rows of a large value, by name.
        packed: the stored cell; empty if it does not exist.
    """

    version: int = 0
    recent: tuple[str, ...] = ()
    lease: bytes | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: bytes = b""

    @classmethod
    def parse(cls, packed: bytes | None, where: str) -> Root:
        """Parse the cell.

        Args:
            where: the table, for messages.

        Raises:
            StateError: the cell is not a root of a janitor, or has another layout.
        """
        if packed is None:
            return cls()
        try:
            found = json.loads(packed)
            if found["layout"] > LAYOUT:
                raise StateError(
                    f"{where} was written by a newer janitor (layout {found['layout']}; this version knows {LAYOUT}).",
                    "Use the newer version.",
                )
            if found["layout"] != LAYOUT:
                raise StateError(
                    f"{where} has layout {found['layout']}, which no released janitor wrote (this version knows "
                    f"{LAYOUT}).",
                    "Drop the table; the janitor then deletes nothing until the store is adopted.",
                )
            blocks = {name: tuple(keys) for name, keys in found["blocks"].items()}
            lease = found["lease"]
            lease_text = None if lease is None else lease.encode(errors="surrogateescape")
            return cls(found["version"], tuple(found["recent"]), lease_text, found["values"], blocks, packed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"The root of {where} cannot be read: {error!r}.",
                "Another program has written into the table. Drop the table; the janitor then deletes nothing until "
                "the store is adopted.",
            ) from error

    def next(self, token: str, **changes: Any) -> Root:
        """Return the next root; ``changes`` are its new attributes."""
        new = replace(self, version=self.version + 1, recent=(*self.recent, token)[-_RECENT:], **changes)
        lease = None if new.lease is None else new.lease.decode(errors="surrogateescape")
        content = {
            "layout": LAYOUT,
            "version": new.version,
            "recent": new.recent,
            "lease": lease,
            "values": new.values,
            "blocks": new.blocks,
        }
        return replace(new, packed=json.dumps(content, separators=(",", ":")).encode())

    def entry(self, name: str) -> Any:
        """Return the value or the blocks under a name, for a comparison with another root."""
        return self.values.get(name), self.blocks.get(name)

    def named(self) -> set[str]:
        """Return the keys, in hex, of all blocks that the root names."""
        return {key for keys in self.blocks.values() for key in keys}
