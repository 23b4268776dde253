"""The description of the routes for programs: OpenAPI 3.1, of the JSON language.

CDAP's Avro bodies are opaque bytes here; ``docs/rest.md`` has their schemas.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

Document = dict[str, Any]

_LONG: Document = {
    "description": "A 64-bit number; sent as text, taken as either.",
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
_ID: Document = {"type": "string", "pattern": "^[0-9a-fA-F]{40}$"}


def _record(required: list[str], **properties: Document) -> Document:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _or_null(schema: Document) -> Document:
    return {"anyOf": [schema, {"type": "null"}]}


def _is(name: str) -> Document:
    return {"$ref": f"#/components/schemas/{name}"}


_SCHEMAS: Document = {
    "Long": _LONG,
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
            "description": "How long these messages live, if shorter than the topic's ttl.",
        },
    ),
    "PublishResponse": _record(
        ["transactionWritePointer", "rollbackRange"],
        transactionWritePointer=_is("Long"),
        rollbackRange=_record(
            ["startTimestamp", "startSequenceId", "endTimestamp", "endSequenceId"],
            startTimestamp=_is("Long"),
            startSequenceId=_SEQUENCE,
            endTimestamp=_is("Long"),
            endSequenceId=_SEQUENCE,
        ),
    ),
    "ConsumeRequest": _record(
        [],
        startFrom=_or_null({"oneOf": [_record(["id"], id=_ID), _record(["timeMs"], timeMs=_is("Long"))]}),
        inclusive={"type": "boolean", "default": True},
        limit={"type": ["integer", "null"], "minimum": 1, "maximum": 2**31 - 1},
        transaction={
            "type": ["string", "null"],
            "contentEncoding": "base64",
            "description": "The Thrift struct of a Tephra transaction.",
        },
    ),
    "ConsumeResponse": {"type": "array", "items": _record(["id", "payload"], id=_ID, payload=_is("Payload"))},
}

_CODES = {
    400: "The request is wrong; the text says how.",
    404: "There is no such topic.",
    409: "There is such a topic already.",
    413: "The body is larger than server.max_request_mb.",
    415: "The body is compressed in a way that is not served.",
    500: "It failed; whether anything was written may be unknown.",
    503: "Not now: nothing was done, and the same request may succeed later.",
}


def _operation(
    summary: str, codes: list[int], *, body: Document | None = None, done: Document | None = None, **more: Any
) -> Document:
    answers = {str(code): {"description": _CODES[code], "content": {"text/plain": {}}} for code in codes}
    operation: Document = {"summary": summary, "responses": {"200": done or {"description": "Done."}} | answers, **more}
    if body is not None:
        operation["requestBody"] = body
    return operation


def _either(name: str, *, required: bool = True) -> Document:
    """A body in one of the two languages."""
    content = {"application/json": {"schema": _is(name)}, "avro/binary": {}}
    return {"required": required, "content": content}


def _answer(description: str, schema: Document, *, avro: bool = True) -> Document:
    content: Document = {"application/json": {"schema": schema}}
    return {"description": description, "content": content | ({"avro/binary": {}} if avro else {})}


def _path_parameter(name: str, pattern: str) -> Document:
    return {"name": name, "in": "path", "required": True, "schema": {"type": "string", "pattern": pattern}}


_NAMESPACE = _path_parameter("namespace", "^[a-zA-Z0-9_]+$")
_TOPIC = _path_parameter("topic", "^[a-zA-Z0-9_-]+$")
_BODY = [400, 413, 415]
_TEXT: Document = {"description": "Text.", "content": {"text/plain": {}}}


def _topics() -> Document:
    properties = {"content": {"application/json": {"schema": _is("Properties")}}}
    names = {"type": "array", "items": {"type": "string"}}
    return {
        "": {
            "parameters": [_NAMESPACE],
            "get": _operation("List the topics.", [400, 500], done=_answer("Their names.", names, avro=False)),
        },
        "/{topic}": {
            "parameters": [_NAMESPACE, _TOPIC],
            "put": _operation("Create a topic.", [*_BODY, 409, 500], body=properties),
            "get": _operation(
                "A topic's properties.",
                [400, 404, 500],
                done=_answer("All properties, generation and ttl among them.", _is("Properties"), avro=False),
            ),
            "delete": _operation("Delete a topic; its messages are gone at once.", [400, 404, 500]),
        },
        "/{topic}/properties": {
            "parameters": [_NAMESPACE, _TOPIC],
            "put": _operation("Replace a topic's properties.", [*_BODY, 404, 500], body=properties),
        },
    }


def _messages() -> Document:
    codes = [*_BODY, 404, 500, 503]
    published = _answer("On disk. In a transaction: what rollback takes; else empty.", _is("PublishResponse"))
    calls = {
        "publish": ("Publish messages, or in a transaction what was stored.", "PublishRequest", published),
        "store": ("Store payloads of a transaction, to be published later.", "PublishRequest", None),
        "rollback": ("Take back a transactional publish.", "PublishResponse", None),
        "poll": ("Read messages.", "ConsumeRequest", _answer("The messages.", _is("ConsumeResponse"))),
    }
    return {
        f"/{{topic}}/{name}": {
            "parameters": [_NAMESPACE, _TOPIC],
            "post": _operation(summary, codes, body=_either(schema), done=done),
        }
        for name, (summary, schema, done) in calls.items()
    }


def openapi() -> Document:
    """The document."""
    routes = {f"/v1/namespaces/{{namespace}}/topics{path}": item for path, item in (_topics() | _messages()).items()}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Transactional messaging", "version": version("tms-janitor")},
        "paths": routes
        | {
            "/ping": {"get": _operation("Whether the server answers.", [], done=_TEXT)},
            "/metrics": {"get": _operation("Metrics for Prometheus.", [], done=_TEXT)},
            "/openapi.json": {"get": _operation("This document.", [], done=_answer("OpenAPI.", {}, avro=False))},
        },
        "components": {"schemas": _SCHEMAS},
    }
