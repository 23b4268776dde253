"""The janitor with a real HBase that uses ``hbase.security.authentication: kerberos``."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from janitor.cli.main import execute
from janitor.state.hbase.state import HBaseState
from tests import maven
from tests.builders import HOUR, MINUTE, NOW_MS, pointer, save_snapshot, topic, visibility
from tests.hbase.server import HBaseServer, start
from tests.hbase.tables import write_config
from tests.kerberos.kdc import REALM, Realm
from tests.server.client import Client, TopicClient
from tests.support import require_or_skip
from tms_core.clock import ManualClock, SystemClock
from tms_core.errors import LeaseHeld, StoreError
from tms_core.server.serving import serving
from tms_core.settings.models import HBaseKerberosSettings, HBaseSettings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.schema import create_tables, table_specs
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.wire.sasl import SaslSocket
from tms_core.tables.lease import Lease

INVALID = pointer(NOW_MS - 3 * HOUR)
SERVICE = f"hbase/localhost@{REALM}"
ACCESS = "org.apache.hadoop.hbase.security.access.AccessController"


@pytest.fixture(scope="module")
def hbase(realm: Realm, tmp_path_factory: pytest.TempPathFactory) -> Iterator[HBaseServer]:
    """Yield an HBase on which only ``hbase`` and ``janitor`` have permissions."""
    if reason := maven.missing():
        require_or_skip(reason)
    keytab = realm.keytab("hbase/localhost")
    logins = {"master": "kerberos.principal", "regionserver": "kerberos.principal", "thrift": "kerberos.principal"}
    properties = {
        "hadoop.security.authentication": "kerberos",
        "hbase.security.authentication": "kerberos",
        "hbase.security.authorization": "true",
        "hbase.coprocessor.master.classes": ACCESS,
        "hbase.coprocessor.region.classes": ACCESS,
        "hbase.superuser": "hbase,janitor",
        # A Thrift server acts as the user that has logged in to it.
        "hadoop.proxyuser.hbase.hosts": "*",
        "hadoop.proxyuser.hbase.groups": "*",
        "hbase.thrift.security.qop": "auth-conf",
        **{f"hbase.{role}.{name}": SERVICE for role, name in logins.items()},
        **{f"hbase.{role}.keytab.file": str(keytab) for role in logins},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", f"-Djava.security.krb5.conf={realm.config}")
        server = start(tmp_path_factory.mktemp("kerberos-hbase"), properties=properties)
    with server:
        yield server


@pytest.fixture
def settings(hbase: HBaseServer, keytab: Path, request: pytest.FixtureRequest) -> HBaseSettings:
    wanted = HBaseSettings(
        thrift=(f"localhost:{hbase.address.thrift}",),
        thrift2=(f"localhost:{hbase.address.thrift2}",),
        namespace=f"n{abs(hash(request.node.name))}",
        timeout_seconds=240,
        buckets=4,
        kerberos=HBaseKerberosSettings(principal="janitor", keytab=keytab, service="hbase/_HOST"),
    )
    with closing(HBasePool.configured(wanted, service="HbaseAdmin")) as admin:
        create_tables(admin, table_specs(wanted.namespace, wanted.buckets, "NONE"))
    return wanted


@pytest.fixture
def run(settings: HBaseSettings, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, Any]]:
    save_snapshot(tmp_path / "snapshots", visibility(NOW_MS, [INVALID]))
    transactions = {"source": "directory", "directory": str(tmp_path / "snapshots"), "max_lifetime_seconds": 3600}
    config = write_config(tmp_path / "janitor.yaml", settings, transactions=transactions)
    clock = ManualClock(NOW_MS, monotonic_ms=HOUR)

    def run_command(*arguments: str) -> tuple[int, Any]:
        code = execute([*arguments, "--config", str(config), "--format", "json"], clock)
        output = capsys.readouterr()
        return code, json.loads(output.out) if output.out else output.err

    return run_command


def test_sweep_and_doctor_work_after_kerberos_login(
    settings: HBaseSettings, run: Callable[..., tuple[int, Any]]
) -> None:
    live = list(range(NOW_MS - MINUTE, NOW_MS - MINUTE + 10))
    invalid = list(range(NOW_MS - HOUR // 2, NOW_MS - HOUR // 2 + 5))
    with HBaseStore(settings) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(NOW_MS - 2 * HOUR, NOW_MS - 2 * HOUR + 40)).plain(*live).tx(INVALID, *invalid)
        orders.plain(NOW_MS - MINUTE + 20, body=b"x" * 300_000)
        code, report = run("run", "--once", "--adopt")
        assert (code, report["errors"], report["totals"]["expired"]) == (0, [], 40)
        assert orders.times() == [*invalid, *live, NOW_MS - MINUTE + 20]
        assert orders.pointers()[: len(invalid)] == [-INVALID] * len(invalid)
        code, findings = run("doctor")
        found = {each["check"]: (each["status"], each["message"]) for each in findings}
        assert found["store"][0] == found["state"][0] == found["tables"][0] == "ok"
        status, output = found["hbase kerberos"]
        assert (status, output.startswith(f"janitor@{REALM}, ")) == ("ok", True)


def test_restarted_server_with_login_reads_earlier_messages(settings: HBaseSettings, tmp_path: Path) -> None:
    config = write_config(tmp_path / "tms.yaml", settings, transactions={"source": "none"}, server={"port": 0})
    for before in ([], ["first"]):
        with serving(config, {}, {}, janitor=False) as started, Client(urlsplit(started.url).port or 0) as client:
            orders = TopicClient(client, "orders")
            if not before:
                orders.create(ttl="86400")
            assert orders.poll() == before
            orders.publish("first" if not before else "second")


def test_spark_executors_log_in(settings: HBaseSettings, tmp_path: Path) -> None:
    now_ms = SystemClock().now_ms()
    with HBaseStore(settings) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(now_ms - 2 * HOUR, now_ms - 2 * HOUR + 40)).plain(now_ms)
        config = write_config(tmp_path / "janitor.yaml", settings, transactions={"source": "none"})
        arguments = ["spark", "sweep", "--adopt", "--format", "json", "--config", str(config), "--master", "local[2]"]
        command = [sys.executable, "-m", "janitor", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["totals"]["expired"] == 40
        assert orders.times() == [now_ms]


def test_lease_in_state_excludes_a_second_janitor(settings: HBaseSettings) -> None:
    clock = ManualClock(NOW_MS, monotonic_ms=HOUR)
    with HBaseState(settings, clock) as one, HBaseState(settings, clock) as other:
        first = Lease(one, "one:1", 60, clock)
        first.acquire()
        with pytest.raises(LeaseHeld):
            Lease(other, "other:1", 60, clock).acquire()
        first.release()
        Lease(other, "other:1", 60, clock).acquire()


@pytest.mark.parametrize("qop", ["auth", "auth-int", "auth-conf"])
def test_sasl_quality_of_hbase_server_is_negotiated(qop: str, hbase: HBaseServer, settings: HBaseSettings) -> None:
    port = hbase.command("start-thrift", "thrift", 0, f"hbase.thrift.security.qop={qop}")
    wanted = settings.model_copy(update={"thrift": (f"localhost:{port}",)})
    try:
        with HBaseStore(wanted) as store:
            topic(store, "default:long", ttl_seconds=3600).plain(NOW_MS, body=b"x" * 1_000_000)
            with store.pool.connection() as connection:
                assert isinstance(connection._socket, SaslSocket)
                assert connection._socket.qop == qop
        with HBaseStore(wanted) as store:
            [(_, value)] = topic(store, "default:long", ttl_seconds=3600).messages()
            assert value.payload == b"x" * 1_000_000
    finally:
        hbase.command("stop-thrift", port)


def test_thrift_over_http_logs_in_with_spnego(hbase: HBaseServer, settings: HBaseSettings, realm: Realm) -> None:
    spnego = {
        "hbase.regionserver.thrift.http": "true",
        "hbase.thrift.security.qop": "auth",
        "hbase.thrift.spnego.principal": f"HTTP/localhost@{REALM}",
        "hbase.thrift.spnego.keytab.file": realm.keytab("HTTP/localhost"),
    }
    port = hbase.command("start-thrift", "thrift", 0, *(f"{name}={value}" for name, value in spnego.items()))
    assert settings.kerberos is not None
    own = settings.kerberos.model_copy(update={"service": None})
    wanted = settings.model_copy(
        update={"thrift": (f"localhost:{port}",), "transport": "http", "kerberos": own, "thrift2": None}
    )
    unauthorized = own.model_copy(update={"principal": "guest", "keytab": realm.keytab("guest")})
    wrong_service = own.model_copy(update={"service": "nothttp/_HOST"})
    realm.admin("addprinc -randkey nothttp/localhost")
    try:
        with HBaseStore(wanted) as store:
            orders = topic(store, "default:long", ttl_seconds=3600).plain(
                *range(NOW_MS, NOW_MS + 50), body=b"x" * 9_000
            )
            assert [value.payload for _, value in orders.messages()] == [b"x" * 9_000] * 50
        for other, output in (
            (unauthorized, r"AccessDenied.*user .guest"),
            (None, r"cannot be used: it requires a Kerberos login. Set storage.hbase.kerberos"),
            (wrong_service, r"cannot be used: it rejects the Kerberos login: .*that hbase.thrift.spnego"),
        ):
            with pytest.raises(StoreError, match=output):
                HBaseStore(wanted.model_copy(update={"kerberos": other}))
    finally:
        hbase.command("stop-thrift", port)


def test_user_without_permission_is_rejected_by_hbase(settings: HBaseSettings, realm: Realm) -> None:
    stranger = HBaseKerberosSettings(principal="stranger", keytab=realm.keytab("stranger"))
    with pytest.raises(StoreError, match=r"AccessDenied.*user .stranger"):
        HBaseStore(settings.model_copy(update={"kerberos": stranger}))


def test_login_to_service_with_unknown_key_is_rejected(settings: HBaseSettings, realm: Realm) -> None:
    realm.admin("addprinc -randkey nothbase/localhost")
    wrong = settings.kerberos.model_copy(update={"service": "nothbase/_HOST"}) if settings.kerberos else None
    with pytest.raises(StoreError, match="GSS initiate failed"):
        HBaseStore(settings.model_copy(update={"kerberos": wrong}))
