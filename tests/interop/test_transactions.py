"""Tephra's Java client, manager and codecs with ``TransactionManager``."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.interop.java import Interop
from tests.interop.tephra import JavaRaised, TephraSession
from tests.transaction.managers import served
from tests.transaction.vectors import snapshot_of
from tms_core.clock import ManualClock
from tms_core.errors import BadArgument, Conflict, NotInProgress
from tms_core.transaction.codec.snapshot import read_snapshot
from tms_core.transaction.manager.conflicts import ChangeLimits
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryStorage
from tms_core.transaction.model import Snapshot, TransactionType
from tms_core.transaction.rpc.client import TransactionClient

#: The time limit of a call, in seconds: longer than any successful call.
PATIENCE_SECONDS = 60.0
NOW_MS = 1_795_000_000_000
KEY, OTHER_KEY = b"k\x00\xff".hex(), b"other".hex()


@pytest.fixture(scope="module")
def tephra(java: Interop) -> Iterator[TephraSession]:
    with TephraSession(java) as session:
        yield session


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.fixture
def manager(tmp_path: Path, clock: ManualClock) -> Iterator[TransactionManager]:
    with TransactionManager(DirectoryStorage(tmp_path / "tx"), clock, limits=ChangeLimits(count=3)) as manager:
        yield manager


@pytest.fixture
def client(tephra: TephraSession, manager: TransactionManager) -> Iterator[TephraSession]:
    with served(manager) as service:
        assert tephra.call("connect", service.port, "java-1") == "OK"
        yield tephra


def state(manager: TransactionManager) -> Snapshot:
    return read_snapshot(io.BytesIO(manager.encoded_snapshot()))


def without_time(expected: dict[str, Any]) -> dict[str, Any]:
    """Return a snapshot of Java with a fixed time."""
    return {**expected, "timestamp": NOW_MS}


# --- Tephra's client with the transaction service --------------------------------------------------------------------


def test_java_client_starts_and_commits_transactions(client: TephraSession, manager: TransactionManager) -> None:
    first = client.call("startShort")
    second = client.call("startLong")
    third = client.call("startShort", 5)
    base = NOW_MS * 1_000_000
    assert (first["id"], first["readPointer"], first["inProgress"], first["type"]) == (base + 1, base, [], "SHORT")
    assert (second["id"], second["inProgress"], second["type"]) == (base + 2, [base + 1], "LONG")
    assert (third["inProgress"], third["firstShort"]) == ([base + 1, base + 2], base + 1)
    assert manager.clients() == {first["id"]: "java-1", second["id"]: "java-1", third["id"]: "java-1"}
    client.call("canCommit", first["id"], [KEY])
    client.call("commit", first["id"])
    assert client.call("startShort")["readPointer"] == first["id"]


def test_java_client_gets_conflict_exception_with_key_and_client(client: TephraSession) -> None:
    first, second = client.call("startShort"), client.call("startShort")
    client.call("canCommit", first["id"], [KEY])
    client.call("canCommit", second["id"], [KEY])
    client.call("commit", first["id"])
    with pytest.raises(JavaRaised) as raised:
        client.call("commit", second["id"])
    assert raised.value.name == "TransactionConflictException"
    assert raised.value.fields["transaction"] == second["id"]
    assert (raised.value.fields["key"], raised.value.fields["client"]) == (r"k\x00\xFF", "java-1")
    client.call("abort", second["id"])
    third = client.call("startShort")
    client.call("canCommit", third["id"], [KEY])
    client.call("commit", third["id"])


def test_java_client_gets_false_for_conflict_from_old_can_commit(client: TephraSession) -> None:
    first, second = client.call("startShort"), client.call("startShort")
    assert client.call("oldCanCommit", first["id"], [KEY]) is True
    assert client.call("oldCanCommit", second["id"], [OTHER_KEY]) is True
    assert client.call("oldCommit", first["id"]) is True
    assert client.call("oldCanCommit", second["id"], [KEY]) is False
    assert client.call("oldCommit", second["id"]) is True


@pytest.mark.parametrize("call", ["commit", "checkpoint"])
def test_java_client_call_in_finished_transaction_fails(client: TephraSession, call: str) -> None:
    ended = client.call("startShort")
    client.call("commit", ended["id"])
    with pytest.raises(JavaRaised, match=f"{ended['id']} .* ?is not in progress|{ended['id']} that is not in progress"):
        client.call(call, ended["id"])


def test_java_client_gets_size_exception_for_too_many_changes(client: TephraSession) -> None:
    one = client.call("startShort")
    with pytest.raises(JavaRaised, match=r"\b4 .*\b3\b") as raised:
        client.call("canCommit", one["id"], ["00", "01", "02", "03"])
    assert raised.value.name == "TransactionSizeException"


def test_java_client_start_with_timeout_below_1_is_rejected(client: TephraSession) -> None:
    with pytest.raises(JavaRaised, match=r"\b0 seconds") as raised:
        client.call("startShort", 0)
    assert raised.value.name == "IllegalArgumentException"


def test_java_client_abort_covers_all_checkpoint_pointers(client: TephraSession, manager: TransactionManager) -> None:
    one = client.call("startShort")
    first = client.call("checkpoint", one["id"])
    second = client.call("checkpoint", one["id"])
    assert second["checkpoints"] == [first["writePointer"], second["writePointer"]]
    assert client.call("startShort")["inProgress"] == [one["id"], *second["checkpoints"]]
    client.call("abort", one["id"])
    assert len(state(manager).visibility.in_progress) == 1


def test_java_client_invalidates_truncates_and_resets(
    client: TephraSession, manager: TransactionManager, clock: ManualClock
) -> None:
    one, two = client.call("startShort"), client.call("startShort")
    assert client.call("invalidate", one["id"]) is True
    assert client.call("invalidate", one["id"]) is False
    assert client.call("invalidSize") == 1
    clock.advance(10)
    with pytest.raises(JavaRaised, match="InvalidTruncateTimeException"):
        client.call("truncateBefore", NOW_MS + 5)
    client.call("abort", two["id"])
    assert client.call("truncate", [7]) is False
    assert client.call("truncateBefore", NOW_MS + 5) is True
    assert client.call("truncate", [one["id"]]) is False
    client.call("startLong")
    client.call("prune")
    client.call("reset")
    assert (client.call("invalidSize"), manager.visibility().in_progress) == (0, ())
    assert client.call("startShort")["id"] > two["id"]


def test_java_client_decodes_snapshot_over_thrift(client: TephraSession, manager: TransactionManager) -> None:
    start_transactions(manager)
    assert snapshot_of(client.call("getSnapshot")) == state(manager)


# --- the transaction client with Tephra's service --------------------------------------------------------------------


def test_transaction_client_works_with_tephra_service(tephra: TephraSession) -> None:
    with TransactionClient(f"127.0.0.1:{tephra.call('serve')}", PATIENCE_SECONDS) as client:
        assert client.status() == "OK"
        first, second = client.start_short(60, "me"), client.start_short(client="you")
        for one in (first, second):
            client.can_commit(one.transaction_id, [b"k\xff"])
        client.commit(first.transaction_id)
        with pytest.raises(Conflict) as raised:
            client.commit(second.transaction_id)
        assert (raised.value.key, raised.value.client) == (r"k\xFF", "me")
        client.abort(second)
        with pytest.raises(NotInProgress, match=str(second.transaction_id)):
            client.commit(second.transaction_id)
        long = client.checkpoint(client.start_long("me"))
        assert (long.type, len(long.checkpoint_write_pointers)) == (TransactionType.LONG, 1)
        assert client.clients() == {}
        assert [entry.write_pointer for entry in client.latest().snapshot.in_progress] == [
            long.transaction_id,
            long.write_pointer,
        ]
        assert client.invalidate(long.transaction_id)
        assert client.invalid_size() == 2
        assert client.truncate_invalid([long.transaction_id])
        with pytest.raises(BadArgument, match="timeout"):
            client.start_short(0)


# --- the transaction log with Tephra's classes -----------------------------------------------------------------------


def start_transactions(manager: TransactionManager) -> None:
    """Create transactions of every state."""
    committed = manager.start_short()
    manager.can_commit(committed.transaction_id, [b"a", b"\x00\xff"])
    manager.can_commit(manager.start_short(client="waits").transaction_id, [b"b"])
    manager.commit(committed.transaction_id)
    manager.checkpoint(manager.start_long())
    manager.invalidate(manager.checkpoint(manager.start_short()).transaction_id)
    aborted = manager.checkpoint(manager.start_short())
    manager.abort(aborted)
    manager.abort(manager.start_long())
    gone = manager.start_short().transaction_id
    manager.invalidate(gone)
    manager.truncate_invalid([gone])


def test_tephra_recovers_the_state_from_the_transaction_log(
    tephra: TephraSession, manager: TransactionManager, tmp_path: Path
) -> None:
    start_transactions(manager)
    [log] = (tmp_path / "tx").glob("txlog.*")
    assert log.stat().st_size > 0
    assert snapshot_of(without_time(tephra.call("recover", str(tmp_path / "tx")))) == state(manager)


def test_tephra_decodes_a_snapshot_file(tephra: TephraSession, manager: TransactionManager, tmp_path: Path) -> None:
    start_transactions(manager)
    manager.take_snapshot()
    newest = max((tmp_path / "tx").glob("snapshot.*"), key=lambda path: int(path.suffix[1:]))
    assert snapshot_of(without_time(tephra.call("snapshot", str(newest)))) == state(manager)


def test_transaction_directory_used_by_tephra_is_read_back(
    tephra: TephraSession, manager: TransactionManager, tmp_path: Path, clock: ManualClock
) -> None:
    start_transactions(manager)
    manager.close()
    left = tephra.call("work", str(tmp_path / "tx"))
    with TransactionManager(DirectoryStorage(tmp_path / "tx"), clock) as back:
        assert state(back) == snapshot_of(without_time(left))
        assert back.start_short().transaction_id > left["writePointer"]
