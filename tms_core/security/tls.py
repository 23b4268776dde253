"""TLS contexts of clients and servers, from files that are read again after a change."""

from __future__ import annotations

import ssl
from pathlib import Path

from tms_core.security.files import WatchedFiles


class ClientTls:
    """The TLS side of a client: its authorities and its certificate; threads may share it.

    Args:
        prefix: the prefix of the files' settings, such as ``storage.hbase.tls.``, for messages.
        ca_file: certificates of authorities in PEM; None: the system's authorities.
        certificate, key: the certificate that the client presents, and its private key; None: no certificate.
        server_name: the name in the servers' certificates; None: the host of each address.

    Raises:
        ConfigurationError: a file cannot be used, or other users may read the key.
    """

    def __init__(
        self,
        prefix: str,
        ca_file: Path | None = None,
        certificate: Path | None = None,
        key: Path | None = None,
        server_name: str | None = None,
    ) -> None:
        self.server_name = server_name
        self._ca_file = ca_file
        self._pair = None if certificate is None or key is None else (certificate, key)
        paths = {"ca_file": ca_file, "certificate": certificate, "key": key}
        files = {f"{prefix}{name}": path for name, path in paths.items() if path is not None}
        self._files = WatchedFiles(files, self._load, secret=f"{prefix}key")

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection, from the current files."""
        self._files.refresh()
        return self._files.value

    def _load(self, *_: bytes) -> ssl.SSLContext:
        # A new context for each change, because a context never forgets a loaded authority.
        context = ssl.create_default_context(cafile=self._ca_file)
        if self._pair is not None:
            context.load_cert_chain(*self._pair, _refuse_passphrase)
        return context


class ServerCertificate:
    """The certificate that a server presents.

    Args:
        prefix: the prefix of the files' settings, such as ``server.tls.``, for messages.
        certificate: the chain, in PEM.
        key: the private key, in PEM.

    Attributes:
        context: the context of all connections.

    Raises:
        ConfigurationError: the files cannot be used, or other users may read the key.
    """

    def __init__(self, prefix: str, certificate: Path, key: Path) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._pair = (certificate, key)
        files = {f"{prefix}certificate": certificate, f"{prefix}key": key}
        self._files = WatchedFiles(files, self._load, secret=f"{prefix}key")

    def renew(self) -> None:
        """Present a renewed certificate to new connections."""
        self._files.refresh()

    def _load(self, *_: bytes) -> None:
        # Load into a temporary context first: if certificate and key do not match, only half of them would be replaced.
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), self.context):
            context.load_cert_chain(*self._pair, _refuse_passphrase)


def _refuse_passphrase() -> str:
    """Fail, because OpenSSL would otherwise prompt for the passphrase of an encrypted key on the terminal.

    Raises:
        OSError: always.
    """
    raise OSError("the private key is encrypted with a passphrase")
