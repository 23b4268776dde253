"""Commits of the state in HBase.

A commit writes new blocks and rows of history, then replaces the root, then deletes blocks that the new root does not
name. A process that dies in between leaves unnamed blocks, which the next process deletes, or rows of history without
their values. It never leaves values without their history.

Processes do not wait for each other. The first process that replaces the root has committed. The other process repeats
its writes on the new root if all values that it has read or changed are the same there; otherwise it has a conflict.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import RLock

from janitor.state.documents import (
    ATTEMPTS,
    Changes,
    ValueGone,
    View,
    damage_as_error,
    lost_race,
    pack_value,
    too_many_races,
)
from janitor.state.hbase.root import INLINE_BYTES, Root
from janitor.state.hbase.table import JanitorTable
from tms_core.errors import StateBusy, StateError, StateUnavailable
from tms_core.tables.lease import LeaseRecord

ROOT = b"root"
#: The prefix of the keys of blocks, followed by the version of the first root that names the block.
BLOCK = b"b"
#: The name prefixes of binary values, and of closed ids, which may be large.
_BINARY, _CLOSED = "ids.", "ids.closed."
#: The maximum size of a row of a block, in bytes.
_PART_BYTES = 1 << 20
_TOKEN_BYTES = 6
#: Values that describe the store: only the holder of the lease writes them, if there is a lease (S4, S12).
_FENCED = ("store", "anchor", "frontiers", "ids", "evidence", "claim", "full_pass", "strikes")
#: Key prefixes of rows of history that may be rewritten; all other rows are written once.
_REWRITABLE = (b"r", b"o", b"q")


@dataclass
class CommittedState:
    """The values of a root."""

    root: Root
    load: Callable[[str, Sequence[str]], bytes]

    def value(self, name: str) -> bytes | None:
        if name in self.root.values:
            return pack_value(self.root.values[name])
        keys = self.root.blocks.get(name)
        return None if keys is None else self.load(name, keys)

    def names(self) -> set[str]:
        return {*self.root.values, *self.root.blocks}


class HBaseDocuments:
    """The state's documents in a table; the replacement of the root commits changes."""

    #: Leaves are large, because the root names each leaf.
    leaf_ids = 16_384

    def __init__(self, table: JanitorTable) -> None:
        self.table = self.loose = table
        self.name = table.name
        self.place = f"table {table.name}"
        self.close = table.close
        self.clock_ms = table.server_ms
        #: Held during a replacement of the root, so that a renewal of the own lease does not look like another lease.
        self._root_lock = RLock()
        self._own_lease: bytes | None = None
        self._has_removed_blocks = False
        #: A cache of the last read blocks, as stored, by name.
        self._read: dict[str, tuple[tuple[str, ...], bytes]] = {}

    @property
    def history(self) -> HBaseDocuments:
        return self

    def get_many(self, keys: Sequence[bytes]) -> dict[bytes, bytes]:
        """Return the existing rows of history."""
        return {key: _decompress(key, value) for key, value in self.table.get_many(keys).items()}

    def scan(self, start: bytes, stop: bytes, *, keys_only: bool = False) -> Iterator[tuple[bytes, bytes]]:
        """Yield rows of history of ``[start, stop)``."""
        for key, value in self.table.scan(start, stop, keys_only=keys_only):
            yield key, value if keys_only else _decompress(key, value)

    @contextmanager
    def present(self) -> Iterator[View]:
        yield self._present()

    @contextmanager
    def transaction(self) -> Iterator[Changes]:
        base = self._present()
        changes = Changes(base)
        yield changes
        self._commit(base.root, changes)

    def lease(self) -> bytes | None:
        return self.root().lease

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Write the lease if it still has the expected value; then this process commits only while it has the lease."""
        with self._root_lock:
            for _ in range(ATTEMPTS):
                root = self.root()
                if root.lease != expected:
                    return False
                token = secrets.token_hex(_TOKEN_BYTES)
                if self._replace(root, root.next(token, lease=value)):
                    record = LeaseRecord.parse(value)
                    self._own_lease = value if record is not None and record.holder else None
                    return True
        raise too_many_races(self.name)

    def root(self) -> Root:
        """Read the root."""
        return Root.parse(self.table.get(ROOT), self.name)

    def _present(self) -> CommittedState:
        root = self.root()
        for name in list(self._read):
            if name not in root.blocks:
                # Another process has replaced the value and deleted its blocks.
                self._read.pop(name, None)
        return CommittedState(root, self._load)

    def _load(self, name: str, keys: Sequence[str]) -> bytes:
        known, stored = self._read.get(name, ((), b""))
        if known != keys:
            parts = self.table.get_many([bytes.fromhex(key) for key in keys])
            if len(parts) < len(keys):
                raise ValueGone
            stored = b"".join(parts[bytes.fromhex(key)] for key in keys)
            self._remember(name, keys, stored)
        with damage_as_error(name):
            return zlib.decompress(stored)

    def _remember(self, name: str, keys: Sequence[str], stored: bytes) -> None:
        if not name.startswith(_CLOSED):
            self._read[name] = (tuple(keys), stored)

    def _commit(self, base: Root, changes: Changes) -> None:
        """Write the changes of a transaction.

        Raises:
            LostRace: another process has changed data that was read or changed; nothing is written.
            StateBusy: another process has the lease; nothing is written.
            StateError: HBase failed, or the outcome is unknown.
        """
        if not changes.values and not changes.rows:
            return
        history = {key: zlib.compress(value, 1) for key, value in changes.rows.items() if value is not None}
        in_doubt = False
        try:
            # Write rows and blocks before the root that names them: readers of the old root do not need them, and a
            # process that dies in between leaves only unnamed blocks, which the next commit deletes.
            self.table.put(history.items())
            for _ in range(ATTEMPTS):
                with self._root_lock:
                    # S12: the root contains the lease, so its compare-and-set also checks the lease.
                    if self._is_fenced_off(base, changes):
                        base = self._rebase(base, changes)
                    root, blocks = with_changes(base, changes.values, secrets.token_hex(_TOKEN_BYTES))
                    self.table.put(blocks.items())
                    # After an error from here on, the root may name the rows, so they must not be deleted.
                    in_doubt = True
                    done = self._replace(base, root)
                    in_doubt = False
                if done:
                    break
                # No root names these blocks; the next attempt writes blocks of a newer version.
                self.table.delete(blocks)
                base = self._rebase(base, changes)
            else:
                raise too_many_races(self.name)
        except StateError:
            if not in_doubt:
                with suppress(StateError):
                    self.table.delete(key for key in history if not key.startswith(_REWRITABLE))
            raise
        for name in changes.values.keys() & root.blocks.keys():
            keys = root.blocks[name]
            self._remember(name, keys, b"".join(blocks[bytes.fromhex(key)] for key in keys))
        deletions = [key for key, value in changes.rows.items() if value is None]
        self._remove_unnamed(base, root, [*deletions, *changes.loose])

    def _is_fenced_off(self, root: Root, changes: Changes) -> bool:
        """Return whether the changes need the lease, and another process has it."""
        fenced = any(name.partition(".")[0] in _FENCED for name in changes.values)
        return fenced and self._own_lease is not None and root.lease != self._own_lease

    def _rebase(self, base: Root, changes: Changes) -> Root:
        """Return the present root, if the changes can be applied to it.

        Raises:
            LostRace: another process has changed values that the changes depend on.
            StateBusy: another process has the lease.
        """
        present = self.root()
        if self._is_fenced_off(present, changes):
            record = LeaseRecord.parse(present.lease)
            raise StateBusy(
                f"{self.name}: {record.holder if record and record.holder else 'no process'} has the lease "
                "now, so this process may no longer write the state.",
                "The holder of the lease continues the work.",
            )
        if any(present.entry(name) != base.entry(name) for name in changes.touched):
            raise lost_race(self.name)
        return present

    def _replace(self, base: Root, root: Root) -> bool:
        """Replace the root; return whether it was replaced.

        Raises:
            StateUnavailable: the outcome is unknown.
        """
        # Readers see only this step: it makes all writes of the commit visible at once.
        done, sure = self.table.swap(ROOT, base.packed, root.packed)
        if done or sure:
            return done
        # The response was lost. If the root or a later root has the random token of this commit, it succeeded.
        present = self.root()
        if root.recent[-1] in present.recent:
            return True
        if present.version - base.version > len(present.recent):
            raise StateUnavailable(
                f"The connection to HBase broke while {self.name} was written, and other processes have written since.",
                "Check whether the change took effect before you repeat it.",
            )
        return False

    def _remove_unnamed(self, base: Root, root: Root, rows: Iterable[bytes]) -> None:
        """Delete blocks that the root does not name, and rows. A failure is harmless; the next commit tries again."""
        keys = [*rows, *map(bytes.fromhex, base.named() - root.named())]
        has_removed_blocks, self._has_removed_blocks = self._has_removed_blocks, False
        with suppress(StateError):
            if not has_removed_blocks:
                # Blocks of processes that died before they replaced the root. No later commit has this version.
                named, end = root.named(), BLOCK + (root.version + 1).to_bytes(8, "big")
                keys += [key for key, _ in self.table.scan(BLOCK, end, keys_only=True) if key.hex() not in named]
            self.table.delete(dict.fromkeys(keys))
            self._has_removed_blocks = True


def _decompress(key: bytes, value: bytes) -> bytes:
    with damage_as_error(key):
        return zlib.decompress(value)


def with_changes(base: Root, changed: Mapping[str, bytes | None], token: str) -> tuple[Root, dict[bytes, bytes]]:
    """Return the root with changed values, and the rows of its new blocks."""
    values, blocks = dict(base.values), dict(base.blocks)
    rows: dict[bytes, bytes] = {}
    begin = BLOCK + (base.version + 1).to_bytes(8, "big") + bytes.fromhex(token)
    for name, value in changed.items():
        values.pop(name, None)
        blocks.pop(name, None)
        if value is None:
            continue
        if len(value) <= INLINE_BYTES and not name.startswith(_BINARY):
            values[name] = json.loads(value)
            continue
        stored = zlib.compress(value, 1)
        parts = [stored[at : at + _PART_BYTES] for at in range(0, len(stored), _PART_BYTES)]
        new = {begin + (len(rows) + number).to_bytes(4, "big"): part for number, part in enumerate(parts)}
        blocks[name] = tuple(key.hex() for key in new)
        rows |= new
    return base.next(token, values=values, blocks=blocks), rows
