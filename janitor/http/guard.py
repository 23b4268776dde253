"""An optional token for the status page, its API and the metrics; probes do not need it.

Prometheus sends it as a bearer token. A browser asks for a user and a password: the password is the token, and the user
name is ignored. The file is read for each request, so you can replace the token while the janitor runs.
"""

from __future__ import annotations

import binascii
import logging
from base64 import b64decode
from hmac import compare_digest
from pathlib import Path
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from tms_core.clock import SystemClock
from tms_core.errors import ConfigurationError, Unauthorized
from tms_core.logs.audit import BoundedAudit, Event
from tms_core.logs.loggers import RateLimitedLogger, get_logger
from tms_core.security.files import token_reader
from tms_core.web import problem
from tms_core.web.failed_attempts import FailedAttempts

_SETTING = "janitor.http.token_file"
_PROBES = ("/healthz", "/readyz")
_CHALLENGE = 'Basic realm="tms-janitor", charset="UTF-8"'


def guarded(app: ASGIApp, token_file: Path | None, failed: FailedAttempts | None = None) -> ASGIApp:
    """Return an application that serves requests with the token, and probes.

    Args:
        token_file: ``janitor.http.token_file``; None to serve all clients.
        failed: delays clients with a wrong token; uses the machine's clock by default.

    Raises:
        ConfigurationError: the file cannot be read, others may read it, or its token is too short.
    """
    if token_file is None:
        return app
    read = token_reader(_SETTING, token_file)
    failed = failed or FailedAttempts(SystemClock())
    seldom = RateLimitedLogger(get_logger(__name__))
    audit = BoundedAudit(SystemClock().monotonic_ms)

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _PROBES:
            try:
                is_known = compare_digest(_token_of(scope), read())
            except ConfigurationError as error:
                # Do not send a path of this machine to a client without a token.
                seldom.log(logging.ERROR, "%s", error)
                refusal = f"{_SETTING} cannot be used; the janitor's log has the reason."
                await problem.response(503, error.code, refusal)(scope, receive, send)
                return
            if not is_known:
                client, path = scope.get("client"), quote(scope["path"])
                address = "" if client is None else str(client[0])
                audit.record(Event.UNAUTHORIZED, principal=None, address=address, verb=scope["method"], object_=path)
                await failed.delay(address)
                refusal = "Send the token of janitor.http.token_file: Authorization: Bearer TOKEN."
                headers = {"WWW-Authenticate": _CHALLENGE}
                await problem.response(401, Unauthorized.code, refusal, headers)(scope, receive, send)
                return
        await app(scope, receive, send)

    return answer


def _token_of(scope: Scope) -> bytes:
    """Return the token of a request; empty without a token."""
    headers = [value for name, value in scope["headers"] if name == b"authorization"]
    scheme, _, credentials = headers[0].partition(b" ") if len(headers) == 1 else (b"", b"", b"")
    if scheme.lower() == b"bearer":
        return bytes(credentials.strip())
    if scheme.lower() != b"basic":
        return b""
    try:
        return b64decode(credentials.strip(), validate=True).partition(b":")[2]
    except binascii.Error:
        return b""
