"""The requests of producers, and the headers that identify the producer of a request."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote
from uuid import UUID

from tms_core.client.protocol.calls import Call, Topic, nothing, path_of, topic_id
from tms_core.client.protocol.messages import time_at
from tms_core.errors import BadRequest, ProducerNotFound
from tms_core.messaging.model import LABEL_BYTES
from tms_core.topic import CONSUMER_NAME

T = TypeVar("T")

#: Half of a surrogate pair, which UTF-8 cannot encode.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class PreviousTransaction:
    """The last transaction of a producer's previous instances that was not aborted, or the last of aborted ones only.

    Attributes:
        transaction: the transaction's id.
        label: the transaction's label.
        outcome: ``committed`` or ``aborted``; ``pending`` while it is not decided.
    """

    transaction: int
    label: str
    outcome: str


@dataclass(frozen=True, slots=True)
class ProducerState:
    """A producer as the server knows it.

    Attributes:
        name: the producer's name.
        generation: the generation of the newest instance.
        updated: the registration time of that instance.
        previous: the last transaction before that instance, with its outcome; None: there was no transaction.
        open: the transactions in progress, each with its label.
    """

    name: str
    generation: int
    updated: datetime
    previous: PreviousTransaction | None
    open: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Signature:
    """The headers that identify the producer of a request.

    Attributes:
        home, name: the producer's topic and name.
        generation: the generation of the instance.
        sequence: the number of the request; None: the request is not numbered.
        label: the label of the transaction.
        oldest_open: the oldest transaction of the instance that may still be open; None: no transaction is open.
    """

    home: str
    name: str
    generation: int
    sequence: int | None
    label: str = ""
    oldest_open: int | None = None

    def on(self, call: Call[T]) -> Call[T]:
        """Return the request with these headers, marked as repeatable."""
        headers = {"x-tms-producer": f"{self.home}/{self.name}", "x-tms-generation": str(self.generation)}
        if self.sequence is not None:
            headers["x-tms-sequence"] = str(self.sequence)
        if self.label:
            headers["x-tms-label"] = quote(self.label)
        if self.oldest_open is not None:
            headers["x-tms-oldest-open"] = str(self.oldest_open)
        return replace(call, headers={**call.headers, **headers}, again=True)


def check_label(label: object) -> None:
    """Check the label of a transaction.

    Raises:
        BadRequest: the label is too long, or not text that UTF-8 can encode.
    """
    if not isinstance(label, str) or _HALF_PAIR.search(label):
        raise BadRequest(f"{label!r} cannot be a label.", "Use text that UTF-8 can encode.")
    if (size := len(label.encode())) > LABEL_BYTES:
        raise BadRequest(f"A label of {size} bytes is too long.", f"Use at most {LABEL_BYTES} bytes.")


class RegisteredInstance(NamedTuple):
    """The response to the registration of an instance.

    Attributes:
        generation: the generation of the instance.
        previous: the last transaction before that instance, with its outcome; None: there was no transaction.
        undecided: older instances' transactions, which the new instance must invalidate and report the outcomes of.
    """

    generation: int
    previous: PreviousTransaction | None
    undecided: list[int]


def register(home: Topic, name: str, instance: UUID, ended: Mapping[int, str]) -> Call[RegisteredInstance]:
    def read(body: bytes) -> RegisteredInstance:
        fields = json.loads(body)
        return RegisteredInstance(
            int(fields["generation"]), _previous(fields["former"]), [*map(int, fields["undecided"])]
        )

    fields = {"ended": {str(pointer): outcome for pointer, outcome in ended.items()}} if ended else {}
    body = json.dumps({"instance": str(instance), **fields}).encode()
    return Call("POST", _path(home, name), read, body, again=True)


def list_producers(home: Topic) -> Call[list[ProducerState]]:
    def read(body: bytes) -> list[ProducerState]:
        return [_state(fields["name"], fields) for fields in json.loads(body)]

    return Call("GET", path_of(home, "producers"), read, again=True)


def show(home: Topic, name: str) -> Call[ProducerState]:
    return Call(
        "GET", _path(home, name), lambda body: _state(name, json.loads(body)), again=True, missing=ProducerNotFound
    )


def delete(home: Topic, name: str) -> Call[None]:
    return Call("DELETE", _path(home, name), nothing, missing=ProducerNotFound)


def _path(home: Topic, name: object) -> str:
    if not isinstance(name, str) or not CONSUMER_NAME.fullmatch(name):
        raise BadRequest(f"{name!r} cannot be a producer.", "Use at most 255 letters, digits, '_' and '-'.")
    return path_of(topic_id(home), f"producers/{name}")


def _previous(fields: Mapping[str, str] | None) -> PreviousTransaction | None:
    return (
        None if fields is None else PreviousTransaction(int(fields["transaction"]), fields["label"], fields["outcome"])
    )


def _state(name: str, fields: Mapping[str, Any]) -> ProducerState:
    open_ = {int(entry["transaction"]): entry["label"] for entry in fields["open"]}
    updated = time_at(int(fields["updatedMs"]))
    return ProducerState(name, int(fields["generation"]), updated, _previous(fields["former"]), open_)
