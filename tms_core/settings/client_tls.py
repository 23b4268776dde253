"""The TLS side of a client: authorities, and the certificate that it shows; files are read again when they change."""

from __future__ import annotations

import ssl
from threading import Lock

from tms_core.errors import ConfigurationError
from tms_core.logs.loggers import get_logger
from tms_core.secret_file import check_secret_file, refuse_passphrase
from tms_core.settings.models import ClientTlsSettings

logger = get_logger(__name__)


class ClientTls:
    """The TLS side of a client; threads may share it.

    Args:
        setting: the name of the setting, for messages.
        wanted: where the files are.

    Raises:
        ConfigurationError: a file cannot be used, or other users may read the key.
    """

    def __init__(self, setting: str, wanted: ClientTlsSettings) -> None:
        self.server_name = wanted.server_name
        self._setting = setting
        self._wanted = wanted
        self._files = [file for file in (wanted.ca_file, wanted.certificate, wanted.key) if file is not None]
        self._lock = Lock()
        self._complaint = ""
        try:
            self._read = self._contents()
            self._context = self._load()
        except OSError as error:
            raise self._unusable(error) from error

    def context(self) -> ssl.SSLContext:
        """Return the context of a new connection.

        Changed files are loaded. If they cannot be used, the previous ones stay in force, and the log reports it once.
        """
        with self._lock:
            try:
                found = self._contents()
                if found != self._read:
                    self._context, self._read, self._complaint = self._load(), found, ""
                    logger.info("%s: files have changed and are in force", self._setting)
            except (OSError, ConfigurationError) as error:
                said = str(error if isinstance(error, ConfigurationError) else self._unusable(error))
                if said != self._complaint:
                    logger.error("%s Until then the previous files are in force.", said)
                self._complaint = said
            return self._context

    def _contents(self) -> list[bytes]:
        return [file.read_bytes() for file in self._files]

    def _load(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=self._wanted.ca_file)
        if self._wanted.certificate is not None and self._wanted.key is not None:
            check_secret_file(f"{self._setting}.key", self._wanted.key)
            context.load_cert_chain(self._wanted.certificate, self._wanted.key, refuse_passphrase)
        return context

    def _unusable(self, error: OSError) -> ConfigurationError:
        return ConfigurationError(
            f"{self._setting}: {', '.join(map(str, self._files))} cannot be used: {error}.",
            "Give certificates, and the private key of the client's certificate, as PEM files without a passphrase.",
        )
