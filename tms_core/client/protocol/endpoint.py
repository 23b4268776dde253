"""One server: the addresses of requests, and the meaning of the HTTP library's errors.

What matters about an error is whether the request may have been done. It was not where there was no connection to send
it on (``Unavailable``); once there was one, it is unknown (``Unanswered``). The environment supplies neither proxies
nor passwords: a token must only go to the given address; it is read when it is used, and shown nowhere. A hook is
called for each attempt and returns a context manager, which is what tracing libraries give out; what it puts into the
headers goes with the request, so a trace goes on in the server's proxies and logs.
"""

from __future__ import annotations

import re
import ssl
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from random import Random
from typing import Any

import httpx2

from tms_core.client.protocol.calls import PROBLEM, Call
from tms_core.client.protocol.values import Buffer, Limits, Measure, Retry, Timeouts
from tms_core.client.protocol.wire import Stop
from tms_core.errors import BadRequest, ClientClosed, ConfigurationError, Unanswered, Unavailable
from tms_core.transaction.rpc.client import TransactionClient

#: Errors are asked for in JSON, where the hint is apart from the message.
_ACCEPT = {"accept": PROBLEM, "accept-encoding": "identity"}
_ADDRESS = re.compile(r"[^:\[\]]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")
#: Raised before there was a connection to send anything on.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
#: Raised before anything is sent, because of what was to be.
_NOT_WRITTEN = (httpx2.LocalProtocolError, UnicodeEncodeError)
#: What may follow ``Bearer`` (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


@dataclass(slots=True)
class Attempt:
    """A request that is being sent; one that is tried again is another attempt.

    Attributes:
        method, url: where to.
        headers: more headers to send with it; those of the client itself, the token's among them, cannot be replaced.
        status: of the answer, when the context manager is left; None: there was no answer.
    """

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None


#: Called for each attempt. The request is sent when what it returns was entered, and an error that comes of it passes
#: through that; what it raises itself goes to the caller.
Hook = Callable[[Attempt], AbstractContextManager[object]]


def no_hook(_: Attempt) -> AbstractContextManager[object]:
    """Nothing is done around requests."""
    return nullcontext()


class Token:
    """Where the token comes from.

    Args:
        given: the token, what returns it, or None.
        file: a file that holds it; read for each request, so that it can be replaced while the program runs.

    Raises:
        ConfigurationError: both arguments are set.
    """

    def __init__(self, given: str | Callable[[], str] | None = None, file: Path | str | None = None) -> None:
        if given is not None and file is not None:
            raise ConfigurationError("A token and a token file are given.", "Give one of them.")
        self._given = given
        self._file = None if file is None else Path(file)

    def __repr__(self) -> str:
        return "<Token>" if self._given is not None or self._file is not None else "<no Token>"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that carry the token.

        Raises:
            ConfigurationError: the file cannot be read, or its contents are not a token.
        """
        if self._file is not None:
            found = self._read(self._file)
        elif self._given is None:
            return {}
        else:
            found = self._given if isinstance(self._given, str) else self._given()
        if not _TOKEN.fullmatch(found):
            raise ConfigurationError("The token is not valid: it is empty, or has characters that no token has.")
        return {"authorization": f"Bearer {found}"}

    def _read(self, file: Path) -> str:
        try:
            return file.read_text(encoding="ascii").strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ConfigurationError(f"The token file {file} cannot be read: {reason}.") from error


@dataclass(frozen=True)
class Options:
    """How a client works, as a value that can be printed and compared.

    Attributes:
        timeouts, limits, retry: how long to wait, how much to hold, how to try again.
        buffer: where ``publish_async`` puts messages.
        tls: how the server's certificate is checked; None: by the certificates that come with the HTTP library.
        hook: a context manager around each attempt to send a request (:mod:`tms_core.client.protocol.endpoint`).
        measure: called with what each publish and each poll came to, in the thread or event loop that did it.
        random: the source of randomness for pauses.
        running: the running time in seconds.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    retry: Retry = field(default_factory=Retry)
    buffer: Buffer = field(default_factory=Buffer)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    hook: Hook = field(default=no_hook, repr=False)
    measure: Measure | None = field(default=None, repr=False)
    random: Random = field(default_factory=Random, repr=False, compare=False)
    running: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)


@dataclass(frozen=True)
class Endpoint:
    """Which server, and how to speak to it.

    Args:
        url: of the server, or of several that serve the same topics: the next one is used if one does not respond.

    Raises:
        ConfigurationError: the URL is none.
    """

    url: str | Sequence[str]
    token: Token
    options: Options
    _urls: _Urls = field(init=False, repr=False)

    def __post_init__(self) -> None:
        given = [self.url] if isinstance(self.url, str) else list(self.url)
        object.__setattr__(self, "_urls", _Urls([_checked(url) for url in given]))

    def __str__(self) -> str:
        return ", ".join(self._urls.all)

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """Return the library's setting for certificates. To read whom the system trusts takes 25 ms, so where no server
        has a certificate, that is left out, and none would be trusted.
        """
        if self.options.tls is not None:
            return self.options.tls
        secure = any(httpx2.URL(url).scheme == "https" for url in self._urls.all)
        return True if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @contextmanager
    def attempt(self, call: Call[Any], stopped: Stop) -> Iterator[Attempt]:
        """Send a call to the current server. A server that does not respond is not the next one.

        Raises:
            MessagingError: the library's errors become ours (:meth:`border`).
        """
        url = self._urls.now
        attempt = Attempt(call.method, url + call.path)
        try:
            with self.options.hook(attempt), self.border(call, stopped, url):
                yield attempt
        except (Unavailable, Unanswered):
            self._urls.leave(url)
            raise

    def request(self, call: Call[Any], attempt: Attempt, seconds: float | None) -> httpx2.Request:
        """Return a call as the library's request.

        Args:
            seconds: how long nothing may take longer; None: as long as the timeouts say.
        """
        own = {"content-type": call.content_type, **_ACCEPT, **call.headers, **self.token.headers()}
        headers = {name.lower(): value for name, value in attempt.headers.items()} | own
        return httpx2.Request(
            call.method, attempt.url, headers=headers, content=call.body, extensions=self._waits(seconds)
        )

    def _waits(self, seconds: float | None) -> dict[str, Any]:
        waits, most = self.options.timeouts, inf if seconds is None else seconds
        timeout = httpx2.Timeout(
            connect=min(waits.connect_seconds, most),
            read=min(waits.answer_seconds, most),
            write=min(waits.send_seconds, most),
            pool=min(waits.free_connection_seconds, most),
        )
        return {"timeout": timeout.as_dict()}

    @contextmanager
    def border(self, call: Call[Any], stopped: Stop, url: str) -> Iterator[None]:
        """The library's errors become ours."""
        if stopped.is_set():
            raise ClientClosed("The client is closed.", "Make another one.")
        try:
            yield
        except _NOT_SENT as error:
            reason = str(error) or type(error).__name__
            # Without the library's own tracebacks: the reason says all that they say.
            raise Unavailable(
                f"{url} cannot be reached: {reason}.", "Start it (tms serve), or correct the URL."
            ) from None
        except _NOT_WRITTEN as error:
            raise BadRequest(
                f"{call} was not sent: {error}.", "Correct the header, which a hook may have added."
            ) from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise Unanswered(f"{url} did not answer {call} in time.", _UNKNOWN) from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            reason = str(error) or type(error).__name__
            raise Unanswered(f"{url} did not answer {call}: {reason}.", _UNKNOWN) from error
        except RuntimeError as error:
            if not stopped.is_set():
                raise
            raise ClientClosed("The client was closed.", "Make another one.") from error


class _Urls:
    """The URLs of servers, one of which is current; threads may share it."""

    def __init__(self, all_: Sequence[str]) -> None:
        if not all_:
            raise ConfigurationError("There is no URL.", _URL_HINT)
        self.all = tuple(all_)
        self._at = 0

    @property
    def now(self) -> str:
        return self.all[self._at]

    def leave(self, url: str) -> None:
        """Switch to the next server, unless that has happened already."""
        at = self._at
        if self.all[at] == url:
            self._at = (at + 1) % len(self.all)


def _checked(given: str) -> str:
    try:
        url = httpx2.URL(given)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"{given!r} is no URL: {error}.", _URL_HINT) from error
    if url.userinfo:
        raise ConfigurationError("The URL has a password in it.", "Give a token instead.")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigurationError(f"{given!r} is no server's URL.", _URL_HINT)
    return given.rstrip("/")


_URL_HINT = "Write it as http://127.0.0.1:11015."
_UNKNOWN = "It is not known whether the server did it."


#: Where transactions are managed: an address, several of the same transactions, or a client.
Transactions = str | Sequence[str] | TransactionClient


def service_at(transactions: Transactions, timeouts: Timeouts) -> TransactionClient:
    """Return the client of a transaction service.

    Raises:
        ConfigurationError: an address is none, or there is none.
    """
    if isinstance(transactions, TransactionClient):
        return transactions
    addresses = [transactions] if isinstance(transactions, str) else list(transactions)
    if not addresses or not all(_ADDRESS.fullmatch(one) for one in addresses):
        raise ConfigurationError(f"{transactions!r} is no address.", "Write HOST:PORT, like 127.0.0.1:15165.")
    return TransactionClient(addresses, timeouts.transaction_seconds)
