"""Commands while another process holds the store: the same results as on a free store.

Each test creates two equal stores at the same time. A second process locks one of them. The outputs of commands on both
stores must be equal.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.request import urlopen

import pytest

from janitor.app.options import Common
from janitor.app.serve import open_daemon
from janitor.app.session import Session
from janitor.cli.main import execute
from janitor.daemon.daemon import DaemonPlan
from tests.builders import DAY, HOUR, MINUTE, NOW_MS, pointer, topic
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit, Outcome
from tests.janitor.control.holder import token_hex
from tms_core.clock import ManualClock
from tms_core.errors import StoreError
from tms_core.rowkey import MessageId
from tms_core.tables.leveldb.store import LevelDBStore

ROOT = Path(__file__).parents[3]
LIVE = MessageId(NOW_MS - MINUTE, 2)


class Holder:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def send(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()

    def wait_for(self, word: str) -> None:
        """Wait for a word on its output, except for ``refreshed``."""
        assert self._process.stdout is not None
        output = next(
            line.strip() for line in self._process.stdout if line.strip() != "refreshed" or word == "refreshed"
        )
        assert output == word

    def wait(self) -> None:
        self._process.wait()

    def continue_until(self, word: str) -> None:
        self.send("go")
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == word:
                return
            self.send("go")


Hold = Callable[..., Holder]
MakeKit = Callable[[], CommandKit]


@pytest.fixture
def hold() -> Iterator[Hold]:
    """Return a function that starts a process that locks the store of a kit until the test ends."""
    with ExitStack() as stack:

        def start(kit: CommandKit, watched: str = "") -> Holder:
            return stack.enter_context(hold_store(kit, watched))

        yield start


@contextmanager
def hold_store(kit: CommandKit, watched: str = "") -> Iterator[Holder]:
    words = [str(kit.clock.now_ms()), str(kit.clock.monotonic_ms()), *([watched] if watched else [])]
    with subprocess.Popen(
        [sys.executable, "-m", "tests.janitor.control.holder", *words],
        cwd=kit.folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            holder = Holder(process)
            holder.wait_for("ready")
            yield holder
        finally:
            process.kill()


@pytest.fixture
def make_kit(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> MakeKit:
    """Return a function that creates an adopted store with data for every verb, and changes to its folder."""
    monkeypatch.setattr(secrets, "token_hex", token_hex)

    def make() -> CommandKit:
        # A deep folder, because addresses of Unix sockets are limited.
        folder = tmp_path_factory.mktemp("kit") / ("deep" * 20) / ("deeper" * 10)
        (folder / "data" / "messaging").mkdir(parents=True)
        (folder / "data" / "tx").mkdir()
        made = CommandKit(folder, ManualClock(NOW_MS, monotonic_ms=DAY), capsys)
        with LevelDBStore(made.store, create=True) as store:
            orders = topic(store, "default:orders", ttl_seconds=86400)
            orders.plain(NOW_MS - 3 * DAY, NOW_MS - 2 * DAY, NOW_MS - MINUTE)
            orders.tx(INVALID, NOW_MS - 3 * HOUR)
            orders.stored(pointer(NOW_MS - 3 * DAY), NOW_MS - 3 * DAY)
            topic(store, "default:retired", ttl_seconds=86400, generation=-1).plain(NOW_MS - HOUR)
        made.snapshot()
        made.set(SETTINGS)
        monkeypatch.chdir(folder)
        made.janitor("adopt")
        made.set_ttl("default:orders", 7200)
        made.clock.advance(MINUTE)
        return made

    return make


Verb = Callable[[CommandKit], Outcome]


def janitor_command(line: str) -> Verb:
    return lambda kit: kit.janitor(line)


def apply_plan(kit: CommandKit) -> Outcome:
    planned = kit.janitor("plan --out plan.json")
    done = kit.janitor("apply plan.json --format json")
    return Outcome(done.code, planned.out + done.out, planned.err + done.err)


VERBS: dict[str, Verb] = {
    line: janitor_command(line)
    for line in (
        "plan --format json",
        "plan",
        "plan --topic 'default:ret*' --format json",
        "plan --at now+7d --format json",
        "inspect message --format json",
        "inspect message --limit 1",
        "inspect payload --format json",
        "inspect meta --format json",
        "inspect snapshot --format json",
        "inspect snapshot",
        "boundary --explain --format json",
        "boundary --explain",
        "verify --format json",
        "verify",
        f"why default:orders {LIVE} --format json",
        f"why default:orders {LIVE}",
        "adopt --format json",
        "approve --all --format json",
        "approve default:orders",
        "approve 'system:*'",
    )
} | {"apply": apply_plan}


def sentences(outcome: Outcome) -> list[str]:
    """Return the lines on standard error without their times."""
    output = [re.sub(r"^\S+Z (?:INFO|WARNING|ERROR) ", "", line) for line in outcome.err.splitlines()]
    return [sentence for sentence in output if not sentence.startswith("opened the store for writing")]


def test_approve_and_adopt_on_a_locked_store_suggest_sweep_now(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    hold(kit)
    for line in ("approve default:orders", "adopt"):
        shown = kit.janitor(line).out
        assert "next: janitor sweep-now --config janitor.yaml\nor wait for the next sweep of the process" in shown
        assert "run --once" not in shown
    assert "run --once" not in kit.janitor("plan").out
    assert kit.janitor("status").code == 0


#: The sizes of the store in the outputs of a plan and a run.
_ON_DISK = re.compile(r"of \S+ k?B on disk|the store: .* after|\"(before|after)\": \d+")


def comparable_output(outcome: Outcome) -> str:
    """Return the output without the next commands, which a daemon does not need, and without the store's size.

    Opening the store for writing changes its files.
    """
    return _ON_DISK.sub("…", outcome.out.split("next: ")[0])


@pytest.mark.parametrize("verb", VERBS.values(), ids=VERBS)
def test_command_on_a_locked_store_prints_the_same_as_on_a_free_store(
    make_kit: MakeKit, hold: Hold, verb: Verb
) -> None:
    free = verb(make_kit())
    kit = make_kit()
    hold(kit)
    held = verb(kit)
    assert (held.code, comparable_output(held), sentences(held)) == (
        free.code,
        comparable_output(free),
        sentences(free),
    )
    assert free.out
    assert held.code == 0


def make_plan_stale(kit: CommandKit) -> None:
    kit.janitor("plan --out plan.json")
    kit.set_ttl("default:orders", 3600)


def change_settings(kit: CommandKit) -> None:
    kit.janitor("plan --out plan.json")
    kit.set(SETTINGS.replace("janitor: {", "janitor: {hold_seconds: 60, "))


def delete_state(kit: CommandKit) -> None:
    kit.janitor("plan --out plan.json")
    shutil.rmtree(kit.folder / "data" / "janitor")


def write_invalid_row(kit: CommandKit) -> None:
    """Write a row of a closed invalid transaction, so that the boundary is false."""
    kit.janitor("run --once")
    with LevelDBStore(kit.store) as store:
        topic(store, "default:orders", ttl_seconds=7200).tx(INVALID, NOW_MS - MINUTE)


FAILURES: dict[str, tuple[Callable[[CommandKit], None], str, int]] = {
    "stale plan": (make_plan_stale, "apply plan.json", 3),
    "settings that differ": (change_settings, "apply plan.json", 3),
    "another store's plan": (delete_state, "apply plan.json", 3),
    "not adopted": (delete_state, "approve --all", 3),
    "clock": (lambda kit: kit.clock.step(DAY), "approve default:orders", 3),
    "no snapshot": (lambda kit: shutil.rmtree(kit.folder / "data" / "tx"), "inspect snapshot", 1),
    "refuted": (write_invalid_row, "verify --format json", 1),
}


@pytest.mark.parametrize(("prepare", "line", "code"), FAILURES.values(), ids=FAILURES)
def test_failing_command_on_a_locked_store_fails_as_on_a_free_store(
    make_kit: MakeKit, hold: Hold, prepare: Callable[[CommandKit], None], line: str, code: int
) -> None:
    outcomes, output = [], []
    for is_held in (False, True):
        kit = make_kit()
        prepare(kit)
        if is_held:
            hold(kit)
        outcomes.append(kit.janitor(line))
        output.append([sentence.replace(str(kit.folder), "") for sentence in sentences(outcomes[-1])])
    free, held = outcomes
    assert (held.code, held.out, output[1]) == (free.code, free.out, output[0])
    assert held.code == code


@pytest.mark.parametrize("words", ["--dry-run", "--since now-60h", ""])
def test_restore_on_a_locked_store_does_the_same_as_on_a_free_store(make_kit: MakeKit, hold: Hold, words: str) -> None:
    outcomes = []
    for is_held in (False, True):
        kit = make_kit()
        kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, "))
        kit.janitor("run --once")
        kit.janitor("pause default:orders")
        if is_held:
            hold(kit)
        restored = kit.janitor(f"archive restore default:orders {words} --format json")
        outcomes.append((restored, kit.janitor("inspect message --format json").out))
    free, held = outcomes
    assert (held[0].code, held[0].out, held[1]) == (free[0].code, free[0].out, free[1])
    assert held[0].json["restored"] > 0


def test_run_on_a_locked_store_exits_4_with_a_hint(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    hold(kit)
    refused = kit.janitor("run --once")
    assert (refused.code, refused.out) == (4, "")
    assert "[TMS-STORE-BUSY]" in refused.err
    assert "janitor sweep-now --config janitor.yaml" in refused.err
    skipped = kit.janitor("run --once --skip-if-locked")
    assert (skipped.code, "janitor sweep-now --config janitor.yaml" in skipped.err) == (0, True)


def test_sweep_now_on_a_locked_store_sweeps_in_the_lock_holder(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    holder = hold(kit)
    request = kit.janitor("sweep-now")
    holder.wait_for("sweeping")
    assert request.code == 0
    assert request.out.endswith("sweeps now; see: janitor status --config janitor.yaml\n")


def test_sweep_now_on_a_free_store_exits_1_with_a_hint(make_kit: MakeKit) -> None:
    refused = make_kit().janitor("sweep-now")
    assert (refused.code, refused.out) == (1, "")
    assert "[TMS-STORE]" in refused.err
    assert "janitor run --once --config janitor.yaml" in refused.err


def test_plan_with_the_state_folder_of_another_store_exits_2(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    shutil.copytree(kit.store, kit.folder / "data" / "other")
    hold(kit)
    kit.set(SETTINGS.replace("data/messaging", "data/other"))
    refused = kit.janitor("plan")
    assert (refused.code, refused.out) == (2, "")
    assert "[TMS-CONFIGURATION]" in refused.err


def test_doctor_on_a_locked_store_exits_0_and_names_the_lock_holder(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    hold(kit)
    examined = kit.janitor("doctor --format json")
    assert examined.code == 0
    [store] = [finding for finding in examined.json if finding["check"] == "store"]
    assert ", 2 topics, held by process " in store["message"]


def test_plan_on_a_store_locked_by_a_process_without_socket_exits_4(make_kit: MakeKit) -> None:
    kit = make_kit()
    with LevelDBStore(kit.store):
        refused = kit.janitor("plan")
    assert (refused.code, refused.out) == (4, "")


def test_command_whose_lock_holder_dies_while_responding_exits_1(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    holder = hold(kit, "message.rows")
    kit.janitor("status")
    with ThreadPoolExecutor() as threads:
        request = threads.submit(execute, shlex.split("inspect message --config janitor.yaml"), kit.clock)
        holder.wait_for("message.rows")
        holder.send("die")
        assert request.result() == 1
    out, err = kit.streams.readouterr()
    assert out == ""
    assert "stopped before it responded" in err
    holder.wait()
    # The socket of the dead process does not block the free store.
    assert kit.janitor("plan").code == 0


@pytest.mark.parametrize("words", ["pause", "pause default:orders", "pause 'default:*'"])
def test_pause_during_a_sweep_stops_after_the_current_batch(make_kit: MakeKit, hold: Hold, words: str) -> None:
    kit = make_kit()
    kit.set(SETTINGS.replace("janitor: {", "janitor: {batch_rows: 2, "))
    with LevelDBStore(kit.store) as store:
        topic(store, "default:orders", ttl_seconds=86400).plain(*(NOW_MS - 3 * DAY + number for number in range(1, 11)))
    holder = hold(kit, "message.delete")
    holder.send("sweep")
    holder.wait_for("message.delete")
    assert kit.janitor(words).code == 0
    holder.continue_until("swept")
    # The topic had twelve due rows; the current batch deleted two of them.
    assert kit.janitor("inspect message --topic default:orders --format json").json["counts"]["plain"] == 11


def test_pause_and_resume_on_a_locked_store_show_in_status_at_once(make_kit: MakeKit, hold: Hold) -> None:
    kit = make_kit()
    holder = hold(kit)
    for words, paused in (("pause", [{"pattern": "*:*", "since_ms": NOW_MS + MINUTE}]), ("resume", [])):
        assert kit.janitor(f"{words} --format json").json["paused"] == paused
        holder.wait_for("refreshed")
        assert kit.janitor("status --format json").json["paused"] == paused


def test_run_of_a_daemon_with_patterns_plans_sweeps_of_their_topics(
    kit: CommandKit, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[DaemonPlan] = []

    def refuse(*parts: object) -> None:
        plans.extend(part for part in parts if isinstance(part, DaemonPlan))
        raise StoreError("the daemon does not start.")

    monkeypatch.setattr("janitor.app.serve.Daemon", refuse)
    kit.set(SETTINGS.replace("janitor: {", "janitor: {http: {port: 0}, "))
    assert kit.janitor("run --topic 'default:ord*'").code == 1
    assert [plan.patterns for plan in plans] == [("default:ord*",)]


def test_page_of_a_daemon_shows_commands_for_any_folder(kit: CommandKit) -> None:
    kit.set(SETTINGS.replace("janitor: {", "janitor: {http: {port: 0}, "))
    common = Common(Path("janitor.yaml"))
    with open_daemon(Session(common, kit.clock)) as (_, url), urlopen(f"{url}api/status") as answer:  # noqa: S310
        assert json.load(answer)["adopt_command"] == f"janitor adopt --config {kit.folder}/janitor.yaml"
