"""Connections to Thrift servers over TLS: trust, errors and changed files."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from pydantic import ValidationError

from tests.kit.certificates import make_certificate
from tests.kit.sockets import SocketServer
from tests.tables.fake_thrift import FakeThrift, Request
from tests.tables.test_hbase_pool import LONG_SECONDS, get
from tests.tables.tls_front import TlsFront
from tms_core.clock import ManualClock
from tms_core.errors import ConfigurationError, StoreUnavailable
from tms_core.security.tls import ClientTls, ServerCertificate
from tms_core.settings.models import ClientTlsSettings, HBaseSettings, TlsSettings
from tms_core.tables.hbase.pool import HBasePool
from tms_core.tables.hbase.wire.socket import TimedSocket


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    return make_certificate(tmp_path / "server.pem", tmp_path / "server.key")


@pytest.fixture
def other(tmp_path: Path) -> TlsSettings:
    return make_certificate(tmp_path / "other.pem", tmp_path / "other.key")


@pytest.fixture
def thrift() -> Iterator[FakeThrift]:
    with FakeThrift() as server:
        yield server


def pool_of(address: str, tls: ClientTlsSettings) -> closing[HBasePool]:
    wanted = HBaseSettings(thrift=(address,), tls=tls)
    return closing(HBasePool.configured(wanted, timeout_seconds=LONG_SECONDS, clock=ManualClock(0)))


def test_tls_calls_share_one_connection(thrift: FakeThrift, tls: TlsSettings) -> None:
    rows = [b"a", b"x" * 3_000_000, b"c"]
    with (
        TlsFront(thrift.address, tls) as front,
        pool_of(front.address, ClientTlsSettings(ca_file=tls.certificate)) as pool,
    ):
        assert [get(pool, row) for row in rows] == rows
        assert front.handshakes == 1


def test_server_with_another_name_requires_server_name(thrift: FakeThrift, tls: TlsSettings) -> None:
    with TlsFront(thrift.address, tls) as front:
        by_number = f"127.0.0.1:{front.port}"
        with (
            pool_of(by_number, ClientTlsSettings(ca_file=tls.certificate)) as pool,
            pytest.raises(StoreUnavailable, match=r"(?i)IP address mismatch.*server_name"),
        ):
            get(pool, b"a")
        with pool_of(by_number, ClientTlsSettings(ca_file=tls.certificate, server_name="localhost")) as pool:
            assert get(pool, b"a") == b"a"


@pytest.mark.parametrize("trusted", ["the other", "the system's"])
def test_server_of_unknown_authority_is_rejected(
    thrift: FakeThrift, tls: TlsSettings, other: TlsSettings, trusted: str
) -> None:
    ca_file = other.certificate if trusted == "the other" else None
    with (
        TlsFront(thrift.address, tls) as front,
        pool_of(front.address, ClientTlsSettings(ca_file=ca_file)) as pool,
        pytest.raises(StoreUnavailable) as caught,
    ):
        get(pool, b"a")
    assert f"HBase's Thrift server {front.address} cannot be reached over TLS: self-signed certificate." in str(
        caught.value
    )
    assert "storage.hbase.tls.ca_file" in str(caught.value)
    assert not thrift.reads


def test_client_certificate_is_sent_to_server_that_requires_it(
    thrift: FakeThrift, tls: TlsSettings, other: TlsSettings
) -> None:
    with TlsFront(thrift.address, tls, clients=other.certificate) as front:
        with (
            pool_of(front.address, ClientTlsSettings(ca_file=tls.certificate)) as pool,
            pytest.raises(StoreUnavailable, match=r"certificate required.*storage\.hbase\.tls\.certificate"),
        ):
            get(pool, b"a")
        shown = ClientTlsSettings(ca_file=tls.certificate, certificate=other.certificate, key=other.key)
        with pool_of(front.address, shown) as pool:
            assert get(pool, b"a") == b"a"


def test_rejected_certificate_is_reported_after_connection_is_closed(
    thrift: FakeThrift, tls: TlsSettings, other: TlsSettings
) -> None:
    with TlsFront(thrift.address, tls, clients=other.certificate) as front:
        client = ClientTls("storage.hbase.tls.", tls.certificate)
        with closing(TimedSocket(front.address, LONG_SECONDS, client)) as connection:
            while connection.is_reusable():
                time.sleep(0.001)
            with pytest.raises(StoreUnavailable, match="certificate required"):
                write_until_it_fails(connection)


def write_until_it_fails(connection: TimedSocket) -> None:
    """Write repeatedly: the first write after the close of the server only causes its reset."""
    for _ in range(1000):
        connection.write(b"a")
        time.sleep(0.001)


def test_server_without_tls_is_reported(tls: TlsSettings) -> None:
    def handle(connection: socket.socket) -> None:
        connection.recv(1 << 16)
        connection.sendall(b"this is not TLS")

    with (
        SocketServer(handle) as server,
        pool_of(f"localhost:{server.port}", ClientTlsSettings(ca_file=tls.certificate)) as pool,
        pytest.raises(StoreUnavailable, match="TLS"),
    ):
        get(pool, b"a")


def test_call_over_broken_tls_connection_is_retried(tls: TlsSettings) -> None:
    seen: list[bytes] = []

    def cut_first(request: Request) -> None:
        seen.append(request.row)
        request.cut() if len(seen) == 1 else request.send(request.answer())

    with (
        FakeThrift(cut_first) as thrift,
        TlsFront(thrift.address, tls) as front,
        pool_of(front.address, ClientTlsSettings(ca_file=tls.certificate)) as pool,
    ):
        assert get(pool, b"a") == b"a"
        assert (seen, front.handshakes) == ([b"a", b"a"], 2)


def test_changed_tls_files_are_used_by_the_next_connection(
    thrift: FakeThrift,
    tls: TlsSettings,
    other: TlsSettings,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    authority = tmp_path / "authority.pem"
    authority.write_bytes(tls.certificate.read_bytes())
    client = ClientTls("storage.hbase.tls.", authority)
    previous = client.context()
    assert client.context() is previous
    authority.write_bytes(b"half")
    with caplog.at_level(logging.INFO):
        assert client.context() is client.context() is previous
    [said] = caplog.messages
    assert "Until then the previous contents are in force" in said
    authority.write_bytes(other.certificate.read_bytes())
    assert client.context() is not previous
    with TlsFront(thrift.address, other) as front:
        wanted = ClientTlsSettings(ca_file=authority)
        with pool_of(front.address, wanted) as pool:
            assert get(pool, b"a") == b"a"


def test_unusable_tls_files_are_reported_at_startup(tls: TlsSettings, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"storage\.hbase\.tls\.ca_file .*nothing "):
        HBasePool.configured(HBaseSettings(tls=ClientTlsSettings(ca_file=tmp_path / "nothing")))
    tls.key.chmod(0o644)
    with pytest.raises(ConfigurationError, match=r"storage\.hbase\.tls\.key "):
        HBasePool.configured(HBaseSettings(tls=ClientTlsSettings(certificate=tls.certificate, key=tls.key)))


@pytest.mark.parametrize(("given", "missing"), [("certificate", "key"), ("key", "certificate")])
def test_certificate_and_key_require_each_other(given: str, missing: str, tls: TlsSettings) -> None:
    with pytest.raises(ValidationError) as caught:
        ClientTlsSettings.model_validate({given: tls.certificate})
    assert [error["ctx"]["setting"] for error in caught.value.errors()] == [missing]


@pytest.mark.parametrize("load", [partial(ClientTls, "storage.hbase.tls.", None), partial(ServerCertificate, "tls.")])
def test_key_with_passphrase_is_rejected_without_prompt(tls: TlsSettings, load: Callable[..., object]) -> None:
    key = serialization.load_pem_private_key(tls.key.read_bytes(), None)
    encrypted = serialization.BestAvailableEncryption(b"never prompted for")
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    tls.key.write_bytes(key.private_bytes(pem, pkcs8, encrypted))
    with pytest.raises(ConfigurationError, match="passphrase"):
        load(tls.certificate, tls.key)
