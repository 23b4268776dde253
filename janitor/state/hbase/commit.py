"""How the state in HBase is committed, and which process may commit.

First the new blocks and rows of history are written, then the root is replaced, then goes what no longer counts. So
a process that dies in between leaves blocks that do not count, which the next one removes, or a page of history
without its effect; never an effect without its history.

No process waits for another: the one that replaces the root first has committed. The other one writes again on the
new root when nothing it has read or changed is different there, and otherwise has lost the race.
"""

from __future__ import annotations

import secrets
import zlib
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import RLock

from janitor.state.hbase.root import Root
from janitor.state.hbase.table import JanitorTable
from janitor.state.hbase.view import BLOCK, CLOSED, BlockGone, Changes, Committed, with_changes
from tms_core.errors import StateBusy, StateError, StateUnavailable
from tms_core.tables.lease import LeaseRecord

ROOT = b"root"
#: How often something is tried that another process came before.
ATTEMPTS = 5
_TOKEN_BYTES = 6
#: What was learnt about the store: only who has the lease, or never had one, may say so (rules S4 and S12).
_FENCED = ("store", "anchor", "frontiers", "ids", "evidence", "claim", "thorough", "strikes")
#: Rows of history that have the same key when they are written again; all others are written once.
_RENEWED = (b"r", b"q")
#: What a refused process can do.
_AGAIN = "Nothing was changed; do it again."


class LostRace(StateBusy):
    """Another process has changed what a transaction read or changed."""


class Commits:
    """Commits changes by replacing the root.

    Args:
        table: where it is.
    """

    def __init__(self, table: JanitorTable) -> None:
        self._table = table
        #: Held while the root is replaced, so that our own lease that is renewed meanwhile is not taken for another's.
        self._replacing = RLock()
        self._mine: bytes | None = None
        self._tidy = False
        #: The blocks last read, as they are stored, by name.
        self._read: dict[str, tuple[tuple[str, ...], bytes]] = {}

    def swap_lease(self, expected: bytes | None, value: bytes) -> bool:
        """Change the lease if it is still as expected; from then on this process commits only while it is its own."""
        with self._replacing:
            for _ in range(ATTEMPTS):
                root = self.root()
                if root.lease != expected:
                    return False
                token = secrets.token_hex(_TOKEN_BYTES)
                if self._replace(root, root.next(token, lease=value)):
                    record = LeaseRecord.parse(value)
                    self._mine = value if record is not None and record.holder else None
                    return True
        raise crowded(self._table.name)

    def root(self) -> Root:
        """The root as it is now."""
        return Root.parse(self._table.get(ROOT), self._table.name)

    def present(self) -> Committed:
        """The values that count now."""
        return Committed(self.root(), self._load)

    def _load(self, name: str, keys: Sequence[str]) -> bytes:
        known, stored = self._read.get(name, ((), b""))
        if known != keys:
            parts = self._table.get_many([bytes.fromhex(key) for key in keys])
            if len(parts) < len(keys):
                raise BlockGone
            stored = b"".join(parts[bytes.fromhex(key)] for key in keys)
            self._remember(name, keys, stored)
        return zlib.decompress(stored)

    def _remember(self, name: str, keys: Sequence[str], stored: bytes) -> None:
        if not name.startswith(CLOSED):
            self._read[name] = (tuple(keys), stored)

    def commit(self, changes: Changes) -> None:
        """Write what a transaction has changed.

        Raises:
            LostRace: another process has changed what it read or changed; nothing is written.
            StateBusy: another process has the lease; nothing is written.
            StateError: HBase could not do it, or it is not known whether it did.
        """
        if not changes.values and not changes.rows:
            return
        history = {key: value for key, value in changes.rows.items() if value is not None}
        base, in_doubt = changes.base.root, False
        try:
            self._table.put(history.items())
            for _ in range(ATTEMPTS):
                with self._replacing:
                    if self._is_fenced_off(base, changes):
                        base = self._rebased(base, changes)
                    root, blocks = with_changes(base, changes.values, secrets.token_hex(_TOKEN_BYTES))
                    self._table.put(blocks.items())
                    in_doubt = True
                    done = self._replace(base, root)
                    in_doubt = False
                if done:
                    break
                self._table.delete(blocks)
                base = self._rebased(base, changes)
            else:
                raise crowded(self._table.name)
        except StateError:
            if not in_doubt:
                with suppress(StateError):
                    self._table.delete(key for key in history if not key.startswith(_RENEWED))
            raise
        for name in changes.values.keys() & root.blocks.keys():
            keys = root.blocks[name]
            self._remember(name, keys, b"".join(blocks[bytes.fromhex(key)] for key in keys))
        self._remove_what_went(base, root, [key for key, value in changes.rows.items() if value is None])

    def _is_fenced_off(self, root: Root, changes: Changes) -> bool:
        """Whether this process says what only a holder of the lease may say, and the root shows another one."""
        fenced = any(name.partition(".")[0] in _FENCED for name in changes.values)
        return fenced and self._mine is not None and root.lease != self._mine

    def _rebased(self, base: Root, changes: Changes) -> Root:
        """The present root, on which the changes may be written as they are.

        Raises:
            LostRace: they rest on what is different there.
            StateBusy: another process has the lease.
        """
        present = self.root()
        if self._is_fenced_off(present, changes):
            record = LeaseRecord.parse(present.lease)
            raise StateBusy(
                f"{self._table.name}: {record.holder if record and record.holder else 'no process'} has the lease "
                "now, so this process may not write its state any more.",
                "The next holder goes on from there.",
            )
        if any(present.entry(name) != base.entry(name) for name in changes.touched):
            raise lost(self._table.name)
        return present

    def _replace(self, base: Root, root: Root) -> bool:
        """Replace the root; returns whether it was.

        Raises:
            StateUnavailable: that cannot be told.
        """
        done, sure = self._table.swap(ROOT, base.packed, root.packed)
        if done or sure:
            return done
        present = self.root()
        if root.recent[-1] in present.recent:
            return True
        if present.version - base.version > len(present.recent):
            raise StateUnavailable(
                f"The connection to HBase broke while {self._table.name} was written, and others have written since.",
                "See what is there before it is done again.",
            )
        return False

    def _remove_what_went(self, base: Root, root: Root, rows: Iterable[bytes]) -> None:
        """Delete what does not count any more. What is left where that fails does no harm, and the next one tries."""
        went = [*rows, *map(bytes.fromhex, base.named() - root.named())]
        tidy, self._tidy = self._tidy, False
        with suppress(StateError):
            if not tidy:
                # What processes have left that died before they replaced the root; none can be of its version any more.
                named, end = root.named(), BLOCK + (root.version + 1).to_bytes(8, "big")
                went += [key for key, _ in self._table.scan(BLOCK, end, keys_only=True) if key.hex() not in named]
            self._table.delete(dict.fromkeys(went))
            self._tidy = True


def lost(where: str) -> LostRace:
    """The error for a transaction that read values which are different now."""
    return LostRace(f"{where} was changed by another process at this moment.", _AGAIN)


def crowded(where: str) -> StateBusy:
    """The error for a transaction that other processes overtook too often."""
    return StateBusy(f"{where} is being written by other processes all the time.", _AGAIN)
