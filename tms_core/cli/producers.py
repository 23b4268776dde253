"""``tms producer``: show, fence and delete the producers of a running server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from tms_core.cli.consumers import find_in_topics
from tms_core.cli.help import CommandGroup
from tms_core.cli.remote import Remote, remote, topic_argument
from tms_core.logs.printable import columns
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from tms_core.client import PreviousTransaction, ProducerState


@click.group("producer", cls=CommandGroup)
def producer() -> None:
    """Show producers and fence their instances."""


@producer.command("list")
@click.argument("pattern", metavar="[NS:PATTERN]", default="default:*")
@remote
def list_producers(options: Remote, pattern: str) -> None:
    """List producers with their generations and open transactions.

    \b
    Examples:
      tms producer list
      tms producer list 'shop:*' --format json
    """
    with options.client() as client:
        found = find_in_topics(client, pattern, client.producers)

    def lines() -> Iterator[str]:
        if not found:
            yield f"no topic that matches {pattern} has a producer"
            return
        rows = [
            [
                str(topic),
                one.name,
                str(one.generation),
                _time(one),
                str(len(one.open)),
                _describe_previous(one.previous),
            ]
            for topic, one in found
        ]
        yield from columns([["topic", "producer", "generation", "registered", "open", "previous"], *rows])

    options.print([_value(topic, one) for topic, one in found], lines)


@producer.command("show")
@topic_argument
@click.argument("name")
@remote
def show(options: Remote, topic: TopicId, name: str) -> None:
    """Show the transactions of a producer.

    The output has the open transactions, and the last transaction before the present instance.

    \b
    Example:
      tms producer show default:bills importer
    """
    with options.client() as client:
        found = client.producer_state(topic, name)

    def lines() -> Iterator[str]:
        yield f"{name} of {topic}: generation {found.generation}, registered {_time(found)}"
        if found.previous is not None:
            yield f"the last transaction before this generation: {_describe_previous(found.previous)}"
        if found.open:
            rows = [[str(pointer), label] for pointer, label in found.open.items()]
            yield from columns([["open transaction", "label"], *rows])

    options.print(_value(topic, found), lines)


@producer.command("fence")
@topic_argument
@click.argument("name")
@remote
def fence(options: Remote, topic: TopicId, name: str) -> None:
    """Fence the running instance of a producer.

    The server invalidates its open transactions. Use this for a program that hangs or that you cannot
    find. The next instance starts as usual and gets the outcome of the last transaction.

    \b
    Example:
      tms producer fence default:bills importer
    """
    with options.client() as client:
        client.producer_state(topic, name)
        with client.producer(topic, name) as fencing:
            generation, previous = fencing.generation, fencing.previous
    value = {"topic": str(topic), "name": name, "generation": str(generation), "previous": _previous(previous)}
    suffix = f"; the last transaction: {_describe_previous(previous)}" if previous is not None else ""
    options.print(value, lambda: [f"instances of {name} before generation {generation} are fenced{suffix}"])


@producer.command("delete")
@topic_argument
@click.argument("name")
@remote
def delete(options: Remote, topic: TopicId, name: str) -> None:
    """Delete a producer and fence its instance.

    The server invalidates its open transactions. The server deletes an idle producer after a week.

    \b
    Example:
      tms producer delete default:bills importer
    """
    with options.client() as client:
        client.delete_producer(topic, name)
    options.print({"deleted": name}, lambda: [f"producer {name} of {topic} is deleted"])


def _time(one: ProducerState) -> str:
    return f"{one.updated:%Y-%m-%d %H:%M:%S} UTC"


def _describe_previous(previous: PreviousTransaction | None) -> str:
    if previous is None:
        return ""
    label = f" ({previous.label})" if previous.label else ""
    return f"{previous.transaction}{label} {previous.outcome}"


def _previous(previous: PreviousTransaction | None) -> dict[str, str] | None:
    if previous is None:
        return None
    return {"transaction": str(previous.transaction), "label": previous.label, "outcome": previous.outcome}


def _value(topic: TopicId, one: ProducerState) -> dict[str, Any]:
    return {
        "topic": str(topic),
        "name": one.name,
        "generation": str(one.generation),
        "updated": one.updated.isoformat(),
        "previous": _previous(one.previous),
        "open": {str(pointer): label for pointer, label in one.open.items()},
    }
