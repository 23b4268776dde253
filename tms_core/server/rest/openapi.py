"""The OpenAPI 3.1 description of the routes, with JSON bodies.

CDAP's Avro bodies are opaque bytes here; ``docs/reference/rest.md`` has their schemas.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from tms_core.messaging.producers.rows import TransactionOutcome

Document = dict[str, Any]

_LONG: Document = {
    "description": "A 64-bit number; sent as text, accepted as text or number.",
    "oneOf": [
        {"type": "string", "pattern": "^-?[0-9]{1,19}$"},
        {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1},
    ],
}
_SEQUENCE: Document = {"type": "integer", "minimum": 0, "maximum": 65535}
_PAYLOAD: Document = {
    "description": "Text, or any bytes as base64.",
    "oneOf": [
        {"type": "string"},
        {
            "type": "object",
            "properties": {"base64": {"type": "string", "contentEncoding": "base64"}},
            "required": ["base64"],
            "additionalProperties": False,
        },
    ],
}
_CODE: Document = {
    "type": "string",
    "pattern": "^TMS-[A-Z-]+$",
    "description": "The code of the error; docs/reference/errors.md lists all codes.",
}
_ID: Document = {"type": "string", "pattern": "^[0-9a-fA-F]{40}$"}


def _record(required: list[str] | None = None, /, **properties: Document) -> Document:
    """Return the schema of an object with these fields; all are required unless ``required`` lists others."""
    names = list(properties) if required is None else required
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


def _or_null(schema: Document) -> Document:
    return {"anyOf": [schema, {"type": "null"}]}


def _is(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


def _is_header(name: str) -> Document:
    return {"$ref": f"#/components/headers/{name}"}


_PRODUCER_FIELDS: Document = {
    "generation": {**_is("Long"), "description": "The generation of the current instance."},
    "updatedMs": {**_is("Long"), "description": "The registration time of that instance."},
    "former": {**_or_null(_is("Former")), "description": "The outcome of the last transaction before this instance."},
    "open": {
        "type": "array",
        "description": "Its transactions in progress.",
        "items": _record(transaction=_is("Long"), label={"type": "string"}),
    },
}

_SCHEMAS: Document = {
    "Long": _LONG,
    "Problem": _record(
        ["title", "status", "code", "detail"],
        title={"type": "string", "description": "The phrase of the HTTP status."},
        status={"type": "integer", "minimum": 400, "maximum": 599},
        code=_CODE,
        detail={"type": "string", "description": "The failure and its cause."},
        hint={"type": "string", "description": "The next step."},
    ),
    "Payload": _PAYLOAD,
    "Properties": {
        "type": "object",
        "additionalProperties": {"type": ["string", "number", "boolean"]},
        "description": "A topic's properties; ttl is in seconds.",
        "examples": [{"ttl": "3600"}],
    },
    "PublishRequest": _record(
        [],
        transactionWritePointer=_or_null(_is("Long")),
        messages={"type": ["array", "null"], "items": _is("Payload")},
        ttlSeconds={
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": 2**31 - 1,
            "description": "The ttl of these messages, if shorter than the topic's ttl.",
        },
    ),
    "PublishResponse": _record(transactionWritePointer=_is("Long"), rollbackRange=_is("RollbackRange")),
    "RollbackRequest": _record(
        ["transactionWritePointer"], transactionWritePointer=_is("Long"), rollbackRange=_is("RollbackRange")
    ),
    "RollbackRange": _record(
        startTimestamp=_is("Long"), startSequenceId=_SEQUENCE, endTimestamp=_is("Long"), endSequenceId=_SEQUENCE
    ),
    "ConsumeRequest": _record(
        [],
        startFrom=_or_null({"oneOf": [_record(id=_ID), _record(timeMs=_is("Long"))]}),
        inclusive={"type": "boolean", "default": True},
        limit={"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1},
        transaction={
            "type": ["string", "null"],
            "contentEncoding": "base64",
            "description": "The Thrift struct of a Tephra transaction.",
        },
        waitSeconds={"type": "integer", "minimum": 0, "maximum": 60, "default": 0},
    ),
    "Ages": _record(
        messages={"type": "integer", "minimum": 0},
        older={"type": "integer", "minimum": 0, "description": "The number of messages older than the requested age."},
        atLeast={"type": "boolean", "description": "Whether there are more messages than were counted."},
        holdSeconds={
            "type": ["integer", "null"],
            "minimum": 0,
            "description": "How long the janitor in this server holds rows after a ttl is shortened; null: no janitor.",
        },
    ),
    "Position": _record(position=_ID),
    "Consumer": _record(
        ["position"],
        position=_ID,
        claims={
            "type": "array",
            "description": "The claims of transactions in progress; absent without claims.",
            "items": _record(
                transaction=_is("Long"),
                after={**_ID, "description": "The id before the first message."},
                last={**_ID, "description": "The id of the last message."},
                deliveries={"type": "integer", "minimum": 1, "description": "The number of deliveries."},
            ),
        },
        failed={
            "type": "array",
            "description": "Delivered, unprocessed messages, at most 100 ranges; absent without such messages.",
            "items": _record(
                message={
                    **_ID,
                    "type": ["string", "null"],
                    "description": "The message that failed in a batch of its own; null: the messages failed together.",
                },
                after={**_ID, "description": "The id before the first message."},
                last={**_ID, "description": "The id of the last message."},
                deliveries={"type": "integer", "minimum": 1, "description": "The number of deliveries."},
                retryMs={
                    "type": ["integer", "null"],
                    "description": "The earliest time of the next delivery; null: the next poll.",
                },
            ),
        },
    ),
    "GroupPollRequest": _record(
        ["transaction"],
        limit={"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1},
        transaction={
            "type": "string",
            "contentEncoding": "base64",
            "description": "The Thrift struct of the Tephra transaction that claims the returned messages.",
        },
    ),
    "GroupRollback": _record(
        ["transactionWritePointer"],
        transactionWritePointer=_is("Long"),
        after=_or_null({**_ID, "description": "Return only messages after this id."}),
    ),
    "Consumers": {
        "type": "array",
        "items": _record(
            name={"type": "string"},
            position={**_ID, "description": "The id of the last message that the consumer has read."},
            lagMessages={"type": "integer", "minimum": 0, "description": "The number of unread messages."},
            lagIsAtLeast={
                "type": "boolean",
                "description": "Whether the count stopped at its limit, so that there may be more.",
            },
            lagSeconds={
                "type": "number",
                "minimum": 0,
                "description": "The age of the oldest unread message; 0 without unread messages.",
            },
            updatedMs={**_is("Long"), "description": "When the position was last stored."},
            expired={"type": "boolean", "description": "Whether messages may have expired unread."},
        ),
    },
    "Registration": _record(
        ["instance"],
        instance={"type": "string", "format": "uuid", "description": "A random UUID; each instance uses a new one."},
        ended={
            "type": "object",
            "description": "The outcomes of transactions that were undecided, by their numbers.",
            "additionalProperties": {"enum": ["committed", "aborted"]},
        },
    ),
    "Registered": _record(
        generation=_is("Long"),
        former=_or_null(_is("Former")),
        undecided={
            "type": "array",
            "description": "Undecided transactions of older instances; report their outcomes in the next registration.",
            "items": _is("Long"),
        },
    ),
    "Former": _record(
        transaction=_is("Long"),
        label={"type": "string", "description": "The label that the producer gave the transaction."},
        outcome={"enum": [outcome.value for outcome in TransactionOutcome]},
    ),
    "Producer": _record(**_PRODUCER_FIELDS),
    "Producers": {"type": "array", "items": _record(name={"type": "string"}, **_PRODUCER_FIELDS)},
    "ConsumeResponse": {"type": "array", "items": _record(id=_ID, payload=_is("Payload"))},
}

_CODES = {
    400: "The request is invalid; the text has the reason.",
    404: "The topic, or its consumer or producer, does not exist.",
    409: "The topic or consumer already exists, claims are open, the transaction has ended, the producer is "
    "fenced (X-TMS-Fenced), or messages are in other partitions (X-TMS-Partitions).",
    413: "The body is larger than the limit (server.max_request_mb, server.max_transaction_ids), or has too many "
    "messages for that limit; or a message is larger than the store accepts.",
    415: "The compression of the body is not supported.",
    500: "The server failed; it may be unknown whether anything was written.",
    503: "Temporarily unavailable: nothing was done, and the same request may succeed later.",
}
_REFUSALS = {
    401: "The token is missing or invalid.",
    403: "The token is valid, but its principal lacks the permission.",
    429: "The principal is above its quota (server.auth.quotas); Retry-After has the wait.",
}
_SCHEMES: Document = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token of the kind in server.auth."}
}


def _error(description: str) -> Document:
    """Describe an error response: text, or a problem in JSON if the request's Accept header names JSON."""
    content: Document = {"text/plain": {}, "application/problem+json": {"schema": _is("Problem")}}
    return {"description": description, "headers": {"X-TMS-Error": _is_header("Error")}, "content": content}


def _operation(
    summary: str, codes: list[int], *, body: Document | None = None, done: Document | None = None, **more: Any
) -> Document:
    answers = {str(code): _error(_CODES[code]) for code in codes}
    operation: Document = {"summary": summary, "responses": {"200": done or {"description": "Done."}} | answers, **more}
    if body is not None:
        operation["requestBody"] = body
    return operation


def _body(name: str, *, avro: bool = True) -> Document:
    """Return a request body in JSON, and with ``avro`` also in Avro."""
    content: Document = {"application/json": {"schema": _is(name)}}
    return {"required": True, "content": content | ({"avro/binary": {}} if avro else {})}


def _answer(description: str, schema: Document, *, avro: bool = True) -> Document:
    content: Document = {"application/json": {"schema": schema}}
    return {"description": description, "content": content | ({"avro/binary": {}} if avro else {})}


def _path_parameter(name: str, pattern: str) -> Document:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": pattern}}


def _header_parameter(name: str, schema: Document, description: str) -> Document:
    return {"name": name, "in": "header", "required": False, "schema": schema, "description": description}


#: The path parameters, in the order of their occurrence in paths.
_IN_PATH = [
    _path_parameter("namespace", "^[a-zA-Z0-9_]+$"),
    _path_parameter("topic", "^[a-zA-Z0-9_-]+$"),
    _path_parameter("name", "^[a-zA-Z0-9_-]{1,255}$"),
]
_FORCE = _header_parameter("X-TMS-Force", {"enum": ["true", "false"]}, "Make the change even if claims are open.")
_ONLY_NEW = _header_parameter("If-None-Match", {"enum": ["*"]}, "Only if the consumer does not exist yet.")
_ORDER = _header_parameter("X-TMS-Order", {"enum": ["partition", "none"]}, "The order of the group: partition or none.")
_MAX_DELIVERIES = _header_parameter(
    "X-TMS-Max-Deliveries",
    {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
    "The maximum number of deliveries of a message; the last delivery has only this message.",
)
_PRODUCER_HEADERS = [
    _header_parameter("X-TMS-Producer", {"type": "string"}, "The producer: namespace:topic/name."),
    _header_parameter(
        "X-TMS-Generation", {"type": "string", "pattern": "^[0-9]{1,19}$"}, "The generation from the registration."
    ),
    _header_parameter("X-TMS-Sequence", {"type": "string", "pattern": "^[0-9]{1,19}$"}, "The number of the request."),
    _header_parameter("X-TMS-Label", {"type": "string"}, "The label of the transaction, percent-encoded."),
    _header_parameter(
        "X-TMS-Oldest-Open",
        {"type": "string", "pattern": "^[0-9]{1,19}$"},
        "The oldest transaction of the instance that may still be open.",
    ),
]
_GROUP_HEADERS: Document = {
    "X-TMS-Deliveries": {"schema": {"type": "integer"}, "description": "The number of deliveries of these messages."},
    "X-TMS-Held": {"schema": {"type": "string"}, "description": "The transaction that must be decided first."},
    "X-TMS-Position": {"schema": _ID, "description": "The position from which the next message may come."},
}
_OLDER_THAN: Document = {
    "name": "olderThanSeconds",
    "in": "query",
    "required": True,
    "schema": {"type": "integer", "minimum": 1, "maximum": 2**31 - 1},
}
_BODY = [400, 413, 415]
_TEXT: Document = {"description": "Text.", "content": {"text/plain": {}}}


def _topics() -> Document:
    properties = {"content": {"application/json": {"schema": _is("Properties")}}}
    names = {"type": "array", "items": {"type": "string"}}
    return {
        "": {"get": _operation("List the topics.", [400, 500], done=_answer("Their names.", names, avro=False))},
        "/{topic}": {
            "put": _operation("Create a topic.", [*_BODY, 409, 500], body=properties),
            "get": _operation(
                "Return a topic's properties.",
                [400, 404, 500],
                done=_answer("All properties, including generation and ttl.", _is("Properties"), avro=False),
            ),
            "delete": _operation("Delete a topic; readers no longer see its messages.", [400, 404, 500]),
        },
        "/{topic}/ages": {
            "get": _operation(
                "Return the number of live messages, and how many a shorter ttl would hide.",
                [400, 404, 500],
                done=_answer("At most 100,000 messages are counted.", _is("Ages"), avro=False),
                parameters=[_OLDER_THAN],
            )
        },
        "/{topic}/properties": {
            "put": _operation("Replace a topic's properties.", [*_BODY, 404, 409, 500], body=properties)
        },
    }


def _consumers() -> Document:
    return {
        "/{topic}/consumers": {
            "get": _operation(
                "Return the positions and lags of the topic's consumers.",
                [400, 404, 500],
                done=_answer("By their names.", _is("Consumers"), avro=False),
            )
        },
        "/{topic}/consumers/{name}": {
            "put": _operation(
                "Store the position of a consumer.",
                [*_BODY, 404, 409, 500],
                body=_body("Position", avro=False),
                parameters=[_FORCE, _ONLY_NEW],
            ),
            "get": _operation(
                "Return the position and lag of a consumer.",
                [400, 404, 500],
                done=_answer("The stored position, and the open claims.", _is("Consumer"), avro=False),
            ),
            "delete": _operation("Delete a consumer.", [400, 404, 409, 500], parameters=[_FORCE]),
        },
        "/{topic}/consumers/{name}/poll": {
            "post": _operation(
                "Claim messages for a transaction, as a member of a consumer group.",
                [*_BODY, 404, 409, 500, 503],
                body=_body("GroupPollRequest"),
                done=_answer("The messages; empty if no message is available.", _is("ConsumeResponse"))
                | {"headers": _GROUP_HEADERS},
                parameters=[_ORDER, _MAX_DELIVERIES],
            )
        },
        "/{topic}/consumers/{name}/rollback": {
            "post": _operation(
                "Release the claims of a transaction before it is aborted.",
                [*_BODY, 404, 409, 500, 503],
                body=_body("GroupRollback"),
            )
        },
    }


def _producers() -> Document:
    registered = _answer(
        "The new generation, and the outcome of the previous instance's last transaction.",
        _is("Registered"),
        avro=False,
    )
    return {
        "/{topic}/producers": {
            "get": _operation(
                "List the topic's producers.", [400, 404, 500], done=_answer("By name.", _is("Producers"), avro=False)
            )
        },
        "/{topic}/producers/{name}": {
            "post": _operation(
                "Register an instance of a producer; older instances are fenced.",
                [*_BODY, 404, 500, 503],
                body=_body("Registration", avro=False),
                done=registered,
            ),
            "get": _operation(
                "Return a producer.",
                [400, 404, 500],
                done=_answer("The producer, with its open transactions.", _is("Producer"), avro=False),
            ),
            "delete": _operation("Delete a producer; its instance is fenced.", [400, 404, 500, 503]),
        },
    }


def _messages() -> Document:
    codes = [*_BODY, 404, 409, 500, 503]
    published = _answer(
        "The messages are durable. In a transaction: the rollback range; otherwise empty.", _is("PublishResponse")
    )
    calls = {
        "publish": ("Publish messages, or the stored payloads of a transaction.", "PublishRequest", published),
        "store": (
            "Store payloads of a transaction for a later publish; without payloads, record a producer's transaction.",
            "PublishRequest",
            None,
        ),
        "rollback": (
            "Roll back a publish of a transaction; without rollbackRange, all of its publishes in the topic.",
            "RollbackRequest",
            None,
        ),
        "poll": ("Read messages.", "ConsumeRequest", _answer("The messages.", _is("ConsumeResponse"))),
    }
    return {
        f"/{{topic}}/{name}": {
            "post": _operation(
                summary,
                codes,
                body=_body(schema),
                done=done,
                **({} if name == "poll" else {"parameters": _PRODUCER_HEADERS}),
            )
        }
        for name, (summary, schema, done) in calls.items()
    }


def _require_tokens(paths: Document) -> Document:
    """Add the required token, and its errors, to all paths except ``/ping``."""
    refusals = {str(code): _error(description) for code, description in _REFUSALS.items()}
    return {
        path: {
            method: {**operation, "responses": operation["responses"] | refusals, "security": [{"token": []}]}
            if method != "parameters" and path != "/ping"
            else operation
            for method, operation in item.items()
        }
        for path, item in paths.items()
    }


def openapi(*, secured: bool = False) -> Document:
    """Return the OpenAPI document.

    Args:
        secured: whether the server requires tokens.
    """
    parts = _topics() | _messages() | _consumers() | _producers()
    routes = {
        f"/v1/namespaces/{{namespace}}/topics{path}": {"parameters": _IN_PATH[: 1 + path.count("{")], **item}
        for path, item in parts.items()
    }
    names = _answer(
        "Names with their namespaces: NAMESPACE:TOPIC.", {"type": "array", "items": {"type": "string"}}, avro=False
    )
    paths = routes | {
        "/v1/topics": {"get": _operation("List the topics of all namespaces.", [500], done=names)},
        "/ping": {"get": _operation("Return 200 if the server runs.", [], done=_TEXT)},
        "/metrics": {"get": _operation("Return the metrics for Prometheus.", [], done=_TEXT)},
        "/openapi.json": {"get": _operation("Return this document.", [], done=_answer("OpenAPI.", {}, avro=False))},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Transactional messaging", "version": version("tms-janitor")},
        "paths": _require_tokens(paths) if secured else paths,
        "components": {"schemas": _SCHEMAS, "headers": {"Error": {"schema": _CODE}}}
        | ({"securitySchemes": _SCHEMES} if secured else {}),
    }
