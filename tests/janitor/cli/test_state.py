"""Commands about the past: history and ledger from the state, and the text of ``why``."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from janitor.app.options import Common
from janitor.app.session import Session
from janitor.cli.history import LOST, RUNNING, status
from janitor.cli.ledger import cells, parts
from janitor.cli.state import place_of
from janitor.cli.why import lines
from janitor.inspect.answer import FoundRow, LedgerReach, MissingRow, Trace, Why
from janitor.inspect.fate import Fate
from janitor.rules.policy import Hold, Reason, Rule
from janitor.state.records import RunRecord
from janitor.state.sqlite.state import FILE_NAME, SqliteState
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, SECOND, pointer
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tests.janitor.state.entries import TOPIC, entry
from tms_core.clock import SystemClock
from tms_core.rowkey import MessageId, MessageKey, PayloadKey, generation_prefix, time_prefix


@pytest.fixture
def state(kit: CommandKit) -> SqliteState:
    made = SqliteState(kit.folder / "data" / "janitor")
    made.save_created_ms(NOW_MS - HOUR)
    return made


def key_range(start_ms: int, stop_ms: int) -> tuple[bytes, bytes]:
    """Return the keys of the first and the last message row of a time range."""
    first, last = (MessageKey(TOPIC, 1, ms, 3).pack() for ms in (start_ms, stop_ms))
    return first, last + b"\x00"


@pytest.mark.parametrize("verb", ["history", "ledger"])
def test_command_without_state_exits_0_and_creates_none(kit: CommandKit, verb: str) -> None:
    shown = kit.janitor(verb)
    assert shown.code == 0
    assert "janitor archive list --config janitor.yaml" in shown.out
    assert kit.janitor(f"{verb} --format json").json["known_since_ms"] is None
    assert not (kit.folder / "data" / "janitor").exists()


@pytest.mark.parametrize("verb", ["history", "ledger"])
@pytest.mark.usefixtures("state")
def test_command_on_the_state_of_a_deleted_store_exits_0(kit: CommandKit, verb: str) -> None:
    kit.janitor("run --once --adopt")
    shutil.rmtree(kit.store)
    assert kit.janitor(verb).code == 0


@pytest.mark.parametrize("line", ["status", "history", "plan", "adopt", "doctor"])
def test_command_on_the_state_of_another_user_exits_1_and_names_it(kit: CommandKit, line: str) -> None:
    """A name that is too long fails like a folder of another user, which root could enter."""
    place = "x" * 300
    kit.set(SETTINGS.replace("data/janitor", place))
    failed = kit.janitor(line)
    assert failed.code == 1
    assert re.search(rf"{place}/\w+\.\w+ cannot be reached: .*janitor\.state", failed.out + failed.err, re.DOTALL), (
        failed
    )


@pytest.mark.parametrize("place", ["janitor.yaml", "loop", "ring"])
@pytest.mark.parametrize("line", ["status", "history", "plan", "run --once", "adopt", "pause", "topic default:orders"])
def test_command_with_an_unreachable_state_exits_1_and_names_it(kit: CommandKit, line: str, place: str) -> None:
    (kit.folder / "loop").mkdir()
    (kit.folder / "ring").symlink_to("ring")
    (kit.folder / "loop" / FILE_NAME).symlink_to(FILE_NAME)
    kit.set(SETTINGS.replace("data/janitor", place))
    failed = kit.janitor(line)
    assert (failed.code, "[TMS-STATE]" in failed.err, place in failed.err) == (1, True, True), failed
    assert "janitor.state" in failed.err


@pytest.mark.parametrize(
    ("created_ms", "adopted_ms", "lines"),
    [
        (NOW_MS - 40 * DAY, NOW_MS - 41 * DAY, ["known: the last 30 days", "2023-10-04"]),
        (NOW_MS - 40 * DAY, NOW_MS - 40 * DAY, ["known: the last 30 days"]),
        (NOW_MS - HOUR, NOW_MS - DAY, ["known since 2023-11-14 21:13:20 UTC; nothing older", "are lost"]),
        (NOW_MS - HOUR, None, ["known since 2023-11-14 21:13:20 UTC; nothing older"]),
        (None, None, ["creation"]),
    ],
)
def test_history_and_ledger_start_with_the_reach_of_the_state(
    kit: CommandKit, created_ms: int | None, adopted_ms: int | None, lines: list[str]
) -> None:
    kit.janitor("adopt")
    with SqliteState(kit.folder / "data" / "janitor") as opened:
        record = opened.store()
        assert record is not None
        opened.save_store(replace(record, adopted_ms=adopted_ms))
        opened.driver.connection.execute("DELETE FROM documents WHERE key = 'created'")
        if created_ms is not None:
            opened.save_created_ms(created_ms)
    for verb in ("history", "ledger"):
        first = kit.janitor(verb).out.splitlines()[:-1]
        assert len(first) == len(lines)
        assert all(words in line for words, line in zip(lines, first, strict=True)), first


def test_history_shows_a_line_per_run_newest_first(kit: CommandKit, state: SqliteState) -> None:
    kit.janitor("run --once --adopt")
    kit.clock.advance(MINUTE)
    kit.snapshot()
    kit.janitor("run --once")
    first, second = state.runs(9)[::-1]
    shown = kit.janitor("history").out.splitlines()
    assert [line.split()[0] for line in shown[-2:]] == [second.id, first.id]
    assert " ".join(shown[-1].split()[1:]) == "2023-11-14 22:13:20 UTC 0 s apply done 2 1 0 1 0"
    assert len(kit.janitor("history --limit 1").out.splitlines()) == len(shown) - 1


def test_history_of_a_blocked_or_failed_run_says_why(kit: CommandKit, state: SqliteState) -> None:
    kit.janitor("run --once")
    assert "blocked" in kit.janitor("history").out
    assert "nothing is deleted, because this store is not adopted" in kit.janitor("history").out
    state.begin_run(RunRecord("bad", "apply", NOW_MS + 1))
    state.finish_run(RunRecord("bad", "apply", NOW_MS + 1, NOW_MS + 2, "failed", error="the disk is full"))
    assert "the disk is full" in kit.janitor("history --limit 1").out
    assert "the disk is full" in kit.janitor("history bad").out


def test_history_since_a_time_shows_runs_started_at_or_after_it(kit: CommandKit, state: SqliteState) -> None:
    for minutes in (10, 5, 4):
        state.begin_run(RunRecord(f"run-{minutes}", "apply", NOW_MS - minutes * MINUTE))
    shown = kit.janitor("history --since now-5m --format json").json
    assert [run["id"] for run in shown["runs"]] == ["run-4", "run-5"]
    assert "no runs" in kit.janitor("history --since now").out


@pytest.mark.parametrize(
    ("silent_ms", "beaten", "shown"),
    [(60 * SECOND, True, RUNNING), (60 * SECOND + 1, True, LOST), (60 * SECOND, False, RUNNING), (HOUR, False, LOST)],
)
def test_history_of_an_unfinished_run_has_a_status_by_its_heartbeat(
    kit: CommandKit, state: SqliteState, silent_ms: int, beaten: bool, shown: str
) -> None:
    sign_ms = NOW_MS - silent_ms
    run = RunRecord("on", "apply", sign_ms - DAY if beaten else sign_ms, heartbeat_ms=sign_ms if beaten else None)
    assert status(run, NOW_MS, 60) == shown
    state.begin_run(run)
    [line] = [line for line in kit.janitor("history").out.splitlines() if line.startswith("on ")]
    assert f" {shown} " in line
    assert ("the next run closes it" in line) == (shown == LOST)
    assert kit.janitor("history --format json").json["runs"][0]["status"] == shown


@pytest.mark.usefixtures("state")
def test_history_of_a_run_shows_its_report(kit: CommandKit) -> None:
    printed = kit.janitor("run --once --adopt --format json").json
    shown = kit.janitor(f"history {printed['id']}").out
    assert f"run {printed['id']}, apply, done; started 2023-11-14 22:13:20 UTC" in shown
    assert "default:orders" in shown
    assert "2 expired, 1 of old generations deleted, 1 of invalid transactions inverted" in shown
    document = kit.janitor(f"history {printed['id']} --format json").json
    assert document["report"] == printed
    assert (document["id"], document["expired"]) == (printed["id"], 2)


def test_history_of_a_run_says_what_its_report_left_out(kit: CommandKit, state: SqliteState) -> None:
    printed = kit.janitor("run --once --adopt --format json").json
    notes = [{"guard": "snapshot", "tripped": False, "message": "old"}]
    report = {**printed, "topics_omitted": 7, "errors": ["one", "two"], "guards": notes}
    report["totals"]["kept"]["unrecognized"] = 3
    state.begin_run(RunRecord("odd", "apply", NOW_MS))
    state.finish_run(RunRecord("odd", "apply", NOW_MS, NOW_MS, "partial", errors=("one", "two")), report)
    shown = kit.janitor("history odd").out
    for words in ("and 7 smaller entries", "failed: one", "failed: two", "snapshot: old", "3 unrecognized"):
        assert words in shown
    assert "one (and 1 more)" in kit.janitor("history --limit 1").out


@pytest.mark.usefixtures("state")
def test_history_of_an_unknown_run_exits_2_with_a_hint(kit: CommandKit) -> None:
    request = kit.janitor("history nothing")
    assert request.code == 2
    assert "janitor history --config janitor.yaml [TMS-USAGE]" in request.err


def test_ledger_shows_entries_with_decoded_keys_newest_first(kit: CommandKit, state: SqliteState) -> None:
    start, stop = key_range(NOW_MS - 2 * DAY, NOW_MS - DAY)
    entries = [
        entry(
            start=start, stop=stop, rows=1234, ttl_seconds=86400, cutoff_ms=NOW_MS - DAY, snapshot_timestamp_ms=NOW_MS
        ),
        entry(start=start, stop=stop, rule="old_generation", metadata_generation=-2, snapshot_timestamp_ms=None),
    ]
    state.add_ledger(entries)
    newest, oldest = (" ".join(line.split()) for line in kit.janitor("ledger").out.splitlines()[-2:])
    assert oldest == (
        "default:orders 1 message expired 1,234 2023-11-12 22:13:20 UTC #3 2023-11-13 22:13:20 UTC #3"
        " ttl 1 d, cutoff 2023-11-13 22:13:20 UTC 2023-11-14 22:13:20 UTC run"
    )
    assert newest.endswith("generation -2 none run")
    shown = kit.janitor("ledger --format json").json
    assert [item["rule"] for item in shown["entries"]] == ["old_generation", "expired"]
    item = shown["entries"][1]
    assert (item["start"], item["stop"], item["rows"]) == (start.hex(), stop.hex(), 1234)
    assert item["from"] == {"generation": 1, "publish_ms": NOW_MS - 2 * DAY, "sequence": 3}
    assert item["to"] == {"generation": 1, "publish_ms": NOW_MS - DAY, "sequence": 3}


def test_ledger_of_a_topic_pattern_or_run_shows_only_its_entries(kit: CommandKit, state: SqliteState) -> None:
    start, stop = key_range(1, 2)
    other = replace(TOPIC, topic="other")
    state.add_ledger([entry(start=start, stop=stop), entry(start=start, stop=stop, topic=other, run_id="next")])

    def found(line: str) -> list[str]:
        return [item["topic"] for item in kit.janitor(f"ledger {line} --format json").json["entries"]]

    assert found("") == ["other", "orders"]
    assert found("--topic default:orders") == ["orders"]
    assert found("--topic 'default:o*' --limit 1") == ["other"]
    assert found("--topic default:nothing --topic default:orders") == ["orders"]
    assert found("--run next") == ["other"]
    assert found("--run next --topic default:orders") == []
    assert found("--run next --topic default:nothing") == []


def test_ledger_of_an_unknown_run_fails_as_history_does(kit: CommandKit, state: SqliteState) -> None:
    state.begin_run(RunRecord("empty", "apply", 1))
    assert "no entries" in kit.janitor("ledger --run empty").out
    for line in ("ledger --run nothing", "ledger --run nothing --format json"):
        done = kit.janitor(line)
        assert (done.code, done.out) == (2, "")
        assert "run nothing; list the runs: janitor history" in done.err


def test_parts_of_a_full_or_partial_key_are_the_numbers_it_has() -> None:
    payload = PayloadKey(TOPIC, 2, pointer(NOW_MS), NOW_MS + 1, 4).pack()
    assert parts(entry(table="payload"), payload) == {
        "generation": 2,
        "pointer": pointer(NOW_MS),
        "write_ms": NOW_MS + 1,
        "sequence": 4,
    }
    assert parts(entry(), time_prefix(TOPIC.prefix, 1, NOW_MS)) == {"generation": 1, "publish_ms": NOW_MS}
    assert parts(entry(), generation_prefix(TOPIC.prefix, 2)) == {"generation": 2}
    assert parts(entry(), TOPIC.prefix) == {}


def test_ledger_of_open_ranges_shows_their_ends_as_words(kit: CommandKit, state: SqliteState) -> None:
    first = MessageKey(TOPIC, 1, NOW_MS, 0).pack()
    whole = entry(start=first, stop=generation_prefix(TOPIC.prefix, 2), rows=None)
    assert cells(whole)[4:7] == ["unknown", "2023-11-14 22:13:20 UTC #0", "the end"]
    cut = entry(start=generation_prefix(TOPIC.prefix, 1), stop=time_prefix(TOPIC.prefix, 1, NOW_MS))
    assert cells(cut)[5:7] == ["the beginning", "2023-11-14 22:13:20 UTC"]
    payload = PayloadKey(TOPIC, 1, pointer(NOW_MS - HOUR), NOW_MS, 0).pack()
    assert cells(entry(table="payload", start=payload))[5] == "transaction of 2023-11-14 21:13:20 UTC"
    state.add_ledger([entry(table="payload", start=payload, stop=payload + b"\x00")])
    [item] = kit.janitor("ledger --format json").json["entries"]
    assert item["from"]["pointer"] == str(pointer(NOW_MS - HOUR))


MESSAGE_ID = MessageId(NOW_MS - DAY, 0)
DUE_MS = NOW_MS - HOUR
LIVE = Fate("keep", Reason.LIVE, Rule.EXPIRED, NOW_MS + DAY, goes_ms=NOW_MS + DAY)
HELD = Fate("keep", Reason.HELD, Rule.EXPIRED, DUE_MS)


def why_answer(*found: FoundRow, **changes: object) -> Why:
    memory = LedgerReach(NOW_MS - DAY, NOW_MS - DAY, 30)
    described = Why(TOPIC, MESSAGE_ID, NOW_MS, 1, 3600, "", found, (), memory)
    return replace(described, **changes)  # type: ignore[arg-type]


def message(fate: Fate, **changes: object) -> FoundRow:
    key = MessageKey(TOPIC, 1, MESSAGE_ID.publish_ms, 0).pack()
    return replace(FoundRow("message", key, 1, MESSAGE_ID.publish_ms, None, "", False, fate), **changes)  # type: ignore[arg-type]


def fate_text(fate: Fate, **changes: object) -> str:
    """Return the text about the fate of a message."""
    return list(lines(why_answer(message(fate), **changes), "--config janitor.yaml"))[3].strip()


EXPIRES = "2023-11-15 22:13:20 UTC, in 1 d"
EXPIRED = "expired 2023-11-14 21:13:20 UTC"
DELETES = "next run deletes it$"


@pytest.mark.parametrize(
    ("fate", "words"),
    [
        (LIVE, f"{EXPIRES}$"),
        (Fate("delete", None, Rule.EXPIRED, DUE_MS), f"{EXPIRED}; .* {DELETES}"),
        (Fate("delete", None, Rule.OLD_GENERATION), f"generation; .* {DELETES}"),
        (
            replace(HELD, hold=Hold.FRONTIER, goes_ms=NOW_MS + HOUR, until_ms=NOW_MS + HOUR),
            f"{EXPIRED}; .* 2023-11-14 23:13:20 UTC .*: janitor approve default:orders --config janitor.yaml$",
        ),
        (replace(HELD, hold=Hold.QUARANTINED, until_ms=NOW_MS), f"{EXPIRED}; .* 2023-11-14 22:13:20 UTC$"),
        (replace(LIVE, hold=Hold.PROTECTED, goes_ms=None), f"{EXPIRES}; never .*janitor.protect "),
        (replace(HELD, hold=Hold.FIRST_CONTACT), f"{EXPIRED}; .*: janitor adopt --config janitor.yaml$"),
        (replace(HELD, reason=Reason.UNDECIDED), rf"{EXPIRED}, .* transaction .*\(rule L5\)$"),
        (
            replace(HELD, reason=Reason.REFERENCED, goes_ms=NOW_MS),
            rf"{EXPIRED}, .* message .*\(rule L5\), 2023-11-14 22:13:20 UTC at the earliest$",
        ),
        (replace(LIVE, goes_ms=NOW_MS + 2 * DAY), f"{EXPIRES}, .* message: 2023-11-16 22:13:20 UTC at the earliest$"),
        (Fate("keep", Reason.UNKNOWN_TOPIC), r"metadata \(rule L1\)$"),
    ],
    ids=range(11),
)
def test_why_of_a_row_names_its_fate_and_the_reason(fate: Fate, words: str) -> None:
    assert re.search(words, fate_text(fate))


def test_why_of_a_paused_topic_names_the_resume_commands() -> None:
    assert fate_text(replace(LIVE, hold=Hold.PAUSED), resume=("*:*", "default:*")).endswith(
        ": janitor resume '*:*' --config janitor.yaml, janitor resume 'default:*' --config janitor.yaml"
    )


def test_why_of_rows_shows_topic_transaction_and_inversion() -> None:
    negated = entry(rule="invalid_transaction", run_id="r1", at_ms=NOW_MS, snapshot_timestamp_ms=None)
    rolled_back = message(LIVE, transaction="rolled_back", inverted=(Trace.of(negated, certain=False),))
    inverted = message(replace(LIVE, action="invert", invert=True), transaction="invalid")
    shown = "\n".join(lines(why_answer(rolled_back, inverted)))
    assert shown.startswith("default:orders, generation 1, ttl 1 h; as of 2023-11-14 22:13:20 UTC\n")
    assert "message of generation 1, published 2023-11-13 22:13:20 UTC, exists" in shown
    assert "perhaps inverted by run r1, 2023-11-14 22:13:20 UTC, as invalid transaction, with no snapshot" in shown
    assert shown.count("inverts it") == 1


def test_why_of_a_deleted_row_separates_certain_from_possible_runs() -> None:
    taken_by = entry(run_id="r1", at_ms=NOW_MS, ttl_seconds=60, cutoff_ms=NOW_MS, snapshot_timestamp_ms=NOW_MS)
    sure = Trace.of(taken_by, certain=True)
    died = Trace.of(entry(run_id="r2", rows=None), certain=False)
    shown = "\n".join(lines(why_answer(missing=(MissingRow("message", None, (sure, died)),))))
    assert "the message does not exist" in shown
    assert (
        "deleted, if it existed, by run r1, 2023-11-14 22:13:20 UTC,"
        " as expired (ttl 1 min, cutoff 2023-11-14 22:13:20 UTC), with the snapshot of 2023-11-14 22:13:20 UTC" in shown
    )
    assert "perhaps deleted by run r2" in shown
    assert "died" in shown
    many = "\n".join(lines(why_answer(missing=(MissingRow("payload", b"", (died,) * 9),))))
    assert "its stored payload does not exist" in many
    assert "and 4 more runs" in many


def test_why_of_a_row_that_no_run_deleted_shows_the_reach_of_the_ledger() -> None:
    gone = MissingRow("message", None, ())
    shown = list(lines(why_answer(missing=(gone,))))[-1]
    assert shown == (
        "  no known run deleted it: the state has all deletions since 2023-11-13 22:13:20 UTC;"
        " it was deleted earlier or by CDAP, or never existed"
    )
    unknown = list(lines(why_answer(missing=(gone,), ledger_reach=LedgerReach(None, None, 30))))[-1]
    assert "creation" in unknown


def test_why_of_an_id_with_a_payload_it_does_not_need_says_so() -> None:
    request = why_answer(message(LIVE), message_id=MESSAGE_ID._replace(payload_ms=5))
    assert "stored payload" in list(lines(request))[-1]


def test_why_before_and_after_a_run_names_it(kit: CommandKit) -> None:
    expired, living = MessageId(NOW_MS - 3 * DAY, 0), MessageId(NOW_MS - MINUTE, 2)
    kit.janitor("adopt")
    [due] = kit.janitor(f"why default:orders {expired} --format json").json["found"]
    assert due["action"] == "delete"
    run = kit.janitor("run --once --format json").json["id"]
    assert f"deleted, if it existed, by run {run}" in kit.janitor(f"why default:orders {expired}").out
    found = kit.janitor(f"why default:orders {living} --format json").json["found"]
    assert [(row["action"], row["due_ms"]) for row in found] == [("keep", NOW_MS - MINUTE + DAY + 1)]


@pytest.mark.parametrize("words", ["orders 00", "default:* 00", f"default:orders {'0' * 39}", "default:orders xyz"])
def test_why_with_an_invalid_topic_or_id_exits_2(kit: CommandKit, words: str) -> None:
    assert kit.janitor(f"why {words}").code == 2


@pytest.mark.parametrize("leveldb", [None, "store", "/elsewhere/store"])
@pytest.mark.parametrize("environ", [{}, {"TMS_JANITOR__STATE": "said"}, {"TMS_STORAGE__KIND": "hbase"}], ids=str)
@pytest.mark.parametrize(
    "settings",
    [
        None,
        "",
        "storage:\njanitor:",
        "janitor: {state: own}",
        "janitor: {state: /own}",
        "storage: {kind: leveldb, leveldb: {path: store}}",
        "storage: {kind: hbase, hbase: {thrift: ['127.0.0.1:9']}}",
    ],
)
def test_place_of_settings_is_that_of_a_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: str | None, environ: dict[str, str], leveldb: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = None if settings is None else tmp_path / "conf" / "janitor.yaml"
    if config is not None:
        config.parent.mkdir()
        config.write_text(settings or "")
    wanted = Session(Common(config, leveldb), SystemClock()).place
    found = place_of(config, leveldb, None)
    assert Path(found.state_name).absolute() == Path(wanted.state_name).absolute()
    assert type(found) is type(wanted)


def test_history_of_a_run_under_way_has_its_heartbeat_and_no_report(kit: CommandKit, state: SqliteState) -> None:
    state.begin_run(RunRecord("on", "apply", NOW_MS, heartbeat_ms=NOW_MS))
    assert "last heartbeat 2023-11-14 22:13:20 UTC" in kit.janitor("history on").out
    assert kit.janitor("history on --format json").json["report"] is None


def test_why_of_a_topic_without_metadata_or_a_deleted_one_says_so() -> None:
    first = [
        next(lines(why_answer(**changes)))
        for changes in ({"generation": None, "ttl_seconds": None}, {"problem": "it is broken"}, {"generation": -2})
    ]
    assert [line.partition(";")[0].partition(", ")[2] for line in first] == [
        "which has no metadata",
        "it is broken",
        "generation -2 (deleted), ttl 1 h",
    ]
