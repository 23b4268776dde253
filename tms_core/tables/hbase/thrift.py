"""A happybase connection to a Thrift server of HBase that never returns the response to another call.

thriftpy2 reads the next bytes of its socket as the response to its last call. After a timeout, these bytes are the late
response to the previous call, and all later responses are off by one, so a program could delete the wrong rows.
Therefore each call has a number that its response must repeat. A connection is closed after any error, and an idle
connection is checked before its next use. A call has one time limit from its first byte to its last, however slowly the
bytes arrive.

happybase's socket and client do not check this, so this module replaces them, and all calls of happybase's
``Connection`` and ``Table`` use the replacement. Calls that happybase lacks (``hbase.thrift``) are made by name. All
errors are converted.
"""

from __future__ import annotations

import io
import re
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from importlib.resources import files
from types import ModuleType
from typing import Any, Literal

import happybase
import thriftpy2
from thriftpy2.protocol.cybin import ProtocolError, TCyBinaryProtocol
from thriftpy2.protocol.exc import TProtocolException
from thriftpy2.thrift import TApplicationException, TClient, TException, TMessageType
from thriftpy2.transport import TTransportException
from thriftpy2.transport.buffered import TCyBufferedTransport

from tms_core.errors import LoginFailed, StoreError, StoreFull, StoreNotFound, StoreUnavailable, TooLarge, WriteRefused
from tms_core.tables.hbase.wire.security import ThriftSecurity

Service = Literal["Hbase", "HbaseAdmin"]
#: A call: its name, and its arguments in order or encoded for the wire.
Call = tuple[str, tuple[Any, ...] | bytes]

#: The structs and the service of Thrift 1, in a module that the import of happybase creates.
HBASE: Any = import_module("Hbase_thrift")

#: The bytes of one read of the socket; a page of keys has a few hundred kilobytes.
_BUFFER_BYTES = 1 << 18
#: The errors of thriftpy2 after a broken connection or invalid data.
_BROKEN = (OSError, EOFError, TTransportException, TProtocolException, ProtocolError, MemoryError)
#: The errors of thriftpy2 for a response whose fields have wrong types.
_DECODING_ERRORS = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
#: The fields of structs that this package reads. They are optional in Thrift 1, but HBase sends them.
_REQUIRED_FIELDS = {
    "TCell": ("value", "timestamp"),
    "TRegionInfo": ("startKey", "endKey", "name"),
    "ColumnDescriptor": ("maxVersions", "timeToLive"),
    "TableDescriptor": ("families",),
    "Family": ("maxVersions", "ttlSeconds", "minVersions", "keepDeleted"),
}
#: The package before the name of a Java class.
_PACKAGE = re.compile(r"^([a-z0-9_]+\.)+(?=[A-Z])")
#: Java's names of transient errors: of a region that moves, or a server that starts, restarts or is overloaded.
_TRANSIENT_ERRORS = (
    "CallQueueTooBig", "CallTimeout", "ConnectException", "ConnectionClosed", "FailedServer", "MasterNotRunning",
    "NoServerForRegion", "NotServingRegion", "PleaseHold", "RegionMoved", "RegionOpening", "RegionServerAborted",
    "RegionServerStopped", "RegionTooBusy", "RetriesExhausted", "ScannerReset", "ServerNotRunningYet", "SocketTimeout",
    "OutOfOrderScannerNext", "UnknownScanner", "WrongRegion",
)  # fmt: skip
#: Texts of errors about quotas of HBase and of its file system, and about a full disk.
_NO_SPACE = (b"SpaceLimitingException", b"QuotaExceededException", b"No space left on device")
#: The hint for a message above the limit.
RAISE_CELL_LIMIT = (
    "Send smaller messages, or raise hbase.client.keyvalue.maxsize and hbase.server.keyvalue.maxsize in HBase, and "
    "storage.hbase.max_cell_bytes to the same number."
)
_NOT_FOUND = ("NamespaceNotFound", "TableNotFound", "NoSuchColumnFamily")


class ConnectionLost(StoreUnavailable):
    """The connection broke; a repeatable call may use another connection."""


class ThriftTimeout(StoreUnavailable):
    """The server did not respond in time; it may still execute the request."""


class ScannerLost(ConnectionLost):
    """The server has closed a scanner; a new scanner can continue at its position."""


class NotServed(StoreError):
    """The server does not know a call: it is older, or has the other interface."""


@cache
def interface() -> ModuleType:
    """Return the structs and services of ``hbase.thrift``, which happybase lacks."""
    source = (files("tms_core.tables.hbase") / "hbase.thrift").read_text(encoding="utf-8")
    return thriftpy2.load_fp(io.StringIO(source), module_name="tms_core_hbase_thrift")


@cache
def calls_of(service: Service) -> Any:
    """Return the service class of an interface, with arguments and results of each call for thriftpy2."""
    if service == "HbaseAdmin":
        return interface().HbaseAdmin
    return type("Hbase", (HBASE.Hbase, interface().Cluster), {})


class ThriftConnection:
    """One open connection, for one thread at a time.

    Args:
        address: ``HOST:PORT`` of a Thrift server (binary protocol).
        service: the interface of the server: Thrift 1 or 2.
        timeout_seconds: the timeout of a call, and of connecting.
        security: the protection of the connection; None: it is not protected.

    Attributes:
        broken: whether it has failed; if so, it is closed and must not be used again.
        made: the numbers of calls, by name.
        happybase: happybase's interface to the same calls; Thrift 1 only.

    Raises:
        ConnectionLost: no server listens there.
        ThriftTimeout: no response came in time.
        StoreUnavailable: server and client do not agree on how the connection is protected.
    """

    def __init__(
        self, address: str, service: Service, timeout_seconds: float, security: ThriftSecurity | None = None
    ) -> None:
        self.address = address
        self.broken = False
        self.made: Counter[str] = Counter()
        self._timeout_seconds = timeout_seconds
        try:
            self._socket = (security or ThriftSecurity()).open(address, timeout_seconds)
        except OSError as error:
            raise _unreachable(address, service, error) from error
        except LoginFailed as error:
            raise _not_logged_in(address, error) from error
        transport = TCyBufferedTransport(self._socket, _BUFFER_BYTES)
        self._client = _Client(calls_of(service), _NumberedProtocol(transport, decode_response=False))
        self.happybase = happybase.Connection(autoconnect=False)
        self.happybase.transport, self.happybase.client = transport, _GuardedClient(self)

    def table(self, name: bytes) -> happybase.Table:
        """Return a table by its full name; makes no call."""
        return self.happybase.table(name)

    def call(self, name: str, *args: Any) -> Any:
        """Make a call and return its result.

        Args:
            args: the arguments of the call, in order.

        Raises:
            ConnectionLost: the connection broke, or the response was for another call.
            ThriftTimeout: no response came in time.
            StoreUnavailable: HBase had a transient error; the call may or may not have been executed.
            StoreNotFound: the table does not exist.
            StoreError: HBase rejected the call.
        """
        return self.calls([(name, args)])[0]

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Make several calls in one round trip.

        The server executes the calls in order. If a call fails, it is unknown which of the others were executed.

        Returns:
            The results, in order.

        Raises:
            StoreError: as :meth:`call`; the time limit covers all calls together.
        """
        if self.broken:
            raise ConnectionLost(f"The connection to {self.address} is closed.")
        self.made.update(name for name, _ in calls)
        self._socket.allow(self._timeout_seconds)
        answers: list[Any] = []
        try:
            with self._socket.batch_writes():
                for name, arguments in calls:
                    self._client.send_call(name, arguments)
            for name, _ in calls:
                answers.append(self._client.receive_result(name))
                _require_fields(answers[-1:])
            self._socket.finish()
        except BaseException as error:
            self.close()
            converted = self._convert_error(name, error)
            if converted is None:
                raise
            raise converted from error
        return answers

    def is_reusable(self) -> bool:
        """Return whether the server has neither closed the connection nor sent unrequested bytes."""
        return not self.broken and self._socket.is_reusable()

    def close(self) -> None:
        """Close the connection; closing twice is not an error."""
        self.broken = True
        self._socket.close()

    def _convert_error(self, name: str, error: BaseException) -> StoreError | None:
        """Return the converted error; None if neither the connection nor HBase has caused it."""
        if isinstance(error, TimeoutError):
            return ThriftTimeout(
                f"HBase's Thrift server {self.address} did not respond to {name} within {self._timeout_seconds:g} s.",
                "Check whether it hangs; its hbase.client.operation.timeout should be shorter than "
                "storage.hbase.timeout_seconds.",
            )
        if isinstance(error, _BROKEN):
            return ConnectionLost(
                f"The connection to HBase's Thrift server {self.address} broke during {name}: {_error_text(error)}.",
                "Check the log of the server, whether it still runs, and whether it has the binary protocol over a "
                "buffered transport (over HTTP with storage.hbase.transport: http).",
            )
        if isinstance(error, LoginFailed):
            return _not_logged_in(self.address, error)
        if isinstance(error, TApplicationException):
            return _server_error(self.address, name, error)
        if isinstance(error, HBASE.IllegalArgument) and b"scanner ID is invalid" in (error.message or b""):
            return ScannerLost(f"HBase's Thrift server {self.address} has closed a scanner.", "Try again.")
        if isinstance(error, (HBASE.IOError, HBASE.IllegalArgument, interface().IOError2)):
            return _hbase_error(name, error.message or b"")
        if isinstance(error, TException):
            return StoreError(f"HBase could not execute {name}: {error!r}.", "Check the Thrift server's log.")
        return None


def _require_fields(answer: Any) -> None:
    """Check that a response has all required fields, because a server could omit any field.

    Raises:
        ProtocolError: a field is missing.
    """
    if isinstance(answer, list) and answer and isinstance(answer[0], HBASE.TRowResult):
        _require_row_fields(answer)
    elif isinstance(answer, list):
        for item in answer:
            _require_fields(item)
    elif isinstance(answer, dict):
        for value in answer.values():
            _require_fields(value)
    elif (required := _REQUIRED_FIELDS.get(type(answer).__name__)) is not None:
        values = [getattr(answer, field) for field in required]
        if None in values:
            raise ProtocolError(f"a {type(answer).__name__} of the response is incomplete")
        for value in values:
            _require_fields(value)


def _require_row_fields(rows: Sequence[Any]) -> None:
    # Without recursion: a page of a sweep has thousands of rows, and the recursive check takes twenty times as long.
    for row in rows:
        if row.row is None or row.columns is None:
            raise ProtocolError("a TRowResult of the response is incomplete")
        for cell in row.columns.values():
            if cell.value is None or cell.timestamp is None:
                raise ProtocolError("a TCell of the response is incomplete")


class _GuardedClient:
    """A replacement of happybase's client that makes each call on the connection."""

    def __init__(self, connection: ThriftConnection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._connection.call, name)


class _Client(TClient):
    """A Thrift client that can send several calls before the first response."""

    def send_call(self, name: str, arguments: tuple[Any, ...] | bytes) -> None:
        if isinstance(arguments, bytes):
            self._oprot.write_message_begin(name, TMessageType.CALL, 0)
            self._oprot.trans.write(arguments)
            self._oprot.trans.flush()
            return
        # The numbers of fields have gaps, but are in the order of the arguments.
        fields = getattr(self._service, f"{name}_args").thrift_spec.values()
        self._send(name, **{field[1]: argument for field, argument in zip(fields, arguments, strict=True)})

    def receive_result(self, name: str) -> Any:
        try:
            return self._recv(name)
        except _DECODING_ERRORS as error:
            raise ProtocolError(f"the response cannot be decoded ({error})") from error


class _NumberedProtocol(TCyBinaryProtocol):
    """Thrift's binary protocol with the check that a response repeats the name and the number of its call."""

    _last = 0

    def __init__(self, transport: TCyBufferedTransport, *, decode_response: bool) -> None:
        super().__init__(transport, decode_response=decode_response)
        self._unanswered: deque[tuple[str, int]] = deque()

    def write_message_begin(self, name: str, kind: int, number: int) -> None:
        self._last = (self._last + 1) & 0x7FFFFFFF
        self._unanswered.append((name, self._last))
        super().write_message_begin(name, kind, self._last)

    def read_message_begin(self) -> tuple[str, int, int]:
        name, kind, number = super().read_message_begin()
        expected = self._unanswered.popleft()
        if (name, number) != expected:
            raise ProtocolError(f"the response to {name!r} number {number} came for {expected}")
        return name, kind, number


def _unreachable(address: str, service: Service, error: OSError) -> StoreUnavailable:
    if isinstance(error, TimeoutError):
        return ThriftTimeout(
            f"HBase's Thrift server {address} does not respond.", "Check host and port, and whether the server runs."
        )
    name = "thrift" if service == "Hbase" else "thrift2"
    return ConnectionLost(
        f"HBase's Thrift server {address} cannot be reached: {_error_text(error)}.",
        f"Start it there (hbase {name} start), or correct storage.hbase.{name}.",
    )


def _not_logged_in(address: str, error: LoginFailed) -> StoreUnavailable:
    return StoreUnavailable(f"HBase's Thrift server {address} cannot be used: {error.message}", error.hint)


def _server_error(address: str, name: str, error: TApplicationException) -> StoreError:
    """Return the error for Thrift's own exceptions, whose reason is only in the log of the server."""
    if error.type == TApplicationException.UNKNOWN_METHOD:
        return NotServed(
            f"The server at {address} does not know {name}.",
            "Check that storage.hbase.thrift is a Thrift 1 server, and storage.hbase.thrift2 a Thrift 2 server.",
        )
    text = error.message.decode(errors="replace") if isinstance(error.message, bytes) else error.message
    return StoreError(f"HBase's Thrift server {address} failed: {text}.", "Check its log for the reason.")


def _hbase_error(name: str, message: bytes) -> StoreError:
    """Return the error for a message of HBase, usually ``java.class.Name: text``, without Java's stack trace."""
    first, *rest = message.decode(errors="replace").strip().split("\n")
    reason = _PACKAGE.sub("", first).rstrip(".: ")
    java = reason.partition(":")[0]
    text = f"HBase could not execute {name}: {reason[:300] or 'it gave no reason'}."
    if any(kind in java for kind in _NOT_FOUND):
        return StoreNotFound(text, "Create the tables (tms admin create-tables), or correct storage.hbase.namespace.")
    if "AccessDenied" in java:
        return StoreError(text, "Grant that user read and write on the tables.")
    if "KeyValue size too large" in reason:
        # HBase's client checks all cells of a call before it sends the first cell.
        return TooLarge("HBase rejects the message: it is above hbase.client.keyvalue.maxsize.", RAISE_CELL_LIMIT)
    if "is read only" in reason:
        return WriteRefused(
            text, "Make the table writable again: alter it with READONLY => 'false' in the HBase shell."
        )
    if any(kind in message for kind in _NO_SPACE):
        return StoreFull(text, "Free some space, or raise the quota of the table or of HBase's folder.")
    if any(kind in java for kind in _TRANSIENT_ERRORS):
        cause = next((line.strip() for line in rest if line.startswith("Caused by: ")), "")
        return StoreUnavailable(f"{text} {cause[:300]}".rstrip(), "Check HBase's health; a later attempt may succeed.")
    return StoreError(text, "Check the log of HBase's Thrift server for details.")


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__
