"""How connections to HBase's Thrift servers are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from tms_core.errors import LoginFailed, StoreUnavailable
from tms_core.security.tls import ClientTls
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.wire.socket import TimedSocket

if TYPE_CHECKING:
    from tms_core.security.kerberos import KerberosLogin


@dataclass(frozen=True)
class ThriftSecurity:
    """What each new connection is protected by.

    Attributes:
        tls: checks the server and shows a certificate; None: no TLS.
        login: logs in with Kerberos; None: nobody does.
        service: the principal of the servers, with ``_HOST`` for the host of each address.
    """

    tls: ClientTls | None = None
    login: KerberosLogin | None = None
    service: str = ""

    @classmethod
    def configured(cls, wanted: HBaseSettings) -> Self:
        """Return the protection that ``storage.hbase`` asks for.

        Raises:
            ConfigurationError: a file that it names cannot be used.
        """
        tls = None
        if wanted.tls is not None:
            given = wanted.tls
            tls = ClientTls("storage.hbase.tls.", given.ca_file, given.certificate, given.key, given.server_name)
        if wanted.kerberos is None:
            return cls(tls)
        # gssapi is of an extra.
        from tms_core.security.kerberos import KerberosLogin  # noqa: PLC0415

        return cls(tls, KerberosLogin("storage.hbase.kerberos", wanted.kerberos), wanted.kerberos.service)

    def open(self, address: str, timeout_seconds: float) -> TimedSocket:
        """Connect to ``HOST:PORT``.

        Raises:
            OSError, EOFError: nothing listens there, or it closes the connection.
            StoreUnavailable: the two sides do not agree on TLS, or the Kerberos login fails.
        """
        if self.login is None:
            return TimedSocket(address, timeout_seconds, self.tls)
        from tms_core.tables.hbase.wire.sasl import SaslSocket  # noqa: PLC0415 as in configured

        try:
            return SaslSocket(address, timeout_seconds, self.tls, self.login, self.service)
        except LoginFailed as error:
            raise StoreUnavailable(
                f"HBase's Thrift server {address} cannot be used: {error.message}", error.hint
            ) from error
