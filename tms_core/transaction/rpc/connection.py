"""A connection to a transaction service, and its errors.

A call has one time limit from its first byte to its last, and its response must repeat its number. Otherwise the late
response to one call would count as the response to the next call.
"""

from __future__ import annotations

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Generic, Protocol, TypeVar

from tms_core.errors import ConfigurationError, FormatError, TransactionError
from tms_core.security.files import read_token
from tms_core.security.tls import ClientTls
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.wire import Failure, Fields, MessageKind

#: The largest response, in bytes: a snapshot of about twenty million invalid ids.
MAX_RESPONSE_BYTES = 256 * 1024 * 1024
#: The call that sends a token; the first call of a connection if the service requires a token.
AUTHENTICATE = "authenticate"
#: The first call of a server that forwards calls: only the manager with this log may execute them.
EXECUTE_HERE = "answerYourself"
#: The response to such a call from a server without that manager.
NOT_MANAGED_HERE = "Transactions are not managed here now"
#: The response of a service with a certificate to a call without TLS.
TLS_ONLY = "This transaction service speaks TLS only"
#: The responses of a service with tokens to a call without its token, and to an administrative call without that token.
UNAUTHORIZED = "This transaction service demands a token"
NOT_ADMINISTRATIVE = "This call needs the administrative token (transactions.admin_token_file)"
#: The response to a token that the service cannot compare, because the file with its own token is unusable.
TOKEN_UNREADABLE = "This transaction service cannot read its token"  # noqa: S105 a message
_CHUNK_BYTES = 1 << 18
#: The length of a call or a response, which precedes it.
LENGTH = struct.Struct(">i")


class ServiceUnavailable(TransactionError):
    """No transaction service is reachable, or the service cannot execute the call now; nothing was changed."""

    code = "TMS-TRANSACTION-SERVICE-UNAVAILABLE"


class OutcomeUnknown(TransactionError):
    """The call got no response, so it may or may not have been executed."""

    code = "TMS-TRANSACTION-OUTCOME-UNKNOWN"


class MethodUnknown(ServiceUnavailable):
    """The service does not know the method: Tephra's service has fewer methods than ``tms serve``."""


class TlsRequired(ServiceUnavailable):
    """The service requires TLS, and the call had none."""

    code = "TMS-TLS-REQUIRED"


class TokenRequired(ServiceUnavailable):
    """The service requires a token, and the call had none or another token."""

    code = "TMS-TRANSACTION-TOKEN-REQUIRED"


class TokenUnreadable(ServiceUnavailable):
    """The file of the token is unusable, in this process or in the service; an operator may write it later."""


class RpcConnection(Protocol):
    """A connection for one call at a time: a :class:`SocketConnection`, or a stub."""

    def call(self, name: str, fields: tuple[bytes, ...], seconds: float) -> Fields:
        """Call a method; see :meth:`SocketConnection.call`."""
        ...

    def is_reusable(self) -> bool:
        """Return whether the connection can be used again."""
        ...

    def close(self) -> None:
        """Close the connection."""
        ...


C = TypeVar("C", bound=RpcConnection)


class IdleConnections(Generic[C]):
    """A pool of idle connections for reuse; threads may share it."""

    def __init__(self, connect: Callable[[], C]) -> None:
        self._connect = connect
        self._lock = Lock()
        self._idle: list[C] = []
        self._closed = False

    @contextmanager
    def borrow(self) -> Iterator[C]:
        """Yield a connection that no other thread uses; close the connection if the block raises."""
        connection = self._reuse_connection() or self._connect()
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            if not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close all idle connections; a second call does nothing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def _reuse_connection(self) -> C | None:
        while True:
            with self._lock:
                if not self._idle:
                    return None
                connection = self._idle.pop()
            # An idle connection is unusable after the service has closed it or sent unrequested bytes.
            if connection.is_reusable():
                return connection
            connection.close()


class SocketConnection:
    """A connection, for one call at a time.

    Args:
        address: ``HOST:PORT``.
        timeout_seconds: the timeout of connecting.
        token_file: a file with the token for the service; None: no token is required.
        token_setting: the setting or parameter that has the file, for errors.
        tls: checks the certificate of the service; None: no TLS.
        certificate_name: the name in that certificate; empty: the host of the address.

    Raises:
        ServiceUnavailable: the token cannot be read, or was rejected; or TLS failed.
        OSError: the service does not listen.
    """

    def __init__(
        self,
        address: str,
        timeout_seconds: float,
        token_file: Path | None = None,
        tls: ssl.SSLContext | ClientTls | None = None,
        certificate_name: str = "",
        token_setting: str = "token_file",  # noqa: S107 a name
    ) -> None:
        token = None if token_file is None else _token(token_setting, token_file)
        self._address = address
        host, port = address.rpartition(":")[::2]
        host = host.strip("[]")
        self._socket = socket.create_connection((host, int(port)), timeout_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is not None:
            context = tls.context() if isinstance(tls, ClientTls) else tls
            self._socket = _wrap_tls(self._socket, address, context, certificate_name or host)
        self._number = 0
        if token is not None:
            self._authenticate(token, timeout_seconds, token_setting)

    def _authenticate(self, token: bytes, seconds: float, setting: str) -> None:
        try:
            self.call(AUTHENTICATE, (wire.string(1, token),), seconds)
        except MethodUnknown:
            return  # the service requires no token
        except (TransactionError, FormatError, EOFError) as error:
            self.close()
            if isinstance(error, ServiceUnavailable) and not isinstance(error, TokenRequired):
                # Another token would not help: the service requires TLS, cannot read its own token, or is not reached.
                raise
            kind = TokenRequired if isinstance(error, TokenRequired) else ServiceUnavailable
            raise kind(
                f"The transaction service at {self._address} rejects the token of {setting}.",
                "Use the token file of the server.",
            ) from error

    def call(self, name: str, fields: tuple[bytes, ...], seconds: float) -> Fields:
        """Call a method.

        Returns:
            The result: field 0 is the return value, any other a declared exception.

        Raises:
            ServiceUnavailable: the service could not execute the call, and nothing was changed.
            OSError, EOFError, FormatError: the connection is broken.
            OutcomeUnknown: the service failed during the call.
        """
        self._number = (self._number + 1) & 0x7FFFFFFF
        data = wire.message(MessageKind.CALL, name, self._number, *fields)
        return result_of(name, self._number, self.forward_call(data, seconds))

    def forward_call(self, frame: bytes, seconds: float) -> bytes:
        """Send an encoded call and receive the response.

        Returns:
            The encoded response, without its length.

        Raises:
            OSError, EOFError, FormatError: the connection is broken, and the outcome is unknown.
        """
        deadline = time.monotonic() + seconds
        self._socket.settimeout(seconds)
        self._socket.sendall(LENGTH.pack(len(frame)) + frame)
        head = self._read(LENGTH.size, deadline)
        if head == b"HTTP":
            # An HTTP server treats the call as a bad request, so nothing was changed.
            raise ServiceUnavailable(
                f"The transaction service at {self._address} responds in HTTP.",
                "Set transactions.thrift to the port of the transaction service, not of REST or the status page.",
            )
        (size,) = LENGTH.unpack(head)
        if not 0 <= size <= MAX_RESPONSE_BYTES:
            raise FormatError(f"a response of {size} bytes")
        return self._read(size, deadline)

    def is_reusable(self) -> bool:
        """Return whether the service has neither closed the connection nor sent unrequested bytes."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def interrupt(self) -> None:
        """Interrupt the call of another thread that waits for a response."""
        with suppress(OSError):
            # Not the method of SSLSocket, which removes the TLS object that the other thread uses.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _read(self, size: int, deadline: float) -> bytes:
        parts: list[bytes] = []
        while size:
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise TimeoutError
            self._socket.settimeout(remaining)
            data = self._socket.recv(min(size, _CHUNK_BYTES))
            if not data:
                raise EOFError("the service closed the connection")
            parts.append(data)
            size -= len(data)
        return b"".join(parts)


def _token(setting: str, file: Path) -> bytes:
    """Return the token; an error about its file is transient, because an operator may write the file later."""
    try:
        return read_token(setting, file, 1)
    except ConfigurationError as error:
        raise TokenUnreadable(error.message, error.hint) from error


def _wrap_tls(plain: socket.socket, address: str, tls: ssl.SSLContext, name: str) -> ssl.SSLSocket:
    try:
        return tls.wrap_socket(plain, server_hostname=name)
    except OSError as error:
        plain.close()
        raise ServiceUnavailable(
            f"The transaction service {address} cannot be reached over TLS: {error}.",
            "Check that the service has transactions.tls, that transactions.ca_file has the authority of its "
            f"certificate, and that the certificate names {name}.",
        ) from error


def result_of(name: str, number: int, frame: bytes) -> Fields:
    """Return the result in a response.

    Args:
        frame: the response, without its length.

    Raises:
        ServiceUnavailable, OutcomeUnknown: the service failed.
        FormatError: the frame is not a response, or the response to another call.
    """
    response = wire.read_message(frame)
    if (response.name, response.number) != (name, number):
        raise FormatError(f"the response to {response.name} number {response.number} came for {name} {number}")
    if response.kind == MessageKind.EXCEPTION:
        raise _application_error(name, response.fields)
    return response.fields


def _application_error(name: str, fields: Fields) -> TransactionError:
    """Return the error for Thrift's application exception."""
    kind = fields.get(2)
    if kind == Failure.UNKNOWN_METHOD:
        hint = "Use a transaction service of the client's version: Tephra's own service and older ones lack some calls."
        return MethodUnknown(f"The transaction service does not know {name}.", hint)
    if as_text(fields, 1) == TLS_ONLY:
        return TlsRequired(f"{TLS_ONLY}.", "Set transactions.ca_file, or give TransactionClient an SSLContext (tls=…).")
    if as_text(fields, 1) == TOKEN_UNREADABLE:
        return TokenUnreadable(f"{TOKEN_UNREADABLE}.", "Its log names the setting, the file and the reason.")
    if as_text(fields, 1) == UNAUTHORIZED:
        return TokenRequired(f"{UNAUTHORIZED}.", "Set transactions.token_file to a copy of the server's token file.")
    if as_text(fields, 1) == NOT_ADMINISTRATIVE:
        return TokenRequired(f"{NOT_ADMINISTRATIVE}.", "Set transactions.admin_token_file.")
    text = f"The transaction service failed at {name}: {as_text(fields, 1)}."
    if kind == Failure.PROTOCOL_ERROR:
        return ServiceUnavailable(
            text, "If it fails again in a few seconds, check that client and service have the same version."
        )
    return OutcomeUnknown(text, "Check its log for the reason.")


def as_text(fields: Fields, number: int) -> str:
    """Return a text field; empty if it is missing."""
    value = fields.get(number, b"")
    return value.decode(errors="replace") if isinstance(value, bytes) else ""
