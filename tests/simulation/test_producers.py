"""The simulation of producers: no history breaks an invariant, and each planted bug is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest

from tests.simulation import lead_world, producer_world
from tests.simulation.producer_world import play
from tests.simulation.test_groups import ENOUGH, SEEDS, Plant, assert_found, side_not_fenced
from tms_core.errors import StoreError
from tms_core.messaging.producers import announcements
from tms_core.messaging.producers.announcements import AnnouncedAhead, Announcements
from tms_core.messaging.producers.last_request import LastRequest
from tms_core.messaging.producers.registrations import Producers, Registered
from tms_core.messaging.producers.requests import Admission, Requests
from tms_core.messaging.producers.rows import Registration, StartedTransaction
from tms_core.messaging.publish import open_topics, pipeline, rows
from tms_core.messaging.publish.entry import PublishEntry
from tms_core.messaging.publish.open_topics import OpenTopics
from tms_core.messaging.publish.rows import MessageRows
from tms_core.messaging.service import MessagingService
from tms_core.server.ha.fenced_store import MessageFence
from tms_core.server.ha.sealed_ranges import Gaps, SealedRanges
from tms_core.tables.base import CELLS, KEYS, KeyReads, MessageTable, Page, Projection
from tms_core.transaction.manager.manager import TransactionManager

SENT = {"publish", "store", "publish stored"}
REACHED = SENT | {
    "ahead",
    "has a lane",
    "died",
    "answer lost",
    "truncated",
    "late",
    "arrived late",
    "fenced",
    "refused",
}
REACHED |= {"not all taken back"}
LEADS = SENT | {"died", "answer lost", "fenced", "deposed", "handed over", "rows arrived late", "arrived late"}


@pytest.fixture(autouse=True)
def announced_ahead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.producers.announcements._ALONE_BATCHES", 0)


@pytest.mark.seeded
def test_histories_of_producers_hold_every_invariant() -> None:
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        reached += play(seed)
    assert set(reached) == REACHED | {"former committed", "former aborted"}


@pytest.mark.seeded
def test_histories_of_a_change_of_leader_hold_every_invariant() -> None:
    reached: Counter[str] = Counter()
    for seed in SEEDS:
        reached += lead_world.play(seed)
    assert set(reached) >= LEADS


# --- planted bugs ----------------------------------------------------------------------------------------------------


def generation_not_durable_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is in memory only, but the first one."""
    change = Producers._change

    def later(
        self: Producers, key: bytes, raw: bytes | None, known: Registration, deletes: Sequence[bytes] = ()
    ) -> None:
        if raw is None:
            change(self, key, raw, known, deletes)
        else:
            self._requests.rows[key] = known.pack()

    monkeypatch.setattr(Producers, "_change", later)


def sequence_written_behind_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    announce = Announcements.announce

    def later(_: Announcements, entries: Sequence[PublishEntry], *__: object) -> Sequence[PublishEntry]:
        return entries

    monkeypatch.setattr(Announcements, "announce", later)
    monkeypatch.setattr(Announcements, "note_written", announce)


def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "is_late", lambda *_: False)


def no_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "begin_write", lambda *_: True)
    monkeypatch.setattr(TransactionManager, "end_write", lambda *_: None)
    monkeypatch.setattr(pipeline, "is_late", lambda *_: False)


def writes_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "note_written", lambda *_: None)


def roll_back_noted_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left of one that failed is seen."""

    def roll_back(service: MessagingService, topic: object, pointer: int) -> None:
        service._transactions.note_taken_back(pointer, str(topic))  # type: ignore[union-attr]

    monkeypatch.setattr(MessagingService, "rollback", roll_back)


def repetition_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is taken for a new request."""
    admit = Requests.admit

    def as_new(*request: Any) -> Admission:
        return admit(*request)._replace(repeated=None)

    monkeypatch.setattr(Requests, "admit", as_new)


def announced_ids_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_topics, "first_unannounced", lambda *_: 0)


def roll_back_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StartedTransaction, "_replace", lambda self, **_: self)


def void_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_world, "tidy", lambda *_: (0, 0))


def former_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Producers, "_settle", lambda _, __, known, *___: Registered(known.generation, known.previous, [])
    )


def announced_ahead_and_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Announcements, "withdraw", lambda *_: None)


def announced_ahead_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands there is taken for the last request."""
    monkeypatch.setattr(LastRequest, "last_written", lambda self, _: self)


def seats_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes behind an announcement is taken for its producer's."""
    found = LastRequest.last_written
    monkeypatch.setattr(LastRequest, "last_written", lambda self, positions: found(self._replace(lane=0), positions))


def seats_without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What announces the next requests is written where there is room."""
    monkeypatch.setattr(pipeline, "place_request", lambda _, __, at: at)


def stale_announcements_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come, and those that have announced go on."""
    monkeypatch.setattr(announcements, "_update_lanes", lambda ahead, keys, **_: _seat_all(ahead, keys))


def _seat_all(ahead: AnnouncedAhead, keys: Sequence[bytes]) -> None:
    ahead.batches += 1
    for key in keys:
        ahead.lanes.setdefault(key, len(ahead.lanes) + 1)


BUGS: list[Plant] = [
    seats_not_told_apart,
    seats_without_places,
    stale_announcements_followed,
    announced_ahead_and_not_taken_back,
    announced_ahead_and_not_looked_at,
    generation_not_durable_first,
    sequence_written_behind_the_rows,
    no_second_look,
    no_first_look,
    writes_not_noted,
    roll_back_noted_before_it_is_done,
    repetition_not_looked_at,
    announced_ids_given_again,
    roll_back_not_noted,
    void_not_marked,
    former_left_open,
    side_not_fenced,
]


@pytest.mark.parametrize("plant", BUGS)
def test_given_a_planted_bug_when_histories_are_played_then_one_of_them_finds_it(
    plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)

    assert_found(play(seed) for seed in range(ENOUGH))


# --- planted bugs of a change of leaders -----------------------------------------------------------------------------


def nothing_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SealedRanges, "known", lambda *_: Gaps())


def hidden_rows_taken_for_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a request in a transaction, what no reader is shown counts, too."""
    has_all = MessageRows.has_all

    def with_hidden(self: MessageRows, entry: PublishEntry, *given: Any, **more: Any) -> bool:
        with monkeypatch.context() as patch:
            if entry.pointer is not None:
                patch.setattr(rows, "_visible_keys", _with_hidden)
            return has_all(self, entry, *given, **more)

    monkeypatch.setattr(MessageRows, "has_all", with_hidden)


def _with_hidden(table: MessageTable, keys: Sequence[bytes]) -> Page[list[bytes]]:
    page = table.read(CELLS, keys[0], keys[-1] + b"\0", len(keys))
    return Page([cell.key for cell in page.items], None)


def sealed_behind_the_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    read_page = MessageFence.read

    def read(
        self: MessageFence, table: KeyReads, want: Projection[Any], start: bytes, stop: bytes | None, limit: int
    ) -> Page[Any]:
        if want is not KEYS:
            return read_page(self, table, want, start, stop, limit)
        page = table.read(KEYS, start, stop, limit)
        with self._reading(start) as term:
            is_shown = self._visible_keys(term, start)
        return Page(list(filter(is_shown, page.items)), page.resume)

    monkeypatch.setattr(MessageFence, "read", read)


def payloads_stored_again_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "announced_position", lambda _, at: at)


def registered_before_topics_are_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OpenTopics, "hide_late", lambda *_: None)


def failed_write_not_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SealedRanges, "doubt", lambda *_: None)


def taken_back_what_a_producer_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    write = MessageRows.write

    def takes_back(self: MessageRows, entries: Sequence[PublishEntry]) -> None:
        try:
            write(self, entries)
        except StoreError:
            for entry in entries:
                if entry.pointer is None:
                    with suppress(StoreError):
                        self._table.delete(entry.keys(self.prefix))
                else:
                    self.roll_back([entry])
            raise

    monkeypatch.setattr(MessageRows, "write", takes_back)


def part_of_a_request_deleted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is deleted, and not hidden, may come once more."""
    monkeypatch.setattr(MessageFence, "hide", lambda *_: None)


LEAD_BUGS: list[Plant] = [
    failed_write_not_decided,
    part_of_a_request_deleted_only,
    taken_back_what_a_producer_repeats,
    nothing_sealed,
    hidden_rows_taken_for_written,
    sealed_behind_the_first_read,
    payloads_stored_again_elsewhere,
    registered_before_topics_are_sealed,
]


#: The first seed to try, for bugs that few histories show; all other seeds follow.
RARE_LEAD_BUGS = {part_of_a_request_deleted_only: 113}


@pytest.mark.parametrize("plant", LEAD_BUGS)
def test_planted_bug_of_a_change_of_leader_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    first = RARE_LEAD_BUGS.get(plant, 0)
    plant(monkeypatch)

    assert_found(lead_world.play(seed) for seed in (*range(first, 2 * ENOUGH), *range(first)))
