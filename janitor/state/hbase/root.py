"""The root of the state in HBase: one cell, whose replacement is the commit.

HBase changes one row at a time, and Thrift 1 compares one cell and writes one cell. So everything that has to be
written together hangs on one cell: small values are in it, large ones are blocks, rows of their own that never change
and that only count while the root names them. A transaction writes new blocks, which no reader sees, and then replaces
the root if it is still the one it started with. That is all or nothing, whenever the process dies.

The lease is in it too. Thereby a holder that was stopped, and woken when another one had the lease, cannot replace the
root by anything learnt under its own: not in the instant after it has looked either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tms_core.errors import StateError

LAYOUT = 2
#: Packed values up to this many bytes are in the root itself.
INLINE_BYTES = 256
#: How many commits back the root can tell whether a certain one was among them.
_RECENT = 16


@dataclass(frozen=True, slots=True)
class Root:
    """What the root cell holds.

    Attributes:
        version: counts up with every change.
        recent: random names of the last changes, the newest last.
        lease: the lease as its holder wrote it.
        values: small values by name.
        blocks: keys of the rows, in hex, that hold a large value together, by name.
        packed: the cell itself; empty when there is none yet.
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
            StateError: it is not one of ours, or has another layout.
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
            held = None if lease is None else lease.encode(errors="surrogateescape")
            return cls(found["version"], tuple(found["recent"]), held, found["values"], blocks, packed)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise StateError(
                f"The root of {where} cannot be read: {error!r}.",
                "Another program has written into the table. Drop the table; the janitor then deletes nothing until "
                "the store is adopted.",
            ) from error

    def next(self, token: str, **changes: Any) -> Root:
        """Return the root that shall replace this one; ``changes`` are new attributes."""
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
        """Return the value or blocks under a name, to be compared with those of another root."""
        return self.values.get(name), self.blocks.get(name)

    def named(self) -> set[str]:
        """Keys, in hex, of all blocks that count."""
        return {key for keys in self.blocks.values() for key in keys}
