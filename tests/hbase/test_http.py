"""The janitor with a real HBase whose Thrift servers use HTTPS (``hbase.thrift.ssl.enabled``)."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from janitor.state.hbase.state import HBaseState
from tests.builders import DAY, NOW_MS
from tests.hbase.server import PATIENCE_SECONDS, HBaseServer
from tests.hbase.sweep_kit import FilledStore, run_once
from tests.hbase.tables import Tables, write_config
from tests.hbase.thrift_calls import CallSchedule
from tests.kit.certificates import make_certificate, make_keystore
from tms_core.clock import ManualClock
from tms_core.errors import StoreUnavailable
from tms_core.settings.models import ClientTlsSettings, HBaseSettings
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.hbase.wire.http import HttpSocket

HTTP = "hbase.regionserver.thrift.http=true"


class HttpsThrift:
    """Thrift 1 and Thrift 2 servers over HTTPS, whose certificate can be replaced."""

    def __init__(self, hbase: HBaseServer, folder: Path) -> None:
        self._hbase = hbase
        self._folder = folder
        self.ca_file = folder / "authorities.pem"
        self.ports = {"thrift": 0, "thrift2": 0}
        self.rotate()

    def rotate(self) -> None:
        """Restart the servers with a new certificate, the only one that clients trust from now on."""
        tls = make_certificate(self._folder / "server.pem", self._folder / "server.key")
        store = make_keystore(tls)
        self.stop()
        properties = [HTTP, "hbase.thrift.ssl.enabled=true", f"hbase.thrift.ssl.keystore.store={store}"]
        properties += ["hbase.thrift.ssl.keystore.password=secret", "hbase.thrift.ssl.keystore.type=pkcs12"]
        for kind, port in self.ports.items():
            self.ports[kind] = int(self._hbase.command("start-thrift", kind, port, *properties))
        shutil.copy(tls.certificate, self.ca_file)

    def stop(self) -> None:
        for port in self.ports.values():
            if port:
                self._hbase.command("stop-thrift", port)


@pytest.fixture
def thrift(hbase: HBaseServer, tmp_path: Path) -> Iterator[HttpsThrift]:
    server = HttpsThrift(hbase, tmp_path)
    yield server
    server.stop()


@pytest.fixture
def settings(thrift: HttpsThrift, hbase_tables: Tables) -> HBaseSettings:
    return HBaseSettings(
        thrift=(f"localhost:{thrift.ports['thrift']}",),
        thrift2=(f"localhost:{thrift.ports['thrift2']}",),
        transport="http",
        tls=ClientTlsSettings(ca_file=thrift.ca_file),
        namespace=hbase_tables.shared(),
        timeout_seconds=PATIENCE_SECONDS,
        buckets=4,
    )


def test_sweep_over_https_survives_certificate_rotation(
    thrift: HttpsThrift, settings: HBaseSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tms_core.security.files.LOOK_SECONDS", 0)
    clock = ManualClock(NOW_MS, monotonic_ms=DAY)
    with HBaseStore(settings) as store, HBaseState(settings, clock) as state:
        filled = FilledStore.fill(store)
        with store.pool.connection() as connection:
            assert isinstance(connection._socket, HttpSocket)
        calls = CallSchedule(store.pool)
        calls.before("scannerGetList", 3, thrift.rotate)
        errors, report = run_once(filled.kit(state=state))
        assert calls.all_made
        assert (errors, report is None) == ([], False)
        assert filled.is_swept
        filled.check_live_rows()
        assert state.boundary() is not None


def test_doctor_over_https_reaches_both_interfaces(
    settings: HBaseSettings, tmp_path: Path, doctor: Callable[[Path], dict[str, tuple[str, str]]]
) -> None:
    found = doctor(write_config(tmp_path / "janitor.yaml", settings, transactions={"source": "none"}))
    assert str(tmp_path / "authorities.pem") in found["hbase tls"][1]
    assert [found[check][0] for check in ("hbase tls", "store", "tables", "regions")] == ["ok"] * 4


@pytest.mark.parametrize("transport", ["http", "tcp"])
def test_wrong_transport_is_reported(
    hbase: HBaseServer, thrift: HttpsThrift, settings: HBaseSettings, transport: str
) -> None:
    port = hbase.address.thrift if transport == "http" else thrift.ports["thrift"]
    update: dict[str, object] = {"thrift": (f"localhost:{port}",), "transport": transport}
    if transport == "http":
        update["tls"] = None
    with pytest.raises(StoreUnavailable, match=r"storage\.hbase\.transport"):
        HBaseStore(settings.model_copy(update=update))
