"""TLS certificates for ``localhost``, each of which is its own authority."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

from tests.support import PATIENCE_SECONDS, require_tool
from tms_core.settings.models import TlsSettings


def make_certificate(certificate: Path, key: Path) -> TlsSettings:
    openssl = require_tool("openssl", "apt-get install openssl")
    made = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost -keyout"
    subprocess.run([openssl, *made.split(), key, "-out", certificate], check=True, capture_output=True)
    return TlsSettings(certificate=certificate, key=key)


def make_keystore(tls: TlsSettings) -> Path:
    """Return a copy of a certificate and its key as Java reads it (PKCS 12), with the password ``secret``."""
    openssl, store = require_tool("openssl", "apt-get install openssl"), tls.key.with_suffix(".p12")
    pair: list[str | Path] = ["-in", tls.certificate, "-inkey", tls.key, "-out", store, "-passout", "pass:secret"]
    subprocess.run([openssl, "pkcs12", "-export", *pair], check=True, capture_output=True)
    return store


def served_certificate(port: int) -> bytes:
    """Return the certificate that a server shows, as PEM."""
    return ssl.get_server_certificate(("127.0.0.1", port), timeout=PATIENCE_SECONDS).strip().encode()
