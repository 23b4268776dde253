"""Every exit code, and its message."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from janitor.cli.main import execute
from janitor.run.engine import Engine
from janitor.state.base import CounterKey
from janitor.state.sqlite.state import SqliteState
from tests.builders import HOUR, MINUTE, NOW_MS, topic, unknown_topic
from tests.janitor.cli.conftest import SETTINGS, CommandKit
from tests.support import raising
from tms_core.errors import StoreError
from tms_core.tables.base import Origin
from tms_core.tables.lease import Lease
from tms_core.tables.leveldb.store import LevelDBMessageTable, LevelDBStore

ROOT = Path(__file__).parents[3]
FAILED_RUNS = CounterKey("sweeps_total", (("result", "failed"),))


def test_run_with_a_stale_snapshot_exits_0_with_a_warning(kit: CommandKit) -> None:
    assert kit.janitor("run --once --adopt").code == 0
    kit.clock.advance(HOUR)
    done = kit.janitor("run --once --format json")
    assert done.code == 0
    assert [(note["guard"], note["tripped"]) for note in done.json["guards"]] == [("snapshot", False)]


def test_plan_of_a_missing_store_exits_1_with_a_hint_and_creates_no_state(kit: CommandKit) -> None:
    failed = kit.run("plan --leveldb nowhere")
    assert failed.code == 1
    assert failed.out == ""
    assert "[TMS-STORE-NOT-FOUND]" in failed.err
    assert "storage.leveldb.path" in failed.err
    assert not (kit.folder / "nowhere.janitor").exists()


@pytest.mark.parametrize("line", ["history", "history run", "ledger", "topic default:a", "resume", "resume default:a"])
def test_command_on_the_state_of_a_missing_store_exits_1_and_creates_none(kit: CommandKit, line: str) -> None:
    failed = kit.run(f"{line} --leveldb nowhere")
    assert (failed.code, failed.out) == (1, "")
    assert "[TMS-STORE-NOT-FOUND]" in failed.err
    assert not list(kit.folder.glob("nowhere*"))


def test_daemon_with_a_port_in_use_exits_2_and_creates_no_state(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("TMS_JANITOR__HTTP__PORT", str(taken.getsockname()[1]))
        failed = kit.janitor("run")
    assert failed.code == 2
    assert "which another program or another setting uses already" in failed.err
    assert not (kit.folder / "data/janitor").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("sweep", "No such command 'sweep'"),
        ("verfy", "Did you mean 'verify'?"),
        ("plan --never", "No such option"),
        ("plan --at tomorrow", "now-1d12h"),
        ("plan --at 9223372036854775808", "invalid time"),
        ("plan --at now-99999d", "between 1970 and"),
        ("plan --topic orders", "namespace:topic"),
        ("inspect message --limit -1", "--limit"),
        ("apply", "FILE"),
        ("plan --snapshots webhdfs://host/tx", "webhdfs"),
        ("plan --snapshots nowhere/tx", "nowhere/tx: "),
        ("plan --config absent.yaml", "absent.yaml"),
    ],
)
def test_command_with_wrong_usage_exits_2_without_output(kit: CommandKit, line: str, message: str) -> None:
    failed = kit.run(f"{line} --leveldb data/messaging")
    assert (failed.code, failed.out) == (2, "")
    assert message in failed.err


@pytest.mark.parametrize("verb", ["plan", "run --once --adopt"])
def test_pass_over_a_missing_topic_exits_2(kit: CommandKit, verb: str) -> None:
    failed = kit.janitor(f"{verb} --topic default:nothing")
    assert (failed.code, failed.out) == (2, "")
    assert "unknown topic default:nothing" in failed.err
    assert kit.janitor(f"{verb} --topic 'nothing:*'").code == 0
    assert kit.janitor(f"{verb} --topic default:orders").code == 0


@pytest.mark.parametrize("verb", ["plan", "run --once --adopt"])
def test_pass_over_rows_without_readable_metadata_reports_them(kit: CommandKit, verb: str) -> None:
    with LevelDBStore(kit.store) as store:
        unknown_topic(store, "default:lost").plain(NOW_MS)
        unknown_topic(store, "default:unreadable").plain(NOW_MS).write_metadata(b"{")
        topic(store, "default:gone", ttl_seconds=86400, generation=-1)
    for name in ("lost", "unreadable"):
        done = kit.janitor(f"{verb} --topic default:{name} --format json")
        assert (done.code, done.json["totals"]["kept"]["unknown_topic"]) == (0, 1), name
    assert kit.janitor(f"{verb} --topic default:gone").code == 0
    assert kit.janitor(f"{verb} --topic default:nothing").code == 2


def test_plan_with_a_misspelt_setting_exits_2_and_names_it(kit: CommandKit) -> None:
    kit.set(SETTINGS + "server: {prot: 1}\n")
    failed = kit.janitor("plan")
    assert failed.code == 2
    assert "server.prot" in failed.err


def test_plan_of_a_cdap_6_store_exits_2(kit: CommandKit) -> None:
    (kit.store / "default.tms.message.orders.1").mkdir()
    failed = kit.janitor("plan")
    assert failed.code == 2
    assert "CDAP 6" in failed.err


def test_apply_of_a_plan_at_another_time_exits_2_and_deletes_nothing(kit: CommandKit) -> None:
    assert kit.janitor("plan --at now+7d --out plan.json").code == 0
    refused = kit.janitor("apply plan.json --adopt")
    assert refused.code == 2
    assert "what-if" in refused.err
    assert "--at" in refused.err
    assert kit.janitor("plan --format json").json["totals"]["expired"] == 2, "nothing was deleted"


def test_apply_of_a_what_if_ttl_plan_and_plan_with_an_invalid_ttl_exit_2(kit: CommandKit) -> None:
    assert kit.janitor("plan --what-if ttl=1s --out plan.json").code == 0
    refused = kit.janitor("apply plan.json --adopt")
    assert (refused.code, "--what-if" in refused.err) == (2, True)
    unread = kit.janitor("plan --what-if ttl=soon")
    assert (unread.code, "soon" in unread.err) == (2, True)


def test_apply_of_a_missing_plan_file_exits_2_with_a_hint(kit: CommandKit) -> None:
    refused = kit.janitor("apply plan.json")
    assert refused.code == 2
    assert "cannot read plan.json" in refused.err
    assert "janitor plan --out FILE --config janitor.yaml" in refused.err


def test_run_before_adoption_exits_3_with_json(kit: CommandKit) -> None:
    refused = kit.janitor("run --once --format json")
    assert refused.code == 3
    assert refused.json["topics"] == []
    assert [(note["guard"], note["tripped"]) for note in refused.json["guards"]] == [("adoption", True)]


def test_apply_before_adoption_exits_3_and_with_adopt_0(kit: CommandKit) -> None:
    kit.janitor("plan --out plan.json")
    assert kit.janitor("apply plan.json").code == 3
    assert kit.janitor("apply plan.json --adopt").code == 0


def test_run_on_a_replaced_store_exits_3_until_it_is_adopted(kit: CommandKit) -> None:
    kit.janitor("run --once --adopt")
    shutil.copytree(kit.store, kit.folder / "copy")
    shutil.rmtree(kit.store)
    shutil.move(kit.folder / "copy", kit.store)
    refused = kit.janitor("run --once")
    assert refused.code == 3
    assert "[TMS-GUARD-IDENTITY]" in refused.out
    assert kit.janitor("adopt").code == 0
    assert kit.janitor("run --once").code == 0


HOLD = """
import sys
from tms_core.tables.leveldb.library import plyvel
database = plyvel.DB(sys.argv[1])
print("open", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def held(kit: CommandKit) -> Any:
    """Return another process that locks the message table."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(kit.store / "system.tms.message")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "open\n"
    yield process
    process.communicate()


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("line", ["plan", "run --once", "adopt", "inspect meta", "verify"])
def test_command_on_a_locked_store_exits_4_and_names_the_lock_holder(kit: CommandKit, line: str) -> None:
    busy = kit.janitor(line)
    assert (busy.code, busy.out) == (4, "")
    assert "[TMS-STORE-BUSY]" in busy.err


@pytest.mark.usefixtures("held")
def test_run_with_skip_if_locked_on_a_locked_store_exits_0(kit: CommandKit) -> None:
    skipped = kit.janitor("run --once --skip-if-locked")
    assert (skipped.code, skipped.out) == (0, "")
    assert "skipped" in skipped.err


def test_run_with_a_failing_topic_exits_5_and_sweeps_other_topics(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    delete = LevelDBMessageTable.delete

    def failing(table: LevelDBMessageTable, keys: Sequence[bytes], origin: Origin | None) -> None:
        if keys[0].startswith(b"default:orders:"):
            raise StoreError("the disk is full.")
        delete(table, keys, origin)

    monkeypatch.setattr(LevelDBMessageTable, "delete", failing)
    partly = kit.janitor("run --once --adopt --format json")
    assert partly.code == 5
    [error] = partly.json["errors"]
    assert "default:orders: the disk is full." in error
    assert partly.json["totals"]["old_generation"] == 1
    again = kit.janitor("run --once")
    assert again.code == 5
    assert "failed: " in again.out


def test_plan_interrupted_by_ctrl_c_exits_130_with_one_sentence(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "plan", raising(KeyboardInterrupt))
    stopped = kit.janitor("plan")
    assert (stopped.code, stopped.out) == (130, "")
    assert stopped.err.splitlines()[-1].startswith("interrupted")
    assert not list((kit.folder / "data/janitor").glob("leveldb-clone-*"))


@pytest.mark.parametrize("line", ["config show", "config show --format json", "config --help"])
def test_command_with_a_closed_output_pipe_writes_no_error(line: str) -> None:
    read, write = os.pipe()
    os.close(read)
    process = subprocess.run(
        [sys.executable, "-m", "janitor", *line.split()],
        stdout=write,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
        timeout=60,
    )
    os.close(write)
    assert process.stderr == b""
    assert process.returncode in (1, 141)


def break_settings(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: 's3://bucket'}, "))


def break_store(kit: CommandKit) -> None:
    for manifest in kit.store.glob("*/MANIFEST-*"):
        manifest.unlink()


@pytest.mark.parametrize(("harm", "code"), [(break_store, 1), (break_settings, 2)])
@pytest.mark.parametrize("line", ["run --once", "run"])
def test_run_that_cannot_open_what_it_needs_is_recorded_as_failed(
    kit: CommandKit, harm: Callable[[CommandKit], None], code: int, line: str
) -> None:
    assert kit.janitor("run --once --adopt").code == 0
    assert kit.janitor("status --check").code == 0
    kit.clock.advance(MINUTE)
    harm(kit)
    failed = kit.janitor(line)
    assert failed.code == code
    reason = re.sub(r"\.? \[TMS-[A-Z-]+\]$", "", failed.err.splitlines()[0].removeprefix("error: "))
    checked = kit.janitor("status --check")
    assert (checked.code, reason in checked.out) == (1, True), (checked, reason)
    [run, _] = kit.janitor("history --format json").json["runs"]
    assert (run["result"], run["mode"], run["started_ms"]) == ("failed", "apply", kit.clock.now_ms())
    with SqliteState(kit.folder / "data/janitor") as state:
        assert state.counters()[FAILED_RUNS] == 1


@pytest.mark.parametrize("renewed", [False, True])
def test_run_refused_by_another_process_is_recorded_unless_that_is_a_janitor(kit: CommandKit, renewed: bool) -> None:
    assert kit.janitor("run --once --adopt").code == 0
    with LevelDBStore(kit.store), SqliteState(kit.folder / "data/janitor") as state:
        lease = Lease(state, "another", 60, kit.clock)
        if renewed:
            lease.acquire()
        assert kit.janitor("run --once").code == 4
        assert [run.result for run in state.runs(9)] == (["done"] if renewed else ["failed", "done"])
        assert kit.janitor("run --once --skip-if-locked").code == 0
        assert len(state.runs(9)) == (1 if renewed else 2)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("plan --at tomorrow", "TMS-USAGE"),
        ("sweep", "TMS-USAGE"),
        ("plan --leveldb nowhere", "TMS-STORE-NOT-FOUND"),
        ("plan --config absent.yaml", "TMS-CONFIGURATION"),
    ],
)
def test_error_has_message_code_and_hint_as_text_and_as_json(kit: CommandKit, line: str, code: str) -> None:
    error, *hint = kit.run(line).err.splitlines()
    assert re.fullmatch(rf"error: .+ \[{code}\]", error)
    assert all(message.startswith("hint: ") for message in hint)
    found = json.loads(kit.run(f"{line} --format json").err)["error"]
    assert f"error: {found['message']} [{found['code']}]" == error
    assert [f"hint: {text}" for name, text in found.items() if name == "hint"] == hint


def test_command_with_pyjanitor_installed_exits_2_and_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "pyjanitor-1.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: pyjanitor\nVersion: 1.0\n")
    assert execute(["config", "show"]) == 0
    monkeypatch.syspath_prepend(str(tmp_path))
    capsys.readouterr()
    assert execute(["config", "show"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search("pyjanitor(?s:.*)hint: .*pyjanitor and tms-janitor", err)


def test_plan_to_an_unwritable_file_exits_1_and_names_it(kit: CommandKit) -> None:
    failed = kit.janitor("plan --out missing/plan.json")
    assert (failed.code, failed.out) == (1, "")
    assert "missing/plan.json" in failed.err
