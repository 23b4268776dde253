"""Tables that CDAP still cleans or prunes: sweeps run, but prove no boundary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import happybase
import pytest

from janitor.cli.main import execute
from tests.builders import DAY, HOUR, MINUTE, NOW_MS
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.sweep_kit import FilledStore
from tests.hbase.tables import Tables, write_config
from tms_core.clock import ManualClock, SystemClock
from tms_core.tables.hbase.cdap import CACHE_MS, PRUNING_QUIET_MS, CdapWatch, last_pruned_ms
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.rows import HBaseRows
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.read_only import read_only

OBSERVER = "co.cask.cdap.data2.transaction.messaging.coprocessor.hbase20.MessageTableRegionObserver"
FRESH_MS, STALE_MS = NOW_MS - HOUR, NOW_MS - DAY - 1
REGION = b"t1,,1599999999999.0123456789abcdef0123456789abcdef."


def inverse(ms: int) -> bytes:
    return (2**63 - 1 - ms).to_bytes(8, "big")


def rows_at(ms: int) -> dict[str, tuple[bytes, bytes, bytes]]:
    """Return the row, column and value of each kind that Tephra writes at a time."""
    return {
        "bound of a region": (b"\x01" + REGION + b"%d" % ms, b"f:p", (ms * 10**6).to_bytes(8, "big")),
        "region of a run": (b"\x02" + inverse(ms) + REGION, b"f:r", b"\x00\x00\x001"),
        "inactive bound of a run": (b"\x03" + inverse(ms), b"f:i", (ms * 10**6).to_bytes(8, "big")),
        "empty region": (b"\x04" + ms.to_bytes(8, "big") + REGION, b"f:e", b"\x00\x00\x001"),
        "regions of a run": (b"\x05" + inverse(ms), b"f:r", b"\x00\x00\x00\x01"),
    }


@dataclass(frozen=True)
class Pruning:
    """Tephra's state table, and the detection of pruning."""

    table: happybase.Table
    rows: HBaseRows

    def write(self, kind: str, ms: int) -> bytes:
        row, column, value = rows_at(ms)[kind]
        self.table.put(row, {column: value}, timestamp=ms)
        return row

    def last_ms(self) -> int | None:
        return last_pruned_ms(self.rows, NOW_MS - PRUNING_QUIET_MS)


@pytest.fixture
def namespace(hbase_tables: Tables) -> str:
    return hbase_tables.make(buckets=2)


@pytest.fixture
def pool(hbase: HBaseServer) -> Iterator[HBasePool]:
    with closing(HBasePool([hbase.thrift], timeout_seconds=PATIENCE_SECONDS)) as found:
        yield found


@pytest.fixture
def admin(hbase: HBaseServer) -> Iterator[HBasePool]:
    servers = [str(hbase.thrift2)]
    with closing(HBasePool(servers, timeout_seconds=PATIENCE_SECONDS, service="HbaseAdmin")) as found:
        yield found


@pytest.fixture
def pruning(witness: happybase.Connection, pool: HBasePool, namespace: str) -> Pruning:
    name = f"{namespace}:tephra.state".encode()
    with pool.connection() as connection:
        connection.happybase.create_table(name.decode(), {"f": {"max_versions": 1}})
    return Pruning(witness.table(name), HBaseRows(pool, name, SystemClock()))


def test_last_pruned_without_state_table_is_none(pool: HBasePool, namespace: str) -> None:
    assert last_pruned_ms(HBaseRows(pool, f"{namespace}:tephra.state".encode(), SystemClock()), 0) is None


def test_last_pruned_counts_only_fresh_rows_of_each_kind(pruning: Pruning) -> None:
    assert pruning.last_ms() is None
    for kind in rows_at(STALE_MS):
        for ms in (STALE_MS - DAY, STALE_MS):
            pruning.write(kind, ms)
    assert pruning.last_ms() is None
    for kind in rows_at(FRESH_MS):
        row = pruning.write(kind, FRESH_MS)
        assert pruning.last_ms() == FRESH_MS, kind
        pruning.table.delete(row)
        assert pruning.last_ms() is None


def test_last_pruned_counts_rows_up_to_the_exact_age_limit(pruning: Pruning) -> None:
    pruning.write("inactive bound of a run", NOW_MS - PRUNING_QUIET_MS - 1)
    assert pruning.last_ms() is None
    pruning.write("inactive bound of a run", NOW_MS - PRUNING_QUIET_MS)
    assert pruning.last_ms() == NOW_MS - PRUNING_QUIET_MS


@pytest.mark.parametrize("kind", ["bound of a region", "empty region"])
def test_last_pruned_finds_fresh_row_after_many_old_rows(pruning: Pruning, kind: str) -> None:
    with pruning.table.batch(timestamp=STALE_MS) as batch:
        for number in range(2100):
            row, column, value = rows_at(STALE_MS - number)[kind]
            batch.put(row, {column: value})
    pruning.write(kind, FRESH_MS)
    assert pruning.last_ms() == FRESH_MS


def test_cdap_obstacles_are_reported_and_cached(
    hbase: HBaseServer, pool: HBasePool, admin: HBasePool, pruning: Pruning, namespace: str
) -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    watch = CdapWatch(pool, admin, namespace, clock)
    assert watch.obstacles() == ()
    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1", f"|{OBSERVER}|1073741823|")
    row = pruning.write("inactive bound of a run", FRESH_MS)
    clock.advance(CACHE_MS - 1)
    assert watch.obstacles() == ()
    clock.advance(1)
    pruned, observed = watch.obstacles()
    assert f"wrote to {namespace}:tephra.state at 2023-11-14 21:13:20 UTC" in pruned
    assert "data.tx.prune.enable" in pruned
    assert observed.startswith(f"{namespace}:tms.message still has CDAP's observer MessageTableRegionObserver")

    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1")
    pruning.table.delete(row)
    assert watch.obstacles() == (pruned, observed)
    clock.advance(CACHE_MS)
    assert watch.obstacles() == ()


def test_pruning_row_with_impossible_time_is_reported_in_ms(pool: HBasePool, pruning: Pruning, namespace: str) -> None:
    row, column, value = rows_at(FRESH_MS)["inactive bound of a run"]
    pruning.table.put(row, {column: value}, timestamp=2**62)
    [output] = CdapWatch(pool, None, namespace, ManualClock(NOW_MS)).obstacles()
    assert f"tephra.state at {2**62} ms" in output


def test_pruning_is_detected_without_thrift_2(
    hbase: HBaseServer, pool: HBasePool, pruning: Pruning, namespace: str
) -> None:
    hbase.command("set", f"{namespace}:tms.payload", "coprocessor$1", f"|{OBSERVER}|1073741823|")
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    assert CdapWatch(pool, None, namespace, clock).obstacles() == ()
    pruning.write("empty region", FRESH_MS)
    [output] = CdapWatch(pool, None, namespace, clock).obstacles()
    assert "pruning" in output


def test_unreachable_thrift_2_is_an_obstacle(pool: HBasePool, admin: HBasePool, namespace: str) -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    unreachable = HBasePool(["127.0.0.1:1"], service="HbaseAdmin", clock=clock)
    watch = CdapWatch(pool, unreachable, namespace, clock)
    [output] = watch.obstacles()
    assert "still cleans these tables failed" in output
    assert "127.0.0.1:1" in output
    vars(watch)["_admin"] = admin
    assert watch.obstacles() == ()
    unreachable.close()


def test_sweep_with_observer_deletes_but_proves_no_boundary(hbase: HBaseServer, namespace: str) -> None:
    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1", f"|{OBSERVER}|1073741823|")
    wanted = hbase.settings(namespace, admin=True, buckets=2)
    with HBaseStore(wanted) as store:
        filled = FilledStore.fill(store)
        kit = filled.kit()
        assert (kit.engine.run_once(adopt=True).errors, filled.is_swept) == ([], True)
        assert kit.state.boundary() is None
        proven, present = kit.engine.boundary()
        assert (proven, [output.partition(", ")[0] for output in present.obstacles]) == (
            None,
            [f"{namespace}:tms.message still has CDAP's observer MessageTableRegionObserver"],
        )
        assert read_only(store).obstacles() == store.obstacles()

    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1")
    with HBaseStore(wanted) as store:
        kit = filled.kit(store)
        assert kit.engine.run_once(adopt=True).errors == []
        assert kit.engine.boundary()[1].obstacles == ()
        assert kit.state.boundary() is not None


@pytest.mark.parametrize("has_thrift2", [True, False], ids=["Thrift 2", "Thrift 1 only"])
def test_doctor_and_boundary_report_the_observer(
    hbase: HBaseServer, namespace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], has_thrift2: bool
) -> None:
    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1", f"|{OBSERVER}|1073741823|")
    config = write_config(tmp_path / "janitor.yaml", hbase.settings(namespace, admin=has_thrift2))

    def run_line(line: str) -> str:
        assert execute([*line.split(), "--config", str(config)], ManualClock(NOW_MS, monotonic_ms=MINUTE)) == 0
        return capsys.readouterr().out

    for line, label in (("doctor", "cdap"), ("boundary --explain", "obstacle:" if has_thrift2 else "not known:")):
        [output] = [shown for shown in run_line(line).splitlines() if shown.startswith(label) and "observer" in shown]
        assert ("still has CDAP" in output) is has_thrift2
        assert ("needs a Thrift 2 server" in output) is not has_thrift2
    answer = json.loads(run_line("boundary --format json"))
    assert bool(answer["unseen"]) is not has_thrift2
    assert any("observer" in output for output in answer["obstacles"]) is has_thrift2
    hbase.command("set", f"{namespace}:tms.message", "coprocessor$1")
    if has_thrift2:
        [output] = [shown for shown in run_line("doctor").splitlines() if shown.startswith("cdap")]
        assert " ok " in output
