"""Snapshots on HDFS with a required Kerberos login: SPNEGO at the NameNode, over HTTP and HTTPS."""

from __future__ import annotations

import base64
import logging
import ssl
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tests.kerberos.kdc import REALM, Realm, gssapi
from tests.kit.certificates import make_certificate
from tests.transaction.test_webhdfs import FOLDER, DataNode, Hdfs, NameNode, content
from tms_core.errors import ConfigurationError, NoSnapshot
from tms_core.security.kerberos import Exchange
from tms_core.settings.models import KerberosSettings, TransactionSettings
from tms_core.transaction.rpc.client import source_of
from tms_core.transaction.source.source import DirectorySource
from tms_core.transaction.source.webhdfs import WebHdfsFolder


class KerberosNameNode(NameNode):
    """A NameNode that requires a login and proves its identity, or sends ``proof``."""

    keytab: Path
    users: list[str]
    proof: bytes | None = None
    token = b""

    def do_GET(self) -> None:  # noqa: N802
        kind, _, given = self.headers.get("Authorization", "").partition(" ")
        if kind != "Negotiate":
            self.answer(401, b"", **{"WWW-Authenticate": "Negotiate"})
            return
        keys = gssapi.Credentials(usage="accept", store={b"keytab": str(self.keytab).encode()})
        context = gssapi.SecurityContext(creds=keys, usage="accept")
        self.token = context.step(base64.b64decode(given)) or b""
        self.users.append(str(context.initiator_name))
        super().do_GET()

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        if self.token:
            proof = self.token if self.proof is None else self.proof
            headers["WWW-Authenticate"] = f"Negotiate {base64.b64encode(proof).decode()}"
        super().answer(status, content, **headers)


@pytest.fixture(scope="module")
def keytabs(realm: Realm) -> tuple[Path, Path]:
    """Return the keytabs of the NameNode and the janitor."""
    return realm.keytab("HTTP/localhost"), realm.keytab("reader")


@pytest.fixture
def hdfs() -> Hdfs:
    hdfs = Hdfs()
    hdfs.files = {f"{FOLDER}/snapshot.1": content(1), f"{FOLDER}/snapshot.2": content(2)}
    return hdfs


@pytest.fixture(params=["http", "https"])
def url(request: pytest.FixtureRequest, hdfs: Hdfs, keytabs: tuple[Path, Path], tmp_path: Path) -> Iterator[str]:
    """Yield the URL of the folder."""
    KerberosNameNode.keytab, KerberosNameNode.hdfs = keytabs[0], hdfs
    KerberosNameNode.users, KerberosNameNode.proof = [], None
    data_node = type("Data", (DataNode,), {"hdfs": hdfs})
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), kind) for kind in (KerberosNameNode, data_node)]
    if request.param == "https":
        tls = make_certificate(tmp_path / "server.pem", tmp_path / "server.key")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key)
        for server in servers:
            server.socket = context.wrap_socket(server.socket, server_side=True)
    for server in servers:
        Thread(target=server.serve_forever, args=[0.05]).start()
    name, data = (f"localhost:{server.server_address[1]}" for server in servers)
    hdfs.datanode = f"{request.param}://{data}"
    yield f"{'s' if request.param == 'https' else ''}webhdfs://{name}{FOLDER}"
    for server in servers:
        server.shutdown()
        server.server_close()


def source(place: str, keytab: Path, tmp_path: Path) -> DirectorySource:
    ca_file = tmp_path / "server.pem"
    found = source_of(
        TransactionSettings(
            source="directory",
            directory=place,
            kerberos=KerberosSettings(keytab=keytab),
            hdfs_ca_file=ca_file if ca_file.exists() else None,
        )
    )
    assert isinstance(found, DirectorySource)
    return found


def test_snapshot_is_read_from_webhdfs_after_login(url: str, keytabs: tuple[Path, Path], tmp_path: Path) -> None:
    assert source(url, keytabs[1], tmp_path).latest().name == "snapshot.2"
    assert set(KerberosNameNode.users) == {f"reader@{REALM}"}


@pytest.mark.parametrize(("proof", "message"), [(b"anything", "Kerberos login failed"), (b"", "identity")])
def test_namenode_without_valid_proof_is_rejected(
    url: str, keytabs: tuple[Path, Path], tmp_path: Path, proof: bytes, message: str
) -> None:
    found = source(url, keytabs[1], tmp_path)
    KerberosNameNode.proof = proof
    with pytest.raises(NoSnapshot, match=message):
        found.latest()
    ca_file = tmp_path / "server.pem"
    folder = WebHdfsFolder(url, KerberosSettings(keytab=keytabs[1]), ca_file if ca_file.exists() else None)
    with pytest.raises(OSError, match=message), folder.open("snapshot.2"):
        """The server could redirect to any address."""


def test_failed_or_missing_login_is_reported(url: str, realm: Realm, tmp_path: Path) -> None:
    keytab = realm.keytab("expelled")
    realm.admin("delprinc -force expelled")
    with pytest.raises(NoSnapshot) as caught:
        source(url, keytab, tmp_path).latest()
    assert "(transactions.kerberos)" in str(caught.value)
    assert KerberosNameNode.users == []
    ca_file = tmp_path / "server.pem" if url.startswith("s") else None
    with pytest.raises(NoSnapshot, match="Kerberos"):
        DirectorySource.at(url, ca_file=ca_file).latest()


def test_log_and_errors_contain_no_tokens_or_keys(
    url: str,
    keytabs: tuple[Path, Path],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caplog.set_level(logging.INFO)
    caplog.set_level(logging.DEBUG, "tms_core")
    tokens: list[bytes] = []
    step = Exchange.step

    def watched(exchange: Exchange, token: bytes | None = None) -> bytes:
        tokens.append(step(exchange, token))
        return tokens[-1]

    monkeypatch.setattr(Exchange, "step", watched)
    reader = source(url, keytabs[1], tmp_path)
    reader.latest()
    KerberosNameNode.proof = b"anything"
    with pytest.raises(NoSnapshot) as caught:
        reader.latest()
    text = "\n".join([*caplog.messages, str(caught.value), repr(caught.value)])
    # The first 45 bytes: their encodings are prefixes of the encodings of the whole secret.
    secrets = [each[:45] for each in (keytabs[1].read_bytes()[2:], *tokens) if each]
    assert len(secrets) > 2
    assert not [each for each in secrets if each.hex() in text or base64.b64encode(each).decode() in text]


def test_unreadable_authority_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"transactions\.hdfs_ca_file .*none "):
        DirectorySource.at("swebhdfs://localhost:1/tx", ca_file=tmp_path / "none")
