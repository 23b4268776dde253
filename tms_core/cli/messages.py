"""``tms publish`` and ``tms poll``: publish and print messages, as lines of text or as bytes.

``tms publish`` sends lines from a pipe as they arrive, all available lines in one request. Therefore a file is sent in
large batches, and a program that writes few lines is not delayed.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from tms_core.cli.help import Command
from tms_core.cli.remote import Remote, remote, topic_argument
from tms_core.cli.typed import MessageIdType, Moment, SinceType, TtlType
from tms_core.clock import SystemClock
from tms_core.errors import TmsError
from tms_core.logs.printable import moment, printable
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from tms_core.client import Client, Message

#: The size of a read, in bytes: a file needs few requests, and each is far below the server's limit.
_READ_BYTES = 1 << 20
#: The number of hex digits in a message's id.
_ID_DIGITS = 40
#: The maximum number of lines in a request; servers accept ten times as many short messages.
_BATCH_LINES = 16_000
#: The maximum size of a line, in bytes; longer input is a file without lines.
_MAX_LINE_BYTES = 8 << 20
#: The maximum size of binary input, in bytes: ten times the largest request of a server with default settings.
_MAX_BINARY_BYTES = 100 << 20


# --- publish ---------------------------------------------------------------------------------------------------------


@click.command("publish", cls=Command)
@topic_argument
@click.argument("file", type=click.File("rb"), default="-")
@click.option(
    "-m",
    "--message",
    "messages",
    multiple=True,
    metavar="TEXT",
    help="Message to publish instead of a file; repeatable.",
)
@click.option("--binary", is_flag=True, help="Publish the whole input, at most 100 MB, as one message.")
@click.option("--transaction", "together", is_flag=True, help="Publish in one transaction: all messages or none.")
@click.option(
    "--key", metavar="TEXT", help="Key of the messages; messages with the same key are in one partition, in order."
)
@click.option("--ttl", type=TtlType(), help="Time to live of the messages, if shorter than the topic's ttl.")
@remote
def publish(
    options: Remote,
    topic: TopicId,
    file: BinaryIO,
    messages: tuple[str, ...],
    ttl: int | None,
    key: str | None,
    *,
    binary: bool,
    together: bool,
) -> None:
    """Publish messages.

    Each line of a file or of standard input is one message. The command publishes lines as they arrive.
    If it exits without an error, all messages are on disk.

    \b
    Examples:
      tms publish default:orders orders.txt
      tms publish default:orders -m "hello" -m "world"
      tail -f access.log | tms publish default:clicks --ttl 1h
      tms publish default:images --binary < photo.png
      tms publish default:orders --transaction orders.txt
      tms publish default:visits --key user-7 -m "cart" -m "pay"
    """
    if messages:
        batches: Iterable[list[bytes]] = [[message.encode() for message in messages]]
    elif binary:
        batches = [[_read_binary(file)]]
    else:
        batches = _lines(file)
    with options.client() as client, _count_messages() as count:
        if together:
            with client.transaction() as transaction:
                for batch in batches:
                    transaction.publish(topic, batch, ttl=ttl, key=key)
                    count(len(batch))
        else:
            for batch in batches:
                client.publish(topic, batch, ttl=ttl, key=key)
                count(len(batch))
        if not count.messages:
            # Nothing was sent, so the server has not checked the topic.
            client.topic(topic)
    options.print({"published": count.messages}, lambda: [f"{count.messages:,} published to {topic}"])


def _read_binary(file: BinaryIO) -> bytes:
    data = file.read(_MAX_BINARY_BYTES + 1)
    if len(data) > _MAX_BINARY_BYTES:
        raise click.UsageError(f"the input is larger than {_MAX_BINARY_BYTES >> 20} MB, the limit of a binary message")
    return data


def _lines(file: BinaryIO) -> Iterator[list[bytes]]:
    """Yield the lines of a file without line feeds, as many at once as are available."""
    read: Callable[[int], bytes] = getattr(file, "read1", file.read)
    rest, number = b"", 1
    while piece := read(_READ_BYTES):
        *lines, rest = (rest + piece).split(b"\n")
        for at in range(0, len(lines), _BATCH_LINES):
            yield lines[at : at + _BATCH_LINES]
        number += len(lines)
        if len(rest) > _MAX_LINE_BYTES:
            raise click.UsageError(
                f"line {number} is longer than {_MAX_LINE_BYTES >> 20} MB: use --binary to send the file as one message"
            )
    if rest:
        yield [rest]


class _MessageCounter:
    """A counter of transferred messages, shown on a terminal."""

    def __init__(self) -> None:
        self.messages = 0
        self._is_terminal = sys.stderr.isatty()

    def __call__(self, messages: int) -> None:
        self.messages += messages
        if self._is_terminal:
            click.echo(f"\r{self.messages:,} messages", nl=False, err=True)

    def end(self) -> None:
        if self._is_terminal and self.messages:
            click.echo(err=True)


@contextmanager
def _count_messages() -> Iterator[_MessageCounter]:
    """Count published messages, and report them if publishing fails."""
    count = _MessageCounter()
    try:
        yield count
    except TmsError:
        if count.messages:
            click.echo(f"{count.messages:,} messages were sent before the error", err=True)
        raise
    finally:
        count.end()


# --- poll ------------------------------------------------------------------------------------------------------------


class PlaceType(click.ParamType[MessageId | Moment]):
    """A message's id, which has 40 hex digits, or a time, which is shorter."""

    name = "place"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> MessageId | Moment:
        kind = MessageIdType() if isinstance(value, str) and len(value) == _ID_DIGITS else SinceType()
        return kind.convert(value, param, ctx)


@click.command("poll", cls=Command)
@topic_argument
@click.option("-f", "--follow", is_flag=True, help="Wait for new messages, until Ctrl-C.")
@click.option("-n", "--limit", type=click.IntRange(1), metavar="N", help="Stop after this number of messages.")
@click.option("--since", type=SinceType(), help="Start at a time: 10m (ago), 2026-11-14T22:13:20Z, or milliseconds.")
@click.option("--from", "first", type=MessageIdType(), metavar="ID", help="Start at this message.")
@click.option("--after", type=PlaceType(), metavar="ID|TIME", help="Start after this message or millisecond.")
@click.option("--consumer", metavar="NAME", help="Start at this consumer's position, without changing it.")
@click.option("--commit", is_flag=True, help="Store the position after the printed messages; requires --consumer.")
@click.option("--committed", is_flag=True, help="Read in a transaction: no undecided or rolled back messages.")
@click.option("--raw", is_flag=True, help="Print only payloads, each followed by a line feed.")
@remote
def poll(
    options: Remote,
    topic: TopicId,
    limit: int | None,
    since: Moment | None,
    first: MessageId | None,
    after: MessageId | Moment | None,
    consumer: str | None,
    *,
    commit: bool,
    follow: bool,
    committed: bool,
    raw: bool,
) -> None:
    """Print the messages of a topic.

    The command starts at the first message, or where --since, --from, --after or --consumer
    points. It changes neither the topic nor the position of a consumer, unless you add --commit.
    With --format json each line is an object with id, time_ms and payload, which is
    {"base64": ...} if it is not text.

    \b
    Examples:
      tms poll default:orders
      tms poll default:orders -f --since 10m
      tms poll default:orders -n 5 --format json | jq .payload
      tms poll default:orders --committed --raw > orders.txt
      tms poll default:orders --consumer billing
      tms poll default:orders --consumer billing --commit -n 100
    """
    if sum(place is not None for place in (since, first, after, consumer)) > 1:
        raise click.UsageError("--since, --from, --after and --consumer exclude each other")
    if commit and consumer is None:
        raise click.UsageError("--commit requires --consumer NAME, the consumer whose position it sets")
    write = _raw if raw else _json if options.format == "json" else _text
    with options.client() as client:
        place = first or after or since
        start = _time(place) if isinstance(place, Moment) else place
        if consumer is not None:
            start = client.position(topic, consumer)
        inclusive = after is None and consumer is None
        messages = _messages(client, topic, start, limit, inclusive=inclusive, follow=follow, committed=committed)
        last: MessageId | None = None
        for message in messages:
            write(message)
            if follow:
                sys.stdout.flush()
                if commit and consumer is not None:
                    client.set_position(topic, consumer, message.id)
            last = message.id
        if commit and consumer is not None and not follow and last is not None:
            sys.stdout.flush()  # before the position, because unwritten messages must stay unread
            client.set_position(topic, consumer, last)


def _time(moment: Moment) -> datetime:
    return datetime.fromtimestamp(max(0, moment.at(SystemClock().now_ms())) / 1000, UTC)


def _messages(
    client: Client,
    topic: TopicId,
    start: MessageId | datetime | None,
    limit: int | None,
    *,
    inclusive: bool,
    follow: bool,
    committed: bool,
) -> Iterator[Message]:
    if follow:
        with client.consume(
            topic, start=start, inclusive=inclusive, read="committed" if committed else "uncommitted"
        ) as coming:
            yield from islice(coming, limit)
        return
    view = None
    if committed:
        # A reader needs only the snapshot, so the transaction can end before the read.
        with client.transaction() as transaction:
            view = transaction.transaction
    yield from client.poll(topic, start=start, inclusive=inclusive, limit=limit, transaction=view)


def _raw(message: Message) -> None:
    sys.stdout.buffer.write(message.payload + b"\n")


def _json(message: Message) -> None:
    payload: str | dict[str, str]
    try:
        payload = message.payload.decode()
    except UnicodeDecodeError:
        payload = {"base64": base64.b64encode(message.payload).decode("ascii")}
    found = {"id": str(message.id), "time_ms": message.id.publish_ms, "payload": payload}
    text = json.dumps(found, ensure_ascii=False)
    # json.dumps escapes ASCII control characters only; other control characters also move a terminal's cursor.
    sys.stdout.write("".join(char if char.isprintable() else json.dumps(char)[1:-1] for char in text) + "\n")


def _text(message: Message) -> None:
    """Print time, id and payload of a message in one line; escape control characters."""
    text = message.payload.decode(errors="backslashreplace")
    sys.stdout.write(f"{moment(message.id.publish_ms)}  {message.id}  {printable(text)}\n")
