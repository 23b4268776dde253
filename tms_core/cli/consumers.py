"""``tms consumer``: positions and lags of the consumers of a running server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar

import click

from tms_core.cli.help import CommandGroup
from tms_core.cli.remote import Remote, remote, topic_argument
from tms_core.cli.typed import MessageIdType, Moment, SinceType, TopicType
from tms_core.clock import SystemClock
from tms_core.errors import Forbidden, TopicNotFound
from tms_core.logs.printable import columns, duration, moment
from tms_core.rowkey import MessageId
from tms_core.topic import WILDCARDS, TopicId

if TYPE_CHECKING:
    from tms_core.client import Client, ConsumerPosition, FailedMessages, OpenClaim

T = TypeVar("T")

#: The highest sequence number of a message within a millisecond.
LAST_SEQUENCE = 0xFFFF

#: The group that reads dead letters to redrive them, and the maximum number of messages in a transaction.
_REDRIVE_GROUP, _REDRIVE_BATCH = "redrive", 500


@click.group("consumer", cls=CommandGroup)
def consumer() -> None:
    """Show consumers and set their positions."""


@consumer.command("list")
@click.argument("pattern", metavar="[NS:PATTERN]", default="default:*")
@remote
def list_consumers(options: Remote, pattern: str) -> None:
    """List consumers with their positions and lags.

    The lag counts the messages that a reader outside transactions sees. The server counts at most
    100,000 rows of a topic; a longer lag is shown as "many", in JSON as null. The janitor's metrics
    count all rows. The command does not change positions. It omits topics that you may not consume
    or that no longer exist.

    \b
    Examples:
      tms consumer list
      tms consumer list default:orders
      tms consumer list 'default:visits-*'    # the partitions of default:visits
      tms consumer list 'shop:*' --format json
    """
    with options.client() as client:
        found = find_in_topics(client, pattern, client.positions)

    def lines() -> Iterator[str]:
        if not found:
            yield f"no topic that matches {pattern} has a consumer"
            return
        rows = [_row(topic, one) for topic, one in found]
        yield from columns([["topic", "consumer", "lag", "oldest unread", "updated", ""], *rows])

    options.print([_value(topic, one) for topic, one in found], lines)


@consumer.command("show")
@topic_argument
@click.argument("name")
@remote
def show(options: Remote, topic: TopicId, name: str) -> None:
    """Show the position of a consumer, its claims and failures.

    The position is the ID of the last read message; you can pass it to tms poll --after. A claim is a
    batch of a transaction in progress; the batch counts as read after the commit. Failed messages were
    delivered to a program that did not process them. After a message has failed alone, its ID is shown.

    \b
    Example:
      tms consumer show default:orders billing
    """
    with options.client() as client:
        position, claims, failed = client.position(topic, name), client.claims(topic, name), client.failed(topic, name)
    value = {
        "topic": str(topic),
        "name": name,
        "position": str(position),
        "time_ms": position.publish_ms,
        "claims": [_claim(claim) for claim in claims],
        "failed": [_failed_fields(one) for one in failed],
    }

    def lines() -> Iterator[str]:
        yield f"{position}  published {moment(position.publish_ms)}"
        if claims:
            rows = [[str(claim[field]) for field in claim] for claim in map(_claim, claims)]
            yield from columns([["transaction", "after", "up to", "deliveries"], *rows])
        if failed:
            head = ["failed message", "after", "up to", "deliveries", "next delivery"]
            yield from columns([head, *([str(cell or "") for cell in _failed_fields(one).values()] for one in failed)])

    options.print(value, lines)


@consumer.command("release")
@topic_argument
@click.argument("name")
@remote
def release(options: Remote, topic: TopicId, name: str) -> None:
    """Release the open claims of a consumer.

    Other workers then get the messages. The command invalidates the transactions of the claims: their
    writes never become visible, and their workers get an error when they commit. Use it for workers
    that hang. The claims of a crashed worker are released when its transaction times out.

    \b
    Example:
      tms consumer release default:orders billing
    """
    with options.client() as client:
        pointers = sorted({claim.transaction for claim in client.claims(topic, name)})
        with options.transactions() as service:
            released = [pointer for pointer in pointers if service.invalidate(pointer)]
    finished = len(pointers) - len(released)
    found = f"{len(released)} transactions of {name} were invalidated" + (
        f", {finished} had already finished" if finished else ""
    )
    options.print({"released": [str(pointer) for pointer in released], "had_ended": finished}, lambda: [found])


@consumer.command("redrive")
@topic_argument
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of messages.")
@remote
def redrive(options: Remote, topic: TopicId, limit: int | None) -> None:
    """Publish the dead letters of a topic to the topic again.

    The command reads NS:TOPIC-dead as the consumer group "redrive" and publishes to NS:TOPIC in the
    same transactions, so it publishes each message exactly once. All consumers of NS:TOPIC get the
    messages, with new ids and without keys. The messages also stay in NS:TOPIC-dead until they
    expire.

    \b
    Examples:
      tms consumer redrive default:orders
      tms consumer redrive default:orders --limit 10
    """
    from tms_core.client.work import dead_letters_of  # noqa: PLC0415 the import of the client is slow

    dead = dead_letters_of(topic)
    with options.client() as client:
        moved = _republish(client, dead, topic, limit)
    found = f"{moved} messages of {dead} were published to {topic}"
    options.print({"topic": str(topic), "from": str(dead), "messages": moved}, lambda: [found])


def _republish(client: Client, dead: TopicId, topic: TopicId, limit: int | None) -> int:
    """Publish dead letters again, one batch per transaction, up to the last one at the start."""
    try:
        last = max((message.id for message in client.poll(dead)), default=MessageId(0, 0))
    except TopicNotFound as error:
        hint = f"{topic} has dead letters only if a worker sets max_deliveries."
        raise TopicNotFound(error.message, hint) from error
    moved, has_more = 0, last != MessageId(0, 0)
    while has_more and (limit is None or moved < limit):
        size = _REDRIVE_BATCH if limit is None else min(_REDRIVE_BATCH, limit - moved)
        with client.transaction() as tx:
            batch = list(tx.consume(dead, _REDRIVE_GROUP, limit=size))
            tx.publish(topic, [message.payload for message in batch])
        moved += len(batch)
        # Messages that fail again become later dead letters; without this limit, the loop might never end.
        has_more = bool(batch) and batch[-1].id < last
    return moved


@consumer.command("set")
@topic_argument
@click.argument("name")
@click.option("--to", "position", type=MessageIdType(), metavar="ID", help="Last message that the consumer has read.")
@click.option("--since", type=SinceType(), help="Continue with messages of this time and later: 1h (ago), now, …")
@click.option("--force", is_flag=True, help="Invalidate the transactions of open claims first.")
@remote
def set_position(
    options: Remote, topic: TopicId, name: str, position: MessageId | None, since: Moment | None, *, force: bool
) -> None:
    """Set the position of a consumer.

    A consumer that does not exist is registered.

    \b
    Examples:
      tms consumer set default:orders billing --since now
      tms consumer set default:orders billing --since 2026-11-14T00:00:00Z
    """
    if since is not None and position is None:
        position = MessageId(max(0, since.at(SystemClock().now_ms()) - 1), LAST_SEQUENCE)
    elif since is not None or position is None:
        raise click.UsageError("missing position: give --to ID or --since TIME")
    with options.client() as client:
        client.set_position(topic, name, position, force=force)
    options.print(
        {"topic": str(topic), "name": name, "position": str(position)},
        lambda: [f"{name} continues in {topic} after {position}"],
    )


@consumer.command("delete")
@topic_argument
@click.argument("name")
@click.option("--force", is_flag=True, help="Invalidate the transactions of open claims first.")
@remote
def delete(options: Remote, topic: TopicId, name: str, *, force: bool) -> None:
    """Delete a consumer; messages are no longer kept for it.

    \b
    Example:
      tms consumer delete default:orders billing
    """
    with options.client() as client:
        client.delete_position(topic, name, force=force)
    options.print({"deleted": name}, lambda: [f"consumer {name} of {topic} is deleted"])


def find_in_topics(client: Client, pattern: str, find: Callable[[TopicId], Iterable[T]]) -> list[tuple[TopicId, T]]:
    """Call ``find`` for each topic whose name matches a pattern, and return the results; report omitted topics.

    Raises:
        TopicNotFound, Forbidden: the pattern is the name of one topic, which does not exist or may not be read.
    """
    namespace, colon, name = pattern.partition(":")
    if not (namespace and colon and name) or not namespace.replace("_", "").isalnum():
        raise click.UsageError(f"invalid pattern {pattern!r}: use NAMESPACE:TOPIC, as in 'default:*'")
    if WILDCARDS.isdisjoint(name):
        topic = TopicType()(pattern)
        return [(topic, one) for one in find(topic)]
    found: list[tuple[TopicId, T]] = []
    skipped_count = 0
    for topic in client.topics(namespace):
        if not fnmatchcase(topic.topic, name):
            continue
        try:
            found += [(topic, one) for one in find(topic)]
        except (Forbidden, TopicNotFound):
            skipped_count += 1
    if skipped_count:
        topics = "1 topic was" if skipped_count == 1 else f"{skipped_count} topics were"
        click.echo(f"{topics} omitted: no permission, or deleted during the command", err=True)
    return found


def _value(topic: TopicId, one: ConsumerPosition) -> dict[str, Any]:
    return {
        "topic": str(topic),
        "name": one.name,
        "position": str(one.position),
        "lag_messages": None if one.lag_is_at_least else one.lag_messages,
        "lag_is_at_least": one.lag_is_at_least,
        "lag_seconds": one.lag_seconds,
        "updated": one.updated.isoformat(),
        "expired": one.expired,
    }


def _claim(claim: OpenClaim) -> dict[str, Any]:
    return {
        "transaction": str(claim.transaction),
        "after": str(claim.after),
        "last": str(claim.last),
        "deliveries": claim.deliveries,
    }


def _failed_fields(one: FailedMessages) -> dict[str, Any]:
    return {
        "message": None if one.message is None else str(one.message),
        "after": str(one.after),
        "last": str(one.last),
        "deliveries": one.deliveries,
        "again": None if one.again is None else one.again.isoformat(),
    }


def _row(topic: TopicId, one: ConsumerPosition) -> list[str]:
    # Hide a lower bound, because it may be far below the lag.
    lag = "many" if one.lag_is_at_least else f"{one.lag_messages:,}"
    oldest = f"{duration(round(one.lag_seconds * 1000))} ago" if one.lag_messages else ""
    updated = f"{one.updated:%Y-%m-%d %H:%M:%S} UTC"
    return [str(topic), one.name, lag, oldest, updated, "may have missed expired messages" if one.expired else ""]
