"""The simulation of producers: no history breaks an invariant, and each planted bug is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tests.simulation import producer_site
from tests.simulation.producer_site import play
from tests.simulation.test_groups import ENOUGH, SEEDS, Plant, assert_found, side_not_fenced
from tms_core.messaging import lines
from tms_core.messaging.last_request import AnnouncedAhead, LastRequest
from tms_core.messaging.producer_rows import Registration
from tms_core.messaging.producers import Producers, Registered
from tms_core.messaging.queue import Queue
from tms_core.messaging.requests import Admitted, Requests
from tms_core.transaction.manager.manager import TransactionManager

REACHED = {"ahead", "seated", "died", "answer lost", "truncated", "late", "arrived late", "fenced", "refused"}


@pytest.fixture(autouse=True)
def announced_ahead_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tms_core.messaging.last_request._ALONE", 0)


def test_given_histories_when_played_then_every_invariant_holds_and_everything_was_reached() -> None:
    reached: Counter[str] = Counter()
    for seed in range(SEEDS):
        reached += play(seed)
    assert set(reached) == REACHED | {"former committed", "former aborted"}


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
            self._requests._rows._rows[key] = known.pack()

    monkeypatch.setattr(Producers, "_change", later)


def sequence_written_behind_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    announce, waiting = Requests.announce, dict[Admitted, Any]()

    def later(_: Requests, requests: Any, *__: object) -> list[None]:
        waiting.update((one[0], one) for one in requests)
        return [None for _ in requests]

    def wrote(self: Requests, written: Sequence[Admitted]) -> None:
        announce(self, [waiting.pop(admitted) for admitted in written])

    monkeypatch.setattr(Requests, "announce", later)
    monkeypatch.setattr(Requests, "wrote", wrote)


def no_second_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_is_late", lambda *_: False)


def no_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "begin_write", lambda *_: True)
    monkeypatch.setattr(TransactionManager, "end_write", lambda *_: None)
    monkeypatch.setattr(Queue, "_is_late", lambda *_: False)


def aborted_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TransactionManager, "begin_write", TransactionManager.is_in_progress)
    monkeypatch.setattr(TransactionManager, "end_write", lambda *_: None)


def repetition_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Queue, "_repeat", lambda *_: None)


def announced_ids_given_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "first_unannounced", lambda *_: 0)


def roll_back_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producers, "roll_back", lambda *_: None)


def void_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producer_site, "tidy", lambda *_: (0, 0))


def former_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Producers, "_settle", lambda _, __, known, ___: Registered(known.generation, known.former, []))


def announced_ahead_and_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Requests, "take_back", lambda *_: {})


def announced_ahead_and_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands there is taken for the last request."""
    monkeypatch.setattr(LastRequest, "found", lambda self, _: self)


def seats_not_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever comes behind an announcement is taken for its producer's."""
    found = LastRequest.found
    monkeypatch.setattr(LastRequest, "found", lambda self, positions: found(self._replace(seat=0), positions))


def seats_without_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """What announces the next requests is written where there is room."""
    monkeypatch.setattr(Requests, "places", lambda *_: None)


def stale_announcements_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others come, and those that have announced go on."""
    monkeypatch.setattr(AnnouncedAhead, "note", lambda self, keys, **_: _seat_all(self, keys))


def _seat_all(ahead: AnnouncedAhead, keys: Sequence[bytes]) -> None:
    ahead.batches += 1
    for key in keys:
        ahead.seats.setdefault(key, len(ahead.seats) + 1)


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
    aborted_while_it_is_written,
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
