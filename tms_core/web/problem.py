"""Error responses: plain text for CDAP's clients, or problem JSON (RFC 9457) for clients that accept JSON.

In both forms the header ``X-TMS-Error`` has the code of the error, so the text is compatible with CDAP.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from http import HTTPStatus

from starlette.responses import Response

#: The header with the code of an error.
CODE = b"x-tms-error"
#: The content types of both forms.
TEXT, JSON = b"text/plain; charset=utf-8", b"application/problem+json"
#: The content types of an ``Accept`` header that select problem JSON.
_JSON_TYPES = (JSON, b"application/json")


def accepts_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request's ``Accept`` header names JSON."""
    return any(name == b"accept" and any(kind in value.lower() for kind in _JSON_TYPES) for name, value in headers)


def problem(status: int, code: str, detail: str, hint: str = "") -> bytes:
    """Return the body of an error response in JSON.

    Args:
        status: the HTTP status of the response.
        code: the code of the error (``TMS-…``).
        detail: the failure and its cause.
        hint: the next step; omitted if it is empty.
    """
    body = {"title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    return json.dumps(body | ({"hint": hint} if hint else {})).encode()


def response(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response in JSON; see :func:`problem` for the arguments."""
    body = problem(status, code, detail)
    return Response(body, status, {CODE.decode(): code, **(headers or {})}, media_type=JSON.decode())
