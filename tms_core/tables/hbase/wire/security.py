"""The protection and the transport of connections to HBase's Thrift servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tms_core.security.kerberos import KerberosLogin
from tms_core.security.tls import ClientTls
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.wire.http import HttpSocket
from tms_core.tables.hbase.wire.sasl import SaslSocket
from tms_core.tables.hbase.wire.socket import TimedSocket


@dataclass(frozen=True)
class ThriftSecurity:
    """The protection of new connections.

    Attributes:
        tls: the client's TLS side; None: no TLS.
        login: the Kerberos login; None: no login.
        service: the principal of the servers, with ``_HOST`` for the host of each address.
        is_http: Thrift over HTTP, where the login is SPNEGO; otherwise over TCP, where it is SASL.
    """

    tls: ClientTls | None = None
    login: KerberosLogin | None = None
    service: str = ""
    is_http: bool = False

    @classmethod
    def configured(cls, settings: HBaseSettings) -> Self:
        """Return the protection that ``storage.hbase`` configures.

        Raises:
            ConfigurationError: a configured file cannot be used.
        """
        login, service, is_http = None, "", settings.transport == "http"
        if settings.kerberos is not None:
            login = KerberosLogin("storage.hbase.kerberos", settings.kerberos)
            service = settings.kerberos.service or ("HTTP/_HOST" if is_http else "hbase/_HOST")
        return cls(client_tls(settings), login, service, is_http)

    def open(self, address: str, timeout_seconds: float) -> TimedSocket:
        """Connect to ``HOST:PORT``.

        Raises:
            OSError, EOFError: no server listens there, or it closes the connection.
            StoreUnavailable: client and server do not agree on TLS.
            LoginFailed: a ticket cannot be obtained, or the server rejects it.
        """
        service = self.service.replace("_HOST", address.rpartition(":")[0].strip("[]").lower())
        if self.is_http:
            return HttpSocket(address, timeout_seconds, self.tls, self.login, service)
        if self.login is not None:
            return SaslSocket(address, timeout_seconds, self.tls, self.login, service)
        return TimedSocket(address, timeout_seconds, self.tls)


def client_tls(settings: HBaseSettings) -> ClientTls | None:
    """Return the TLS side that ``storage.hbase.tls`` configures; None without TLS.

    Raises:
        ConfigurationError: a configured file cannot be used.
    """
    if (tls := settings.tls) is None:
        return None
    return ClientTls("storage.hbase.tls.", tls.ca_file, tls.certificate, tls.key, tls.server_name)
