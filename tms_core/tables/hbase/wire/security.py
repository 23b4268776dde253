"""How connections to HBase's Thrift servers are protected."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from tms_core.settings.client_tls import ClientTls
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.wire.socket import TimedSocket


@dataclass(frozen=True)
class ThriftSecurity:
    """What each new connection is protected by.

    Attributes:
        tls: checks the server and shows a certificate; None: no TLS.
    """

    tls: ClientTls | None = None

    @classmethod
    def configured(cls, wanted: HBaseSettings) -> Self:
        """Return the protection that ``storage.hbase`` asks for.

        Raises:
            ConfigurationError: a file that it names cannot be used.
        """
        return cls(None if wanted.tls is None else ClientTls("storage.hbase.tls", wanted.tls))

    def open(self, address: str, timeout_seconds: float) -> TimedSocket:
        """Connect to ``HOST:PORT``; raises as :class:`TimedSocket`."""
        return TimedSocket(address, timeout_seconds, self.tls)
