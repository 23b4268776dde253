"""Removal of proven ids from the transaction manager's invalid list (invariant S4).

The invalid list is part of every transaction, and only the janitor can prove that an id may leave it. Afterwards, every
remaining row with that id is readable for good. Therefore a boundary alone is not enough:

* All users of the transaction system share the list, and this janitor knows the boundary of one participant only. If
  the settings name other participants, no id is removed.
* Only single ids are removed, never all ids of a time range: ids on the manager's present list that a full pass has
  closed and that are within the boundary.
* Before the first removal, an audit reads every transactional row again. If a row refutes the boundary, the boundary is
  withdrawn and no id is removed.

A failure here does not affect the deletions of the run; the next run tries again.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Collection
from itertools import islice

from janitor import boundary
from janitor.inspect.rows import Audit, Heartbeat
from janitor.inspect.rows import audit as read_all
from janitor.run import guards, passes
from janitor.run.conclude import with_last_snapshot
from janitor.run.prepare import Deps, Feedback, Truncator, boundary_in_force, obstacles
from janitor.state.base import ProvenBoundary
from janitor.state.figures import GuardNote
from janitor.state.records import is_among
from janitor.sweep.executor import Permission
from janitor.sweep.outcome import Outcome
from janitor.sweep.run import Preparation, Run
from tms_core.errors import Interrupted, TmsError

#: The participant of the transaction system whose rows this janitor reads.
MESSAGING = "messaging"
#: The number of ids in a request, small enough that transactions do not wait long for the manager's lock.
BATCH_IDS = 10_000

logger = logging.getLogger(__name__)


def reason_to_withhold(participants: Collection[str]) -> str:
    """Return the reason why no id is removed with these participants; empty if ids may be removed."""
    others = sorted(set(participants) - {MESSAGING})
    if not others:
        return ""
    return (
        f"no transaction is removed from the invalid list, because janitor.boundary.participants names "
        f"{', '.join(others)}, whose boundary this janitor does not know"
    )


def proven_ids(listed: array[int], closed: array[int], bound: int) -> array[int]:
    """Return the ids of an invalid list that no row has or can get.

    Args:
        listed: the list, ascending.
        closed: ids whose transactions can no longer publish, ascending (``State.known_ids``).
        bound: the proven boundary of the store.
    """
    within = islice(listed, bisect_right(listed, bound))
    return array("q", (pointer for pointer in within if is_among(closed, pointer)))


def remove_proven_ids(
    deps: Deps, receiver: Feedback, run: Run, outcome: Outcome, permission: Permission, heartbeat: Heartbeat
) -> None:
    """Remove the proven ids of a run from the invalid list; add notes to its outcome.

    Args:
        receiver: the transaction manager and its participants.
        run: the run, after its conclusion; if it did not cover every topic, no id is removed.
        permission: checked before each step.
        heartbeat: called with the number of rows that the audit has read.

    Raises:
        Interrupted: the run is over; removed ids stay removed.
    """
    if reason := reason_to_withhold(receiver.participants):
        outcome.notes.append(GuardNote("feedback", False, reason))
        return
    usable = run.ready.tx.usable
    proven = boundary_in_force(deps, run.ready) if passes.is_complete(run, outcome) else None
    if proven is None or usable is None:
        return
    try:
        closed = deps.state.known_ids(deps.clock.now_ms(), deps.terms.lifetime.window_end_ms(0)).closed
        # Usually nothing is proven; then the manager gets no request.
        if proven_ids(usable.invalid, closed, proven.bound):
            _remove_proven_ids(deps, receiver.manager, proven, closed, run, outcome, permission, heartbeat)
    except Interrupted:
        raise
    except TmsError as error:
        message = f"proven transactions could not be removed from the invalid list: {error.message}"
        outcome.notes.append(GuardNote("feedback", False, message))


def _remove_proven_ids(
    deps: Deps,
    manager: Truncator,
    proven: ProvenBoundary,
    closed: array[int],
    run: Run,
    outcome: Outcome,
    permission: Permission,
    heartbeat: Heartbeat,
) -> None:
    # S4: use the manager's present list, not the run's: a client may have rolled back and left the list since.
    present, ready = manager.latest().snapshot, run.ready
    note = guards.check_transaction_system(with_last_snapshot(ready.record, ready.tx), present)
    if note is not None:
        reason = f"no transaction is removed from the invalid list: {note.message}"
        outcome.notes.append(GuardNote("feedback", False, reason))
        return
    ids = proven_ids(present.invalid, closed, proven.bound)
    if not ids or obstacles(deps, ready):
        return
    # S4: audit before the first id leaves the list. Afterwards no reader and no audit can recognize a row of that id.
    found = audit(deps, ready, heartbeat)
    # Another boundary was proven since, so the audit does not apply to this one.
    if found.bound != proven.bound:
        return
    if found.refuted:
        # S12: the next holder of the lease may have proven another boundary.
        if _is_permitted(permission):
            boundary.refute(deps.state, found.refutation, ready.now.wall_ms)
            outcome.errors.append(found.refutation)
        return
    for start in range(0, len(ids), BATCH_IDS):
        # S12: before each batch, as before each deletion.
        if not _is_permitted(permission):
            return
        batch = ids[start : start + BATCH_IDS]
        manager.truncate_invalid(batch)
        outcome.truncated += len(batch)


def _is_permitted(permission: Permission) -> bool:
    if not permission.pauses():
        return True
    logger.info("the removal of transactions from the invalid list stopped, because a topic was paused")
    return False


def audit(deps: Deps, ready: Preparation, heartbeat: Heartbeat) -> Audit:
    """Read every transactional row, and compare it with the boundary in force.

    Raises:
        StoreError, StateError: the store or the state could not be read.
    """
    usable, proven = ready.tx.usable, boundary_in_force(deps, ready)
    known = deps.state.known_ids(ready.now.wall_ms, deps.terms.lifetime.window_end_ms(0))
    return read_all(
        # Read each part separately: a key may exist under two salts, and the whole table shows it once.
        [part.message for part in deps.store.parts()],
        proven.bound if proven else None,
        lambda pointer: pointer in known or (usable is not None and usable.is_invalid(pointer)),
        heartbeat,
    )
