"""``tms tx``, against a transaction service."""

from __future__ import annotations

import io
import json
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.transaction.managers import BASE, NOW_MS
from tms_core.cli.main import execute
from tms_core.clock import ManualClock
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import MemoryStorage
from tms_core.transaction.rpc import calls
from tms_core.transaction.rpc.service import TransactionService

Type = Callable[..., tuple[int, str, str]]


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def manager(clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(MemoryStorage(), clock) as manager:
        yield manager


@pytest.fixture
def service(manager: TransactionManager) -> Iterator[TransactionService]:
    service = TransactionService(manager, "127.0.0.1:0", cleanup_seconds=3600)
    service.start()
    yield service
    service.stop()


@pytest.fixture
def typed(service: TransactionService, capsys: pytest.CaptureFixture[str]) -> Type:
    def run(*words: object) -> tuple[int, str, str]:
        code = execute(["tx", *map(str, words), "--tx-server", service.address])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def as_json(typed: Type, *words: object) -> Any:
    code, out, err = typed(*words, "--format", "json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_list_shows_holders_and_durations(typed: Type, manager: TransactionManager, clock: ManualClock) -> None:
    manager.checkpoint(manager.checkpoint(manager.start_long("import@host-7")))
    clock.advance(2 * 3_600_000 + 5 * 60_000)
    mine = manager.start_short(90, "me").transaction_id
    for number in range(7):
        manager.note_published(mine, f"default:t{number}", NOW_MS + number)
    clock.advance(100_000)
    manager.invalidate(manager.start_short().transaction_id)
    code, out, _ = typed("list")
    assert code == 0
    blocked = "default:t0, default:t1, default:t2, default:t3, default:t4 and 2 more"
    assert out.splitlines() == [
        f"2 in progress, 1 invalid; read pointer {manager.visibility().read_pointer}",
        "id                   type   client         held for    expires         checkpoints  blocks",
        f"{BASE + 1}  long   import@host-7  2 h 6 min   in 21 h 53 min  2",
        f"{BASE + 7_500_000_000_000}  short  me             1 min 40 s  10 s ago                     {blocked}",
    ]


def test_list_in_json_has_ids_as_text(typed: Type, manager: TransactionManager, clock: ManualClock) -> None:
    one = manager.checkpoint(manager.start_short(30, "me"))
    manager.note_published(one.write_pointer, "default:orders", NOW_MS + 1)
    clock.advance(1_000)
    assert as_json(typed, "list") == {
        "now_ms": NOW_MS + 1_000,
        "read_pointer": str(BASE),
        "write_pointer": str(one.write_pointer),
        "invalid": 0,
        "in_progress": [
            {
                "id": str(one.transaction_id),
                "type": "short",
                "client": "me",
                "held_ms": 1_000,
                "expires_in_ms": 29_000,
                "checkpoints": [str(one.write_pointer)],
                "topics": {"default:orders": NOW_MS + 1},
            }
        ],
    }


def test_list_without_transactions_prints_one_line(typed: Type) -> None:
    assert typed("list")[:2] == (0, f"0 in progress, 0 invalid; read pointer {BASE}\n")


def test_list_shows_invalid_ids_with_their_start(typed: Type, manager: TransactionManager) -> None:
    one = manager.start_short().transaction_id
    manager.invalidate(one)
    assert as_json(typed, "list", "--invalid")["invalid_transactions"] == [{"id": str(one), "began_ms": NOW_MS}]
    shown = typed("list", "--invalid")[1].splitlines()
    assert (shown[0], shown[2].split()) == ("1 invalid", [str(one), "2026-11-18", "11:06:40", "UTC"])


def test_show_of_an_id_prints_its_state(typed: Type, manager: TransactionManager) -> None:
    done, bad, held = (manager.start_short().transaction_id for _ in range(3))
    manager.commit(done)
    manager.invalidate(bad)
    assert as_json(typed, "show", done) == {"id": str(done), "began_ms": NOW_MS, "state": "committed_or_aborted"}
    assert as_json(typed, "show", bad)["state"] == "invalid"
    assert as_json(typed, "show", held + 1)["state"] == "not_issued_yet"
    assert as_json(typed, "show", held)["state"] == "in_progress"
    code, out, _ = typed("show", bad)
    assert (code, out) == (0, f"{bad}: invalid\n  began 2026-11-18 11:06:40 UTC\n")


def test_show_of_a_checkpoint_prints_its_transaction(typed: Type, manager: TransactionManager) -> None:
    one = manager.checkpoint(manager.start_short(client="me"))
    code, out, _ = typed("show", one.write_pointer)
    assert code == 0
    assert out.splitlines() == [
        f"{one.transaction_id}: in progress",
        "  began 2026-11-18 11:06:40 UTC",
        "  short, held by me for 0 s",
        "  expires in 30 s",
        f"  checkpoint {one.write_pointer}",
    ]


def test_invalidate_counts_transactions_in_progress(typed: Type, manager: TransactionManager) -> None:
    one, two = manager.start_short().transaction_id, manager.start_long().transaction_id
    assert typed("invalidate", one, two)[:2] == (0, f"{one}: invalid now\n{two}: invalid now\n")
    code, out, err = typed("invalidate", one)
    assert (code, out) == (1, f"{one}: not in progress\n")
    assert re.search(f"hint: .*tms tx show {one}", err)
    assert list(manager.visibility().invalid) == [one, two]


@pytest.mark.parametrize(("long", "output"), [(False, "aborted"), (True, "invalid now")])
def test_abort_ends_with_checkpoints(typed: Type, manager: TransactionManager, long: bool, output: str) -> None:
    one = manager.checkpoint(manager.start_long() if long else manager.start_short())
    assert typed("abort", one.transaction_id, "--yes")[:2] == (0, f"{one.transaction_id}: {output}\n")
    seen = manager.visibility()
    assert (seen.in_progress, len(seen.invalid)) == ((), 2 if long else 0)


def test_abort_of_a_transaction_not_rolled_back_makes_it_invalid(typed: Type, manager: TransactionManager) -> None:
    one = manager.start_short().transaction_id
    manager.note_written(one, "default:orders")
    assert typed("abort", one, "--yes")[:2] == (0, f"{one}: invalid now\n")


def test_abort_and_truncate_without_confirmation_change_nothing(
    typed: Type, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, bad = manager.start_short().transaction_id, manager.start_short().transaction_id
    manager.invalidate(bad)
    for output in ("", "n\n"):
        for words in (("abort", one), ("truncate", bad)):
            monkeypatch.setattr("sys.stdin", io.StringIO(output))
            assert typed(*words)[:2] == (130, "")
    assert (len(manager.visibility().in_progress), manager.invalid_size()) == (1, 1)


def test_abort_of_an_ended_transaction_exits_1(typed: Type, manager: TransactionManager) -> None:
    done = manager.start_short().transaction_id
    manager.commit(done)
    code, _, err = typed("abort", done, "--yes")
    assert (code, f"Transaction {done} is not in progress." in err) == (1, True)


def test_truncate_removes_the_given_ids(typed: Type, manager: TransactionManager) -> None:
    ids = [manager.start_short().transaction_id for _ in range(3)]
    for pointer in ids:
        manager.invalidate(pointer)
    assert typed("truncate", *ids[:2], "--yes")[:2] == (0, "3 were invalid, 1 are left\n")


def test_truncate_of_an_id_that_is_not_invalid_fails_after_the_others(typed: Type, manager: TransactionManager) -> None:
    invalid, open_ = (manager.start_short().transaction_id for _ in range(2))
    manager.invalidate(invalid)
    code, out, err = typed("truncate", open_, invalid, "--yes")
    assert (code, out) == (1, "1 were invalid, 0 are left\n")
    assert "1 of 2 were not on the invalid list." in err
    assert f"tms tx show {open_}" in err


def test_truncate_on_a_service_without_snapshots_removes_the_given_ids(
    typed: Type, manager: TransactionManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(calls._CALLS, "getSnapshot")
    ids = [manager.start_short().transaction_id for _ in range(3)]
    for pointer in ids:
        manager.invalidate(pointer)
    assert typed("truncate", *ids[:2], "--yes")[:2] == (0, "3 were invalid, 1 are left\n")
    code, _, err = typed("truncate", ids[0], "--yes")
    assert (code, "1 of 1 were not on the invalid list" in err) == (1, True)
    assert manager.visibility().invalid.tolist() == ids[2:]


@pytest.mark.parametrize("before", [NOW_MS + 1_000, "2026-11-18T11:06:41Z", "2026-11-18T11:06:41"])
def test_truncate_before_a_time_removes_ids_started_earlier(
    typed: Type, manager: TransactionManager, clock: ManualClock, before: object
) -> None:
    manager.invalidate(manager.start_short().transaction_id)
    clock.advance(1_000)
    manager.invalidate(manager.start_short().transaction_id)
    assert typed("truncate", "--before", before, "--yes")[:2] == (0, "2 were invalid, 1 are left\n")
    manager.start_short()
    clock.advance(1)
    code, _, err = typed("truncate", "--before", NOW_MS + 1_001, "--yes")
    assert (code, "are in progress" in err) == (1, True)


@pytest.mark.parametrize(
    "words",
    [
        ["truncate"],
        ["truncate", 1, "--before", 1],
        ["truncate", "--before", "noon"],
        ["show", "x"],
        ["show", -1],
        ["show"],
    ],
)
def test_command_with_wrong_usage_exits_2(typed: Type, words: list[object]) -> None:
    code, out, err = typed(*words, "--yes") if words[0] == "truncate" else typed(*words)
    assert (code, out) == (2, "")
    assert "tms tx" in err


def test_command_without_a_service_exits_1_with_a_hint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "tms.yaml"
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        settings.write_text(f"transactions: {{thrift: '{address}'}}\n", encoding="utf-8")
        assert execute(["tx", "list", "--config", str(settings)]) == 1
        err = capsys.readouterr().err
        assert f"The transaction service {address} cannot be reached" in err
        assert "[TMS-TRANSACTION-SERVICE-UNAVAILABLE]" in err
        with monkeypatch.context() as patch:
            patch.setenv("TMS_CONFIG", str(settings))
            assert execute(["tx", "list"]) == 1
        assert str(address) in capsys.readouterr().err
        monkeypatch.setenv("TMS_TRANSACTIONS__THRIFT", address)
        assert execute(["tx", "invalidate", "1"]) == 1
        assert "tms serve" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "show", "invalidate", "abort", "truncate"])
def test_help_of_each_command_shows_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["tx", command, "--help"]) == 0
    assert f"      tms tx {command}"[4:] in capsys.readouterr().out


def test_list_shows_terminal_commands_in_client_names_escaped(typed: Type, manager: TransactionManager) -> None:
    name = "me\n1795\x1b[2J"
    pointer = manager.start_short(client=name).transaction_id
    _, listed, _ = typed("list")
    _, shown, _ = typed("show", pointer)
    for text in (listed, shown):
        assert "me\\n1795\\x1b[2J" in text
        assert "\x1b" not in text
    assert as_json(typed, "list")["in_progress"][0]["client"] == name


@pytest.mark.parametrize("given", ["foo", str(2**63)])
def test_transaction_id_that_is_not_a_number_is_wrong_usage(typed: Type, given: str) -> None:
    code, _, err = typed("show", given)
    assert code == 2
    assert err.startswith(f"error: invalid transaction '{given}'")
    assert "[TMS-USAGE]\nhint: tms tx show --help\n" in err
