"""``tms topic``: create, show, change and delete topics of a running server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

import click

from tms_core.cli.help import CommandGroup, combine_options
from tms_core.cli.outcome import arguments
from tms_core.cli.remote import Remote, remote, topic_argument
from tms_core.cli.typed import TtlType
from tms_core.clock import SystemClock
from tms_core.errors import Forbidden
from tms_core.logs.printable import columns, complete, duration, moment
from tms_core.messaging.topics.partitions import PARTITIONS
from tms_core.topic import BY_TTL, CONSUMED, RETENTION, TopicId, parse_java_int

if TYPE_CHECKING:
    from tms_core.client import Ages, Client

#: The tolerated difference when a message's time is later than this machine's clock.
ALLOWANCE = timedelta(minutes=5)


#: The options for properties of a topic.
_changes = combine_options(
    click.option("--ttl", type=TtlType(), help="Time to live of the messages: 7d, 1h30m, or seconds."),
    click.option(
        "--property", "properties", multiple=True, metavar="NAME=VALUE", help="Set another property; repeatable."
    ),
    click.option(
        "--retention",
        type=click.Choice([BY_TTL, CONSUMED]),
        help="consumed: a message is deleted when all consumers have processed it, or when its ttl ends.",
    ),
    click.option("--partitions", type=int, metavar="N", help="Number of partitions."),
)
_counted = click.option("--count", is_flag=True, help="Also count the messages; this reads all of them.")


@click.group("topic", cls=CommandGroup)
def topic() -> None:
    """Create, show, change and delete topics."""


@topic.command("create")
@topic_argument
@_changes
@remote
def create(
    options: Remote,
    topic: TopicId,
    ttl: int | None,
    retention: str | None,
    partitions: int | None,
    properties: tuple[str, ...],
) -> None:
    """Create a topic.

    Without --ttl the topic gets the server's default (server.default_ttl_seconds).
    With --partitions, the messages are in TOPIC-0, TOPIC-1 and so on, by their keys.

    \b
    Examples:
      tms topic create default:orders
      tms topic create default:clicks --ttl 3d
      tms topic create default:jobs --retention consumed
      tms topic create default:visits --partitions 8
      tms topic create default:views --property 'routes={"users": 2, "pages": 3}'
    """
    with options.client() as client:
        client.create_topic(topic, ttl=ttl, properties=_properties(properties, retention, partitions))
        _print(options, client.topic(topic).properties, topic)


@topic.command("list")
@click.argument("namespace", required=False)
@click.option("--all", "everything", is_flag=True, help="List the topics of all namespaces.")
@_counted
@remote
def list_topics(options: Remote, namespace: str | None, *, everything: bool, count: bool) -> None:
    """List the topics of a namespace.

    \b
    Examples:
      tms topic list
      tms topic list --all
      tms topic list system
      tms topic list --count
    """
    if everything and namespace is not None:
        raise click.UsageError("a namespace and --all exclude each other")
    with options.client() as client:
        found = client.topics(None if everything else namespace or "default")
        counts = {one: _count(client, one) for one in found} if count else {}
    if namespace is None and not everything and options.format == "table":
        click.echo(f"only namespace default; all topics: {complete('tms topic list --all', arguments())}", err=True)
    if count:
        value: list[Any] = [{"topic": str(one), "messages": counts[one]} for one in found]
        rows = [[str(one), f"{counts[one]:,}"] for one in found]
        options.print(value, lambda: columns([["topic", "messages"], *rows]))
        return
    names = [str(one) for one in found]
    options.print(names, lambda: names)


@topic.command("show")
@topic_argument
@_counted
@remote
def show(options: Remote, topic: TopicId, *, count: bool) -> None:
    """Show the properties of a topic: ttl, generation and others.

    \b
    Examples:
      tms topic show default:orders
      tms topic show default:orders --count
    """
    with options.client() as client:
        properties = client.topic(topic).properties
        _print(options, properties, topic, _count(client, topic) if count else None, ahead_ms=_ahead_ms(client, topic))


@topic.command("update")
@topic_argument
@_changes
@remote
def update(
    options: Remote,
    topic: TopicId,
    ttl: int | None,
    retention: str | None,
    partitions: int | None,
    properties: tuple[str, ...],
) -> None:
    """Change properties of a topic.

    A shorter ttl hides messages at once, and the command prints their number. The janitor holds these
    messages for janitor.hold_seconds before it deletes them; until then you can revert the change.
    With another number of partitions, the server creates new partitions, and ordered groups read the
    old partitions completely first.

    \b
    Examples:
      tms topic update default:orders --ttl 14d
      tms topic update default:visits --partitions 12
    """
    with options.client() as client:
        before = client.topic(topic)
        # An update replaces all properties, as in CDAP, so it has to include the unchanged ones.
        current = {name: value for name, value in before.properties.items() if name != "generation"}
        target = {**current, **_properties(properties, retention, partitions)}
        shorter = ttl if ttl is not None else parse_java_int(target["ttl"])
        # Count before the change: afterwards, these messages look like messages that were already hidden.
        ages = client.ages(topic, shorter) if shorter is not None and 0 < shorter < before.ttl_seconds else None
        client.update_topic(topic, ttl=ttl, properties=target)
        _print(options, client.topic(topic).properties, topic, hidden=ages)
    if ages is not None and ages.older and options.format == "table":
        click.echo(complete(_describe_hold(topic, before.ttl_seconds, ages.hold_seconds), arguments()), err=True)


@topic.command("delete")
@topic_argument
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@remote
def delete(options: Remote, topic: TopicId, *, yes: bool) -> None:
    """Delete a topic and all its messages.

    \b
    Example:
      tms topic delete default:orders
    """
    with options.client() as client:
        client.topic(topic)  # fail on a mistyped name before asking for confirmation
        if not yes:
            click.confirm(f"Delete {topic} and all its messages", abort=True, err=True)
        client.delete_topic(topic)
    options.print({"deleted": str(topic)}, lambda: [f"{topic} is deleted"])


def _properties(pairs: tuple[str, ...], retention: str | None, partitions: int | None) -> dict[str, str]:
    properties = {} if retention is None else {RETENTION: retention}
    properties |= {} if partitions is None else {PARTITIONS: str(partitions)}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise click.BadParameter(f"invalid property {pair!r}: use NAME=VALUE", param_hint="--property")
        properties[name] = value
    return properties


def _count(client: Client, topic: TopicId) -> int:
    """Return the number of messages for a reader outside a transaction."""
    return sum(1 for _ in client.poll(topic))


def _ahead_ms(client: Client, topic: TopicId) -> int | None:
    """Return the time of the first message dated ahead of this clock; None: no such message, or no permission."""
    latest = datetime.fromtimestamp(SystemClock().now_ms() / 1000, UTC) + ALLOWANCE
    with suppress(Forbidden):
        return next((message.id.publish_ms for message in client.poll(topic, start=latest, limit=1)), None)
    return None


def _describe_hold(topic: TopicId, ttl_seconds: int, hold_seconds: int | None) -> str:
    """Return how long the janitor holds messages that a shorter TTL has hidden, and the commands for them."""
    keep = f"To keep them:           tms topic update {topic} --ttl {ttl_seconds}"
    if hold_seconds == 0:
        return f"The janitor deletes them with its next run, because janitor.hold_seconds is 0.\n{keep}"
    period = "for the time in janitor.hold_seconds"
    if hold_seconds is not None:
        ends = moment(SystemClock().now_ms() + hold_seconds * 1000)
        period = f"for {duration(hold_seconds * 1000)} from its next run: until about {ends}"
    return (
        f"The janitor holds them before it deletes them, {period}.\n"
        f"To see the deadline:    janitor topic {topic}\n"
        f"{keep}\n"
        f"To release them now:    janitor approve {topic}"
    )


def _print(
    options: Remote,
    properties: Mapping[str, str],
    topic: TopicId,
    messages: int | None = None,
    *,
    hidden: Ages | None = None,
    ahead_ms: int | None = None,
) -> None:
    value: dict[str, Any] = {"topic": str(topic), "properties": dict(properties)}
    if hidden is not None:
        value["hidden"] = hidden._asdict()
    if messages is not None:
        value["messages"] = messages
    if ahead_ms is not None:
        value["ahead_ms"] = ahead_ms

    def lines() -> Iterator[str]:
        ttl = int(properties["ttl"])
        yield f"{topic}: messages live {duration(ttl * 1000)}, generation {properties['generation']}"
        for name in sorted(set(properties) - {"ttl", "generation"}):
            yield f"  {name} = {properties[name]}"
        if messages is not None:
            yield f"  {messages:,} messages"
        if ahead_ms is not None:
            yield f"  messages are dated ahead of this clock, from {moment(ahead_ms)} on: they outlive their ttl"
            remedy = f"  remedy: correct the clock if it is slow; otherwise read them, then: tms topic delete {topic}"
            yield complete(f"{remedy}; then: tms topic create {topic}", arguments())
        if hidden is not None:
            more = "at least " if hidden.at_least else ""
            counts = f"{more}{hidden.older:,} of {more}{hidden.messages:,}"
            yield f"  {counts} messages are older; readers no longer see them"

    options.print(value, lines)
