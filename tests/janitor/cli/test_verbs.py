"""The verbs that ask and decide: adopt, approve, inspect, boundary, verify, doctor, config, completion."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from typing import Any

import pytest

from janitor.state.records import TopicCount
from janitor.state.sqlite.state import SqliteState
from janitor.state.topic_history import save_sizes
from janitor.stats.topic_sizes import TopicSizeCounter
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, Site
from tms_core.clock import ManualClock
from tms_core.tables.leveldb import library
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId

# --- adopt, approve --------------------------------------------------------------------------------------------------


def test_given_adopt_then_the_topics_are_counted_and_the_next_run_deletes(site: Site) -> None:
    done = site.janitor("adopt")
    assert done.out == "adopted, with 2 topics\nnext: janitor run --once --config janitor.yaml\n"
    assert site.janitor("run --once --format json").json["totals"]["expired"] == 2


def test_given_held_topics_when_one_is_approved_then_that_one_goes(site: Site) -> None:
    with LevelDBStore(site.store) as store:
        topic(store, "default:bills", ttl_seconds=86400).plain(NOW_MS - MINUTE)
    site.janitor("run --once --adopt")
    with LevelDBStore(site.store) as store:
        topic(store, "default:bills", ttl_seconds=30)
        topic(store, "default:orders", ttl_seconds=30)
    approved = site.janitor("approve default:bills")
    assert approved.out == "approved:\n  default:bills\nnext: janitor run --once --config janitor.yaml\n"
    done = site.janitor("run --once --format json").json
    assert [(entry["topic"], entry["held"]) for entry in done["topics"]] == [("bills", None), ("orders", "frontier")]
    assert site.janitor("approve --all --format json").json == {"approved": ["default:orders"], "clock": False}


def test_given_nothing_held_when_approved_then_that_is_said(site: Site) -> None:
    site.janitor("adopt")
    assert site.janitor("approve --all").out == "nothing is held\n"
    assert site.janitor("approve --clock").out == "the clock is accepted\nnext: janitor plan --config janitor.yaml\n"
    assert site.janitor("approve default:orders").out == "nothing is held of default:orders\n"


def test_given_a_held_topic_and_a_clock_that_jumped_then_each_is_approved_by_itself(site: Site) -> None:
    site.janitor("run --once --adopt")
    with LevelDBStore(site.store) as store:
        topic(store, "default:orders", ttl_seconds=30)
    site.clock.step(DAY)
    refused = site.janitor("approve --all")
    assert refused.code == 3
    assert "janitor approve --clock --config janitor.yaml" in refused.err
    assert site.janitor("approve --clock --format json").json == {"approved": [], "clock": True}
    held = site.janitor("run --once --format json").json
    assert {entry["held"] for entry in held["topics"]} == {"frontier"}
    assert site.janitor("approve --all --format json").json == {"approved": ["default:orders"], "clock": False}
    assert {entry["held"] for entry in site.janitor("run --once --format json").json["topics"]} == {None}


# --- inspect ---------------------------------------------------------------------------------------------------------


def test_given_messages_then_they_are_decoded_counted_and_not_consumed(site: Site) -> None:
    for _ in range(2):
        found = site.janitor("inspect message --limit 1 --format json").json
        assert found["counts"] == {"plain": 4, "transactional": 1, "invalid": 1}
        assert found["min_transaction_ms"] == NOW_MS - 4 * HOUR
        [row] = found["rows"]
        assert (row["topic"], row["publish_ms"], row["kind"]) == ("default:orders", NOW_MS - 3 * DAY, "plain")


def test_given_an_empty_table_then_that_is_said(site: Site) -> None:
    assert site.janitor("inspect payload").out == "no rows\n"


def test_given_a_topic_whose_metadata_cannot_be_read_then_it_is_shown_with_the_reason_and_drives_no_terminal(
    site: Site,
) -> None:
    with LevelDBStore(site.store) as store:
        store.metadata.compare_and_set(b"default:odd:", None, b'{"ttl":"\x1b[2J"}')
    shown = site.janitor("inspect meta")
    assert "default:odd" in shown.out
    assert "\x1b" not in shown.out
    assert "1 deleted, 1 topics, 1 unreadable" in shown.out


def test_given_a_snapshot_then_its_transactions_are_shown_with_their_times(site: Site) -> None:
    shown = site.janitor("inspect snapshot").out
    assert "source: snapshot.1699999999000" in shown
    assert "timestamp_ms: 1699999999000 (2023-11-14 22:13:19 UTC)" in shown
    assert f"{INVALID}  invalid  2023-11-14 18:13:20 UTC" in shown


def test_given_no_snapshot_when_inspected_then_1_and_why(site: Site) -> None:
    shutil.rmtree(site.folder / "data/tx")
    missing = site.janitor("inspect snapshot")
    assert (missing.code, missing.out) == (1, "")
    assert "[TMS-SNAPSHOT-NOT-FOUND]" in missing.err
    assert "--snapshots" in missing.err


# --- boundary, verify -------------------------------------------------------------------------------------------------


def test_given_a_complete_run_then_the_boundary_is_shown_with_what_holds_it(site: Site) -> None:
    assert site.janitor("boundary").out.startswith("no boundary is published yet\nnext: janitor boundary --explain ")
    site.janitor("run --once --adopt")
    shown = site.janitor("boundary --explain").out.splitlines()
    assert shown[0].startswith(f"{INVALID}, transactions of 2023-11-14 18:13:20 UTC, by run 1700000000000-")
    assert shown[1].startswith(f"held at {INVALID}: snapshot 1699999999000")


def test_given_a_true_boundary_when_audited_then_it_is_proven(site: Site) -> None:
    assert "no boundary is published yet" in site.janitor("verify").out
    site.janitor("run --once --adopt")
    proven = site.janitor("verify")
    assert proven.code == 0
    assert f"proven: no row up to {INVALID}" in proven.out


@pytest.mark.parametrize("listed", [True, False])
def test_given_a_row_that_makes_the_boundary_false_when_audited_then_it_is_refuted_and_named(
    site: Site, listed: bool
) -> None:
    site.janitor("run --once --adopt")
    with LevelDBStore(site.store) as store:
        topic(store, "default:orders", ttl_seconds=86400).tx(INVALID, NOW_MS - 2 * HOUR)
    if not listed:  # an operator has taken it off the list because of the claim
        site.snapshot((), age_ms=500)
    refuted = site.janitor("verify")
    assert refuted.code == 1
    assert f"refuted: 1 rows up to {INVALID}" in refuted.out
    assert b"default:orders:".hex() in refuted.out
    again = site.janitor("verify")
    assert again.code == 1
    assert f"no boundary is published: the boundary {INVALID} is refuted" in again.out
    found = site.janitor("verify --format json")
    assert found.code == 1, "its former name is understood for a version"
    assert (found.json["boundary"], found.json["refuted"], found.json["open_cells"]) == (None, 0, 1)
    assert "was refuted" in site.janitor("status").out


# --- doctor ----------------------------------------------------------------------------------------------------------


def checks(site: Site, line: str = "doctor --config janitor.yaml") -> dict[str, Any]:
    found = site.run(f"{line} --format json")
    assert found.code == (1 if any(check["status"] == "fail" for check in found.json) else 0)
    return {check["check"]: (check["status"], check["message"]) for check in found.json}


def test_given_all_in_place_then_every_check_is_ok(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.janitor("run --once --adopt")
    monkeypatch.setattr(library, "build", lambda: library.Build("plyvel-next 2.1.2", "1.23", is_slow=False))
    monkeypatch.setattr("janitor.spark.session.require_java", lambda _: None)
    found = checks(site)
    assert {status for status, _ in found.values()} == {"ok"}
    assert list(found) == ["settings", "store", "state", "snapshots", "clock", "lifetime", "disk", "spark", "leveldb"]
    assert found["leveldb"][1] == "plyvel-next 2.1.2 with LevelDB 1.23"
    assert "last run done at 2023-11-14 22:13:20 UTC" in found["state"][1]


@pytest.mark.parametrize(
    ("check", "settings", "said"),
    [
        (
            "archive",
            "janitor: {state: data/janitor, archive: {enabled: true, path: file.txt/below}}",
            "cannot be written",
        ),
        (
            "archive",
            "janitor: {state: data/janitor, archive: {enabled: true, path: 's3://bucket'}}",
            "only to local folders",
        ),
        ("tls", "server: {tls: {certificate: nowhere.pem, key: nowhere.key}}", "server.tls."),
        ("auth", "server: {auth: {kind: tokens, tokens_file: nowhere}}", "nowhere"),
        ("auth", "server: {auth: {kind: jwt, key_file: nowhere, audience: a, issuer: i}}", "nowhere"),
    ],
)
def test_doctor_what_a_run_or_its_server_cannot_use_fails(site: Site, check: str, settings: str, said: str) -> None:
    (site.folder / "file.txt").write_text("not a folder", encoding="utf-8")
    before = SETTINGS if not settings.startswith("janitor") else SETTINGS.partition("janitor:")[0]
    site.set(before + settings)
    status, message = checks(site)[check]
    assert (status, said in message) == ("fail", True), message


def test_doctor_certificate_of_the_transaction_service_that_cannot_be_used_fails(site: Site) -> None:
    site.set(
        SETTINGS.replace("transactions:\n", "transactions:\n  tls: {certificate: nowhere.pem, key: nowhere.key}\n")
    )
    status, message = checks(site)["transaction tls"]
    assert (status, "transactions.tls." in message) == ("fail", True), message


def test_doctor_archive_without_pyarrow_fails_and_names_the_extra(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, "))
    assert checks(site)["archive"][0] == "ok"
    monkeypatch.setattr("janitor.archive.parquet.find_spec", lambda _: None)
    status, message = checks(site)["archive"]
    assert (status, "pyarrow" in message) == ("fail", True)
    assert not (site.folder / "data/archive").exists()


def test_doctor_without_spark_says_who_needs_it(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("janitor.spark.session.find_spec", lambda _: None)
    status, message = checks(site)["spark"]
    assert (status, "janitor spark needs pyspark, which is not installed" in message) == ("ok", True)


def test_given_a_store_never_adopted_then_a_warning_says_what_to_do(site: Site) -> None:
    status, message = checks(site)["state"]
    assert status == "warn"
    assert "janitor adopt" in message


def test_given_no_store_then_the_check_fails_with_the_next_step_and_nothing_is_made(site: Site) -> None:
    before = sorted(site.folder.rglob("*"))
    status, message = checks(site, "doctor --leveldb nowhere/at/all")["store"]
    assert status == "fail"
    assert "Give the folder" in message
    assert sorted(site.folder.rglob("*")) == before


def test_given_a_store_that_cannot_be_written_then_the_check_fails(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "payload" not in str(path) and may(path, mode))
    status, message = checks(site)["store"]
    assert status == "fail"
    assert "system.tms.payload cannot be written; run as its owner" in message


def test_doctor_without_a_source_of_snapshots_names_the_setting(site: Site) -> None:
    site.set(SETTINGS.replace("source: directory", "source: manager").replace("data/tx", "data/nowhere"))
    status, message = checks(site)["snapshots"]
    assert status == "warn"
    assert "transactions.directory" in message


def test_source_none_is_a_choice_and_nothing_warns_about_it(site: Site) -> None:
    site.set(SETTINGS.replace("source: directory", "source: none"))
    assert checks(site)["snapshots"][0] == "ok"
    for words in ("plan", "run --once --adopt", "status"):
        shown = site.janitor(words)
        assert "no snapshots are configured" not in shown.out + shown.err
    assert "no transaction snapshot" in site.janitor("plan").out


def test_given_a_disk_that_is_nearly_full_then_a_warning(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1_000_000_000, 960_000_000, 40_000_000))
    assert checks(site)["disk"] == ("warn", "40 MB of 1.0 GB free")


def test_doctor_leveldb_built_without_optimization_warns(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build", lambda: library.Build("plyvel 1.5.1", "1.22", is_slow=True))
    status, message = checks(site)["leveldb"]
    assert status == "warn"
    assert message.startswith("plyvel 1.5.1 with LevelDB 1.22, ")
    assert "use Python 3.12 or newer" in message


# --- config, completion ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_given_a_shell_then_its_completion_script_names_the_command(site: Site, shell: str) -> None:
    done = site.run(f"completion {shell}")
    assert done.code == 0
    assert "_JANITOR_COMPLETE" in done.out


@pytest.mark.parametrize("line", ["topic", "approve", "why", "pause", "resume", "archive restore"])
def test_given_a_shell_asks_for_a_topic_then_those_that_the_state_knows_are_completed(
    site: Site, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed() -> set[str]:
        with pytest.raises(SystemExit):
            site.run("")
        return {line.partition(",")[2] for line in capsys.readouterr().out.split()}

    monkeypatch.setenv("_JANITOR_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"janitor --config janitor.yaml {line} default:o")
    monkeypatch.setenv("COMP_CWORD", str(3 + len(line.split())))
    assert completed() == set()
    monkeypatch.delenv("_JANITOR_COMPLETE")
    site.janitor("run --once --adopt")
    monkeypatch.setenv("_JANITOR_COMPLETE", "bash_complete")
    assert completed() == {"default:orders"}
    monkeypatch.setenv("COMP_WORDS", f"janitor {line} --config nothing.yaml default:o")
    assert completed() == set()


def test_given_counts_of_a_topic_when_shown_then_size_and_messages_are_there_over_time(site: Site) -> None:
    site.janitor("run --once --adopt")
    orders = TopicId("default", "orders")
    with SqliteState(site.folder / "data/janitor") as state:
        for number, messages in enumerate((0, 50, 100)):
            count = TopicCount(messages, 1000 * number, None, None, NOW_MS - (3 - number) * HOUR)
            state.save_counts({orders: count})
            save_sizes(state, {orders: count})
    shown = site.janitor("topic default:orders").out
    assert "over time    ▁▄█ in the last 3 h, at most 2.0 kB\n             ▁▄█ at most 100 messages\n" in shown


def test_given_counts_of_all_topics_then_plan_run_history_and_status_tell_how_many_messages_are_left(
    site: Site,
) -> None:
    assert "messages:" not in site.janitor("plan").out
    with LevelDBStore(site.store) as store, SqliteState(site.folder / "data/janitor") as state:
        TopicSizeCounter(store, state, ManualClock(NOW_MS - 20_000), rows_per_second=1_000_000).step()
        counted = sum(count.messages for count in state.counts().values())
    report = site.janitor("plan --format json").json
    rows = Counter[str]()
    for entry in report["topics"]:
        rows[entry["rule"]] += entry["rows"] * (entry["table"] == "message")
    # A deleted topic has no count, so what goes of it is added.
    gone, total = rows["expired"] + rows["old_generation"], counted + rows["old_generation"]
    assert report["messages"] == {"before": total, "left": total - gone, "counted_ms": NOW_MS - 20_000}
    told = f"{gone} of about {total} %s, about {total - gone} left"
    aged = " (counted 20 s before)"
    for command in ("plan", "plan --summary"):
        assert f"messages: {told % 'would be deleted'}{aged}" in site.janitor(command).out.splitlines()
    assert f"messages: {told % 'deleted'}{aged}" in site.janitor("run --once --adopt").out.splitlines()
    assert f"messages: {told % 'deleted'}" in site.janitor("status").out
    (run,) = site.janitor("history --format json").json["runs"]
    assert f"messages: {told % 'deleted'}{aged}" in site.janitor(f"history {run['id']}").out.splitlines()
