"""Handing what is proven clean back to the transaction manager, so that it may forget it (rule S4).

The list of invalid transactions rides on every transaction that begins, and only the janitor can say when an id
may leave it. Once it has left, every row that still carries it is readable for good. So a claim alone is not enough:

* the list is shared with everything that uses the same transactions, and this janitor knows the bound of one
  participant only; where the settings name others, nothing is handed over;
* what goes are single ids, never all of a time: those on the manager's list of this moment that a thorough pass has
  closed and that lie within the claim;
* before the first of them every transactional row is read again (the audit), and if one refutes the claim, that is
  withdrawn and nothing goes.

Whatever fails here, the sweep before it was done; the next run tries again.
"""

from __future__ import annotations

import logging
from array import array
from bisect import bisect_right
from collections.abc import Callable, Collection
from itertools import islice

from janitor.boundary import coverage as rounds
from janitor.inspect.rows import Audit
from janitor.report import GuardNote
from janitor.run import guards
from janitor.run.conclude import seen
from janitor.run.deps import Deps, Truncator
from janitor.run.passes import Pass
from janitor.state.base import Claim
from janitor.state.records import is_among
from janitor.sweep.permission import Withheld
from tms_core.errors import Interrupted, TmsError

#: The participant of the transaction system whose rows this janitor looks at.
OURS = "messaging"
#: Ids handed over at once: so few that no transaction waits long for the manager's lock, held while it takes them.
BATCH_IDS = 10_000

logger = logging.getLogger(__name__)


def withheld(participants: Collection[str]) -> str:
    """Why nothing is handed over where these take part in the transactions; empty when that is no reason."""
    others = sorted(set(participants) - {OURS})
    if not others:
        return ""
    return (
        f"janitor.boundary.participants names {', '.join(others)}, whose bound this janitor does not know, so nothing "
        "is taken off the invalid list"
    )


def proven(listed: array[int], closed: array[int], bound: int) -> array[int]:
    """The ids of an invalid list that have nothing left to hide.

    Args:
        listed: the list, ascending.
        closed: ids under which nothing can be published any more, ascending (``State.known_ids``).
        bound: up to where the store is proven clean.
    """
    within = islice(listed, bisect_right(listed, bound))
    return array("q", (pointer for pointer in within if is_among(closed, pointer)))


def hand_over(
    current: Pass,
    deps: Deps,
    claim: Claim | None,
    audit: Callable[[], Audit | None],
    permit: Callable[[], None],
) -> None:
    """Hand over what a run leaves proven; what is to be said of it is added to the run.

    Args:
        current: the run, after its conclusion.
        claim: what is claimed now; None: nothing, so nothing is handed over.
        audit: reads every transactional row; None: something stands in the way of any claim now.
        permit: asks whether the next step may be taken (``Permission.check_all``).

    Raises:
        Interrupted: the run is over; what was handed over is.
    """
    if deps.feedback is None:
        return
    if barred := withheld(deps.feedback.participants):
        current.notes.append(GuardNote("feedback", False, barred))
        return
    usable = current.ready.tx.usable
    if claim is None or usable is None:
        return
    try:
        closed = deps.state.known_ids(deps.clock.now_ms(), deps.terms.lifetime.window_end_ms(0)).closed
        # Mostly there is nothing, and then the manager is not asked.
        if proven(usable.invalid, closed, claim.bound):
            _hand_over(current, deps, deps.feedback.manager, claim, closed, audit, permit)
    except Interrupted:
        raise
    except Withheld:
        logger.info("something was paused, so nothing more is taken off the invalid list")
    except TmsError as error:
        message = f"not all that is proven clean was taken off the invalid list: {error.message}"
        current.notes.append(GuardNote("feedback", False, message))


def _hand_over(
    current: Pass,
    deps: Deps,
    manager: Truncator,
    claim: Claim,
    closed: array[int],
    audit: Callable[[], Audit | None],
    permit: Callable[[], None],
) -> None:
    present = manager.latest().snapshot
    note = guards.check_transaction_system(seen(current.ready.record, current.ready.tx), present)
    if note is not None:
        current.notes.append(GuardNote("feedback", False, f"nothing is taken off the invalid list: {note.message}"))
        return
    ids = proven(present.invalid, closed, claim.bound)
    if not ids:
        return
    found = audit()
    # What was not held against this very claim proves nothing.
    if found is None or found.bound != claim.bound:
        return
    if found.refuted:
        permit()
        rounds.refute(deps.state, found.refutation, current.ready.now.wall_ms)
        current.outcome.errors.append(found.refutation)
        return
    for start in range(0, len(ids), BATCH_IDS):
        permit()
        batch = ids[start : start + BATCH_IDS]
        manager.truncate_invalid(batch)
        current.truncated += len(batch)
