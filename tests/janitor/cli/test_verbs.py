"""Queries and decisions: adopt, approve, inspect, boundary, verify, doctor, config, completion."""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter
from typing import Any

import pytest

from janitor.state.records import TopicCount
from janitor.state.sqlite.state import SqliteState
from janitor.state.topic_history import save_sizes
from janitor.stats.topic_sizes import TopicSizeCounter
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, pointer, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tests.support import free_port
from tms_core.clock import ManualClock
from tms_core.tables.base import MessageValue
from tms_core.tables.leveldb import library
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import TopicId


def test_approve_of_one_held_topic_releases_only_that_topic(kit: CommandKit) -> None:
    with LevelDBStore(kit.store) as store:
        topic(store, "default:bills", ttl_seconds=86400).plain(NOW_MS - MINUTE)
    kit.janitor("run --once --adopt")
    with LevelDBStore(kit.store) as store:
        topic(store, "default:bills", ttl_seconds=30)
        topic(store, "default:orders", ttl_seconds=30)
    approved = kit.janitor("approve default:bills")
    assert approved.out == "approved:\n  default:bills\nnext: janitor run --once --config janitor.yaml\n"
    done = kit.janitor("run --once --format json").json
    assert [(entry["topic"], entry["held"]) for entry in done["topics"]] == [("bills", None), ("orders", "frontier")]
    assert kit.janitor("approve --all --format json").json == {"approved": ["default:orders"], "clock": False}


def test_approve_without_held_rows_says_so(kit: CommandKit) -> None:
    kit.janitor("adopt")
    assert kit.janitor("approve --all").out == "no rows are held\n"
    assert kit.janitor("approve --clock").out == "the clock is accepted\nnext: janitor plan --config janitor.yaml\n"
    assert kit.janitor("approve default:orders").out == "no rows of default:orders are held\n"


def test_approve_of_a_held_topic_and_of_a_clock_jump_are_separate(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    kit.set_ttl("default:orders", 30)
    kit.clock.step(DAY)
    refused = kit.janitor("approve --all")
    assert refused.code == 3
    assert "janitor approve --clock --config janitor.yaml" in refused.err
    assert kit.janitor("approve --clock --format json").json == {"approved": [], "clock": True}
    held = kit.janitor("run --once --format json").json
    assert {entry["held"] for entry in held["topics"]} == {"frontier"}
    assert kit.janitor("approve --all --format json").json == {"approved": ["default:orders"], "clock": False}
    assert {entry["held"] for entry in kit.janitor("run --once --format json").json["topics"]} == {None}


def test_inspect_message_decodes_counts_and_consumes_nothing(kit: CommandKit) -> None:
    for _ in range(2):
        found = kit.janitor("inspect message --limit 1 --format json").json
        assert found["counts"] == {"plain": 4, "transactional": 1, "invalid": 1}
        assert found["min_transaction_ms"] == NOW_MS - 4 * HOUR
        [row] = found["rows"]
        assert (row["topic"], row["publish_ms"], row["kind"]) == ("default:orders", NOW_MS - 3 * DAY, "plain")


def test_inspect_message_shows_the_start_of_the_oldest_transaction(kit: CommandKit) -> None:
    assert "oldest transaction: 2023-11-14 18:13:20 UTC" in kit.janitor("inspect message").out


def test_inspect_with_a_pattern_counts_its_topics_only(kit: CommandKit) -> None:
    for table, counts in (("message", {"plain": 1}), ("meta", {"deleted": 1}), ("payload", {})):
        assert kit.janitor(f"inspect {table} --topic '*:retired' --format json").json["counts"] == counts


def test_inspect_of_an_empty_table_prints_no_rows(kit: CommandKit) -> None:
    assert kit.janitor("inspect payload").out == "no rows\n"


def test_inspect_meta_of_an_unreadable_topic_escapes_its_text(kit: CommandKit) -> None:
    with LevelDBStore(kit.store) as store:
        store.metadata.compare_and_set(b"default:odd:", None, b'{"ttl":"\x1b[2J"}')
        store.metadata.compare_and_set(b"unrecognized", None, b"{}")
    shown = kit.janitor("inspect meta")
    assert "default:odd" in shown.out
    assert b"unrecognized".hex() in shown.out
    assert "\x1b" not in shown.out
    assert "1 deleted, 1 topics, 2 unreadable" in shown.out


def test_inspect_snapshot_shows_transactions_with_their_times(kit: CommandKit) -> None:
    shown = kit.janitor("inspect snapshot").out
    assert "source: snapshot.1699999999000" in shown
    assert "timestamp_ms: 1699999999000 (2023-11-14 22:13:19 UTC)" in shown
    assert f"{INVALID}  invalid  2023-11-14 18:13:20 UTC" in shown
    assert kit.janitor("inspect snapshot --limit 0 --format json").json["invalid"] == []


def test_inspect_with_a_stale_snapshot_shows_the_problem_and_does_not_use_it(kit: CommandKit) -> None:
    kit.clock.advance(HOUR)
    assert "1 h 1 s old" in kit.janitor("inspect snapshot --format json").json["problem"]
    assert "1 h 1 s old" in kit.janitor("inspect snapshot").out
    assert kit.janitor("inspect message --format json").json["counts"]["positive"] == 1


def test_inspect_snapshot_without_a_snapshot_exits_1_with_a_hint(kit: CommandKit) -> None:
    shutil.rmtree(kit.folder / "data/tx")
    missing = kit.janitor("inspect snapshot")
    assert (missing.code, missing.out) == (1, "")
    assert "[TMS-SNAPSHOT-NOT-FOUND]" in missing.err
    assert "--snapshots" in missing.err


def test_boundary_explain_after_a_full_run_shows_its_limits(kit: CommandKit) -> None:
    assert kit.janitor("boundary").out.startswith("no boundary is published yet\nnext: janitor boundary --explain ")
    kit.janitor("run --once --adopt")
    shown = kit.janitor("boundary --explain").out.splitlines()
    assert shown[0].startswith(f"{INVALID}, transactions of 2023-11-14 18:13:20 UTC, by run 1700000000000-")
    assert shown[1].startswith(f"at most {INVALID}: snapshot 1699999999000")


def test_verify_of_a_true_boundary_proves_it(kit: CommandKit) -> None:
    assert "no boundary" in kit.janitor("verify").out
    kit.janitor("run --once --adopt")
    proven = kit.janitor("verify")
    assert proven.code == 0
    assert f"proven: no row up to {INVALID}" in proven.out


def test_verify_of_an_invalid_row_above_the_boundary_refutes_nothing(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    later = pointer(NOW_MS - 600)
    with LevelDBStore(kit.store) as store:
        store.message.put([(b"unrecognized", MessageValue(later, b"?"))])
    kit.snapshot((INVALID, later), age_ms=500)
    found = kit.janitor("verify --format json")
    assert (found.code, found.json["boundary"], found.json["open_cells"]) == (0, str(INVALID), 1)
    assert "(1 of them with unrecognized keys)" in kit.janitor("verify").out


@pytest.mark.parametrize("listed", [True, False])
def test_verify_of_a_false_boundary_refutes_it_and_names_the_row(kit: CommandKit, listed: bool) -> None:
    kit.janitor("run --once --adopt")
    with LevelDBStore(kit.store) as store:
        topic(store, "default:orders", ttl_seconds=86400).tx(INVALID, NOW_MS - 2 * HOUR)
    if not listed:  # an operator removed it from the list because of the boundary
        kit.snapshot((), age_ms=500)
    refuted = kit.janitor("verify")
    assert refuted.code == 1
    assert re.search(f"refuted: 1 .*{INVALID}", refuted.out)
    assert b"default:orders:".hex() in refuted.out
    again = kit.janitor("verify")
    assert again.code == 1
    assert f"no boundary is published: the boundary {INVALID} is refuted" in again.out
    found = kit.janitor("verify --format json")
    assert found.code == 1, "the previous name is accepted for one version"
    assert (found.json["boundary"], found.json["refuted"], found.json["open_cells"]) == (None, 0, 1)
    assert "was refuted" in kit.janitor("status").out


def checks(kit: CommandKit, line: str = "doctor --config janitor.yaml") -> dict[str, Any]:
    found = kit.run(f"{line} --format json")
    assert found.code == (1 if any(check["status"] == "fail" for check in found.json) else 0)
    return {check["check"]: (check["status"], check["message"]) for check in found.json}


def test_doctor_with_everything_in_place_reports_ok(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.janitor("run --once --adopt")
    monkeypatch.setattr(library, "build", lambda: library.Build("plyvel-next 2.1.2", "1.23", is_slow=False))
    monkeypatch.setattr("janitor.spark.session.require_java", lambda _: None)
    found = checks(kit)
    assert {status for status, _ in found.values()} == {"ok"}
    assert list(found) == ["settings", "store", "state", "snapshots", "clock", "lifetime", "disk", "spark", "leveldb"]
    assert found["leveldb"][1] == "plyvel-next 2.1.2 with LevelDB 1.23"
    assert "last run done at 2023-11-14 22:13:20 UTC" in found["state"][1]


ARCHIVED = SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: PATH}, ")
TLS = "tls: {certificate: nowhere.pem, key: nowhere.key}"


@pytest.mark.parametrize(
    ("check", "settings", "status", "text"),
    [
        ("archive", ARCHIVED.replace("PATH", "file.txt/below"), "fail", "cannot be written"),
        ("archive", ARCHIVED.replace("PATH", "'s3://bucket'"), "fail", "archives only to local folders"),
        ("tls", SETTINGS + "server: {" + TLS + "}", "fail", "server.tls."),
        ("auth", SETTINGS + "server: {auth: {kind: tokens, tokens_file: nope}}", "fail", "nope"),
        ("auth", SETTINGS + "server: {auth: {kind: jwt, key_file: nope, audience: a, issuer: i}}", "fail", "nope"),
        ("transaction tls", SETTINGS.replace("source:", TLS + "\n  source:"), "fail", "transactions.tls."),
        (
            "snapshots",
            SETTINGS.replace("source: directory", "source: manager").replace("data/tx", "data/nowhere"),
            "warn",
            "transactions.directory",
        ),
        ("state", SETTINGS, "warn", "janitor adopt"),
    ],
)
def test_doctor_finds_what_a_run_cannot_use(kit: CommandKit, check: str, settings: str, status: str, text: str) -> None:
    (kit.folder / "file.txt").write_text("not a folder", encoding="utf-8")
    kit.set(settings)
    found, message = checks(kit)[check]
    assert (found, text in message) == (status, True), message


@pytest.mark.parametrize(
    "setting",
    [
        "transactions.token_file",
        "transactions.admin_token_file",
        "transactions.ca_file",
        "transactions.hdfs_ca_file",
        "transactions.kerberos.keytab",
        "server.leader.ca_file",
        "janitor.http.token_file",
    ],
)
def test_doctor_checks_each_file_that_settings_name(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    file = kit.folder / "named"
    monkeypatch.setenv(f"TMS_{setting.replace('.', '__').upper()}", str(file))
    for contents in (None, ""):
        if contents is not None:
            file.write_text(contents)
        status, message = checks(kit)["files"]
        assert (status, f"{setting} {file}" in message) == ("fail", True)
    file.write_text("contents")
    status, message = checks(kit)["files"]
    assert (status, setting in message) == ("ok", True)


def test_doctor_ignores_files_of_a_store_that_is_not_in_use(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMS_STORAGE__HBASE__TLS__CA_FILE", "nowhere.pem")
    assert "files" not in checks(kit)


def test_doctor_archive_without_pyarrow_names_the_extra(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, "))
    assert checks(kit)["archive"][0] == "ok"
    monkeypatch.setattr("janitor.archive.parquet.find_spec", lambda _: None)
    status, message = checks(kit)["archive"]
    assert (status, "pyarrow" in message) == ("fail", True)
    assert not (kit.folder / "data/archive").exists()


def test_doctor_without_spark_names_what_needs_it(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("janitor.spark.session.find_spec", lambda _: None)
    status, message = checks(kit)["spark"]
    assert (status, "janitor spark needs pyspark, which is not installed" in message) == ("ok", True)


def test_doctor_of_a_missing_store_fails_with_a_hint_and_creates_nothing(kit: CommandKit) -> None:
    before = sorted(kit.folder.rglob("*"))
    status, message = checks(kit, "doctor --leveldb nowhere/at/all")["store"]
    assert status == "fail"
    assert "--leveldb" in message
    assert sorted(kit.folder.rglob("*")) == before


def test_doctor_store_that_cannot_be_written_fails(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    may = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: "payload" not in str(path) and may(path, mode))
    status, message = checks(kit)["store"]
    assert status == "fail"
    assert "system.tms.payload cannot be written; run as its owner" in message


def test_doctor_with_source_none_does_not_warn(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("source: directory", "source: none"))
    assert checks(kit)["snapshots"][0] == "ok"
    for words in ("plan", "run --once --adopt", "status"):
        shown = kit.janitor(words)
        assert "transactions.directory" not in shown.out + shown.err
    assert "no transaction snapshot" in kit.janitor("plan").out


def test_doctor_without_the_external_service_does_not_start_a_server(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("source: directory", f"source: thrift\n  thrift: '127.0.0.1:{free_port()}'"))
    status, message = checks(kit)["snapshots"]
    assert (status, "tms serve" in message, "transactions.thrift" in message) == ("warn", False, True)
    assert ".;" not in message


def test_doctor_with_a_nearly_full_disk_warns(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type(shutil.disk_usage("/"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1_000_000_000, 960_000_000, 40_000_000))
    assert checks(kit)["disk"] == ("warn", "40 MB of 1.0 GB free")


def test_doctor_leveldb_built_without_optimization_warns(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "build", lambda: library.Build("plyvel 1.5.1", "1.22", is_slow=True))
    status, message = checks(kit)["leveldb"]
    assert status == "warn"
    assert message.startswith("plyvel 1.5.1 with LevelDB 1.22, ")
    assert "use Python 3.12 or newer" in message


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_script_of_a_shell_names_the_command(kit: CommandKit, shell: str) -> None:
    done = kit.run(f"completion {shell}")
    assert done.code == 0
    assert "_JANITOR_COMPLETE" in done.out


@pytest.mark.parametrize("line", ["topic", "approve", "why", "pause", "resume", "archive restore"])
def test_shell_completes_the_topics_of_the_state(
    kit: CommandKit, line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed() -> set[str]:
        with pytest.raises(SystemExit):
            kit.run("")
        return {line.partition(",")[2] for line in capsys.readouterr().out.split()}

    monkeypatch.setenv("_JANITOR_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", f"janitor --config janitor.yaml {line} default:o")
    monkeypatch.setenv("COMP_CWORD", str(3 + len(line.split())))
    assert completed() == set()
    monkeypatch.delenv("_JANITOR_COMPLETE")
    kit.janitor("run --once --adopt")
    monkeypatch.setenv("_JANITOR_COMPLETE", "bash_complete")
    assert completed() == {"default:orders"}
    monkeypatch.setenv("COMP_WORDS", f"janitor {line} --config nothing.yaml default:o")
    assert completed() == set()


def test_topic_with_counts_shows_size_and_messages_over_time(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    orders = TopicId("default", "orders")
    with SqliteState(kit.folder / "data/janitor") as state:
        for number, messages in enumerate((0, 50, 100)):
            count = TopicCount(messages, 1000 * number, None, None, NOW_MS - (3 - number) * HOUR)
            state.save_counts({orders: count})
            save_sizes(state, {orders: count})
    shown = kit.janitor("topic default:orders").out
    assert "over time    ▁▄█ in the last 3 h, at most 2.0 kB\n             ▁▄█ at most 100 messages\n" in shown


def test_plan_run_history_and_status_show_the_messages_left(kit: CommandKit) -> None:
    assert "messages:" not in kit.janitor("plan").out
    with LevelDBStore(kit.store) as store, SqliteState(kit.folder / "data/janitor") as state:
        TopicSizeCounter(store, state, ManualClock(NOW_MS - 20_000), rows_per_second=1_000_000).step()
        counted = sum(count.messages for count in state.counts().values())
    report = kit.janitor("plan --format json").json
    rows = Counter[str]()
    for entry in report["topics"]:
        rows[entry["rule"]] += entry["rows"] * (entry["table"] == "message")
    # A deleted topic has no count, so its deleted rows are added.
    gone, total = rows["expired"] + rows["old_generation"], counted + rows["old_generation"]
    assert report["messages"] == {"before": total, "left": total - gone, "counted_ms": NOW_MS - 20_000}
    progress = f"{gone} of about {total} %s, about {total - gone} left"
    aged = " (counted 20 s before)"
    for command in ("plan", "plan --summary"):
        assert f"messages: {progress % 'would be deleted'}{aged}" in kit.janitor(command).out.splitlines()
    assert f"messages: {progress % 'deleted'}{aged}" in kit.janitor("run --once --adopt").out.splitlines()
    assert f"messages: {progress % 'deleted'}" in kit.janitor("status").out
    (run,) = kit.janitor("history --format json").json["runs"]
    assert f"messages: {progress % 'deleted'}{aged}" in kit.janitor(f"history {run['id']}").out.splitlines()


def test_approve_without_a_topic_or_with_two_choices_exits_2(kit: CommandKit) -> None:
    kit.janitor("adopt")
    refused = kit.janitor("approve")
    assert (refused.code, refused.out) == (2, "")
    assert "--all" in refused.err
    assert "--clock" in refused.err
    assert kit.janitor("approve default:orders --all").code == 2


def test_doctor_warns_of_a_store_of_another_user(kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    status, message = checks(kit)["store"]
    assert (status, "run as its owner" in message) == ("warn", True)


def test_doctor_counts_damaged_snapshots_that_were_skipped(kit: CommandKit) -> None:
    (kit.folder / "data/tx/snapshot.1699999999999").write_bytes(b"")
    assert checks(kit)["snapshots"] == ("ok", "snapshot.1699999999000, 1 skipped")


@pytest.mark.parametrize(("hours", "status"), [(2, "fail"), (-2, "warn")])
def test_doctor_finds_a_clock_that_was_changed(kit: CommandKit, hours: int, status: str) -> None:
    kit.janitor("run --once --adopt")
    kit.clock.step(hours * HOUR)
    assert checks(kit)["clock"][0] == status


def test_doctor_warns_of_an_unknown_lifetime(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("  max_lifetime_seconds: 3600\n", ""))
    assert checks(kit)["lifetime"][0] == "warn"
