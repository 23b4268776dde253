"""The janitor beside a transaction service: ``transactions.source: thrift``."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.builders import HOUR
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit
from tests.transaction.managers import LeftBehind
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc.service import TransactionService


@pytest.fixture
def service(kit: CommandKit) -> Iterator[TransactionService]:
    """A transaction service, and settings that name it."""
    with TransactionManager(LeftBehind(INVALID), kit.clock) as manager:
        service = TransactionService(manager, "127.0.0.1:0")
        service.start()
        thrift = f"source: thrift\n  thrift: '{service.address}'"
        kit.set(SETTINGS.replace("source: directory", thrift))
        yield service
        service.stop()


def test_inspect_snapshot_of_a_service_shows_its_state_of_now(kit: CommandKit, service: TransactionService) -> None:
    shown = kit.janitor("inspect snapshot")
    assert shown.code == 0
    assert f"source: the transaction service {service.address}" in shown.out
    assert f"{INVALID}  invalid" in shown.out
    kit.clock.advance(HOUR)
    assert "problem" not in kit.janitor("inspect snapshot").out


@pytest.mark.usefixtures("service")
def test_plan_beside_a_service_inverts_what_is_invalid_there(kit: CommandKit) -> None:
    assert kit.janitor("plan --format json").json["totals"]["invalid_transaction"] == 1


def test_plan_without_an_answer_of_the_service_inverts_nothing(kit: CommandKit) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        kit.set(SETTINGS.replace("source: directory", f"source: thrift\n  thrift: '{address}'"))
        planned = kit.janitor("plan --format json")
        assert planned.code == 0
        assert planned.json["totals"]["invalid_transaction"] == 0
        missing = kit.janitor("inspect snapshot")
        assert missing.code == 1
        assert str(address) in missing.err
