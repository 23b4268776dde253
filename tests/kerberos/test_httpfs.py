"""Snapshots from Hadoop's HttpFS with a required Kerberos login, over HTTP and HTTPS.

It serves the local file system instead of HDFS: the login, the REST interface and TLS are the same.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from tests import maven
from tests.interop.java import SHORT_LIVED
from tests.kerberos.kdc import REALM, Realm
from tests.kit.certificates import make_certificate, make_keystore
from tests.support import free_port, is_listening, require_or_skip
from tests.transaction.test_webhdfs import content
from tms_core.errors import NoSnapshot
from tms_core.settings.models import KerberosSettings, TransactionSettings
from tms_core.transaction.rpc.client import source_of
from tms_core.transaction.source.source import SnapshotSource

_START_SECONDS = 120
_MAIN = "org.apache.hadoop.fs.http.server.HttpFSServerWebServer"


def write_xml(path: Path, properties: Mapping[str, object]) -> None:
    each = (
        f"<property><name>{name}</name><value>{escape(str(value))}</value></property>"
        for name, value in properties.items()
    )
    path.write_text(f"<configuration>{''.join(each)}</configuration>")


@pytest.fixture(scope="module", params=["webhdfs", "swebhdfs"])
def httpfs(
    request: pytest.FixtureRequest, realm: Realm, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, Path]]:
    """Yield the URL of the snapshot folder, and the certificate file of HttpFS."""
    if reason := maven.missing():
        require_or_skip(reason)
    folder = tmp_path_factory.mktemp("httpfs")
    for name in ("log", "temp", "snapshots"):
        (folder / name).mkdir()
    for number in (1, 2):
        (folder / f"snapshots/snapshot.{number}").write_bytes(content(number))
    port = free_port()
    tls = make_certificate(folder / "server.pem", folder / "server.key")
    (folder / "signature").write_text("signs cookies")
    write_xml(folder / "core-site.xml", {"fs.defaultFS": "file:///", "hadoop.tmp.dir": folder / "temp"})
    write_xml(
        folder / "httpfs-site.xml",
        {
            "httpfs.http.hostname": "localhost",
            "httpfs.http.port": port,
            "httpfs.ssl.enabled": str(request.param == "swebhdfs").lower(),
            "httpfs.hadoop.config.dir": folder,
            "httpfs.hadoop.filesystem.schemes": "file",
            "hadoop.http.authentication.type": "kerberos",
            "hadoop.http.authentication.kerberos.principal": f"HTTP/localhost@{REALM}",
            "hadoop.http.authentication.kerberos.keytab": realm.keytab("HTTP/localhost"),
            "hadoop.http.authentication.signature.secret.file": folder / "signature",
        },
    )
    write_xml(
        folder / "ssl-server.xml",
        {
            "ssl.server.keystore.location": make_keystore(tls),
            "ssl.server.keystore.type": "pkcs12",
            "ssl.server.keystore.password": "secret",
            "ssl.server.keystore.keypassword": "secret",
        },
    )
    settings = {"home": folder, "config": folder, "log": folder / "log", "temp": folder / "temp"}
    command = [
        "java",
        "-Xmx256m",
        *SHORT_LIVED,
        "--add-opens=java.base/java.lang=ALL-UNNAMED",
        f"-Djava.security.krb5.conf={realm.config}",
        *(f"-Dhttpfs.{name}.dir={value}" for name, value in settings.items()),
        "-cp",
        ":".join(map(str, [folder, *maven.build(Path(__file__).parent / "httpfs")])),
        _MAIN,
    ]
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + _START_SECONDS
        while not is_listening(port):
            assert process.poll() is None, (folder / "output").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"{request.param}://localhost:{port}{folder}/snapshots", tls.certificate
    finally:
        process.terminate()
        process.wait()


def source(place: str, ca_file: Path, kerberos: KerberosSettings | None) -> SnapshotSource:
    found = source_of(TransactionSettings(source="directory", directory=place, kerberos=kerberos, hdfs_ca_file=ca_file))
    assert found is not None
    return found


def test_snapshot_is_read_from_httpfs_after_login(httpfs: tuple[str, Path], realm: Realm) -> None:
    reader = KerberosSettings(keytab=realm.keytab("httpreader"))
    assert source(*httpfs, reader).latest().snapshot.write_pointer == 5000
    with pytest.raises(NoSnapshot, match="Kerberos"):
        source(*httpfs, None).latest()
