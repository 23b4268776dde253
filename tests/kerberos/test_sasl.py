"""Thrift calls after a Kerberos login: qualities of protection, long values and errors."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.kerberos.kdc import REALM, Realm
from tests.kerberos.sasl_front import SaslFront
from tests.kit.certificates import make_certificate
from tests.tables.fake_thrift import FakeThrift
from tests.tables.test_hbase_pool import LONG_SECONDS, get
from tests.tables.tls_front import TlsFront
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.settings.models import ClientTlsSettings, HBaseKerberosSettings, HBaseSettings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.thrift import Call, ThriftTimeout
from tms_core.tables.hbase.wire.sasl import SaslSocket

QOPS = ("auth", "auth-int", "auth-conf")


@pytest.fixture
def thrift() -> Iterator[FakeThrift]:
    with FakeThrift() as server:
        yield server


def pool_of(
    address: str, keytab: Path, *, seconds: float = LONG_SECONDS, tls: ClientTlsSettings | None = None
) -> closing[HBasePool]:
    wanted = HBaseSettings(thrift=(address,), kerberos=HBaseKerberosSettings(keytab=keytab), tls=tls)
    return closing(HBasePool.configured(wanted, timeout_seconds=seconds, clock=ManualClock(0)))


@pytest.mark.parametrize("qop", QOPS)
def test_calls_use_the_sasl_quality_of_the_server(qop: str, thrift: FakeThrift, service: Path, keytab: Path) -> None:
    long = b"x" * 300_000
    with SaslFront(thrift.address, service, qop) as front, pool_of(front.address, keytab) as pool:
        assert [get(pool, row) for row in (b"a", long, b"b")] == [b"a", long, b"b"]
        with pool.connection() as connection:
            assert isinstance(connection._socket, SaslSocket)
            assert connection._socket.qop == qop
            calls: list[Call] = [("getRow", (b"table", row, {})) for row in (b"c", b"d")]
            assert [rows[0].row for rows in connection.calls(calls)] == [b"c", b"d"]
        assert front.users == [f"janitor@{REALM}"]
        # With auth-int and auth-conf, the server announces a limit for frames.
        assert (max(front.frames) > 65_536) == (qop == "auth")


def test_rejected_login_quotes_the_server(thrift: FakeThrift, service: Path, keytab: Path) -> None:
    with SaslFront(thrift.address, service) as front, pool_of(front.address, keytab) as pool:
        front.refusal = "GSS initiate failed"
        with pytest.raises(StoreUnavailable) as caught:
            get(pool, b"a")
    assert str(caught.value).startswith(
        f"HBase's Thrift server {front.address} cannot be used: it rejects the Kerberos login: GSS initiate failed. "
    )


def test_missing_ticket_is_reported_before_login(thrift: FakeThrift, service: Path, realm: Realm) -> None:
    keytab = realm.keytab("dropped")
    realm.admin("delprinc -force dropped")
    with (
        SaslFront(thrift.address, service) as front,
        pool_of(front.address, keytab) as pool,
        pytest.raises(StoreUnavailable, match=r"Kerberos .*principal"),
    ):
        get(pool, b"a")
    assert front.users == []


@pytest.mark.usefixtures("service")
def test_login_to_silent_server_is_reported(keytab: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        pool_of(f"localhost:{silent.getsockname()[1]}", keytab, seconds=0.5) as pool,
    ):
        with pytest.raises(StoreUnavailable, match="Kerberos") as caught:
            get(pool, b"a")
        assert not isinstance(caught.value, ThriftTimeout)


@pytest.mark.parametrize("qop", ["auth-int", "auth-conf"])
def test_response_modified_in_transit_is_discarded(qop: str, thrift: FakeThrift, service: Path, keytab: Path) -> None:
    with SaslFront(thrift.address, service, qop) as front, pool_of(front.address, keytab) as pool:
        assert get(pool, b"a") == b"a"
        front.damage = True
        # The pool repeats the call over another connection.
        assert get(pool, b"b") == b"b"
        assert len(front.users) == 2


def test_connection_with_expired_ticket_is_not_reused(
    thrift: FakeThrift, service: Path, keytab: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with SaslFront(thrift.address, service) as front, pool_of(front.address, keytab) as pool:
        assert get(pool, b"a") == b"a"
        monkeypatch.setattr("tms_core.security.kerberos.Exchange.is_expired", True)
        assert get(pool, b"b") == b"b"
        assert len(front.users) == 2


def test_pool_recovers_after_realm_outage(thrift: FakeThrift, tmp_path: Path) -> None:
    with Realm(tmp_path / "other") as other, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KRB5_CONFIG", str(other.config))
        service, own = other.keytab("hbase/localhost"), other.keytab("lasting", options="-maxlife 2s")
        with SaslFront(thrift.address, service) as front, pool_of(front.address, own) as pool:
            assert get(pool, b"a") == b"a"
            other.stop()
            # MIT's library reads the clock of the machine.
            time.sleep(3)
            with pytest.raises(StoreUnavailable, match="kdc") as caught:
                get(pool, b"b")
            assert "kdc" in caught.value.hint
            other.start()
            assert get(pool, b"c") == b"c"
        assert front.users == [f"lasting@{REALM}"] * 2


def test_login_over_tls_succeeds(thrift: FakeThrift, service: Path, keytab: Path, tmp_path: Path) -> None:
    tls = make_certificate(tmp_path / "server.pem", tmp_path / "server.key")
    with (
        SaslFront(thrift.address, service) as front,
        TlsFront(front.address, tls) as outer,
        pool_of(outer.address, keytab, tls=ClientTlsSettings(ca_file=tls.certificate)) as pool,
    ):
        assert get(pool, b"a") == b"a"
        assert (front.users, outer.handshakes) == ([f"janitor@{REALM}"], 1)
