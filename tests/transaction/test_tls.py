"""The transaction service and its clients over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import re
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from thriftpy2.thrift import TApplicationException

import tms_core.client
from tests.kit.certificates import make_certificate, served_certificate
from tests.support import PATIENCE_SECONDS, wait_until
from tests.transaction.managers import served
from tests.transaction.raw_client import connect, is_closed, make_thrift_client
from tms_core.cli.main import execute
from tms_core.errors import ConfigurationError
from tms_core.security.tls import ClientTls, ServerCertificate
from tms_core.server.serving import serving
from tms_core.settings.models import TlsSettings, TransactionSettings
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.rpc import service as module
from tms_core.transaction.rpc.client import TransactionClient, source_of
from tms_core.transaction.rpc.connection import ServiceUnavailable, TlsRequired
from tms_core.transaction.rpc.service import TransactionService


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    return make_certificate(tmp_path / "certificate.pem", tmp_path / "key.pem")


def certificate_of(tls: TlsSettings) -> ServerCertificate:
    return ServerCertificate("transactions.tls.", tls.certificate, tls.key)


@pytest.fixture
def service(manager: TransactionManager, tls: TlsSettings) -> Iterator[TransactionService]:
    with served(manager, certificate=certificate_of(tls)) as service:
        yield service


def settings_for(service: TransactionService, ca_file: Path, host: str = "localhost") -> TransactionSettings:
    return TransactionSettings(source="thrift", thrift=f"{host}:{service.port}", ca_file=ca_file)


def test_client_that_trusts_the_authority_has_calls_of_every_size_done(
    service: TransactionService, tls: TlsSettings
) -> None:
    settings = settings_for(service, tls.certificate)
    with TransactionClient.configured(settings, PATIENCE_SECONDS) as client:
        for size in (1, 20_000):
            begun = client.start_short()
            client.can_commit(begun.transaction_id, [b"%06d" % number for number in range(size)])
            client.commit(begun.transaction_id)
    source = source_of(settings)
    assert source is not None
    assert source.latest().snapshot.write_pointer == begun.transaction_id


def test_connection_over_tls_is_used_again(
    service: TransactionService, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = Mock(wraps=service._accepted)
    monkeypatch.setattr(service, "_accepted", accept)
    with TransactionClient.configured(settings_for(service, tls.certificate)) as client:
        for _ in range(20):
            client.commit(client.start_short().transaction_id)
    assert accept.call_count == 1


@pytest.mark.parametrize(
    ("trusts", "host", "reason"), [(False, "localhost", "self-signed"), (True, "127.0.0.1", "IP address mismatch")]
)
def test_client_that_does_not_trust_the_certificate_does_nothing(
    service: TransactionService, manager: TransactionManager, tls: TlsSettings, trusts: bool, host: str, reason: str
) -> None:
    other = make_certificate(tls.key.with_name("other.pem"), tls.key.with_name("other.key"))
    settings = settings_for(service, tls.certificate if trusts else other.certificate, host)
    with (
        TransactionClient.configured(settings) as client,
        pytest.raises(ServiceUnavailable, match=f"over TLS: .*{reason}") as error,
    ):
        client.start_short()
    assert re.search(rf"transactions\.ca_file .*{host}", error.value.hint)
    assert not manager.visibility().in_progress


@pytest.mark.parametrize("has_token", [False, True])
def test_plain_client_of_a_service_with_tls_gets_a_tls_error(
    service: TransactionService, manager: TransactionManager, tmp_path: Path, has_token: bool
) -> None:
    token_file = tmp_path / "token" if has_token else None
    (tmp_path / "token").write_text("secret")
    with TransactionClient(service.address, token_file=token_file) as client, pytest.raises(TlsRequired) as error:
        client.start_short()
    assert "transactions.ca_file" in error.value.hint
    assert not manager.visibility().in_progress


def test_tephra_client_of_a_service_with_tls_gets_a_tls_error(service: TransactionService) -> None:
    with (
        contextlib.closing(make_thrift_client(service)) as client,
        pytest.raises(TApplicationException, match="speaks TLS only"),
    ):
        client.startShort()


@pytest.mark.parametrize("data", [b"GET / HTTP/1.1\r\n\r\n", b"\0\0\0\1x", b"\x16nothing of TLS", b"\xff\xff\xff\xff"])
def test_garbage_at_a_service_with_tls_is_cut_off(service: TransactionService, data: bytes) -> None:
    with connect(service) as connection:
        connection.sendall(data)
        assert is_closed(connection) or is_closed(connection)


def test_tls_client_of_a_plain_service_is_a_clear_error(manager: TransactionManager, tls: TlsSettings) -> None:
    with (
        served(manager) as plain,
        TransactionClient.configured(settings_for(plain, tls.certificate)) as client,
        pytest.raises(ServiceUnavailable, match="over TLS") as error,
    ):
        client.start_short()
    assert "transactions.tls" in error.value.hint


def test_silent_connection_without_a_handshake_is_cut_off(
    service: TransactionService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 0.1)
    for begins in (b"", b"\x16", b"\0\0"):
        with connect(service) as connection:
            connection.sendall(begins)
            assert is_closed(connection)


def test_many_connections_without_a_handshake_do_not_keep_others_out(
    service: TransactionService, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_CONNECTIONS", 3)
    monkeypatch.setattr(module, "HANDSHAKE_SECONDS", 2 * PATIENCE_SECONDS)
    with ExitStack() as stack:
        silent = [stack.enter_context(connect(service)) for _ in range(3)]
        with TransactionClient.configured(settings_for(service, tls.certificate)) as client:
            assert client.status() == "OK"
        silent[0].settimeout(10)
        assert is_closed(silent[0])


def test_renewed_certificate_is_shown_and_open_connections_continue(
    manager: TransactionManager, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0.01)
    new = make_certificate(tls.key.with_name("new.pem"), tls.key.with_name("new.key"))
    with served(manager, certificate=certificate_of(tls)) as service:
        with TransactionClient.configured(settings_for(service, tls.certificate)) as client:
            client.start_short()
            previous = served_certificate(service.port)
            tls.certificate.write_bytes(new.certificate.read_bytes())
            wait_until(lambda: "transactions.tls.certificate " in caplog.text)
            assert served_certificate(service.port) == previous
            tls.key.write_bytes(new.key.read_bytes())
            wait_until(lambda: served_certificate(service.port) != previous)
            client.start_short()
        assert served_certificate(service.port) == new.certificate.read_bytes().strip()
        with TransactionClient.configured(settings_for(service, new.certificate)) as client:
            client.start_short()
    assert len(manager.visibility().in_progress) == 3


@pytest.mark.parametrize(
    ("mode", "message"),
    [(0o644, r"transactions\.tls\.key .* other users"), (None, r"transactions\.tls\.key .* cannot be read")],
)
def test_key_that_is_missing_or_open_to_others_is_rejected(
    manager: TransactionManager, tls: TlsSettings, mode: int | None, message: str
) -> None:
    if mode is None:
        tls.key.unlink()
    else:
        tls.key.chmod(mode)
    with pytest.raises(ConfigurationError, match=message):
        TransactionService(manager, "127.0.0.1:0", certificate=certificate_of(tls)).start()


def test_key_that_others_can_read_later_is_reported_once_and_stays_in_force(
    tls: TlsSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    server, client = certificate_of(tls), ClientTls("transactions.", tls.certificate, tls.certificate, tls.key)
    trusted = client.context()
    tls.key.chmod(0o644)
    for _ in range(2):
        server.renew()
        assert client.context() is trusted
    messages = [record.getMessage() for record in caplog.records]
    assert [text.count(f"{tls.key} can be read or written by other users") for text in messages] == [1, 1]
    assert all(f"chmod g-w,o-rwx {tls.key} Until then the previous contents are in force" in text for text in messages)
    tls.key.chmod(0o600)
    server.renew()
    assert len(caplog.records) == 2


def test_ca_file_that_is_missing_names_the_setting(tmp_path: Path) -> None:
    settings = TransactionSettings(source="thrift", ca_file=tmp_path / "nothing.pem")
    for use in (TransactionClient.configured, source_of):
        with pytest.raises(ConfigurationError, match=r"transactions\.ca_file"):
            use(settings)


def test_server_with_tls_for_transactions_serves_clients_and_commands(
    tmp_path: Path, tls: TlsSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"certificate": str(tls.certificate), "key": str(tls.key)}
    settings = {
        "storage": {"kind": "memory"},
        "server": {"port": 0},
        "transactions": {"thrift": "127.0.0.1:0", "tls": pair, "ca_file": str(tls.certificate)},
    }
    config = tmp_path / "tms.yaml"
    config.write_text(yaml.safe_dump(settings))
    with serving(config, {}, {}, janitor=False) as started:
        assert started.transactions is not None
        address = started.transactions.replace("127.0.0.1", "localhost")
        assert execute(["tx", "list", "--tx-server", address]) == 1
        assert "[TMS-TLS-REQUIRED]" in capsys.readouterr().err
        assert execute(["tx", "list", "--config", str(config), "--tx-server", address]) == 0
        trusted = ClientTls("transactions.", tls.certificate).context()
        with TransactionClient(address, tls=trusted) as service:
            with tms_core.client.Client(started.url, transactions=service) as client:
                client.create_topic("default:orders")
                with client.transaction() as transaction:
                    transaction.publish("default:orders", [b"sync"])
                asyncio.run(publish(started.url, service))
                assert [message.payload for message in client.poll("default:orders")] == [b"sync", b"async"]
            assert not service.in_progress()


async def publish(url: str, service: TransactionClient) -> None:
    async with tms_core.client.AsyncClient(url, transactions=service) as client, client.transaction() as transaction:
        await transaction.publish("default:orders", [b"async"])


def test_context_of_the_callers_own_is_used(service: TransactionService, tls: TlsSettings) -> None:
    context = ssl.create_default_context(cafile=tls.certificate)
    context.check_hostname = False
    with TransactionClient(service.address, tls=context) as client:
        assert client.status() == "OK"


def test_client_with_a_renewed_ca_file_trusts_only_the_new_authorities(
    service: TransactionService, tls: TlsSettings, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    other = make_certificate(tls.key.with_name("other.pem"), tls.key.with_name("other.key"))
    trusted = tls.key.with_name("trusted.pem")
    trusted.write_bytes(other.certificate.read_bytes())
    with TransactionClient.configured(settings_for(service, trusted)) as client:
        with pytest.raises(ServiceUnavailable, match="self-signed"):
            client.start_short()
        trusted.write_bytes(tls.certificate.read_bytes())
        client.commit(client.start_short().transaction_id)
        trusted.write_bytes(b"none")
        client.commit(client.start_short().transaction_id)
    authorities = ClientTls("transactions.", tls.certificate)
    previous = authorities.context()
    tls.certificate.write_bytes(b"none")
    assert (authorities.context(), authorities.context()) == (previous, previous)
    # The service is in the same process, and may have logged the change of its certificate.
    assert sum(f"transactions.ca_file {tls.certificate} cannot be used" in line for line in caplog.messages) == 1
    tls.certificate.write_bytes(other.certificate.read_bytes())
    assert authorities.context() is not previous
