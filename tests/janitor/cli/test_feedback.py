"""The janitor and a transaction service: snapshots, and ``janitor.boundary.feedback`` to its invalid list."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator

import pytest

from janitor.app.options import Common
from janitor.app.session import Session
from tests.builders import HOUR
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tests.transaction.managers import PreviousStorage
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.service import TransactionService

JANITOR = "janitor: {state: data/janitor"
ON = f"{JANITOR}, boundary: {{feedback: on}}"


@pytest.fixture
def manager(kit: CommandKit) -> Iterator[TransactionManager]:
    with TransactionManager(PreviousStorage(INVALID), kit.clock) as manager:
        # The manager's pointers are higher than those in the kit's snapshot files.
        manager.abort(manager.start_short())
        yield manager


@pytest.fixture
def address(manager: TransactionManager) -> Iterator[str]:
    service = TransactionService(manager, "127.0.0.1:0")
    service.start()
    yield service.address
    service.stop()


@pytest.fixture
def closed_address() -> Iterator[str]:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


def settings(source: str, thrift: str, janitor: str = ON) -> str:
    return SETTINGS.replace("source: directory", f"source: {source}\n  thrift: '{thrift}'").replace(JANITOR, janitor)


def test_inspect_snapshot_of_a_service_shows_its_current_state(
    kit: CommandKit, manager: TransactionManager, address: str
) -> None:
    tx = manager.checkpoint(manager.start_short())
    kit.set(settings("thrift", address, JANITOR))
    shown = kit.janitor("inspect snapshot")
    assert shown.code == 0
    assert f"source: the transaction service {address}" in shown.out
    assert f"{INVALID}  invalid" in shown.out
    assert re.search(rf"{tx.transaction_id} +in progress, short .* {tx.write_pointer}$", shown.out, re.MULTILINE)
    assert "in progress, checkpoint" in shown.out
    kit.clock.advance(HOUR)
    assert "problem" not in kit.janitor("inspect snapshot").out


def test_plan_with_a_service_counts_rows_of_its_invalid_transactions(kit: CommandKit, address: str) -> None:
    kit.set(settings("thrift", address, JANITOR))
    assert kit.janitor("plan --format json").json["totals"]["invalid_transaction"] == 1


def test_plan_with_an_unreachable_service_inverts_nothing(kit: CommandKit, closed_address: str) -> None:
    kit.set(settings("thrift", closed_address, JANITOR))
    planned = kit.janitor("plan --format json")
    assert (planned.code, planned.json["totals"]["invalid_transaction"]) == (0, 0)
    missing = kit.janitor("inspect snapshot")
    assert (missing.code, closed_address in missing.err) == (1, True)


@pytest.mark.parametrize("source", ["thrift", "manager"])
def test_feedback_empties_the_list(kit: CommandKit, manager: TransactionManager, address: str, source: str) -> None:
    # With the source ``manager``, a janitor outside of the server reads the manager's snapshot files.
    kit.set(settings(source, address))
    done = kit.janitor("run --once --adopt")
    assert done.code == 0, done.err
    assert "1 transactions removed from the invalid list" in done.out
    assert manager.invalid_size() == 0
    assert kit.janitor("inspect message --format json").json["counts"]["rolled_back"] == 1
    kit.snapshot(invalid=())
    assert kit.janitor("verify").code == 0


@pytest.mark.parametrize("source", ["directory", "none"])
@pytest.mark.parametrize("verb", ["run --once --adopt", "run --adopt"])
def test_feedback_without_a_manager_exits_2(kit: CommandKit, source: str, verb: str) -> None:
    kit.set(settings(source, "127.0.0.1:15165"))
    refused = kit.janitor(verb)
    assert refused.code == 2
    assert f"transactions.source is {source}" in refused.err
    assert "transactions.source: thrift" in refused.err


@pytest.mark.parametrize("verb", ["plan", "run --once"])
def test_feedback_without_a_manager_in_plan_mode_exits_0(kit: CommandKit, verb: str) -> None:
    kit.set(settings("directory", "127.0.0.1:15165", f"{ON}, apply: false"))
    assert kit.janitor(verb).code == 0


def test_daemon_that_only_plans_has_no_feedback(kit: CommandKit, address: str) -> None:
    kit.set(settings("thrift", address, f"{ON}, apply: false"))
    with Session(Common(config=kit.folder / "janitor.yaml"), kit.clock).feedback() as feedback:
        assert feedback is None
    kit.set(settings("thrift", address))
    with Session(Common(config=kit.folder / "janitor.yaml"), kit.clock).feedback() as feedback:
        assert feedback is not None


def test_feedback_with_an_unreachable_manager_exits_0_with_a_warning(kit: CommandKit, closed_address: str) -> None:
    kit.set(settings("manager", closed_address))
    done = kit.janitor("run --once --adopt --format json")
    assert done.code == 0
    assert (done.json["boundary"], done.json["truncated"], done.json["errors"]) == (str(INVALID), 0, [])
    [note] = [note for note in done.json["guards"] if note["guard"] == "feedback"]
    assert str(closed_address) in note["message"]
    assert not note["tripped"]


def test_boundary_with_other_participants_names_them(kit: CommandKit) -> None:
    assert "no feedback" not in kit.janitor("boundary --explain").out
    assert kit.janitor("boundary --format json").json["feedback"] == {"on": False, "withheld": None}
    kit.set(settings("manager", "127.0.0.1:15165"))
    assert kit.janitor("boundary --format json").json["feedback"] == {"on": True, "withheld": None}
    both = f"{JANITOR}, boundary: {{feedback: on, participants: [messaging, datasets]}}"
    kit.set(settings("manager", "127.0.0.1:15165", both))
    explained = kit.janitor("boundary --explain")
    assert "because janitor.boundary.participants names datasets, whose boundary" in explained.out
    assert "datasets" in kit.janitor("boundary --format json").json["feedback"]["withheld"]
