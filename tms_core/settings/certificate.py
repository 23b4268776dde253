"""A server's certificate and its private key, which are read again when they are renewed."""

from __future__ import annotations

import ssl

from tms_core.errors import ConfigurationError
from tms_core.logs.loggers import get_logger
from tms_core.secret_file import check_secret_file, refuse_passphrase
from tms_core.settings.models import TlsSettings

#: How often a server checks whether its certificate was renewed, in seconds.
LOOK_SECONDS = 10
logger = get_logger(__name__)


class ServerCertificate:
    """The certificate that a server shows, from two files.

    Args:
        setting: the name of the setting, for messages.
        tls: where the files are.
    """

    def __init__(self, setting: str, tls: TlsSettings) -> None:
        self._setting = setting
        self._tls = tls
        self._read: tuple[bytes, bytes] | None = None
        self._complaint = ""

    def load(self) -> ssl.SSLContext:
        """Return a context with the certificate.

        Raises:
            ConfigurationError: the files cannot be used, or other users may read the key.
        """
        try:
            self._read = self._contents()
            return self._loaded()
        except OSError as error:
            raise self._unusable(error) from error

    def renew(self, context: ssl.SSLContext) -> None:
        """Load a renewed certificate into a context, for connections from now on.

        If the new pair cannot be used, the former one stays in force, and the log says so once.
        """
        try:
            found = self._contents()
            if found == self._read:
                return
            # First elsewhere: of a pair that does not fit, half would be in force.
            self._loaded()
            context.load_cert_chain(self._tls.certificate, self._tls.key, refuse_passphrase)
        except (OSError, ConfigurationError) as error:
            said = str(error if isinstance(error, ConfigurationError) else self._unusable(error))
            if said != self._complaint:
                logger.error("%s Until then the former certificate is in force.", said)
            self._complaint = said
            return
        self._read, self._complaint = found, ""
        logger.info("%s: %s has changed and is in force", self._setting, self._tls.certificate)

    def _contents(self) -> tuple[bytes, bytes]:
        return self._tls.certificate.read_bytes(), self._tls.key.read_bytes()

    def _loaded(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self._tls.certificate, self._tls.key, refuse_passphrase)
        check_secret_file(f"{self._setting}.key", self._tls.key)
        return context

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{self._setting}: {self._tls.certificate} and {self._tls.key} cannot be used: {error}.",
            "Give a certificate chain and its private key, both PEM files, without a passphrase.",
        )
