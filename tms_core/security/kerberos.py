"""Kerberos logins at services, with a keytab or a ticket cache.

No other module imports gssapi, of the extra ``[kerberos]``. It binds MIT's library, which finds realms and their
servers in ``krb5.conf``. Each new connection uses a valid ticket. With a keytab, the library renews tickets after half
of their lifetime; a ticket cache is read again.

One limit: a caller cannot shorten the library's time-outs for servers of the realm.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Iterable

from tms_core.errors import ConfigurationError, LoginFailed, hint_for_extra
from tms_core.security.files import check_secret_file
from tms_core.settings.models import KerberosSettings

try:
    import gssapi
except ImportError as error:  # the extra, or MIT's library
    _MISSING: ImportError | None = error
else:
    _MISSING = None

#: The first error number of MIT's library (krb5_err.et), unsigned as in GSSAPI.
_BASE = -1765328384 & 0xFFFFFFFF
#: Error numbers with the same explanation as another: a wrong key, a wrong clock, an unusable ticket cache.
_ALIASES = {31: 24, 33: 37, 148: 37, 199: 140, 212: 140}
_SPNEGO = "1.3.6.1.5.5.2"


class KerberosLogin:
    """A principal that logs in to services of a realm; threads may share it.

    Args:
        setting: the section of the settings, for messages.
        settings: the principal, and its keytab or ticket cache.

    Raises:
        ConfigurationError: gssapi is not installed, or the keytab cannot be used.
    """

    def __init__(self, setting: str, settings: KerberosSettings) -> None:
        if _MISSING is not None:
            raise ConfigurationError(
                f"{setting} is set, but gssapi cannot be used: {_MISSING}.",
                f"Install MIT's library: apt-get install gcc libkrb5-dev. {hint_for_extra('kerberos')}",
            )
        if settings.keytab is not None:
            check_secret_file(f"{setting}.keytab", settings.keytab)
        self._setting = setting
        self._settings = settings
        self._store = {}
        if settings.keytab is not None:
            # One cache in memory for all logins of the principal, or each connection pool would fetch a ticket.
            cache = hashlib.sha256(f"{settings.principal}\n{settings.keytab}".encode()).hexdigest()
            self._store = {b"client_keytab": str(settings.keytab).encode(), b"ccache": f"MEMORY:tms-{cache}".encode()}
        elif settings.ticket_cache is not None:
            self._store = {b"ccache": settings.ticket_cache.encode()}

    def credentials(self) -> gssapi.Credentials:
        """Return a valid ticket, fetched or renewed if necessary.

        Raises:
            LoginFailed: a ticket cannot be obtained.
        """
        principal, keytab = self._settings.principal, self._settings.keytab
        if keytab is not None:
            try:
                keytab.open("rb").close()
            except OSError as error:
                raise LoginFailed(
                    f"{self._setting}.keytab {keytab} cannot be read: {error.strerror}.",
                    "Use a file that this user can read.",
                ) from error
        try:
            name = None if principal is None else gssapi.Name(principal, gssapi.NameType.kerberos_principal)
            found = gssapi.Credentials(name=name, usage="initiate", store=self._store or None)
            # Read the lifetime, because gssapi detects an expired ticket only then.
            _ = found.lifetime
        except gssapi.exceptions.GSSError as error:
            raise self.failure(error) from error
        return found

    def exchange(self, service: str, *, spnego: bool = False) -> Exchange:
        """Start a login at a service.

        Args:
            service: its principal, ``NAME/HOST@REALM``; without a realm, ``krb5.conf`` determines the host's realm.
            spnego: whether to negotiate by SPNEGO, as HTTP does.

        Raises:
            LoginFailed: a ticket cannot be obtained.
        """
        credentials = self.credentials()
        kind = gssapi.NameType.kerberos_principal if "@" in service else gssapi.NameType.hostbased_service
        text = service if "@" in service else service.replace("/", "@", 1)
        flag = gssapi.RequirementFlag
        try:
            context = gssapi.SecurityContext(
                name=gssapi.Name(text, kind),
                creds=credentials,
                mech=gssapi.OID.from_int_seq(_SPNEGO) if spnego else gssapi.MechType.kerberos,
                usage="initiate",
                flags=flag.mutual_authentication
                | flag.integrity
                | flag.confidentiality
                | flag.out_of_sequence_detection,
            )
        except gssapi.exceptions.GSSError as error:
            raise self.failure(error, service) from error
        return Exchange(self, context, service)

    @staticmethod
    def negotiated(headers: Iterable[str]) -> bytes | None:
        """Return the token of a header ``WWW-Authenticate: Negotiate``, which may be empty; None without a header."""
        for header in headers:
            kind, _, token = header.strip().partition(" ")
            if kind.lower() == "negotiate":
                try:
                    return base64.b64decode(token, validate=True)
                except ValueError:
                    return b""
        return None

    def describe(self) -> str:
        """Return the principal and the lifetime of its ticket.

        Raises:
            LoginFailed: a ticket cannot be obtained.
        """
        found = self.credentials()
        return f"{found.name}, with a ticket for {found.lifetime or 0} s"

    def failure(self, error: gssapi.exceptions.GSSError, service: str = "") -> LoginFailed:
        """Return the error with its reason and a hint; krb5_err.et defines the numbers."""
        keytab, who = self._settings.keytab, self._settings.principal or "its principal"
        name = self._settings.principal or "PRINCIPAL"
        ticket = f"kinit {name}"
        number = (error.min_code & 0xFFFFFFFF) - _BASE
        if isinstance(error, gssapi.exceptions.ExpiredCredentialsError):
            # With a keytab, the library reports its expired ticket only after it could not reach the realm.
            number = 32 if keytab is None else 156
        text = error.gen_message().rpartition("): ")[2]
        reasons = {
            1: (f"{who} has expired", f"Extend the principal in the realm: kadmin modprinc -expire DATE {name}."),
            6: (
                f"the realm does not know the principal {who}",
                f"Correct {self._setting}.principal, or add the principal to the realm.",
            ),
            7: (f"the realm does not know the service {service}", "Correct the host of the address, or the service."),
            24: (f"the realm has another key of {who}", f"Create {keytab} again: kadmin ktadd -k FILE PRINCIPAL."),
            32: ("the ticket has expired", f"Renew the ticket ({ticket}), or set {self._setting}.keytab."),
            37: ("the clocks of this machine and of the realm differ too much", "Correct both clocks: timedatectl."),
            134: (f"{who} is not the name of a principal", f"Correct {self._setting}.principal."),
            140: (f"the ticket cache cannot be used ({text})", f"Create it again ({ticket})."),
            156: (
                "no server of the realm can be reached",
                "Check kdc in /etc/krb5.conf (KRB5_CONFIG), and the network.",
            ),
            195: ("the ticket cache has no ticket", f"Fetch a ticket ({ticket}), or set {self._setting}.keytab."),
        }
        if number == 195 and keytab is not None:
            reason, hint = f"{keytab} has no key of {who}", f"List its keys (klist -k {keytab})."
        else:
            hint = "Check /etc/krb5.conf (KRB5_CONFIG), and the log of the realm."
            reason, hint = reasons.get(_ALIASES.get(number, number), (text, hint))
        return LoginFailed(f"Kerberos login failed ({self._setting}): {reason}.", hint)


class Exchange:
    """A login at a service, and the protection of bytes after it."""

    def __init__(self, login: KerberosLogin, context: gssapi.SecurityContext, service: str) -> None:
        self._login = login
        self._context = context
        self._service = service
        self._expiry_seconds: float | None = None

    @property
    def is_complete(self) -> bool:
        """Return whether both sides are authenticated."""
        return bool(self._context.complete)

    @property
    def is_expired(self) -> bool:
        """Return whether the ticket has expired since the login, so that the service may reject further calls."""
        return self._expiry_seconds is not None and time.monotonic() > self._expiry_seconds

    def authorization(self) -> str:
        """Start the login, and return the header ``Authorization`` of its HTTP request (RFC 4559).

        Raises:
            LoginFailed: as :meth:`step`.
        """
        return f"Negotiate {base64.b64encode(self.step()).decode()}"

    def step(self, token: bytes | None = None) -> bytes:
        """Handle a token of the service, and return the next token for the service.

        Raises:
            LoginFailed: one side rejects the other.
        """
        try:
            answer = self._context.step(token)
            if self._context.complete:
                self._expiry_seconds = time.monotonic() + self._context.lifetime
        except gssapi.exceptions.GSSError as error:
            raise self._login.failure(error, self._service) from error
        return answer or b""

    def wrap(self, data: bytes, *, encrypt: bool) -> bytes:
        """Return the protected form of bytes to send.

        Raises:
            LoginFailed: the ticket has expired.
        """
        try:
            return self._context.wrap(data, encrypt).message
        except gssapi.exceptions.GSSError as error:
            raise self._login.failure(error, self._service) from error

    def unwrap(self, data: bytes, *, encrypted: bool = False) -> bytes:
        """Return received bytes without their protection.

        Raises:
            LoginFailed: the bytes were altered, or are not encrypted although ``encrypted`` requires it.
        """
        try:
            found = self._context.unwrap(data)
        except gssapi.exceptions.GSSError as error:
            raise self._login.failure(error, self._service) from error
        if encrypted and not found.encrypted:
            raise LoginFailed(
                f"The service {self._service} sent bytes that are not encrypted.", "Check the program at its address."
            )
        return found.message

    def max_plain_bytes(self, size: int, *, encrypt: bool) -> int:
        """Return the largest number of bytes whose protected form has at most ``size`` bytes."""
        return self._context.get_wrap_size_limit(size, encrypt)
