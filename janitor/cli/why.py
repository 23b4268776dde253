"""``janitor why``: the rule that deletes a message, the time and any hold; or the run that deleted it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from janitor.archive import index
from janitor.cli import render
from janitor.cli.ledger import policy
from janitor.cli.options import common_options, session
from janitor.cli.outcome import command_line
from janitor.cli.state import complete_topics
from janitor.inspect.answer import FoundRow, MissingRow, Trace, Why
from janitor.inspect.fate import Fate
from janitor.rules.policy import Hold, Reason, Rule
from tms_core.cli.help import Command
from tms_core.cli.typed import MessageIdType, TopicType
from tms_core.logs.printable import complete, complete_command, duration
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from janitor.app.session import Session

#: The maximum number of named runs that may have deleted a row.
NAMED_RUNS = 5

_TRANSACTIONS = {
    "": "published outside a transaction",
    "rolled_back": "its transaction was rolled back, or was invalid and its row inverted",
    "positive": "of a transaction whose state is unknown without a snapshot",
    "invalid": "of an invalid transaction",
    "undecided": "of a transaction that may still commit",
    "committed": "of a committed transaction",
    "unreadable": "its value cannot be read",
}


@click.command("why", cls=Command)
@click.argument("topic", type=TopicType(), metavar="NS:TOPIC", shell_complete=complete_topics)
@click.argument("message_id", type=MessageIdType(), metavar="MESSAGE_ID")
@common_options
def command(topic: TopicId, message_id: MessageId) -> None:
    """Explain why a message is still stored, or which run deleted it.

    For a stored message, the command shows the rule that deletes it, the time, and any hold. For a
    deleted message, it shows the run whose range contains the message.

    \b
    Example:
      janitor why default:orders 0000018bcfe56800000000000000000000000000 --config janitor.yaml
    """
    current = session()
    with current.reading() as engine:
        answer = engine.why(topic, message_id)
    if current.as_json:
        render.print_json(answer.to_json())
        return
    out = render.console()
    for line in (*lines(answer, current.arguments()), *_restore_commands(current, answer)):
        out.print(line)


def _restore_commands(current: Session, answer: Why) -> Iterator[str]:
    """Yield the commands that restore a deleted message from the archive."""
    place, at_ms = current.settings.janitor.archive.path, answer.message_id.publish_ms
    if "://" in place or not Path(place).is_dir() or all(one.table != "message" for one in answer.missing):
        return
    run_id = index.run_of(Path(place), answer.topic, at_ms, answer.message_id.sequence)
    if run_id is None:
        return
    yield "it is archived; to restore it into a paused topic:"
    yield f"  {command_line(current, f'pause {answer.topic}')}"
    window = f"--run {run_id} --since {at_ms} --until {at_ms + 1}"
    yield f"  {command_line(current, f'archive restore {answer.topic} {window}')}"


def lines(answer: Why, arguments: str = "") -> Iterator[str]:
    """Yield the answer as text.

    Args:
        arguments: the options of this store for commands.
    """
    yield f"{answer.topic}, {_metadata(answer)}; as of {render.moment(answer.now_ms)}"
    for found in answer.found:
        yield _describe_row(found)
        yield f"  {_TRANSACTIONS[found.transaction]}"
        yield f"  {_fate(answer, found, arguments)}"
        if found.unprocessed:
            yield f"  not deleted earlier (rule L7): {found.unprocessed}"
        if found.fate.action == "invert":
            yield "  the next run inverts it"
        for trace in found.inverted[:NAMED_RUNS]:
            yield f"  perhaps inverted by {_run(trace)}"
    for missing in answer.missing:
        yield from _missing(answer, missing)
    if answer.message_id.in_payload_table and answer.found and not answer.found[0].refers:
        yield "the id refers to a stored payload, but the message contains its payload"


def _metadata(answer: Why) -> str:
    if answer.problem:
        return answer.problem
    if answer.generation is None or answer.ttl_seconds is None:
        return "which has no metadata"
    deleted = " (deleted)" if answer.generation < 0 else ""
    consumed = ", at most until all consumers have processed it" if answer.consumed else ""
    return f"generation {answer.generation}{deleted}, ttl {duration(answer.ttl_seconds * 1000)}{consumed}"


def _describe_row(found: FoundRow) -> str:
    what, when = ("message", "published") if found.table == "message" else ("payload", "stored")
    return f"{what} of generation {found.generation}, {when} {render.moment(found.time_ms)}, exists"


def _fate(answer: Why, found: FoundRow, arguments: str) -> str:
    fate = found.fate
    if fate.rule is None:
        return f"stays: {_STAY_REASONS[fate.reason] if fate.reason else ''}" + _hold(answer, fate, arguments)
    if fate.rule is Rule.PROCESSED:
        due = "has been processed by all consumers"
    else:
        due = "is due for its generation" if fate.due_ms is None else _due(fate, answer.now_ms)
    if fate.action == "delete":
        return f"{due}; the next run deletes it"
    if fate.reason in _WAITING:
        when = f", {render.moment(fate.goes_ms)} at the earliest" if fate.goes_ms else ""
        return f"{due}, but stays as long as {_WAITING[fate.reason]} (rule L5){when}{_hold(answer, fate, arguments)}"
    later = ""
    if fate.hold is None and fate.goes_ms is not None and fate.goes_ms != fate.due_ms:
        later = f", but is deleted with its message: {render.moment(fate.goes_ms)} at the earliest"
    return f"{due}{later}{_hold(answer, fate, arguments)}"


def _due(fate: Fate, now_ms: int) -> str:
    """Return when the ttl is over, of a row that only time takes."""
    if fate.due_ms is None or fate.due_ms <= now_ms:
        return f"has expired {render.moment(fate.due_ms or 0)}"
    return f"expires {render.moment(fate.due_ms)}, in {duration(fate.due_ms - now_ms, rough=True)}"


_STAY_REASONS = {
    Reason.UNKNOWN_TOPIC: "the janitor deletes no rows of a topic without readable metadata (rule L1)",
    Reason.NEWER_GENERATION: "its generation is above the topic's, as after a restore of the metadata table (rule L2)",
    Reason.UNRECOGNIZED: "TMS does not write keys of this form (rule L0)",
    Reason.LIVE: "no rule deletes it",
}
_WAITING = {Reason.UNDECIDED: "its transaction may still commit", Reason.REFERENCED: "a message refers to it"}


def _hold(answer: Why, fate: Fate, arguments: str) -> str:
    """Return the reason of a hold, and the command that releases it."""
    until = "" if fate.until_ms is None else render.moment(fate.until_ms)
    if fate.hold is Hold.FRONTIER:
        release = "" if fate.goes_ms is None else f" until {render.moment(fate.goes_ms)}"
        approve = complete_command(f"janitor approve {answer.topic}", arguments)
        return f"; held{release} because its topic changed, or at once with: {approve}"
    if fate.hold is Hold.CONSUMER:
        return f"; held until {until} at the latest, because a consumer of its topic has not read it"
    if fate.hold is Hold.TRANSACTION:
        return "; held until the transactions of its time have ended, plus a few minutes"
    if fate.hold is Hold.PAUSED:
        resume = ", ".join(complete_command(f"janitor resume '{pattern}'", arguments) for pattern in answer.resume)
        return f"; its topic is paused, until: {resume}"
    if fate.hold is Hold.QUARANTINED:
        return f"; its topic failed too often, next attempt {until}".rstrip(" ,")
    if fate.hold is Hold.PROTECTED:
        return "; never deleted, because janitor.protect names its topic"
    return complete("; until the store is adopted: janitor adopt", arguments) if fate.hold else ""


def _missing(answer: Why, missing: MissingRow) -> Iterator[str]:
    what = "the message" if missing.table == "message" else "its stored payload"
    yield f"{what} does not exist"
    for trace in missing.taken[:NAMED_RUNS]:
        yield f"  {'deleted, if it existed,' if trace.certain else 'perhaps deleted'} by {_run(trace)}"
    if len(missing.taken) > NAMED_RUNS:
        yield f"  and {len(missing.taken) - NAMED_RUNS} more runs; --format json lists all"
    since_ms = answer.ledger_reach.complete_since_ms
    known = "this state has no record of its creation"
    if since_ms is not None:
        known = f"the state has all deletions since {render.moment(since_ms)}"
    if not missing.taken:
        yield f"  no known run deleted it: {known}; it was deleted earlier or by CDAP, or never existed"


def _run(entry: Trace) -> str:
    how = entry.rule.replace("_", " ")
    if entry.rule != Rule.INVALID_TRANSACTION:
        how += f" ({policy(entry)})"
    snapshot = (
        "no snapshot"
        if entry.snapshot_timestamp_ms is None
        else (f"the snapshot of {render.moment(entry.snapshot_timestamp_ms)}")
    )
    died = "; that run died, or is still running" if entry.rows is None else ""
    return f"run {entry.run_id}, {render.moment(entry.at_ms)}, as {how}, with {snapshot}{died}"
