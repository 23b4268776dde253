"""One server: how requests are addressed to it, and what the HTTP library's errors mean.

What matters about an error is whether the request may have been done. It was not where there was no connection to send
it on (``Unavailable``); once there was one, nobody knows (``Unanswered``). Neither proxies nor passwords are taken from
the environment: a token must go where the program says, and nowhere else.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tms_core.client.calls import Call
from tms_core.client.token import Token
from tms_core.client.values import Limits, Timeouts
from tms_core.client.wire import Stop
from tms_core.errors import ClientClosed, ConfigurationError, Unanswered, Unavailable
from tms_core.transaction.client import TransactionClient

_ADDRESS = re.compile(r"[^:\[\]]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")
#: Raised before there was a connection to send anything on.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)


@dataclass(frozen=True)
class Site:
    """Which server, and how to speak to it.

    Args:
        url: of the server.
        token: who asks.
        timeouts, limits: how long to wait, and how many connections.
        tls: how the server's certificate is checked; None: as the system does.

    Raises:
        ConfigurationError: the URL is none.
    """

    url: str
    token: Token
    timeouts: Timeouts
    limits: Limits
    tls: ssl.SSLContext | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        try:
            url = httpx2.URL(self.url)
        except httpx2.InvalidURL as error:
            raise ConfigurationError(f"{self.url!r} is no URL: {error}.", _URL_HINT) from error
        if url.userinfo:
            raise ConfigurationError("The URL has a password in it.", "Give a token instead.")
        if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
            raise ConfigurationError(f"{self.url!r} is no server's URL.", _URL_HINT)
        object.__setattr__(self, "url", self.url.rstrip("/"))

    def request(self, call: Call[Any]) -> httpx2.Request:
        """A call as the library's request."""
        headers = {"content-type": call.content_type, "accept-encoding": "identity", **self.token.headers()}
        return httpx2.Request(
            call.method, self.url + call.path, headers=headers, content=call.body, extensions=self._waits
        )

    @property
    def _waits(self) -> dict[str, Any]:
        waits = self.timeouts
        timeout = httpx2.Timeout(
            connect=waits.connect_seconds,
            read=waits.answer_seconds,
            write=waits.send_seconds,
            pool=waits.free_connection_seconds,
        )
        return {"timeout": timeout.as_dict()}

    @contextmanager
    def border(self, call: Call[Any], stopped: Stop) -> Iterator[None]:
        """The library's errors become ours."""
        if stopped.is_set():
            raise ClientClosed("The client is closed.", "Make another one.")
        try:
            yield
        except _NOT_SENT as error:
            reason = str(error) or type(error).__name__
            raise Unavailable(
                f"{self.url} cannot be reached: {reason}.", "Start it (tms serve), or correct the URL."
            ) from error
        except httpx2.TimeoutException as error:
            raise Unanswered(f"{self.url} did not answer {call} in time.", _UNKNOWN) from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            reason = str(error) or type(error).__name__
            raise Unanswered(f"{self.url} did not answer {call}: {reason}.", _UNKNOWN) from error
        except RuntimeError as error:
            if not stopped.is_set():
                raise
            raise ClientClosed("The client was closed.", "Make another one.") from error


_URL_HINT = "Write it as http://127.0.0.1:11015."
_UNKNOWN = "Whether it was done is not known."


def service_at(transactions: str | TransactionClient, timeouts: Timeouts) -> TransactionClient:
    """The client of a transaction service.

    Args:
        transactions: where it is, or the client itself.
        timeouts: how long it may take.

    Raises:
        ConfigurationError: the address is none.
    """
    if not isinstance(transactions, str):
        return transactions
    if not _ADDRESS.fullmatch(transactions):
        raise ConfigurationError(f"{transactions!r} is no address.", "Write HOST:PORT, like 127.0.0.1:15165.")
    return TransactionClient(transactions, timeouts.transaction_seconds)
