"""``tms tx``: show transactions with their clients and ages, and abort or invalidate them.

All calls use Thrift, so the commands also work with Tephra's service, which does not report clients. In JSON, ids are
decimal text: they are above 2^53, where programs that calculate in doubles lose the last digits.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tms_core.cli.help import CommandGroup, shared
from tms_core.cli.outcome import complete_hints
from tms_core.cli.remote import OutputOptions, config_option, format_option
from tms_core.cli.typed import AddressType, Moment, TimeType, TransactionIdType
from tms_core.clock import SystemClock
from tms_core.errors import CannotSnapshot, NotInProgress, TransactionError
from tms_core.logs.printable import columns, duration, moment, printable
from tms_core.transaction.model import (
    InProgress,
    InProgressType,
    Transaction,
    TransactionType,
    VisibilityState,
    transaction_ms,
)

if TYPE_CHECKING:
    from tms_core.transaction.rpc.client import TransactionClient

#: The time limit for calls to the transaction service, in seconds.
_TIMEOUT_SECONDS = 30

#: The maximum number of blocked topics that the list shows for a transaction.
_NAMED_TOPICS = 5

TransactionId = TransactionIdType()


@dataclass(frozen=True)
class CommandOptions(OutputOptions):
    """The options that all commands of the group have."""

    tx_server: str | None
    config: Path | None
    format: str

    @contextmanager
    def client(self) -> Iterator[TransactionClient]:
        """Yield the client of the selected transaction service."""
        from tms_core.settings.models import load  # noqa: PLC0415 help texts do not need it
        from tms_core.transaction.rpc.client import TransactionClient  # noqa: PLC0415

        transactions = load(self.config, os.environ, {}).settings.transactions
        with TransactionClient.configured(transactions, _TIMEOUT_SECONDS, address=self.tx_server or "") as client:
            yield client


def common(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of the group to a command, which receives them as one :class:`CommandOptions`."""

    @shared(
        "--tx-server",
        type=AddressType(),
        metavar="HOST:PORT",
        env="TMS_TRANSACTIONS__THRIFT",
        help="Transaction service; default: the service in the settings.",
    )
    @config_option
    @format_option
    @wraps(command)
    def wrapped(*, tx_server: str | None, config: Path | None, format: str, **rest: Any) -> None:  # noqa: A002
        with complete_hints():
            command(CommandOptions(tx_server, config, format), **rest)

    return wrapped


@click.group("tx", cls=CommandGroup)
def tx() -> None:
    """Show and end transactions."""


@tx.command("list")
@click.option("--invalid", is_flag=True, help="List the invalid transactions, whose writes are hidden.")
@common
def list_transactions(options: CommandOptions, *, invalid: bool) -> None:
    """List transactions in progress, or the invalid list.

    The oldest transaction comes first.

    \b
    Examples:
      tms tx list
      tms tx list --invalid
      tms tx list --tx-server tephra-1:15165 --format json
    """
    with options.client() as client:
        state, clients, published = client.state(), client.clients(), client.published()
    if invalid:
        _print_invalid(options, state)
        return
    held = [
        {**_in_progress_fields(entry, state, clients), "topics": published.get(entry.write_pointer, {})}
        for entry in _transactions(state)
    ]

    def lines() -> Iterator[str]:
        yield f"{len(held)} in progress, {len(state.invalid)} invalid; read pointer {state.read_pointer}"
        if held:
            rows = [
                [
                    one["id"],
                    one["type"],
                    printable(one["client"] or "?"),
                    *_times(one),
                    _count(one),
                    _blocked_topics(one),
                ]
                for one in held
            ]
            yield from columns([["id", "type", "client", "held for", "expires", "checkpoints", "blocks"], *rows])

    options.print({**_summary(state), "in_progress": held}, lines)


@tx.command("show")
@click.argument("transaction_id", metavar="ID", type=TransactionId)
@common
def show(options: CommandOptions, transaction_id: int) -> None:
    """Show the state of a transaction, or of one of its checkpoints.

    \b
    Example:
      tms tx show 1795000000000000000
    """
    with options.client() as client:
        state, clients = client.state(), client.clients()
    entry = _entry(state, transaction_id)
    found: dict[str, Any] = {"id": str(transaction_id), "began_ms": transaction_ms(transaction_id)}
    if entry is not None:
        found |= {"state": "in_progress", **_in_progress_fields(entry, state, clients)}
    else:
        found |= {"state": _state_of(state, transaction_id)}

    def lines() -> Iterator[str]:
        yield f"{found['id']}: {found['state'].replace('_', ' ')}"
        yield f"  began {moment(found['began_ms'])}"
        if entry is not None:
            held_for, expires = _times(found)
            yield f"  {found['type']}, held by {printable(found['client'] or 'an unknown client')} for {held_for}"
            yield f"  expires {expires}"
            yield from (f"  checkpoint {pointer}" for pointer in found["checkpoints"])

    options.print(found, lines)


@tx.command("invalidate")
@click.argument("transaction_ids", metavar="ID...", type=TransactionId, nargs=-1, required=True)
@common
def invalidate(options: CommandOptions, transaction_ids: tuple[int, ...]) -> None:
    """Invalidate transactions: hide their writes permanently.

    Invalidation is always safe: if a client later commits the transaction, the commit is rejected.

    \b
    Example:
      tms tx invalidate 1795000000000000000
    """
    with options.client() as client:
        done = {str(pointer): client.invalidate(pointer) for pointer in transaction_ids}
    options.print(
        done, lambda: (f"{pointer}: {'invalid now' if ok else 'not in progress'}" for pointer, ok in done.items())
    )
    _require_all(done)


@tx.command("abort")
@click.argument("transaction_id", metavar="ID", type=TransactionId)
@click.option("--yes", is_flag=True, help="Do not ask for confirmation; its writes are rolled back.")
@common
def abort(options: CommandOptions, transaction_id: int, *, yes: bool) -> None:
    """Abort a transaction whose writes were rolled back.

    Writes of a short transaction that were not rolled back become readable. If you are not sure,
    invalidate the transaction instead. A long transaction always becomes invalid, and so does a
    transaction with messages or claims that tms serve knows and the client has not rolled back.

    \b
    Example:
      tms tx abort 1795000000000000000
    """
    with options.client() as client:
        entry = _entry(client.state(), transaction_id)
        if entry is None or entry.type is InProgressType.CHECKPOINT:
            raise NotInProgress(
                f"Transaction {transaction_id} is not in progress.", "List the transactions in progress: tms tx list"
            )
        if not yes:
            click.confirm("Have all its writes been rolled back? The others become readable", abort=True, err=True)
        client.abort(_transaction(entry))
        outcome = "invalid now" if client.state().is_invalid(entry.write_pointer) else "aborted"
    options.print({str(transaction_id): True}, lambda: iter([f"{transaction_id}: {outcome}"]))


@tx.command("truncate")
@click.argument("transaction_ids", metavar="[ID...]", type=TransactionId, nargs=-1)
@click.option(
    "--before", type=TimeType(), help="Remove transactions started before: 2026-11-01T00:00:00Z, or milliseconds."
)
@click.option(
    "--yes", is_flag=True, help="Do not ask for confirmation that no table has messages of these transactions."
)
@common
def truncate(options: CommandOptions, transaction_ids: tuple[int, ...], before: Moment | None, *, yes: bool) -> None:
    """Remove transactions from the invalid list.

    Rows of these transactions that still exist become visible, in every table that uses these
    transactions. tms serve first voids the claims of consumer groups and the producers' transactions;
    another transaction service does not, and a group then loses the claimed messages. The janitor
    can remove transactions that it has proven safe (janitor.boundary.feedback).

    \b
    Examples:
      tms tx truncate 1795000000000000000 1795000000000000007
      tms tx truncate --before 2026-11-01T00:00:00Z
    """
    if bool(transaction_ids) == (before is not None):
        raise click.UsageError("missing IDs: give ids, or --before TIME")
    before_ms = None if before is None else before.at(SystemClock().now_ms())
    with options.client() as client:
        if not yes:
            click.confirm(
                "Remaining messages of these transactions become readable. tms serve voids their claims and "
                "producers' transactions first; another transaction service does not, and consumer groups lose the "
                "claimed messages. Are all messages of these transactions deleted?",
                abort=True,
                err=True,
            )
        size, missing = _invalid_before(client, transaction_ids)
        if before_ms is not None:
            client.truncate_invalid_before(before_ms)
        elif not client.truncate_invalid(transaction_ids):
            missing = list(transaction_ids)
        left = client.invalid_size()
    options.print(
        {"invalid_before": size, "invalid_after": left}, lambda: iter([f"{size} were invalid, {left} are left"])
    )
    if missing:
        hint = f"See the state of the first one: tms tx show {missing[0]}"
        raise TransactionError(f"{len(missing)} of {len(transaction_ids)} were not on the invalid list.", hint)


# --- output ----------------------------------------------------------------------------------------------------------


def _print_invalid(options: CommandOptions, state: VisibilityState) -> None:
    """Print the invalid list with the start time of each transaction."""
    began = {str(pointer): transaction_ms(pointer) for pointer in sorted(state.invalid)}

    def lines() -> Iterator[str]:
        yield f"{len(began)} invalid"
        if began:
            rows = [[pointer, moment(began_ms)] for pointer, began_ms in began.items()]
            yield from columns([["id", "began"], *rows])

    found = [{"id": pointer, "began_ms": began_ms} for pointer, began_ms in began.items()]
    options.print({**_summary(state), "invalid_transactions": found}, lines)


def _invalid_before(client: TransactionClient, transaction_ids: Sequence[int]) -> tuple[int, list[int]]:
    """Return the size of the invalid list, and the ids that it lacks; without a snapshot, only the size is known."""
    from tms_core.transaction.rpc.connection import MethodUnknown  # noqa: PLC0415 as in CommandOptions.client

    try:
        state = client.state()
    except (CannotSnapshot, MethodUnknown):
        return client.invalid_size(), []
    return len(state.invalid), [one for one in transaction_ids if not state.is_invalid(one)]


def _transactions(state: VisibilityState) -> list[InProgress]:
    """Return the transactions in progress, without their checkpoints."""
    children = {pointer for entry in state.in_progress for pointer in entry.checkpoints}
    return [entry for entry in state.in_progress if entry.write_pointer not in children]


def _entry(state: VisibilityState, pointer: int) -> InProgress | None:
    """Return the transaction in progress with this id or checkpoint; None: no such transaction."""
    return next((one for one in _transactions(state) if pointer in (one.write_pointer, *one.checkpoints)), None)


def _transaction(entry: InProgress) -> Transaction:
    """Return an entry as a transaction, with the fields that an abort needs."""
    kind = TransactionType.LONG if entry.is_long else TransactionType.SHORT
    pointers = (entry.write_pointer, *entry.checkpoints)
    return Transaction(pointers[0], pointers[0], pointers[-1], type=kind, checkpoint_write_pointers=entry.checkpoints)


def _state_of(state: VisibilityState, pointer: int) -> str:
    if state.is_invalid(pointer):
        return "invalid"
    return "not_issued_yet" if pointer > state.write_pointer else "committed_or_aborted"


def _summary(state: VisibilityState) -> dict[str, Any]:
    return {
        "now_ms": state.timestamp_ms,
        "read_pointer": str(state.read_pointer),
        "write_pointer": str(state.write_pointer),
        "invalid": len(state.invalid),
    }


def _in_progress_fields(entry: InProgress, state: VisibilityState, clients: dict[int, str]) -> dict[str, Any]:
    """Return the fields of a transaction in progress; times use the service's clock."""
    return {
        "id": str(entry.write_pointer),
        "type": (entry.type or InProgressType.SHORT).name.lower(),
        "client": clients.get(entry.write_pointer),
        "held_ms": state.timestamp_ms - transaction_ms(entry.write_pointer),
        "expires_in_ms": entry.expiration_ms - state.timestamp_ms,
        "checkpoints": [str(pointer) for pointer in entry.checkpoints],
    }


def _times(held: dict[str, Any]) -> tuple[str, str]:
    rest_ms = held["expires_in_ms"]
    return duration(held["held_ms"]), f"in {duration(rest_ms)}" if rest_ms >= 0 else f"{duration(-rest_ms)} ago"


def _blocked_topics(held: dict[str, Any]) -> str:
    """Return the topics whose transactional readers wait for the transaction; the longest wait comes first."""
    topics = sorted(held["topics"], key=lambda name: (held["topics"][name], name))
    more = f" and {len(topics) - _NAMED_TOPICS:,} more" if len(topics) > _NAMED_TOPICS else ""
    return printable(", ".join(topics[:_NAMED_TOPICS])) + more


def _count(held: dict[str, Any]) -> str:
    return str(len(held["checkpoints"]) or "")


def _require_all(done: dict[str, bool]) -> None:
    missed = [pointer for pointer, ok in done.items() if not ok]
    if missed:
        hint = f"See the outcome of the first one: tms tx show {missed[0]}"
        raise NotInProgress(f"{len(missed)} of {len(done)} were not in progress.", hint)
