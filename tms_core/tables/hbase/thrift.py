"""A happybase connection to a Thrift server of HBase that never returns the response to another call.

thriftpy2 reads the next bytes of its socket as the response to its last call. After a timeout, these bytes are the late
response to the previous call, and all later responses are off by one. A program that deletes would delete by the wrong
row. Therefore each call has a number that its response must repeat. A connection with any error is closed, and an idle
connection is checked before it is used again. A call has one time limit from its first byte to its last, however slowly
bytes arrive.

happybase's own socket and client do not have this, so this module replaces them, and all calls of happybase's
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
#: A call: its name and its arguments in order, or the arguments as they are encoded on the wire.
Call = tuple[str, tuple[Any, ...] | bytes]

#: The structs and the service of Thrift 1, a module that happybase makes when it is imported.
HBASE: Any = import_module("Hbase_thrift")

#: The bytes of one read of the socket; a page of keys has some hundred kilobytes.
_BUFFER_BYTES = 1 << 18
#: The errors of thriftpy2 after a broken connection or invalid data.
_BROKEN = (OSError, EOFError, TTransportException, TProtocolException, ProtocolError, MemoryError)
#: What thriftpy2 lets out of an answer whose fields are of other types than they should be.
_MISREAD = (TypeError, ValueError, AttributeError, KeyError, OverflowError, RecursionError)
#: The fields that are read of the structs in an answer; Thrift 1 has them all optional, and HBase sends them all.
_NEEDED = {
    "TCell": ("value", "timestamp"),
    "TRegionInfo": ("startKey", "endKey", "name"),
    "ColumnDescriptor": ("maxVersions", "timeToLive"),
    "TableDescriptor": ("families",),
    "Family": ("maxVersions", "ttlSeconds", "minVersions", "keepDeleted"),
}
#: The package before the name of a Java class.
_PACKAGE = re.compile(r"^([a-z0-9_]+\.)+(?=[A-Z])")
#: Java's names of failures that pass: of a region that moves, a server that starts, is full or restarts.
_PASSING = (
    "CallQueueTooBig", "CallTimeout", "ConnectException", "ConnectionClosed", "FailedServer", "MasterNotRunning",
    "NoServerForRegion", "NotServingRegion", "PleaseHold", "RegionMoved", "RegionOpening", "RegionServerAborted",
    "RegionServerStopped", "RegionTooBusy", "RetriesExhausted", "ScannerReset", "ServerNotRunningYet", "SocketTimeout",
    "OutOfOrderScannerNext", "UnknownScanner", "WrongRegion",
)  # fmt: skip
#: HBase's own quotas, and those of the file system below it.
_NO_WRITES = (b"SpaceLimitingException", b"QuotaExceededException", b"No space left on device")
#: What to do about a message above the limit.
RAISE_CELL_LIMIT = (
    "Send smaller messages, or raise hbase.client.keyvalue.maxsize and hbase.server.keyvalue.maxsize in HBase, and "
    "storage.hbase.max_cell_bytes to the same number."
)
_NOT_FOUND = ("NamespaceNotFound", "TableNotFound", "NoSuchColumnFamily")


class ConnectionLost(StoreUnavailable):
    """The connection broke; a call that may be repeated can use another connection."""


class ThriftTimeout(StoreUnavailable):
    """The server did not answer in time; the request may still be executed."""


class ScannerLost(ConnectionLost):
    """The server has forgotten a scanner; a new scanner continues at its position."""


class NotServed(StoreError):
    """The server does not know a call: it is older, or speaks the other interface."""


@cache
def interface() -> ModuleType:
    """Return the structs and services of ``hbase.thrift``: what happybase does not have."""
    source = (files("tms_core.tables.hbase") / "hbase.thrift").read_text(encoding="utf-8")
    return thriftpy2.load_fp(io.StringIO(source), module_name="tms_core_hbase_thrift")


@cache
def calls_of(service: Service) -> Any:
    """Return the calls of an interface: arguments and results of each, as thriftpy2 makes them."""
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
        broken: whether it failed; then it is closed and must not be used again.
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
        """Return a table by its full name, without a call."""
        return self.happybase.table(name)

    def call(self, name: str, *args: Any) -> Any:
        """Ask the server.

        Args:
            args: its arguments, in order.

        Raises:
            ConnectionLost: the connection broke, or the response was for another call.
            ThriftTimeout: there was no answer in time.
            StoreUnavailable: HBase cannot do it now; it may be done or not.
            StoreNotFound: there is no such table.
            StoreError: HBase refuses.
        """
        return self.calls([(name, args)])[0]

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Make several calls in one round trip.

        The server executes them in order. If a call fails, it is not known which of the others were executed.

        Returns:
            The answers, in order.

        Raises:
            StoreError: as :meth:`call`; the time limit is for all of them together.
        """
        if self.broken:
            raise ConnectionLost(f"The connection to {self.address} is closed.")
        self.made.update(name for name, _ in calls)
        self._socket.allow(self._timeout_seconds)
        answers: list[Any] = []
        try:
            with self._socket.together():
                for name, arguments in calls:
                    self._client.ask(name, arguments)
            for name, _ in calls:
                answers.append(self._client.answer(name))
                _require_whole(answers[-1:])
            self._socket.finish()
        except BaseException as error:
            self.close()
            translated = self._translate(name, error)
            if translated is None:
                raise
            raise translated from error
        return answers

    def is_quiet(self) -> bool:
        """Return whether the server has neither closed the connection nor sent anything unasked."""
        return not self.broken and self._socket.is_quiet()

    def close(self) -> None:
        """Close it; closing twice is not an error."""
        self.broken = True
        self._socket.close()

    def _translate(self, name: str, error: BaseException) -> StoreError | None:
        """Return the converted error; None: it is neither a failure of the connection nor of HBase."""
        if isinstance(error, TimeoutError):
            return ThriftTimeout(
                f"HBase's Thrift server {self.address} did not answer {name} within {self._timeout_seconds:g} s.",
                "See whether it hangs; its own hbase.client.operation.timeout should be shorter than "
                "storage.hbase.timeout_seconds.",
            )
        if isinstance(error, _BROKEN):
            return ConnectionLost(
                f"The connection to HBase's Thrift server {self.address} broke during {name}: {_error_text(error)}.",
                "See whether the server still runs, speaks the binary protocol over a buffered transport (over HTTP "
                "with storage.hbase.transport: http), and what its log says.",
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
            return StoreError(f"HBase could not do {name}: {error!r}.", "Look into the Thrift server's log.")
        return None


def _require_whole(answer: Any) -> None:
    """Check that a response has all fields that are read without a check; a server could omit any field.

    Raises:
        ProtocolError: a field is missing.
    """
    if isinstance(answer, list) and answer and isinstance(answer[0], HBASE.TRowResult):
        _require_whole_rows(answer)
    elif isinstance(answer, list):
        for one in answer:
            _require_whole(one)
    elif isinstance(answer, dict):
        for value in answer.values():
            _require_whole(value)
    elif (needed := _NEEDED.get(type(answer).__name__)) is not None:
        values = [getattr(answer, field) for field in needed]
        if None in values:
            raise ProtocolError(f"a {type(answer).__name__} of the answer is not whole")
        for value in values:
            _require_whole(value)


def _require_whole_rows(rows: Sequence[Any]) -> None:
    # Written out: a sweep reads thousands of rows a page, and the walk above takes twenty times as long for each.
    for row in rows:
        if row.row is None or row.columns is None:
            raise ProtocolError("a TRowResult of the answer is not whole")
        for cell in row.columns.values():
            if cell.value is None or cell.timestamp is None:
                raise ProtocolError("a TCell of the answer is not whole")


class _GuardedClient:
    """What happybase takes for its client: each of its calls is one of the connection's."""

    def __init__(self, connection: ThriftConnection) -> None:
        self._connection = connection

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(self._connection.call, name)


class _Client(TClient):
    """A Thrift client that sends further calls before the first response."""

    def ask(self, name: str, arguments: tuple[Any, ...] | bytes) -> None:
        if isinstance(arguments, bytes):
            self._oprot.write_message_begin(name, TMessageType.CALL, 0)
            self._oprot.trans.write(arguments)
            self._oprot.trans.flush()
            return
        # Fields are numbered with gaps, but in the order of the arguments.
        fields = getattr(self._service, f"{name}_args").thrift_spec.values()
        self._send(name, **{field[1]: argument for field, argument in zip(fields, arguments, strict=True)})

    def answer(self, name: str) -> Any:
        try:
            return self._recv(name)
        except _MISREAD as error:
            raise ProtocolError(f"the answer cannot be read ({error})") from error


class _NumberedProtocol(TCyBinaryProtocol):
    """Thrift's binary protocol, where an answer must name the call and repeat the number it answers."""

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
            raise ProtocolError(f"the answer to {name!r} number {number} came for {expected}")
        return name, kind, number


def _unreachable(address: str, service: Service, error: OSError) -> StoreUnavailable:
    if isinstance(error, TimeoutError):
        return ThriftTimeout(
            f"HBase's Thrift server {address} does not answer.", "See whether host and port are right and it runs."
        )
    name = "thrift" if service == "Hbase" else "thrift2"
    return ConnectionLost(
        f"HBase's Thrift server {address} cannot be reached: {_error_text(error)}.",
        f"Start it there (hbase {name} start), or correct storage.hbase.{name}.",
    )


def _not_logged_in(address: str, error: LoginFailed) -> StoreUnavailable:
    return StoreUnavailable(f"HBase's Thrift server {address} cannot be used: {error.message}", error.hint)


def _server_error(address: str, name: str, error: TApplicationException) -> StoreError:
    """Thrift's own errors; the server gives no reason, only its log has it."""
    if error.type == TApplicationException.UNKNOWN_METHOD:
        return NotServed(
            f"The server at {address} does not know {name}.",
            "See that storage.hbase.thrift names a Thrift 1 server and storage.hbase.thrift2 a Thrift 2 server.",
        )
    text = error.message.decode(errors="replace") if isinstance(error.message, bytes) else error.message
    return StoreError(f"HBase's Thrift server {address} failed: {text}.", "Its log has the reason.")


def _hbase_error(name: str, message: bytes) -> StoreError:
    """Return the error of HBase: usually ``java.class.Name: text``; omit Java's stack, which does not help a user."""
    first, *rest = message.decode(errors="replace").strip().split("\n")
    reason = _PACKAGE.sub("", first).rstrip(".: ")
    java = reason.partition(":")[0]
    text = f"HBase could not do {name}: {reason[:300] or 'it gave no reason'}."
    if any(kind in java for kind in _NOT_FOUND):
        return StoreNotFound(text, "Make the tables (tms admin create-tables), or correct storage.hbase.namespace.")
    if "AccessDenied" in java:
        return StoreError(text, "Grant that user read and write on the tables.")
    if "KeyValue size too large" in reason:
        # Its client checks the cells of a call before it sends the first one.
        return TooLarge("HBase refuses the message: it is above hbase.client.keyvalue.maxsize.", RAISE_CELL_LIMIT)
    if "is read only" in reason:
        return WriteRefused(
            text, "Make the table writable again: alter it with READONLY => 'false' in the HBase shell."
        )
    if any(kind in message for kind in _NO_WRITES):
        return StoreFull(text, "Free some space, or raise the quota of the table or of HBase's folder.")
    if any(kind in java for kind in _PASSING):
        cause = next((line.strip() for line in rest if line.startswith("Caused by: ")), "")
        return StoreUnavailable(f"{text} {cause[:300]}".rstrip(), "Look at HBase's health; it may work later.")
    return StoreError(text, "The log of HBase's Thrift server has more.")


def _error_text(error: BaseException) -> str:
    return str(error) or type(error).__name__
