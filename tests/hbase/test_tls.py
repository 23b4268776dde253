"""The janitor with a real HBase whose Thrift servers use TLS."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from janitor.cli.main import execute
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.tables import Tables, write_config
from tests.kit.certificates import make_certificate
from tests.tables.tls_front import TlsFront
from tms_core.settings.models import HBaseSettings, TlsSettings

Doctor = Callable[[Path], dict[str, tuple[str, str]]]


@pytest.fixture
def tls(tmp_path: Path) -> TlsSettings:
    return make_certificate(tmp_path / "server.pem", tmp_path / "server.key")


@pytest.fixture
def config(hbase: HBaseServer, hbase_tables: Tables, tls: TlsSettings, tmp_path: Path) -> Iterator[Path]:
    """Return the settings of a janitor with a client certificate."""
    own = make_certificate(tmp_path / "janitor.pem", tmp_path / "janitor.key")
    with ExitStack() as stack:
        fronts = [
            stack.enter_context(TlsFront(str(address), tls, clients=own.certificate))
            for address in (hbase.thrift, hbase.thrift2)
        ]
        settings = HBaseSettings(
            thrift=(fronts[0].address,),
            thrift2=(fronts[1].address,),
            namespace=hbase_tables.make(buckets=3),
            timeout_seconds=PATIENCE_SECONDS,
            tls={"ca_file": "server.pem", "certificate": "janitor.pem", "key": "janitor.key"},  # type: ignore[arg-type]
        )
        yield write_config(tmp_path / "janitor.yaml", settings, transactions={"source": "none"})


def test_tls_reaches_both_thrifts(config: Path, tmp_path: Path, doctor: Doctor) -> None:
    found = doctor(config)
    status, message = found["hbase tls"]
    assert status == "ok"
    assert re.search(f"{tmp_path / 'server.pem'}, .*{tmp_path / 'janitor.pem'}", message)
    assert [found[check][0] for check in ("store", "state", "tables", "regions")] == ["ok", "warn", "ok", "ok"]
    assert execute(["run", "--once", "--adopt", "--config", str(config)]) == 0


def test_doctor_with_wrong_authority_fails(config: Path, tmp_path: Path, doctor: Doctor) -> None:
    (tmp_path / "server.pem").write_bytes((tmp_path / "janitor.pem").read_bytes())
    found = doctor(config)
    assert (found["hbase tls"][0], found["store"][0]) == ("ok", "fail")
    assert "cannot be reached over TLS: self-signed certificate. Check that" in found["store"][1]
    (tmp_path / "server.pem").write_bytes(b"")
    found = doctor(config)
    assert found["hbase tls"][0] == "fail"
    assert "storage.hbase.tls.ca_file " in found["hbase tls"][1]
