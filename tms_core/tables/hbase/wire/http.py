"""Thrift over HTTP (``hbase.regionserver.thrift.http``): a POST request for each call, over persistent connections.

thriftpy2's THttpClient is unsuitable. It sets the timeout of all sockets of the process, ignores the status of
responses, and repeats a request whose connection broke, although the call may have been executed.
"""

from __future__ import annotations

from collections import deque

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from tms_core.errors import LoginFailed
from tms_core.security.kerberos import Exchange, KerberosLogin
from tms_core.security.tls import ClientTls
from tms_core.tables.hbase.wire.socket import TimedSocket

#: The bytes of one read of the socket, and the largest head of a response.
_PIECE_BYTES = 1 << 18
_OK, _UNAUTHORIZED = 200, 401


class HttpSocket(TimedSocket):
    """A connection to a Thrift server over HTTP.

    Args:
        address, timeout_seconds, tls: as of :class:`TimedSocket`.
        login: the login by SPNEGO for each request, as HBase requires; None: no login.
        service: the principal of the server.
    """

    def __init__(
        self, address: str, timeout_seconds: float, tls: ClientTls | None, login: KerberosLogin | None, service: str
    ) -> None:
        super().__init__(address, timeout_seconds, tls)
        self._login = login
        self._service = service
        self._call = bytearray()
        self._unread = bytearray()
        self._parser = HttpResponseParser(self)
        # The logins of requests without a complete response.
        self._exchanges: deque[Exchange | None] = deque()
        self._is_persistent = True
        self._head_bytes = 0
        self._reason = b""
        self._authenticate: list[str] = []

    def write(self, data: bytes) -> None:
        self._call += data

    def flush(self) -> None:
        """Send the call as one request."""
        exchange = None if self._login is None else self._login.exchange(self._service, spnego=True)
        authorization = "" if exchange is None else f"Authorization: {exchange.authorization()}\r\n"
        head = (
            f"POST / HTTP/1.1\r\nHost: {self.address}\r\nContent-Type: application/x-thrift\r\n"
            f"Content-Length: {len(self._call)}\r\n{authorization}\r\n"
        )
        self._exchanges.append(exchange)
        call, self._call = bytes(self._call), bytearray()
        super().write(head.encode() + call)

    def read(self, size: int) -> bytes:
        while not self._unread:
            self._receive()
        data = bytes(self._unread[:size])
        del self._unread[:size]
        return data

    def finish(self) -> None:
        # The last chunk of a response is empty, so the read of the result does not wait for it.
        while self._exchanges and not self._unread:
            self._receive()

    def is_reusable(self) -> bool:
        return self._is_persistent and not self._unread and not self._exchanges and super().is_reusable()

    def _receive(self) -> None:
        data = super().read(_PIECE_BYTES)
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError as error:
            raise error.__context__ or error from None
        except HttpParserError as error:
            raise ConnectionError(f"it does not speak HTTP: {error}") from error
        if self._head_bytes > _PIECE_BYTES:
            raise ConnectionError("the head of its response is too long")

    # --- callbacks of the parser -------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._reason, self._authenticate = b"", []
        if not self._exchanges:
            raise ConnectionError("it sends a response without a request")

    def on_status(self, reason: bytes) -> None:
        self._reason = reason

    def on_header(self, name: bytes, value: bytes) -> None:
        if name.lower() == b"www-authenticate":
            self._authenticate.append(value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status, exchange = self._parser.get_status_code(), self._exchanges[0]
        reason = self._reason[:300].decode("latin-1")
        if status == _UNAUTHORIZED and exchange is None:
            raise LoginFailed("it requires a Kerberos login.", "Set storage.hbase.kerberos.")
        if status == _UNAUTHORIZED:
            raise LoginFailed(
                f"it rejects the Kerberos login: {reason}.",
                "Check its log, that hbase.thrift.spnego.principal is storage.hbase.kerberos.service, that its keytab "
                "has the key of that principal, and that the clocks of both machines agree.",
            )
        if status != _OK:
            raise ConnectionError(f"it responds with HTTP {status} {reason}")
        if exchange is not None:
            if token := KerberosLogin.negotiated(self._authenticate):
                exchange.step(token)
            if not exchange.is_complete:
                raise LoginFailed("it does not prove its identity.", "Check which server listens at the address.")

    def on_body(self, body: bytes) -> None:
        self._unread += body
        self._head_bytes = 0

    def on_message_complete(self) -> None:
        self._exchanges.popleft()
        self._head_bytes = 0
        self._is_persistent = self._is_persistent and self._parser.should_keep_alive()
