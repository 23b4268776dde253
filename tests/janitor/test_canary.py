"""The canary, over real sweeps: what it writes, what it notices, and whose topic it leaves alone."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from janitor import canary
from janitor.canary import TOPIC, Canary
from janitor.canary.bird import MOST_WAITING, PUBLISH_SECONDS, TTL_SECONDS
from janitor.own import is_own
from janitor.picture import CanaryFigures
from janitor.state.base import CounterKey, State, StoreRecord
from janitor.state.sqlite import SqliteState
from tests.builders import DAY, HOUR, NOW_MS, SECOND, Call, Rig, Topic, janitor, topic, watch
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.lease import Lease
from tms_core.rowkey import Cutoff
from tms_core.tables.memory import MemoryStore
from tms_core.topic import TopicMetadata

TTL_MS = TTL_SECONDS * SECOND
EARLY = CounterKey("canary_early_total")


@dataclass
class Mine:
    """A store with a janitor and a canary, adopted."""

    rig: Rig
    bird: Canary

    @property
    def clock(self) -> ManualClock:
        return self.rig.clock

    @property
    def topic(self) -> Topic:
        return Topic(self.rig.store, TOPIC, abs(self.metadata.generation))

    @property
    def metadata(self) -> TopicMetadata:
        raw = self.rig.store.metadata.get(TOPIC.prefix)
        assert raw is not None
        return TopicMetadata.parse(TOPIC.prefix, raw)

    @property
    def figures(self) -> CanaryFigures:
        return canary.figures(self.rig.state, enabled=True)

    def another(self, **options: Any) -> Canary:
        """The canary of another process."""
        return Canary(self.rig.store, self.rig.state, self.clock, **{"enabled": True, **options})

    def live(self, seconds: int, *, tick_seconds: int = 10, sweep_seconds: int | None = 60) -> None:
        """Let time pass, as in a daemon."""
        for second in range(seconds):
            if sweep_seconds and second % sweep_seconds == 0:
                self.rig.engine.run_once()
            if second % tick_seconds == 0:
                self.bird.tick()
            self.clock.advance(SECOND)

    def lose(self, number: int = 0) -> None:
        """Delete one of the messages that are there, the first one unless told otherwise."""
        store = self.rig.store
        store.message.delete([self.topic.messages()[number][0].pack()])


@pytest.fixture
def mine() -> Mine:
    rig = janitor(MemoryStore(), hold_seconds=0)
    rig.engine.adopt()
    return Mine(rig, Canary(rig.store, rig.state, rig.clock, enabled=True))


def published(mine: Mine) -> Mine:
    """With a topic and one message in it."""
    mine.bird.tick()
    mine.bird.tick()
    return mine


# --- what is written -------------------------------------------------------------------------------------------------


def test_given_an_adopted_store_when_looked_after_then_the_topic_is_made_as_cdap_would(mine: Mine) -> None:
    mine.bird.tick()
    raw = mine.rig.store.metadata.get(TOPIC.prefix)
    assert raw == b'{"generation":"1","owner":"tms-janitor","ttl":"300"}'
    assert is_own(mine.metadata)


def test_given_the_topic_when_looked_after_then_messages_carry_when_they_are_due(mine: Mine) -> None:
    mine.live(130, sweep_seconds=None)
    found = mine.topic.messages()
    assert [key.publish_ms - NOW_MS for key, _ in found] == [10 * SECOND, 70 * SECOND, 130 * SECOND][: len(found)]
    assert [key.sequence for key, _ in found] == [0, 1]
    for key, value in found:
        assert value.pointer is None
        assert json.loads(value.payload or b"") == {"due_ms": key.publish_ms + TTL_MS + 1}
    assert mine.figures == CanaryFigures(enabled=True, published=2, waiting=2)


def test_given_a_store_full_of_topics_when_looked_after_then_nothing_is_written_to_them(mine: Mine) -> None:
    orders = topic(mine.rig.store, "default:orders", ttl_seconds=60)
    written: list[bytes] = []

    def note(call: Call) -> None:
        if call.name.split(".")[1] in ("put", "delete", "invert", "compare_and_set"):
            written.append(call.arguments[0] if call.name.startswith("metadata") else call.arguments[0][0][0])

    watch(mine.rig.store, before=note)
    mine.live(200, sweep_seconds=None)
    assert written
    assert all(key.startswith(TOPIC.prefix) for key in written)
    assert orders.times() == []


@pytest.mark.parametrize("adopted", ["never", "not yet", "elsewhere"])
def test_given_a_store_that_is_not_adopted_when_looked_after_then_nothing_is_written(adopted: str) -> None:
    rig = janitor(MemoryStore())
    if adopted == "not yet":
        rig.state.save_store(StoreRecord("mark", rig.store.identity()))
    if adopted == "elsewhere":
        rig.engine.adopt()
        record = rig.state.store()
        assert record is not None
        rig.state.save_store(replace(record, identity="another"))
    Canary(rig.store, rig.state, rig.clock, enabled=True).tick()
    assert rig.store.metadata.rows() == []


def test_given_a_lease_that_is_not_held_when_looked_after_then_nothing_is_written(mine: Mine) -> None:
    lease = Lease(SqliteState.in_memory(), "this one", 60, mine.clock)
    bird = mine.another(lease=lease)
    bird.tick()
    assert mine.rig.store.metadata.rows() == []
    lease.acquire()
    bird.tick()
    assert is_own(mine.metadata)


@pytest.mark.parametrize(
    "properties", [b'{"generation":"1","ttl":"300"}', b'{"generation":"-1","ttl":"300"}', b"{", b'{"owner":"x"}']
)
@pytest.mark.parametrize("enabled", [True, False])
def test_given_somebody_elses_topic_of_that_name_when_looked_after_then_it_is_left_alone_and_said_once(
    mine: Mine, properties: bytes, enabled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = Topic(mine.rig.store, TOPIC).write_metadata(properties).plain(NOW_MS)
    bird = mine.another(enabled=enabled)
    for _ in range(3):
        bird.tick()
    assert mine.rig.store.metadata.rows() == [(TOPIC.prefix, properties)]
    assert stranger.times() == [NOW_MS]
    assert len(caplog.messages) == (1 if enabled else 0)


# --- what is noticed -------------------------------------------------------------------------------------------------


def test_given_honest_sweeps_when_an_hour_passes_then_nothing_is_early_and_lateness_is_known(mine: Mine) -> None:
    mine.live(3600)
    figures = mine.figures
    assert (figures.early, figures.published) == (0, 60)
    assert figures.late_seconds is not None
    assert 0 <= figures.late_seconds <= 60 + 10
    assert figures.waiting <= TTL_SECONDS // PUBLISH_SECONDS + 2


@pytest.mark.parametrize(("age_ms", "early"), [(1, 1), (TTL_MS - 1, 1), (TTL_MS, 1), (TTL_MS + 1, 0)])
def test_given_a_message_that_goes_when_it_is_missed_then_it_was_early_up_to_its_ttl(
    mine: Mine, age_ms: int, early: int, caplog: pytest.LogCaptureFixture
) -> None:
    published(mine)
    mine.clock.advance(age_ms)
    mine.lose()
    mine.bird.tick()
    assert mine.rig.state.counters().get(EARLY, 0) == mine.figures.early == early
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == early
    mine.bird.tick()
    assert mine.figures.early == early, "counted once"


def test_given_a_message_missed_after_it_was_due_when_looked_after_then_lateness_is_until_then(mine: Mine) -> None:
    published(mine)
    mine.clock.advance(TTL_MS + 1 + 12_345)
    mine.lose()
    mine.bird.tick()
    assert mine.figures.late_seconds == 12.345


def test_given_messages_that_go_one_after_the_other_when_looked_after_then_lateness_is_the_last_ones(
    mine: Mine,
) -> None:
    published(mine)
    mine.clock.advance(60 * SECOND)
    mine.bird.tick()
    mine.clock.advance(TTL_MS)
    mine.lose()
    mine.bird.tick()
    assert mine.figures.late_seconds == pytest.approx(60, abs=0.01)
    mine.clock.advance(5 * SECOND)
    mine.lose()
    mine.bird.tick()
    assert mine.figures.late_seconds == pytest.approx(5, abs=0.01)


def test_given_sweeps_by_a_wrong_law_when_time_passes_then_it_is_noticed(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way round: every ttl is taken for a minute less than it is."""
    right = Cutoff.at

    def wrong(now_ms: int, ttl_seconds: int) -> Cutoff:
        return right(now_ms, ttl_seconds - 60)

    mine.live(1800)
    assert mine.figures.early == 0
    monkeypatch.setattr(Cutoff, "at", wrong)
    mine.live(600)
    assert mine.figures.early > 0


# --- clocks ----------------------------------------------------------------------------------------------------------


def test_given_a_wall_clock_that_jumps_far_when_messages_go_for_it_then_they_were_early(mine: Mine) -> None:
    published(mine)
    mine.clock.advance(SECOND)
    mine.clock.step(HOUR)
    mine.lose()
    mine.bird.tick()
    assert mine.figures.early == 1


@pytest.mark.parametrize(("step_ms", "early"), [(0, 1), (2_000, 1), (2_001, 0), (300_000, 0), (302_000, 1)])
def test_given_a_wall_clock_set_forward_when_messages_go_for_it_then_the_allowance_excuses_that(
    mine: Mine, step_ms: int, early: int
) -> None:
    published(mine)
    mine.clock.advance(TTL_MS - 2_000)
    mine.clock.step(step_ms)
    mine.lose()
    mine.bird.tick()
    assert (mine.figures.early, mine.figures.late_seconds) == (early, None if early else 0.0)


def test_given_a_wall_clock_set_back_when_a_message_goes_as_it_was_due_then_it_was_not_early(mine: Mine) -> None:
    published(mine)
    mine.clock.advance(TTL_MS + SECOND)
    mine.lose()
    mine.clock.step(-HOUR)
    mine.bird.tick()
    assert mine.figures.early == 0
    assert mine.figures.late_seconds == pytest.approx(1, abs=0.01)


def test_given_a_reboot_when_messages_have_gone_then_the_wall_clock_tells(mine: Mine) -> None:
    published(mine)
    mine.clock.advance(10 * SECOND)
    mine.lose()
    mine.clock.reboot("another")
    mine.another().tick()
    assert mine.figures.early == 1


def test_given_a_reboot_with_the_clock_behind_when_messages_have_gone_then_nobody_can_tell(mine: Mine) -> None:
    published(mine)
    mine.lose()
    mine.clock.reboot("another")
    mine.clock.step(-DAY)
    mine.another().tick()
    assert (mine.figures.early, mine.figures.late_seconds) == (0, None)


def test_given_a_message_that_goes_while_it_is_looked_for_when_it_just_came_due_then_it_was_not_early(
    mine: Mine,
) -> None:
    published(mine)
    mine.clock.advance(TTL_MS)

    def sweep(call: Call) -> None:
        if call.name == "message.keys" and mine.clock.now_ms() == NOW_MS + TTL_MS:
            mine.clock.advance(1)
            mine.lose()

    watch(mine.rig.store, before=sweep)
    mine.bird.tick()
    assert mine.figures.early == 0


# --- memory ----------------------------------------------------------------------------------------------------------


def test_given_a_restart_when_looked_after_then_what_was_watched_still_is(mine: Mine) -> None:
    published(mine)
    bird = mine.another()
    mine.lose()
    mine.clock.advance(SECOND)
    bird.tick()
    assert mine.figures.early == 1


def test_given_a_note_that_was_lost_when_looked_after_then_what_lies_in_the_topic_is_watched(mine: Mine) -> None:
    mine.live(130, sweep_seconds=None)
    mine.topic.plain(NOW_MS, NOW_MS + 1, body=b"[]").tx(7, NOW_MS + 2).ref(7, NOW_MS + 3)
    mine.topic.plain(NOW_MS + 4, body=json.dumps({"due_ms": NOW_MS}).encode())
    mine.rig.state.save_note("canary", None)
    bird = mine.another()
    bird.tick()
    assert mine.figures.waiting == 3, "two, and the one that was published now"
    first = [key for key, _ in mine.topic.messages() if key.publish_ms == NOW_MS + 10 * SECOND]
    mine.rig.store.message.delete([first[0].pack()])
    bird.tick()
    assert mine.figures.early == 1
    assert len({key.sequence for key, value in mine.topic.messages() if value.payload != b"body"}) > 1


def test_given_a_process_that_died_before_it_remembered_when_looked_after_then_its_message_is_watched(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    published(mine)
    mine.clock.advance(60 * SECOND)
    with monkeypatch.context() as patch:
        patch.setattr(mine.rig.state, "save_note", _fail)
        with pytest.raises(StoreError):
            mine.bird.tick()
    assert mine.figures.waiting == 1
    mine.another().tick()
    assert mine.figures.waiting == 3
    assert [key.sequence for key, _ in mine.topic.messages()] == [0, 1, 2]


def _fail(*_: object) -> None:
    raise StoreError("the disk is full.")


def test_given_a_janitor_that_is_paused_for_long_when_looked_after_then_no_more_are_published(mine: Mine) -> None:
    mine.live((MOST_WAITING + 20) * PUBLISH_SECONDS, sweep_seconds=None, tick_seconds=PUBLISH_SECONDS)
    assert len(mine.topic.times()) == mine.figures.waiting == MOST_WAITING
    mine.rig.engine.run_once()
    mine.live(PUBLISH_SECONDS, tick_seconds=PUBLISH_SECONDS)
    assert mine.figures.waiting <= MOST_WAITING
    assert mine.figures.published == MOST_WAITING + 1
    assert mine.figures.early == 0


def test_given_a_message_that_is_not_there_after_publishing_when_looked_after_then_it_is_an_error_and_not_watched(
    mine: Mine, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine.bird.tick()
    monkeypatch.setattr(mine.rig.store.message, "put", list)
    with pytest.raises(StoreError, match="not there after it was published"):
        mine.bird.tick()
    assert mine.figures == CanaryFigures(enabled=True)


# --- its end, and another beginning ----------------------------------------------------------------------------------


def test_given_a_canary_when_disabled_then_its_topic_is_deleted_as_cdap_would_and_swept(mine: Mine) -> None:
    published(mine)
    bird = mine.another(enabled=False)
    bird.tick()
    assert mine.rig.store.metadata.get(TOPIC.prefix) == b'{"generation":"-1","owner":"tms-janitor","ttl":"300"}'
    bird.tick()
    assert mine.rig.state.note("canary") is None
    mine.rig.engine.run_once()
    assert mine.topic.times() == []
    before = mine.rig.store.operations
    bird.tick()
    assert mine.rig.store.operations == before, "nothing is left to do"


def test_given_a_canary_that_was_disabled_when_enabled_again_then_it_has_the_next_generation(mine: Mine) -> None:
    published(mine)
    mine.another(enabled=False).tick()
    mine.clock.advance(SECOND)
    bird = mine.another()
    bird.tick()
    assert mine.rig.store.metadata.get(TOPIC.prefix) == b'{"generation":"2","owner":"tms-janitor","ttl":"300"}'
    mine.rig.engine.run_once()
    bird.tick()
    assert len(mine.topic.times()) == 1
    assert (mine.figures.waiting, mine.figures.early) == (1, 0), "what went with the old generation was not early"


def test_given_a_ttl_that_somebody_shortened_when_messages_go_then_they_were_not_early(mine: Mine) -> None:
    published(mine)
    mine.topic.describe(ttl_seconds=10, owner="tms-janitor")
    mine.clock.advance(11 * SECOND)
    mine.lose()
    mine.bird.tick()
    assert (mine.figures.early, mine.figures.waiting) == (0, 0)
    mine.clock.advance(60 * SECOND)
    mine.bird.tick()
    [(key, value)] = mine.topic.messages()
    assert json.loads(value.payload or b"") == {"due_ms": key.publish_ms + 10_001}


def test_given_somebody_who_writes_the_metadata_at_the_same_time_when_looked_after_then_theirs_stands(
    mine: Mine,
) -> None:
    def write(call: Call) -> None:
        if call.name == "metadata.compare_and_set":
            Topic(mine.rig.store, TOPIC).describe(ttl_seconds=60)

    watch(mine.rig.store, before=write)
    mine.bird.tick()
    assert "owner" not in mine.metadata.properties


def test_given_no_memory_at_all_when_asked_for_figures_then_they_are_those_of_a_beginning() -> None:
    state: State = SqliteState.in_memory()
    assert canary.figures(state, enabled=False) == CanaryFigures()


def test_given_the_last_sequence_when_published_then_it_begins_anew(mine: Mine) -> None:
    published(mine)
    note = mine.rig.state.note("canary")
    mine.rig.state.save_note("canary", {**note, "sequence": 65535})
    for _ in range(2):
        mine.clock.advance(60 * SECOND)
        mine.bird.tick()
    assert [key.sequence for key, _ in mine.topic.messages()] == [0, 65535, 0]
