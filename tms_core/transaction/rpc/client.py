"""A client of a transaction service: Tephra's own, or that of ``tms serve``.

A call without a response may have been executed. Tephra's Java client repeats every call, including commits. A commit
that is repeated after a lost response fails as "not in progress", so committed data is rolled back. This client repeats
only idempotent calls, and raises ``OutcomeUnknown`` with a remedy for other calls. A connection is closed after any
error, and a response must repeat the number of its call.
"""

from __future__ import annotations

import io
import ssl
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Protocol, Self

from tms_core.errors import (
    BadArgument,
    CannotSnapshot,
    ChangesTooLarge,
    Conflict,
    FormatError,
    NotInProgress,
    TransactionError,
    TruncateTimeError,
)
from tms_core.security.tls import ClientTls
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.snapshot import read_complete_visibility
from tms_core.transaction.codec.thrift import transaction_fields, transaction_of
from tms_core.transaction.codec.wire import Fields, Kind
from tms_core.transaction.model import MAX_TIMEOUT_SECONDS, UNKNOWN_CLIENT, InProgress, Transaction, VisibilityState
from tms_core.transaction.rpc.connection import (
    IdleConnections,
    MethodUnknown,
    OutcomeUnknown,
    RpcConnection,
    ServiceUnavailable,
    SocketConnection,
    as_text,
)
from tms_core.transaction.source.source import DirectorySource, Loaded, SnapshotSource, SourceUnreachable


class ServiceSettings(Protocol):
    """The settings ``transactions``, as a protocol, so that applications need not import the package of settings."""

    @property
    def source(self) -> str: ...

    @property
    def thrift(self) -> str: ...

    @property
    def token_file(self) -> Path | None: ...

    @property
    def admin_token_file(self) -> Path | None: ...

    @property
    def ca_file(self) -> Path | None: ...

    @property
    def is_over_tls(self) -> bool: ...

    @property
    def kerberos(self) -> Any: ...

    @property
    def hdfs_ca_file(self) -> Path | None: ...

    def snapshot_directory(self) -> str | None: ...


#: The next step if a service cannot be reached; with source manager, it is the service of a server with these settings.
_START_HINT = (
    "Start the service there, or correct its address: transactions.thrift, --tx-server, transactions= of a Client."
)
_START_SERVER_HINT = "Start it (tms serve), or correct its address: transactions.thrift, --tx-server."
#: The shortest time limit of a call, in seconds, because 0 would mean no limit.
_SHORTEST_SECONDS = 0.001
#: The result of a call to a service that does not know the method.
_UNKNOWN = object()


class _Broken(Exception):
    """The connection broke during a call."""


class _TimedOut(_Broken):
    """The call timed out."""


class TransactionClient:
    """A client of a transaction service; threads may share it, and each call has its own connection.

    Args:
        address: ``HOST:PORT`` of the service, or of several servers of the same transactions. After a failure, the call
            uses the next server within its time limit, unless it may have been executed and must not be repeated.
        timeout_seconds: the time limit of a call, and of a connection.
        token_file: the file of the token that the service requires; None: no token.
        tls: checks the certificate of the service; None: no TLS.
        connect: opens a connection from address and timeout; None: over TCP, with the token and TLS.

    Every method raises ``ServiceUnavailable`` if the call was not executed, and ``OutcomeUnknown`` if it may have been.
    """

    def __init__(
        self,
        address: str | Sequence[str],
        timeout_seconds: float = 30,
        *,
        token_file: Path | None = None,
        tls: ssl.SSLContext | None = None,
        connect: Callable[[str, float], RpcConnection] | None = None,
    ) -> None:
        addresses = (address,) if isinstance(address, str) else tuple(address)
        #: The address of the current service.
        self.address = addresses[0]
        self.connect = connect or partial(SocketConnection, token_file=token_file, tls=tls)
        self._timeout_seconds = timeout_seconds
        self._hint = _START_HINT
        self._connections = {one: IdleConnections(partial(self._open_connection, one)) for one in addresses}
        #: Whether the service knows `commitAndStart`; each new connection assumes that it does.
        self._has_commit_and_start = True
        #: Whether the service knows calls with an id in place of a transaction, likewise.
        self._has_id_calls = True

    @classmethod
    def configured(cls, wanted: ServiceSettings, timeout_seconds: float = 30, *, address: str = "") -> Self:
        """Return a client for the configured service, or for another service with the configured token and authorities.

        Raises:
            ConfigurationError: ``transactions.ca_file`` cannot be read.
        """
        client = cls(address or wanted.thrift, timeout_seconds, connect=connecting(wanted))
        if wanted.source == "manager":
            client._hint = _START_SERVER_HINT
        return client

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections; a second call does nothing."""
        for pool in self._connections.values():
            pool.close()

    # --- transactions ------------------------------------------------------------------------------------------------

    def start_short(self, timeout_seconds: int | None = None, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a short transaction; this and the other methods match ``TransactionManager``."""
        if timeout_seconds is None:
            return self._transaction("startShortClientId", wire.string(1, client))
        fields = (wire.string(1, client), _timeout(2, timeout_seconds))
        return self._transaction("startShortWithClientIdAndTimeOut", *fields)

    def start_long(self, client: str = UNKNOWN_CLIENT) -> Transaction:
        """Start a long transaction."""
        return self._transaction("startLongClientId", wire.string(1, client))

    def can_commit(self, transaction_id: int, changes: Collection[bytes]) -> None:
        """Record the changes of a transaction, and check whether another transaction has made one of them."""
        keys = wire.strings(2, list(changes), Kind.SET)
        self._call("canCommitOrThrow", wire.i64(1, transaction_id), keys, repeatable=True)

    def commit(self, transaction_id: int, write_pointer: int | None = None) -> None:
        """Commit a transaction.

        Args:
            write_pointer: the present write pointer, which Tephra's service requires; by default the id.
        """
        pointer = transaction_id if write_pointer is None else write_pointer
        self._call("commitOrThrow", wire.i64(1, transaction_id), wire.i64(2, pointer))

    def commit_and_start(
        self,
        transaction_id: int,
        write_pointer: int | None = None,
        timeout_seconds: int | None = None,
        client: str = UNKNOWN_CLIENT,
    ) -> Transaction | None:
        """Commit, and start a short transaction that sees the commit, in one call.

        Returns:
            None: the commit succeeded, but Tephra's own service does not know the call, so no transaction was started.
        """
        timeout = () if timeout_seconds is None else (_timeout(3, timeout_seconds),)
        if self._has_commit_and_start:
            try:
                return self._transaction(
                    "commitAndStart", wire.i64(1, transaction_id), wire.string(2, client), *timeout
                )
            except MethodUnknown:
                self._has_commit_and_start = False
        self.commit(transaction_id, write_pointer)
        return None

    def abort(self, transaction: Transaction) -> None:
        """Abort a transaction whose writes were rolled back."""
        # Send no lists of ids, which may be larger than a request.
        fields = (
            wire.i64(1, transaction.transaction_id),
            wire.i32(2, transaction.type + 1),
            wire.i64s(3, transaction.checkpoint_write_pointers),
        )
        if self._call_by_id("abortById", fields, NoneType, repeatable=True) is _UNKNOWN:
            self._call("abortTx", wire.structure(1, *transaction_fields(transaction)), repeatable=True)

    def invalidate(self, transaction_id: int) -> bool:
        """Hide the writes of a transaction permanently; return whether it was in progress."""
        return bool(self._call("invalidateTx", wire.i64(1, transaction_id), kind=bool))

    def checkpoint(self, transaction: Transaction) -> Transaction:
        """Give a transaction another write pointer."""
        found = self._call_by_id("checkpointById", (wire.i64(1, transaction.transaction_id),), dict)
        if found is _UNKNOWN:
            return self._transaction("checkpoint", wire.structure(1, *transaction_fields(transaction)))
        pointer, pointers = found.get(1), found.get(2)
        if not isinstance(pointer, int) or not isinstance(pointers, array):
            raise self._outcome_unknown("checkpointById", "the response has another type")
        return replace(transaction, write_pointer=pointer, checkpoint_write_pointers=pointers)

    # --- the invalid list --------------------------------------------------------------------------------------------

    def truncate_invalid(self, transaction_ids: Collection[int]) -> bool:
        """Remove ids from the invalid list; return whether an id was removed."""
        return self._boolean("truncateInvalidTx", wire.i64s(1, sorted(transaction_ids), Kind.SET))

    def truncate_invalid_before(self, time_ms: int) -> bool:
        """Remove the ids of transactions that started before a time; return whether an id was removed."""
        return self._boolean("truncateInvalidTxBefore", wire.i64(1, time_ms))

    def invalid_size(self) -> int:
        """Return the number of transactions on the invalid list."""
        return int(self._call("invalidTxSize", kind=int, repeatable=True))

    def reset(self) -> None:
        """Reset the manager's state."""
        self._call("resetState")

    def prune_now(self) -> None:
        """Make Tephra's service prune the invalid list; ``tms serve`` ignores this call."""
        self._call("pruneNow", repeatable=True)

    # --- state -------------------------------------------------------------------------------------------------------

    def status(self) -> str:
        """Return ``OK`` or ``NOTOK``."""
        text: bytes = self._call("status", kind=bytes, repeatable=True)
        return text.decode(errors="replace")

    def encoded_snapshot(self) -> bytes:
        """Return the complete state in the format of a snapshot file."""
        data: bytes = self._call("getSnapshot", kind=bytes, repeatable=True)
        return data

    def in_progress(self) -> Sequence[InProgress]:
        """Return the transactions in progress with their checkpoints, from a snapshot."""
        try:
            return read_complete_visibility(io.BytesIO(self.encoded_snapshot())).in_progress
        except FormatError as error:
            raise self._outcome_unknown("getSnapshot", str(error)) from error

    def clients(self) -> dict[int, str]:
        """Return the clients of the transactions in progress, by id; empty for Tephra's service."""
        try:
            found: Fields = self._call("inProgressClients", kind=dict, repeatable=True)
        except MethodUnknown:
            return {}
        names = (name.decode(errors="replace") for name in found.get(2, ()))
        return dict(zip(found.get(1, ()), names, strict=False))

    def published(self) -> dict[int, dict[str, int]]:
        """Return the topics of the messages of transactions in progress, by id, with the time of the first message.

        Empty if the service does not know them, as Tephra's service.
        """
        try:
            rows: Fields = self._call("inProgressTopics", kind=dict, repeatable=True)
        except MethodUnknown:
            return {}
        found: dict[int, dict[str, int]] = {}
        for pointer, topic, ms in zip(rows.get(1, ()), rows.get(2, ()), rows.get(3, ()), strict=False):
            found.setdefault(pointer, {})[topic.decode(errors="replace")] = ms
        return found

    def latest(self) -> Loaded:
        """Return a current snapshot, as a snapshot source does.

        Raises:
            NoSnapshot: the service does not respond, or not with a snapshot.
        """
        try:
            state = self.state()
        except (TransactionError, FormatError) as error:
            raise SourceUnreachable(error.message, error.hint) from error
        # Outside the `try`, because an implausible snapshot is another error than a missing response.
        return Loaded(state, f"the transaction service {self.address}")

    def state(self) -> VisibilityState:
        """Return the manager's current state.

        Raises:
            ServiceUnavailable: no service responds.
            FormatError: the response is not a snapshot.
        """
        return read_complete_visibility(io.BytesIO(self.encoded_snapshot()))

    # --- calls -------------------------------------------------------------------------------------------------------

    def _transaction(self, name: str, *fields: bytes) -> Transaction:
        try:
            return transaction_of(self._call(name, *fields, kind=dict))
        except FormatError as error:
            raise self._outcome_unknown(name, str(error)) from error

    def _call_by_id(self, name: str, fields: tuple[bytes, ...], kind: type, *, repeatable: bool = False) -> Any:
        """Call a method with an id in place of a transaction; return ``_UNKNOWN`` if the service is Tephra's."""
        if self._has_id_calls:
            try:
                return self._call(name, *fields, kind=kind, repeatable=repeatable)
            except MethodUnknown:
                self._has_id_calls = False
        return _UNKNOWN

    def _boolean(self, name: str, *fields: bytes) -> bool:
        found: Fields = self._call(name, *fields, kind=dict)
        return bool(found.get(1))

    def _call(self, name: str, *fields: bytes, kind: type = NoneType, repeatable: bool = False) -> Any:
        """Call a method; return its result.

        Args:
            repeatable: whether to repeat the call if a connection breaks.
        """
        result = self._call_services(name, fields, repeatable=repeatable)
        for number, value in result.items():
            if number:
                raise _declared_error(name, number, value if isinstance(value, dict) else {})
        value = result.get(0)
        if not isinstance(value, kind):
            raise self._outcome_unknown(name, "the response has another type")
        return value

    def _call_services(self, name: str, fields: tuple[bytes, ...], *, repeatable: bool) -> Fields:
        """Call one service after another within the time limit, as long as the call is repeatable."""
        several = len(self._connections) > 1
        # A transaction whose start got no response times out, so another service may start a transaction.
        repeatable = repeatable or (several and name.startswith("start"))
        deadline = time.monotonic() + self._timeout_seconds
        order = self._order() if several else [self.address] * 2
        for remaining, address in zip(range(len(order) - 1, -1, -1), order, strict=True):
            seconds = self._timeout_seconds
            if several:
                rest = max(_SHORTEST_SECONDS, deadline - time.monotonic())
                # Keep time for the other services if this service hangs.
                seconds = rest / (remaining + 1) if repeatable else rest
            try:
                return self._call_service(address, name, fields, seconds)
            except MethodUnknown:
                raise
            except ServiceUnavailable:
                self._leave(address)
                if not (several and remaining):
                    raise
            except _Broken as broken:
                self._leave(address)
                if not (repeatable and remaining) or (isinstance(broken, _TimedOut) and not several):
                    raise self._outcome_unknown(name, str(broken)) from broken
        raise AssertionError("no service was called")

    def _order(self) -> list[str]:
        """Return the services, starting with the current one."""
        addresses = list(self._connections)
        at = addresses.index(self.address)
        return addresses[at:] + addresses[:at]

    def _leave(self, address: str) -> None:
        """Switch to the next service, unless another thread has done so."""
        if self.address == address:
            self.address = [*self._order(), address][1]

    def _call_service(self, address: str, name: str, fields: tuple[bytes, ...], seconds: float) -> Fields:
        with self._connections[address].borrow() as connection:
            try:
                return connection.call(name, fields, seconds)
            except MethodUnknown as error:
                # Raise it after the block, because the connection remains usable.
                unknown = error
            except TimeoutError as error:
                raise _TimedOut(f"no response within {seconds:g} s") from error
            except (OSError, EOFError, FormatError) as error:
                raise _Broken(str(error)) from error
        raise unknown

    def _open_connection(self, address: str) -> RpcConnection:
        # Assume all calls again, because the service may have been replaced.
        self._has_commit_and_start = self._has_id_calls = True
        try:
            return self.connect(address, self._timeout_seconds / len(self._connections))
        except OSError as error:
            raise ServiceUnavailable(
                f"The transaction service {address} cannot be reached: {error.strerror or error}.", self._hint
            ) from error

    def _outcome_unknown(self, name: str, reason: str) -> OutcomeUnknown:
        return OutcomeUnknown(
            f"It is unknown whether the transaction service {self.address} has executed {name}: {reason}.",
            "If this was a commit: invalidate the transaction, and roll nothing back. If it was committed, it stays "
            "committed.",
        )


def connecting(settings: ServiceSettings, certificate_name: str = "") -> Callable[[str, float], SocketConnection]:
    """Return a function that opens a connection by the settings, from address and timeout.

    Args:
        certificate_name: the name in the certificate; empty: the host of the address.

    Raises:
        ConfigurationError: ``transactions.ca_file`` cannot be read.
    """
    tls = ClientTls("transactions.", settings.ca_file) if settings.is_over_tls else None
    # Send the token with more permissions.
    name = "token_file" if settings.admin_token_file is None else "admin_token_file"
    token_file = getattr(settings, name)
    return partial(
        SocketConnection,
        token_file=token_file,
        token_setting=f"transactions.{name}",
        tls=tls,
        certificate_name=certificate_name,
    )


class ServiceSource:
    """A source of snapshots from a transaction service (``transactions.source: thrift``); it keeps no connection.

    Args:
        address: ``HOST:PORT`` of the service.
        connect: see :class:`TransactionClient`.
    """

    def __init__(self, address: str, connect: Callable[[str, float], RpcConnection] = SocketConnection) -> None:
        self._address = address
        self._connect = connect

    def latest(self) -> Loaded:
        """Return a current snapshot; see :meth:`TransactionClient.latest`."""
        with TransactionClient(self._address, connect=self._connect) as client:
            return client.latest()


def source_of(settings: ServiceSettings) -> SnapshotSource | None:
    """Return the source of snapshots for a program outside the server; None if there is no source.

    Raises:
        ConfigurationError: the folder of snapshots is a URL of another kind than webhdfs, or a configured file cannot
            be used.
    """
    if settings.source == "thrift":
        return ServiceSource(settings.thrift, connect=connecting(settings))
    directory = settings.snapshot_directory()
    return None if directory is None else DirectorySource.at(directory, settings.kerberos, settings.hdfs_ca_file)


#: The exception in each field of a response, except "not in progress".
_DECLARED: Mapping[tuple[str, int], type[TransactionError]] = {
    ("getSnapshot", 1): CannotSnapshot,
    ("truncateInvalidTxBefore", 1): TruncateTimeError,
    ("startLongClientId", 1): BadArgument,
    ("startShortClientId", 1): BadArgument,
    ("startShortWithClientIdAndTimeOut", 1): BadArgument,
    ("canCommitOrThrow", 2): Conflict,
    ("commitOrThrow", 2): Conflict,
    ("canCommitOrThrow", 3): ChangesTooLarge,
    ("commitOrThrow", 3): ChangesTooLarge,
    ("commitAndStart", 2): Conflict,
    ("commitAndStart", 3): BadArgument,
}


def _timeout(number: int, seconds: int) -> bytes:
    """Return the field of a timeout.

    Raises:
        BadArgument: the timeout exceeds the field's range.
    """
    if seconds > MAX_TIMEOUT_SECONDS:
        raise BadArgument(f"timeout must not exceed {MAX_TIMEOUT_SECONDS} seconds but is {seconds} seconds")
    return wire.i32(number, seconds)


def _declared_error(name: str, number: int, fields: Fields) -> TransactionError:
    """Return the error that a service reports."""
    kind = _DECLARED.get((name, number), NotInProgress)
    if kind is Conflict:
        pointer, key, client = fields.get(1, 0), as_text(fields, 2), as_text(fields, 3)
        text = f"Transaction {pointer} conflicts with one of {client or 'an unknown client'}, on {key}."
        return Conflict(text, pointer, key, client)
    return kind(as_text(fields, 1))
