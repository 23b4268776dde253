"""The routes of producers, and the producer headers of requests."""

from __future__ import annotations

from typing import Any, cast
from urllib.parse import unquote_to_bytes

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tms_core.errors import BadRequest
from tms_core.messaging.producers.requests import Sent
from tms_core.messaging.producers.rows import LastTransaction, Registration, StartedTransaction
from tms_core.server.auth.gate import Need
from tms_core.server.codec.json_text import read_registration
from tms_core.server.rest.body import BodyLimit, Headers
from tms_core.server.rest.context import ContextRoute, ServerContext, named_topic, topic_of
from tms_core.topic import TopicId, cache_names
from tms_core.web.protocol import SEQUENCE

#: The headers of a producer's request: the producer (``namespace:topic/name``), its registered generation, the
#: percent-encoded label of the transaction, and the oldest transaction of the instance that may be open.
PRODUCER, GENERATION = b"x-tms-producer", b"x-tms-generation"
LABEL, OLDEST_OPEN = b"x-tms-label", b"x-tms-oldest-open"
#: The header of a final rejection: a newer instance of the producer is registered.
FENCED = b"x-tms-fenced"
#: The maximum size of a registration, which has about 30 bytes for each reported outcome.
_REGISTRATION = BodyLimit(16 << 20, "the limit of a registration")
_DIGITS = 19


class ProducerRoutes(ContextRoute):
    """The routes of producers."""

    async def producers(self, request: Request) -> Response:
        """``GET …/topics/{topic}/producers``."""
        context, topic = self._context, topic_of(request.scope)
        found = await context.in_thread(request.scope, context.service.producers.of, topic)
        gate, principal = context.gate, request.scope.get("principal")

        def fields(name: str, known: Registration, open_: list[StartedTransaction]) -> dict[str, Any]:
            if gate is None or gate.allows(cast(str, principal), topic, Need.PUBLISH, name):
                return {"name": name, **_registration_fields(known, open_)}
            # The id of a transaction permits writes in it after a restart, when its owner is not known.
            return {"name": name, **_registration_fields(known._replace(previous=None), [])}

        return JSONResponse([fields(*one) for one in found])

    async def producer(self, request: Request) -> Response:
        """``POST``, ``GET`` and ``DELETE …/topics/{topic}/producers/{name}``."""
        context, topic, name = self._context, topic_of(request.scope), request.path_params["name"]
        producers, principal = context.service.producers, request.scope.get("principal")
        if request.method == "POST":
            async with context.body_of(request, read_registration, _REGISTRATION) as (instance, ended):
                known = await context.in_thread(
                    request.scope, producers.register, topic, name, instance, ended, principal
                )
            undecided = [str(pointer) for pointer in known.undecided]
            fields = {
                "generation": str(known.generation),
                "former": _previous_fields(known.previous),
                "undecided": undecided,
            }
            return JSONResponse(fields)
        if request.method == "DELETE":
            await context.in_thread(request.scope, producers.delete, topic, name, principal)
            return Response()
        return JSONResponse(_registration_fields(*await context.in_thread(request.scope, producers.get, topic, name)))


def parse_producer_headers(
    context: ServerContext, principal: str | None, headers: Headers, *, numbered: bool = True
) -> Sent | None:
    """Return the producer headers of a request; None: it has no producer.

    Args:
        context: has the gate, which checks that the principal may publish to the producer's home.
        numbered: whether the request must have a number, like all writes.

    Raises:
        Forbidden: the principal may not publish there.
        BadRequest: a header is missing or invalid.
    """
    named = headers.get(PRODUCER)
    if named is None:
        if any(name in headers for name in (GENERATION, SEQUENCE, LABEL, OLDEST_OPEN)):
            raise BadRequest(
                "The request has headers of a producer without X-TMS-Producer.",
                "Send X-TMS-Producer: namespace:topic/name.",
            )
        return None
    found, name, generation = _instance(named, headers.get(GENERATION, b""))
    if context.gate is not None:
        context.gate.require(cast(str, principal), found, Need.PUBLISH, name)
    sequence = _number(headers.get(SEQUENCE, b""), "X-TMS-Sequence") if numbered else 0
    oldest_open = _number(headers[OLDEST_OPEN], "X-TMS-Oldest-Open") if OLDEST_OPEN in headers else 0
    return Sent(found, name, generation, sequence, _label(headers) if LABEL in headers else "", oldest_open)


@cache_names(4096)
def _instance(producer: bytes, generation: bytes) -> tuple[TopicId, str, int]:
    """Parse the home and the name of a producer, and the generation of its instance."""
    home, slash, name = producer.decode("latin-1").partition("/")
    namespace, colon, topic = home.partition(":")
    if not (slash and colon and topic):
        raise BadRequest("X-TMS-Producer: this is not a producer.", "Send namespace:topic/name.")
    return named_topic(namespace, topic), name, _number(generation, "X-TMS-Generation")


def _number(text: bytes, name: str) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise BadRequest(f"{name}: this is not a number.", "Send the generation and the number of the request.")
    return int(text)


def _label(headers: Headers) -> str:
    try:
        return unquote_to_bytes(headers[LABEL]).decode()
    except UnicodeDecodeError as error:
        raise BadRequest("X-TMS-Label: this is not UTF-8.", "Percent-encode the label's UTF-8.") from error


def _previous_fields(previous: LastTransaction | None) -> dict[str, str] | None:
    if previous is None:
        return None
    return {"transaction": str(previous.transaction), "label": previous.label, "outcome": previous.outcome.value}


def _registration_fields(known: Registration, open_: list[StartedTransaction]) -> dict[str, Any]:
    return {
        "generation": str(known.generation),
        "updatedMs": str(known.updated_ms),
        "former": _previous_fields(known.previous),
        "open": [{"transaction": str(started.pointer), "label": started.label} for started in open_],
    }
