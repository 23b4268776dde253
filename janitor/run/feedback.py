"""Handing what is proven clean back to the transaction manager, so that it may forget it (rule S4).

The list of invalid transactions rides on every transaction that begins, and nobody but the janitor can say when an id
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
from typing import Protocol

from janitor.boundary import coverage as rounds
from janitor.inspect.rows import Audit
from janitor.report import GuardNote
from janitor.run import guards
from janitor.run.conclude import Pass, seen
from janitor.state.base import Claim, State
from janitor.state.records import is_among
from janitor.sweep.permission import Withheld
from tms_core.errors import Interrupted, TmsError
from tms_core.transaction.source.source import SnapshotSource

#: The participant of the transaction system whose rows this janitor looks at.
OURS = "messaging"
#: Ids handed over at once: so few that nobody waits long for the manager, whose lock is held while it takes them.
BATCH_IDS = 10_000

logger = logging.getLogger(__name__)


class Truncator(SnapshotSource, Protocol):
    """A transaction manager: that of this process, or a client of another one's."""

    def truncate_invalid(self, transaction_ids: Collection[int], /) -> bool:
        """Take ids off the invalid list (Tephra's ``truncateInvalidTx``); returns whether any was on it.

        Raises:
            TmsError: it was not done, or that is not known.
        """
        ...


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


class Feedback:
    """What hands over.

    Args:
        manager: who has the list.
        participants: everything that takes part in its transactions (``janitor.boundary.participants``).
    """

    def __init__(self, manager: Truncator, participants: Collection[str]) -> None:
        self._manager = manager
        self._withheld = withheld(participants)

    def hand_over(
        self,
        current: Pass,
        state: State,
        claim: Claim | None,
        closed: Callable[[], array[int]],
        audit: Callable[[], Audit | None],
        permit: Callable[[], None],
    ) -> None:
        """Hand over what a run leaves proven; what is to be said of it is added to the run.

        Args:
            current: the run, after its conclusion.
            claim: what is claimed now; None: nothing, so nothing is handed over.
            closed: reads the ids under which nothing can be published any more, ascending.
            audit: reads every transactional row; None: something stands in the way of any claim now.
            permit: asks whether the next step may be taken (``Permission.check_all``).

        Raises:
            Interrupted: the run is over; what was handed over is.
        """
        if self._withheld:
            current.notes.append(GuardNote("feedback", False, self._withheld))
            return
        usable = current.ready.tx.usable
        if claim is None or usable is None:
            return
        try:
            ids = closed()
            # Mostly there is nothing, and then nobody is asked.
            if proven(usable.invalid, ids, claim.bound):
                self._hand_over(current, state, claim, ids, audit, permit)
        except Interrupted:
            raise
        except Withheld:
            logger.info("something was paused, so nothing more is taken off the invalid list")
        except TmsError as error:
            message = f"not all that is proven clean was taken off the invalid list: {error.message}"
            current.notes.append(GuardNote("feedback", False, message))

    def _hand_over(
        self,
        current: Pass,
        state: State,
        claim: Claim,
        closed: array[int],
        audit: Callable[[], Audit | None],
        permit: Callable[[], None],
    ) -> None:
        present = self._manager.latest().snapshot
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
            rounds.refute(state, found.refutation, current.ready.now.wall_ms)
            current.outcome.errors.append(found.refutation)
            return
        for start in range(0, len(ids), BATCH_IDS):
            permit()
            batch = ids[start : start + BATCH_IDS]
            self._manager.truncate_invalid(batch)
            current.truncated += len(batch)
