"""The methods of Tephra's transaction service, with their Thrift calls and results.

The errors of a method are part of the interface (``transaction.thrift``). A declared error is a field of the response.
Any other error is Thrift's application exception, which Java shows as "Internal error processing …" followed by the
reason. Old methods return false where new methods raise.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tms_core.errors import (
    BadArgument,
    CannotSnapshot,
    ChangesTooLarge,
    Conflict,
    FormatError,
    NotInProgress,
    StoreError,
    TransactionError,
    TruncateTimeError,
    without_paths,
)
from tms_core.logs.audit import Event, record
from tms_core.logs.loggers import get_logger
from tms_core.transaction.codec import wire
from tms_core.transaction.codec.thrift import transaction_fields, transaction_of
from tms_core.transaction.codec.wire import Failure, Fields, MessageKind, RpcMessage, integer
from tms_core.transaction.manager.durable import ManagerStopped
from tms_core.transaction.manager.manager import TransactionManager
from tms_core.transaction.manager.storage import DirectoryFull
from tms_core.transaction.model import Transaction, TransactionType

logger = get_logger(__name__)

#: Executes a method, and returns its encoded result as field 0; None: the method has no result.
_Method = Callable[[TransactionManager, Fields], bytes | None]


class _Call(NamedTuple):
    method: _Method
    #: The field of the response for each declared error.
    declared: Mapping[type[TransactionError], int] = {}


def answer(manager: TransactionManager, frame: bytes, address: str = "") -> bytes:
    """Execute the call of a frame.

    Args:
        address: the address of the client, for the audit log.

    Returns:
        The response, without its frame.

    Raises:
        FormatError: the frame is not a call, so it gets no response.
    """
    try:
        request = wire.read_message(frame)
    except wire.TooManyStrings as error:
        return _too_many(error.request, str(error))
    if request.kind != MessageKind.CALL:
        raise FormatError(f"a message of kind {request.kind}, which is not a call")
    call = _CALLS.get(request.name)
    if call is None:
        return failure(request, Failure.UNKNOWN_METHOD, f"Invalid method name: '{request.name}'")
    result = "failed"
    try:
        fields, result = _execute(call, manager, request.fields)
    except FormatError as error:
        result = "refused"
        return failure(request, Failure.PROTOCOL_ERROR, f"{request.name}: {error}")
    except (TransactionError, StoreError) as error:
        logger.warning("%s failed: %s", request.name, error)
        # Without a log, the manager has changed nothing, except that a reset may be incomplete.
        undone = isinstance(error, (ManagerStopped, DirectoryFull)) and request.name != "resetState"
        kind = Failure.PROTOCOL_ERROR if undone else Failure.INTERNAL_ERROR
        text = " ".join(filter(None, without_paths(error)))
        return failure(request, kind, f"Internal error processing {request.name}: {text} [{error.code}]")
    finally:
        if (event := _AUDITED.get(request.name)) is not None:
            record(event, address=address, verb=request.name, object_=_object(request.fields), result=result)
    return wire.message(MessageKind.REPLY, request.name, request.number, *fields)


def _object(arguments: Fields) -> str:
    """Return the argument of an administrative call: transactions, or a time in milliseconds."""
    value = arguments.get(1, "")
    if not isinstance(value, array):
        return str(value)
    text = " ".join(map(str, value[:_AUDITED_IDS]))
    return f"{text} and {len(value) - _AUDITED_IDS} more" if value[_AUDITED_IDS:] else text


def _execute(call: _Call, manager: TransactionManager, arguments: Fields) -> tuple[tuple[bytes, ...], str]:
    """Carry out a call, and return the fields of its answer and its result for the audit log."""
    try:
        result = call.method(manager, arguments)
    except TransactionError as error:
        number = call.declared.get(type(error))
        if number is None:
            raise
        return (wire.structure(number, *_error(error)),), "refused"
    return (() if result is None else (result,)), "refused" if result == _FALSE else "done"


def _too_many(request: RpcMessage, text: str) -> bytes:
    """Return the response to a call with a change set, or another list, that is too large."""
    if request.name == "canCommitTx":
        return wire.message(MessageKind.REPLY, request.name, request.number, _boolean(False))
    call = _CALLS.get(request.name)
    if call is None or ChangesTooLarge not in call.declared:
        return failure(request, Failure.PROTOCOL_ERROR, f"{request.name}: {text}")
    error = ChangesTooLarge(f"The change set is too large: {text}")
    return wire.message(
        MessageKind.REPLY, request.name, request.number, wire.structure(call.declared[ChangesTooLarge], *_error(error))
    )


def failure(request: RpcMessage, kind: Failure, text: str) -> bytes:
    """Return the response to a call with Thrift's application exception."""
    fields = (wire.string(1, text), wire.i32(2, kind))
    return wire.message(MessageKind.EXCEPTION, request.name, request.number, *fields)


def _error(error: TransactionError) -> tuple[bytes, ...]:
    """Return the fields of a declared exception."""
    match error:
        case Conflict():
            client = (wire.string(3, error.client),) if error.client else ()
            return (wire.i64(1, error.transaction_id), wire.string(2, error.key), *client)
        case ChangesTooLarge():
            return (wire.string(1, error.message), wire.string(2, "org.apache.tephra.TransactionSizeException"))
        case BadArgument():
            return (wire.string(1, error.message), wire.string(2, "java.lang.IllegalArgumentException"))
    return (wire.string(1, without_paths(error)[0]),)


# --- arguments and results -------------------------------------------------------------------------------------------


def _result(transaction: Transaction) -> bytes:
    return wire.structure(0, *transaction_fields(transaction))


def _boolean(value: bool) -> bytes:
    """Return a boolean in a struct: the result of a method that may also raise."""
    return wire.structure(0, wire.boolean(1, value))


def _transaction(arguments: Fields) -> Transaction:
    return transaction_of(_argument(arguments, 1, dict))


def _client(arguments: Fields, number: int = 1) -> str:
    if number not in arguments:
        raise BadArgument("ClientId must not be null")
    client: bytes = _argument(arguments, number, bytes)
    return client.decode(errors="replace")


def _changes(arguments: Fields) -> list[bytes]:
    changes: list[bytes] = _argument(arguments, 2, list, [])
    return changes


def _argument(arguments: Fields, number: int, kind: type, default: object = None) -> Any:
    value = arguments.get(number, default)
    if not isinstance(value, kind):
        raise FormatError(f"argument {number} is missing or has another type")
    return value


# --- methods ---------------------------------------------------------------------------------------------------------


def _can_commit_tx(manager: TransactionManager, arguments: Fields) -> bytes:
    try:
        manager.can_commit(_transaction(arguments).transaction_id, _changes(arguments))
    except (Conflict, ChangesTooLarge):
        return _boolean(False)
    return _boolean(True)


def _commit_tx(manager: TransactionManager, arguments: Fields) -> bytes:
    try:
        manager.commit(_transaction(arguments).transaction_id)
    except Conflict:
        return _boolean(False)
    return _boolean(True)


def _commit_and_start(manager: TransactionManager, arguments: Fields) -> bytes:
    timeout_seconds = integer(arguments, 3) if 3 in arguments else None
    return _result(manager.commit_and_start(integer(arguments, 1), timeout_seconds, _client(arguments, 2)))


def _transaction_by_id(arguments: Fields) -> Transaction:
    """Return the transaction of an ``abortById`` call, with only the fields that an abort reads."""
    pointer, kind = integer(arguments, 1), integer(arguments, 2, 1) - 1
    checkpoints = _argument(arguments, 3, array, array("q"))
    if kind not in (TransactionType.SHORT, TransactionType.LONG):
        raise FormatError(f"a transaction of type {kind + 1}, which does not exist")
    return Transaction(0, pointer, pointer, type=TransactionType(kind), checkpoint_write_pointers=checkpoints)


def _checkpoint(manager: TransactionManager, arguments: Fields) -> bytes:
    pointer = integer(arguments, 1)
    found = manager.checkpoint(Transaction(0, pointer, pointer))
    return wire.structure(0, wire.i64(1, found.write_pointer), wire.i64s(2, found.checkpoint_write_pointers))


def _truncate(manager: TransactionManager, arguments: Fields) -> bytes:
    return _boolean(manager.truncate_invalid(_argument(arguments, 1, array, array("q"))))


def _clients(manager: TransactionManager, _: Fields) -> bytes:
    clients = manager.clients()
    return wire.structure(0, wire.i64s(1, list(clients)), wire.strings(2, list(clients.values())))


def _published_topics(manager: TransactionManager, _: Fields) -> bytes:
    rows = [(pointer, topic, ms) for pointer, topics in manager.published().items() for topic, ms in topics.items()]
    pointers, topics, times = zip(*rows, strict=True) if rows else ((), (), ())
    return wire.structure(0, wire.i64s(1, pointers), wire.strings(2, topics), wire.i64s(3, times))


def _prune(_manager: TransactionManager, _: Fields) -> None:
    logger.info("pruneNow ignored: only the janitor removes ids from the invalid list (boundary.feedback)")


_GENERIC: Mapping[type[TransactionError], int] = {BadArgument: 1}
_IN_PROGRESS: Mapping[type[TransactionError], int] = {NotInProgress: 1}
_ALL: Mapping[type[TransactionError], int] = {NotInProgress: 1, Conflict: 2, ChangesTooLarge: 3}

_CALLS: Mapping[str, _Call] = {
    "startLong": _Call(lambda manager, _: _result(manager.start_long())),
    "startShort": _Call(lambda manager, _: _result(manager.start_short())),
    "startLongClientId": _Call(lambda manager, fields: _result(manager.start_long(_client(fields))), _GENERIC),
    "startShortTimeout": _Call(lambda manager, fields: _result(manager.start_short(integer(fields, 1)))),
    "startShortClientId": _Call(lambda manager, fields: _result(manager.start_short(None, _client(fields))), _GENERIC),
    "startShortWithClientIdAndTimeOut": _Call(
        lambda manager, fields: _result(manager.start_short(integer(fields, 2), _client(fields))), _GENERIC
    ),
    "startShortWithTimeout": _Call(lambda manager, fields: _result(manager.start_short(integer(fields, 1))), _GENERIC),
    "canCommitTx": _Call(_can_commit_tx, _IN_PROGRESS),
    "canCommitOrThrow": _Call(lambda manager, fields: manager.can_commit(integer(fields, 1), _changes(fields)), _ALL),
    "commitTx": _Call(_commit_tx, _IN_PROGRESS),
    "commitOrThrow": _Call(lambda manager, fields: manager.commit(integer(fields, 1)), _ALL),
    "commitAndStart": _Call(_commit_and_start, {NotInProgress: 1, Conflict: 2, BadArgument: 3}),
    "abortTx": _Call(lambda manager, fields: manager.abort(_transaction(fields))),
    "abortById": _Call(lambda manager, fields: manager.abort(_transaction_by_id(fields))),
    "invalidateTx": _Call(lambda manager, fields: wire.boolean(0, manager.invalidate(integer(fields, 1)))),
    "getSnapshot": _Call(lambda manager, _: wire.string(0, manager.encoded_snapshot()), {CannotSnapshot: 1}),
    "resetState": _Call(lambda manager, _: manager.reset()),
    "status": _Call(lambda manager, _: wire.string(0, "OK" if manager.is_running else "NOTOK")),
    "truncateInvalidTx": _Call(_truncate),
    "truncateInvalidTxBefore": _Call(
        lambda manager, fields: _boolean(manager.truncate_invalid_before(integer(fields, 1))), {TruncateTimeError: 1}
    ),
    "invalidTxSize": _Call(lambda manager, _: wire.i32(0, manager.invalid_size())),
    "checkpoint": _Call(lambda manager, fields: _result(manager.checkpoint(_transaction(fields))), _IN_PROGRESS),
    "checkpointById": _Call(_checkpoint, _IN_PROGRESS),
    "pruneNow": _Call(_prune),
    "inProgressClients": _Call(_clients),
    "inProgressTopics": _Call(_published_topics),
}
#: The methods in the audit log, and the largest number of a call's transaction ids in a line.
_AUDITED = {
    "truncateInvalidTx": Event.TRUNCATE,
    "truncateInvalidTxBefore": Event.TRUNCATE,
    "resetState": Event.RESET,
    "invalidateTx": Event.INVALIDATE,
}
_AUDITED_IDS = 10
#: The result of a call that has changed nothing.
_FALSE = wire.boolean(0, value=False)
#: The names of all methods.
METHODS = frozenset(_CALLS)
