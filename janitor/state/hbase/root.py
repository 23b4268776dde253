"""The root of the state in HBase: one cell whose replacement is the commit.

HBase changes one row at a time, and Thrift 1 compares and writes one cell. Therefore all values that must be written
together depend on one cell. It contains small values. Large values are blocks: separate rows that never change, and
that count only while the root names them. A transaction writes new blocks, which are invisible, and then replaces the
root by compare-and-set. That is all or nothing, whenever the process dies.

The root contains the lease, too. Therefore a suspended holder that wakes after another process has taken the lease
cannot replace the root, not even right after its last check.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tms_core.errors import StateError

LAYOUT = 5
#: Packed values up to this many bytes are in the root itself.
INLINE_BYTES = 256
#: The number of last commits that the root remembers.
_RECENT = 16


@dataclass(frozen=True, slots=True)
class Root:
    """The contents of the root cell.

    Attributes:
        version: incremented by every change.
        recent: random names of the last changes, the newest last.
        lease: the lease record as its holder wrote it.
        values: small values by name.
        blocks: by name, the keys (in hex) of the rows that together contain a large value.
        packed: the cell itself; empty: the cell does not exist.
    """

    version: int = 0
    recent: tuple[str, ...] = ()
    lease: bytes | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    blocks: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    packed: bytes = b""

    @classmethod
    def parse(cls, packed: bytes | None, where: str) -> Root:
        """Read the cell.

        Args:
            where: the table, for messages.

        Raises:
            StateError: it is not a root of a janitor, or has another layout.
        """
        if packed is None:
            return cls()
        try:
            found = json.loads(packed)
            if found["layout"] > LAYOUT:
                raise StateError(
                    f"{where} was written by a newer janitor (layout {found['layout']}; this one knows {LAYOUT}).",
                    "Use that version.",
                )
            if found["layout"] != LAYOUT:
                raise StateError(
                    f"{where} has layout {found['layout']}, which no released janitor wrote (this one knows {LAYOUT}).",
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
