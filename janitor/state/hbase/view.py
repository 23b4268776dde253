"""The values of the state in HBase, as they are at one moment and as a transaction has changed them.

They are packed, so that no caller gets an object that another one changes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from janitor.state.hbase.root import INLINE_BYTES, Root

#: Blocks are rows that begin so; then comes the version of the root that named them first.
BLOCK = b"b"
#: Values that begin so are bytes and no JSON, and of those of closed ids there may be many.
BINARY, CLOSED = "ids.", "ids.closed."
#: Bytes of one row of a block.
_PART_BYTES = 1 << 20


class BlockGone(Exception):
    """A block is not there any more: the root that named it has been replaced."""


class View(Protocol):
    """The values of one moment."""

    def value(self, name: str) -> bytes | None:
        """A packed value; None without one."""
        ...

    def names(self) -> set[str]:
        """The names of all values."""
        ...

    def stamp(self, name: str) -> tuple[str, ...] | None:
        """Equal where a block's content is; None where that cannot be told."""
        ...


@dataclass
class Committed:
    """The values that hang on a root."""

    root: Root
    load: Callable[[str, Sequence[str]], bytes]

    def value(self, name: str) -> bytes | None:
        if name in self.root.values:
            return packed(self.root.values[name])
        keys = self.root.blocks.get(name)
        return None if keys is None else self.load(name, keys)

    def names(self) -> set[str]:
        return {*self.root.values, *self.root.blocks}

    def stamp(self, name: str) -> tuple[str, ...] | None:
        return self.root.blocks.get(name)


@dataclass
class Changes:
    """The values as a transaction sees them.

    Attributes:
        values: changed ones; None: removed.
        rows: of history; None: removed.
        touched: names that were read or changed.
    """

    base: Committed
    values: dict[str, bytes | None] = field(default_factory=dict)
    rows: dict[bytes, bytes | None] = field(default_factory=dict)
    touched: set[str] = field(default_factory=set)

    def value(self, name: str) -> bytes | None:
        self.touched.add(name)
        return self.values[name] if name in self.values else self.base.value(name)

    def names(self) -> set[str]:
        changed = {name for name, value in self.values.items() if value is not None}
        return self.base.names() - self.values.keys() | changed

    def stamp(self, name: str) -> tuple[str, ...] | None:
        return None if name in self.values else self.base.stamp(name)

    def copy(self) -> Changes:
        return Changes(self.base, dict(self.values), dict(self.rows), set(self.touched))


def packed(value: Any) -> bytes:
    """A JSON value as it is kept."""
    return json.dumps(value, separators=(",", ":")).encode()


def with_changes(base: Root, changed: Mapping[str, bytes | None], token: str) -> tuple[Root, dict[bytes, bytes]]:
    """The root with changed values, and the rows of its new blocks."""
    values, blocks = dict(base.values), dict(base.blocks)
    rows: dict[bytes, bytes] = {}
    begin = BLOCK + (base.version + 1).to_bytes(8, "big") + bytes.fromhex(token)
    for name, value in changed.items():
        values.pop(name, None)
        blocks.pop(name, None)
        if value is None:
            continue
        if len(value) <= INLINE_BYTES and not name.startswith(BINARY):
            values[name] = json.loads(value)
            continue
        stored = zlib.compress(value, 1)
        parts = [stored[at : at + _PART_BYTES] for at in range(0, len(stored), _PART_BYTES)]
        new = {begin + (len(rows) + number).to_bytes(4, "big"): part for number, part in enumerate(parts)}
        blocks[name] = tuple(key.hex() for key in new)
        rows |= new
    return base.next(token, values=values, blocks=blocks), rows
