"""What an operator decides: that a store is adopted, that held rows may go, that archived rows come back."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from janitor.archive import index as archived
from janitor.archive import restore as archive
from janitor.archive.restore import Request, Restored
from janitor.boundary import coverage as rounds
from janitor.law import frontier
from janitor.law.policy import Hold
from janitor.run import conclude, guards, passes
from janitor.run.deps import Deps
from janitor.run.prepare import IN_PROGRESS, Prepared, prepare, run_context
from janitor.state import decided
from janitor.state.records import LINEAGE, RESTORED
from janitor.sweep.transactions import TransactionView
from tms_core.errors import GuardTripped, NotAdopted
from tms_core.topic import TopicId


class OperatorDecisions:
    """Carries out what an operator decides.

    Args:
        deps: the store must be one that can be written.
    """

    def __init__(self, deps: Deps) -> None:
        self.deps = deps

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        """Accept this store, this transaction system and this clock as they are now.

        Args:
            once_for: do it once for this text; the state remembers it in the transaction that adopts.
            store_id: adopt no other store (``store_id`` of a plan).

        Returns:
            The topics whose rows may go from now on as they come due.

        Raises:
            NotAdopted: this is another store; nothing was changed.
        """
        with self.deps.turn:
            ready = prepare(self.deps)
            if store_id is not None and store_id != ready.record.mark:
                raise NotAdopted(
                    f"The store that is meant is {store_id}, and this one is {ready.record.mark}: it was not adopted.",
                    "See that the settings name the store that is meant, then: janitor plan",
                )
            return adopt(self.deps, ready, once_for)

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        """Let held frontiers go with the next run, accept the machine's clock, or both.

        Args:
            patterns: shell patterns of the topics whose held rows may go; none lets no topic go.
            clock: accept this machine's clock as it is now.
            once_for: do it once for this text; the state remembers it in the same transaction.

        Raises:
            NotAdopted: there is nothing to approve before the store is adopted.
            GuardTripped: topics are named while the clock is in doubt and not accepted with them; what is due by it is
                not known.
        """
        state, ready = self.deps.state, prepare(self.deps)
        if not ready.adopted:
            raise NotAdopted("This store is not adopted yet.", "Look at janitor plan, then: janitor adopt")
        for note in ready.notes:
            if not clock and note.tripped and note.guard == "clock":
                raise GuardTripped(f"Nothing was approved: {note.message}.")
        context = run_context(self.deps, ready, thorough=False, patterns=patterns)
        context.load_topics()
        held = {
            work.topic.topic: frontier.approve(work.record, work.topic)
            for work in context.topics.values()
            if patterns and work.frontier.hold is Hold.FRONTIER and context.in_scope(work.topic.topic.prefix)
        }
        with state.transaction():
            state.save_frontiers(held)
            if clock:
                state.save_anchor(ready.now)
            if once_for is not None:
                decided.note_done(state, decided.approval(patterns, clock=clock), once_for)
        return sorted(held)

    def restore(self, folder: Path, request: Request) -> Restored:
        """Bring archived rows back (:func:`janitor.archive.restore.restore`).

        Args:
            folder: the archive's.

        Raises:
            Refused, ArchiveError, StoreError: as that says; what was written until then stays.
        """
        with self.deps.turn:
            try:
                return restore(self.deps, folder, request)
            finally:
                self.deps.restored(request.target or request.source)


def adopt(deps: Deps, ready: Prepared, once_for: str | None = None) -> list[TopicId]:
    """Adopt a store as it was prepared; arguments and result as of :meth:`OperatorDecisions.adopt`."""
    state, lineage = deps.state, deps.store.lineage()
    context = run_context(deps, ready, thorough=False, label=Hold.FIRST_CONTACT)
    context.load_topics()
    topics = {work.topic.topic: work.record for work in context.topics.values()}
    record = ready.record
    if ready.adopted and ready.first_contact:
        # Another transaction system: what is known of open ids and claims is about the former one's.
        record = replace(record, mark=guards.successor_mark(record.mark, "transactions"))
    record = conclude.seen(replace(record, adopted_ms=ready.now.wall_ms), ready.tx)
    with state.transaction():
        state.save_store(record)
        state.save_frontiers(topics)
        state.save_anchor(ready.now)
        # Adopting may follow a backup that was put back, with what was covered already.
        rounds.end(state)
        state.replace_evidence([])
        state.save_claim(None)
        # Ids that are invalid by now are known only when a run has ended.
        state.save_note(IN_PROGRESS, None)
        state.save_note(LINEAGE, dict(lineage))
        state.save_note(RESTORED, None)
        if once_for is not None:
            decided.note_done(state, "adopt", once_for)
    return sorted(topics)


def restore(deps: Deps, folder: Path, request: Request) -> Restored:
    """Bring archived rows back, or say what would be; arguments as of :meth:`OperatorDecisions.restore`."""
    files, now_ms = archived.find_topic(folder, request.source), deps.clock.now_ms()
    transactions = TransactionView(prepare(deps).tx.usable, now_ms, deps.terms.lifetime.undecided_ms)
    told = partial(passes.heartbeat, deps)
    return archive.restore(deps.store, deps.state, transactions, files, request, now_ms, told, deps.side)
