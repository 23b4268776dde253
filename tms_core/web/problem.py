"""Error responses: plain text as CDAP's clients read it, or a problem in JSON (RFC 9457) for clients that ask for JSON.

A response has the error's code in the header ``X-TMS-Error`` in both forms, so the text stays as CDAP has it.
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
#: Parts of an ``Accept`` header that ask for a problem in JSON.
_ASKING = (JSON, b"application/json")


def accepts_json(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether a request's ``Accept`` header names JSON."""
    return any(name == b"accept" and any(kind in value.lower() for kind in _ASKING) for name, value in headers)


def problem(status: int, code: str, detail: str, hint: str = "") -> bytes:
    """Return the body of an error response in JSON.

    Args:
        status: the HTTP status of the response.
        code: of the error (``TMS-…``).
        detail: what failed, and why.
        hint: what to do next; left out if it is empty.
    """
    body = {"title": HTTPStatus(status).phrase, "status": status, "code": code, "detail": detail}
    return json.dumps(body | ({"hint": hint} if hint else {})).encode()


def response(status: int, code: str, detail: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return an error response in JSON; for its arguments see :func:`problem`."""
    body = problem(status, code, detail)
    return Response(body, status, {CODE.decode(): code, **(headers or {})}, media_type=JSON.decode())
