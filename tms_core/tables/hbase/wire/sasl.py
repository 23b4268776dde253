"""SASL over a connection to a Thrift server: the mechanism GSSAPI (RFC 4752) in the frames of Thrift's TSaslTransport.

thriftpy2 has such a transport in Python and in Cython. The fast binary protocol needs the transport in Cython, which
cannot write a value above its buffer of 4 KiB. Therefore this socket, below the buffered transport, replaces it.
"""

from __future__ import annotations

import struct

from tms_core.errors import LoginFailed
from tms_core.security.kerberos import Exchange, KerberosLogin
from tms_core.security.tls import ClientTls
from tms_core.tables.hbase.wire.socket import TimedSocket

_START, _OK, _BAD, _ERROR, _COMPLETE = range(1, 6)
_STATUS = struct.Struct(">BI")
_LENGTH = struct.Struct(">I")
#: The protection levels of a server, the strongest first: bits of RFC 4752, and ``hbase.thrift.security.qop``.
_LAYERS = ((4, "auth-conf"), (2, "auth-int"), (1, "auth"))
#: The largest frame that the server may send by RFC 4752; Java's servers send larger frames nevertheless.
_ANNOUNCED_BYTES = 0xFFFFFF
_LARGEST_BYTES = 1 << 30
_LARGEST_SASL_BYTES = 1 << 20


class SaslSocket(TimedSocket):
    """A connection with a Kerberos login.

    Args:
        address, timeout_seconds, tls: as of :class:`TimedSocket`.
        login: the Kerberos login.
        service: the principal of the server.

    Attributes:
        qop: the strongest offered protection: ``auth``, ``auth-int`` or ``auth-conf``.

    Raises:
        LoginFailed: a ticket cannot be obtained, or the server rejects it.
    """

    def __init__(
        self, address: str, timeout_seconds: float, tls: ClientTls | None, login: KerberosLogin, service: str
    ) -> None:
        super().__init__(address, timeout_seconds, tls)
        self.qop = ""
        self._frame_bytes = 0
        self._unread = memoryview(b"")
        try:
            self._exchange = login.exchange(service)
            self.allow(timeout_seconds)
            self._log_in(self._exchange)
        except TimeoutError as error:
            self.close()
            raise self._login_error("it does not respond") from error
        except EOFError as error:
            self.close()
            raise ConnectionError("it closed the connection during the Kerberos login") from error
        except BaseException:
            self.close()
            raise

    def read(self, size: int) -> bytes:
        if not self._unread:
            (length,) = _LENGTH.unpack(self._read_exactly(_LENGTH.size, _LARGEST_BYTES))
            frame = self._read_exactly(length, _LARGEST_BYTES)
            if self.qop != "auth":
                try:
                    frame = self._exchange.unwrap(frame, encrypted=self.qop == "auth-conf")
                except LoginFailed as error:
                    raise ConnectionError(error.message) from error
            self._unread = memoryview(frame)
        data, self._unread = self._unread[:size], self._unread[size:]
        return bytes(data)

    def is_reusable(self) -> bool:
        return not self._unread and not self._exchange.is_expired and super().is_reusable()

    def _send(self, data: bytes) -> None:
        frames = []
        for start in range(0, len(data), self._frame_bytes):
            frame = data[start : start + self._frame_bytes]
            if self.qop != "auth":
                try:
                    frame = self._exchange.wrap(frame, encrypt=self.qop == "auth-conf")
                except LoginFailed as error:
                    raise ConnectionError(error.message) from error
            frames += [_LENGTH.pack(len(frame)), frame]
        super()._send(b"".join(frames))

    def _log_in(self, exchange: Exchange) -> None:
        """Authenticate, then negotiate the protection of the following bytes.

        Raises:
            LoginFailed: the server rejects the login.
        """
        self._send_status(_START, b"GSSAPI")
        token = exchange.step()
        while not exchange.is_complete:
            self._send_status(_OK, token)
            token = exchange.step(self._challenge())
        self._send_status(_OK, token)
        offer = exchange.unwrap(self._challenge())
        layer, self.qop = next((layer for layer in _LAYERS if offer[:1] and offer[0] & layer[0]), (0, ""))
        if not layer:
            raise LoginFailed("The Thrift server offers no quality of protection.", "Check hbase.thrift.security.qop.")
        largest = 0 if layer == 1 else _ANNOUNCED_BYTES
        self._send_status(_OK, exchange.wrap(bytes([layer]) + largest.to_bytes(3, "big"), encrypt=False))
        while self._status()[0] != _COMPLETE:
            """Skip an empty challenge, which the server sends before it reads the client's response."""
        limit = int.from_bytes(offer[1:4], "big")
        self._frame_bytes = _LARGEST_BYTES if layer == 1 else exchange.max_plain_bytes(limit, encrypt=layer == 4)
        if self._frame_bytes <= 0:
            raise self._login_error(f"it accepts frames of at most {limit} bytes, too few for data")

    def _send_status(self, status: int, body: bytes) -> None:
        super()._send(_STATUS.pack(status, len(body)) + body)

    def _challenge(self) -> bytes:
        return self._status()[1]

    def _status(self) -> tuple[int, bytes]:
        status, length = _STATUS.unpack(self._read_exactly(_STATUS.size, _LARGEST_SASL_BYTES))
        body = self._read_exactly(length, _LARGEST_SASL_BYTES)
        if status in (_OK, _COMPLETE):
            return status, body
        text = body[:300].decode(errors="replace") if status in (_BAD, _ERROR) else "it does not speak SASL"
        raise self._login_error(text)

    def _login_error(self, text: str) -> LoginFailed:
        return LoginFailed(
            f"it rejects the Kerberos login: {text}.",
            "Check its log, that it has hbase.thrift.security.qop, that its keytab has the key of "
            "storage.hbase.kerberos.service, and that the clocks of both machines agree.",
        )

    def _read_exactly(self, size: int, largest: int) -> bytes:
        if size > largest:
            raise OSError(f"a frame of {size} bytes")
        parts = []
        while size:
            parts.append(super().read(min(size, 1 << 18)))
            size -= len(parts[-1])
        return b"".join(parts)
