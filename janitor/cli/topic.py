"""``janitor topic``: size, ttl, holds, consumers and deletions of one topic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.text import Text

from janitor.cli import render
from janitor.cli.options import common_options, session
from janitor.cli.outcome import command_line
from janitor.cli.state import complete_topics, open_state
from janitor.status.collect import collect
from janitor.status.past import topic_detail
from tms_core.cli.help import Command
from tms_core.cli.typed import TopicType
from tms_core.logs.printable import complete_command, duration
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from janitor.app.session import Session

#: Characters for a curve, lowest first.
_BLOCKS = "▁▂▃▄▅▆▇█"


@click.command("topic", cls=Command)
@click.argument("topic", type=TopicType(), metavar="NS:TOPIC", shell_complete=complete_topics)
@common_options
def command(topic: TopicId) -> None:
    """Show one topic: size, ttl, holds, consumers and deletions.

    The command reads the janitor's state, not the store, so it works while a daemon runs. The status
    page shows the same values under /topics/NS:TOPIC.

    \b
    Example:
      janitor topic default:orders --config janitor.yaml
    """
    current = session()
    # After this, the state has recent changes of the TTL.
    current.refresh_status()
    with open_state(current) as state:
        found = topic_detail(state, collect(state, current.deployment(), current.clock), topic) if state else None
    if found is None:
        hint = command_line(current, "inspect meta")
        raise click.UsageError(
            f"unknown topic {topic}: the janitor knows a topic after its first run; list the topics: {hint}"
        )
    if current.as_json:
        render.print_json(found)
        return
    out = render.console()
    for line in lines(current, topic, found):
        out.print(line)


def lines(current: Session, topic: TopicId, found: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the result of ``topic_detail`` as lines."""
    now_ms, figures = found["now_ms"], found["figures"]
    deleted = ", deleted" if figures["generation"] < 0 else ""
    yield Text(f"{topic}", style="bold")
    ttl = duration(figures["ttl_seconds"] * 1000)
    yield render.line("ttl", f"{ttl}; generation {abs(figures['generation'])}{deleted}")
    yield from _size(figures, found["sizes"], now_ms)
    if found["next_due_ms"] is not None:
        late = found["next_due_ms"] <= now_ms
        yield render.line("next due", "now" if late else render.when(found["next_due_ms"], now_ms))
    if figures["overdue_rows"]:
        yield render.line("overdue", f"{figures['overdue_rows']:,} due rows were not deleted by the last run")
    if found["ahead"]:
        commands = (f"tms topic delete {topic}", f"tms topic create {topic}")
        steps = "; then: ".join(complete_command(step, current.arguments()) for step in commands)
        yield render.line(
            "ahead",
            "messages have future timestamps, so they are deleted later than their ttl; if the clock is behind, set it "
            f"right; otherwise read the messages, then: {steps}",
            style="yellow",
        )
    yield from _hold_lines(found["held"], now_ms)
    if found["quarantined"]:
        entry = found["quarantined"]
        retry = f"next attempt {render.when(entry['probe_ms'], now_ms)}"
        yield render.line("quarantined", f"failed {entry['strikes']} times: {entry['error'].rstrip('.')}; {retry}")
    for consumer in found["consumers"]:
        claims = describe_claims(consumer["open_claims"], consumer["redelivered"])
        yield render.line("consumer", f"{consumer['consumer']}: {lag(consumer, now_ms)}", claims)
    for change in found["changes"]:
        yield render.line("changed", f"{_describe_change(change)}, seen {render.when(change['seen_ms'], now_ms)}")
    for entry in found["ledger"]:
        rows = "rows" if entry["rows"] is None else f"{entry['rows']:,} rows"
        rule = entry["rule"].replace("_", " ")
        at = render.when(entry["at_ms"], now_ms)
        yield render.line("deleted", f"{rows} of the {entry['table']} table, {rule}", at, f"run {entry['run_id']}")
    yield render.line("one message", command_line(current, f"why {topic} MESSAGE_ID"))


def lag(consumer: Mapping[str, Any], now_ms: int) -> str:
    """Return the lag of a consumer as text."""
    if not consumer["lag_messages"]:
        return f"has read all, {render.when(consumer['updated_ms'], now_ms)}"
    lag_text = describe_lag(consumer["lag_messages"], consumer["oldest_unread_ms"], now_ms)
    lost = "; some may have expired before it read them" if consumer["expired"] else ""
    return f"{lag_text}; last read {render.when(consumer['updated_ms'], now_ms)}{lost}"


def describe_lag(messages: int, oldest_ms: int | None, now_ms: int) -> str:
    """Return the number of unread messages and the age of the oldest one, as text."""
    age = "" if oldest_ms is None else f", the oldest {duration(now_ms - oldest_ms)} old"
    return f"lag {messages:,} {'message' if messages == 1 else 'messages'}{age}"


def describe_claims(open_claims: int, redelivered: int) -> str:
    """Return the open claims of a consumer group as text; empty if it has none."""
    parts = [
        f"{open_claims:,} open {'claim' if open_claims == 1 else 'claims'}" if open_claims else "",
        f"{redelivered:,} redelivered" if redelivered else "",
    ]
    return ", ".join(part for part in parts if part)


def _size(figures: Mapping[str, Any], sizes: Sequence[Mapping[str, Any]], now_ms: int) -> Iterator[Text]:
    if figures["messages"] is None:
        yield render.line("size", "not counted yet")
        return
    counted = f"counted {render.when(figures['counted_ms'], now_ms)}"
    yield render.line("size", f"{figures['messages']:,} messages, {render.size(figures['size_bytes'])}; {counted}")
    if figures["oldest_ms"] is not None:
        yield render.line("oldest", render.when(figures["oldest_ms"], now_ms))
        yield render.line("newest", render.when(figures["newest_ms"], now_ms))
    if len(sizes) > 1:
        since = duration(now_ms - sizes[0]["counted_ms"])
        curve, highest = _sparkline([size["size_bytes"] for size in sizes])
        yield render.line("over time", f"{curve} in the last {since}, at most {render.size(highest)}")
        curve, highest = _sparkline([size["messages"] for size in sizes])
        yield render.line("", f"{curve} at most {highest:,} messages")


def _sparkline(figures: Sequence[int]) -> tuple[str, int]:
    """Return numbers as a curve of block characters, and the highest number."""
    highest = max(figures)
    return "".join(_BLOCKS[figure * (len(_BLOCKS) - 1) // (highest or 1)] for figure in figures), highest


def _hold_lines(hold: Mapping[str, Any] | None, now_ms: int) -> Iterator[Text]:
    if hold is None:
        return
    until = "" if hold["until_ms"] is None else f", until {render.when(hold['until_ms'], now_ms)}"
    cause = f": {hold['cause']}" if hold["cause"] else ""
    reason = hold["reason"].replace("_", " ")
    yield render.line(
        "held", f"{hold['rows']:,} rows, {render.size(hold['size_bytes'])} ({reason}){until}{cause}", style="yellow"
    )
    if hold["command"]:
        yield render.line("release", hold["command"])
    for command_ in hold["keep"]:
        yield render.line("keep", command_)


def _describe_change(change: Mapping[str, Any]) -> str:
    if change["generation"] != change["generation_before"]:
        return f"generation {change['generation_before']} → {change['generation']}"
    before, after = (duration(change[name] * 1000) for name in ("ttl_before", "ttl_seconds"))
    return f"ttl {before} → {after}"
