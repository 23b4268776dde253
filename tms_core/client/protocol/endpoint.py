"""A server: the addresses of requests, and the meaning of the HTTP library's errors.

An error tells whether the server may have executed the request. Without a connection it has not (``Unavailable``);
after the connection was made, the outcome is unknown (``Unanswered``).

The environment supplies neither proxies nor passwords, because a token must only reach the given address. The client
reads the token for each request, and shows it nowhere.

The client calls a hook for each attempt. The hook returns a context manager, as tracing libraries do. Headers that it
adds are sent with the request, so a trace continues in the server's proxies and logs.
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

#: The client accepts errors in JSON, which has the hint in a field of its own.
_ACCEPT = {"accept": PROBLEM, "accept-encoding": "identity"}
_ADDRESS = re.compile(r"[^:\[\]]+:\d{1,5}|\[[0-9A-Fa-f:.]+\]:\d{1,5}")
#: Errors raised before a connection was made.
_NOT_SENT = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.ProxyError)
#: Errors raised before anything is sent, because the request is invalid.
_NOT_WRITTEN = (httpx2.LocalProtocolError, UnicodeEncodeError)
#: OpenSSL reports a response without TLS as one of another version.
_NO_TLS_HINT = "The server may not use TLS: try http:// in the URL."
#: What may follow ``Bearer`` (RFC 6750).
#: The number of characters that are read of a token file; servers reject such a long token.
_TOKEN_CHARACTERS = 1 << 16
_TOKEN = re.compile(r"[A-Za-z0-9\-._~+/]+=*")


@dataclass(slots=True)
class Attempt:
    """An attempt to send a request; each repetition is another attempt.

    Attributes:
        method, url: the method and the URL.
        headers: additional headers; they cannot replace headers of the client, such as the token's.
        status: the status of the response, when the context manager is left; None: there was no response.
    """

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None


#: Called for each attempt. The request is sent inside the returned context manager, which also sees its errors. An
#: error of the hook itself is raised to the caller.
Hook = Callable[[Attempt], AbstractContextManager[object]]


def no_hook(_: Attempt) -> AbstractContextManager[object]:
    """Return a context manager that does nothing."""
    return nullcontext()


class Token:
    """The source of the token.

    Args:
        token: the token, a function that returns it, or None.
        file: a file that contains it; read for each request, so that it can be replaced while the program runs.

    Raises:
        ConfigurationError: both arguments are set.
    """

    def __init__(self, token: str | Callable[[], str] | None = None, file: Path | str | None = None) -> None:
        if token is not None and file is not None:
            raise ConfigurationError("A token and a token file are given.", "Give one of them.")
        self._token = token
        self._file = None if file is None else Path(file)

    def __repr__(self) -> str:
        return "<Token>" if self._token is not None or self._file is not None else "<no Token>"

    def headers(self) -> dict[str, str]:
        """Return the headers of a request that carry the token.

        Raises:
            ConfigurationError: the file cannot be read, or its contents are not a token.
        """
        if self._file is not None:
            found = self._read(self._file)
        elif self._token is None:
            return {}
        else:
            found = self._token if isinstance(self._token, str) else self._token()
        if not _TOKEN.fullmatch(found):
            raise ConfigurationError("The token is not valid: it is empty, or has characters that no token has.")
        return {"authorization": f"Bearer {found}"}

    def _read(self, file: Path) -> str:
        try:
            with file.open(encoding="ascii") as stream:
                return stream.read(_TOKEN_CHARACTERS).strip()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not text"
            raise ConfigurationError(f"The token file {file} cannot be read: {reason}.") from error


@dataclass(frozen=True)
class Options:
    """Options of a client, as a value that can be printed and compared.

    Attributes:
        timeouts, limits, retry: time limits, size limits, and the pauses between attempts.
        buffer: the buffer of ``publish_async``.
        tls: the check of the server's certificate; None: by the certificates that come with the HTTP library.
        hook: a context manager around each attempt to send a request (:mod:`tms_core.client.protocol.endpoint`).
        measure: called with the result of each publish and each poll, in its thread or event loop.
        random: the source of randomness for pauses.
        monotonic: the monotonic clock, in seconds.
    """

    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    retry: Retry = field(default_factory=Retry)
    buffer: Buffer = field(default_factory=Buffer)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    hook: Hook = field(default=no_hook, repr=False)
    measure: Measure | None = field(default=None, repr=False)
    random: Random = field(default_factory=Random, repr=False, compare=False)
    monotonic: Callable[[], float] = field(default=time.monotonic, repr=False, compare=False)


@dataclass(frozen=True)
class Endpoint:
    """The servers of a client, and the current one.

    Args:
        url: the URL of a server, or of several servers of the same topics; the client switches to the next one if a
            server does not respond.

    Raises:
        ConfigurationError: a URL is invalid.
    """

    url: str | Sequence[str]
    token: Token
    options: Options
    _urls: _Urls = field(init=False, repr=False)

    def __post_init__(self) -> None:
        urls = [self.url] if isinstance(self.url, str) else list(self.url)
        object.__setattr__(self, "_urls", _Urls([_checked(url) for url in urls]))

    def __str__(self) -> str:
        return ", ".join(self._urls.all)

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """Return the library's setting for certificates.

        Reading the system's trusted certificates takes 25 ms. Without an HTTPS server, the setting is a context that
        trusts no certificate.
        """
        if self.options.tls is not None:
            return self.options.tls
        secure = any(httpx2.URL(url).scheme == "https" for url in self._urls.all)
        return True if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    @contextmanager
    def attempt(self, call: Call[Any], stopped: Stop) -> Iterator[Attempt]:
        """Send a call in the block to the current server; if it does not respond, the next call uses another server.

        Raises:
            MessagingError: the library raised an error (:meth:`convert_errors`).
        """
        url = self._urls.now
        attempt = Attempt(call.method, url + call.path)
        try:
            with self.options.hook(attempt), self.convert_errors(call, stopped, url):
                yield attempt
        except (Unavailable, Unanswered):
            self._urls.leave(url)
            raise

    def request(self, call: Call[Any], attempt: Attempt, seconds: float | None) -> httpx2.Request:
        """Return a call as the library's request.

        Args:
            seconds: the upper limit of each timeout; None: no limit below ``Timeouts``.
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
    def convert_errors(self, call: Call[Any], stopped: Stop, url: str) -> Iterator[None]:
        """Convert the library's errors.

        Raises:
            Unavailable: nothing was sent.
            Unanswered: the outcome is unknown.
            BadRequest: the request cannot be sent.
            ClientClosed: the client is closed.
        """
        if stopped.is_set():
            raise ClientClosed("The client is closed.", "Create another client.")
        try:
            yield
        except _NOT_SENT as error:
            reason = str(error) or type(error).__name__
            hint = _NO_TLS_HINT if "WRONG_VERSION_NUMBER" in reason else "Start it (tms serve), or correct the URL."
            # Omit the library's tracebacks: the reason has the same information.
            raise Unavailable(f"{url} cannot be reached: {reason}.", hint) from None
        except _NOT_WRITTEN as error:
            raise BadRequest(
                f"{call} was not sent: {error}.", "Correct the header, which a hook may have added."
            ) from error
        except (httpx2.TimeoutException, TimeoutError) as error:
            raise Unanswered(f"{url} did not answer {call} in time.", _UNKNOWN) from error
        except (httpx2.RequestError, httpx2.StreamError) as error:
            reason = str(error).removesuffix(".") or type(error).__name__
            raise Unanswered(f"{url} did not answer {call}: {reason}.", _UNKNOWN) from error
        except RuntimeError as error:
            if not stopped.is_set():
                raise
            raise ClientClosed("The client was closed.", "Create another client.") from error


class _Urls:
    """The URLs of servers, and the current one; threads may share it."""

    def __init__(self, all_: Sequence[str]) -> None:
        if not all_:
            raise ConfigurationError("There is no URL.", _URL_HINT)
        self.all = tuple(all_)
        self._at = 0

    @property
    def now(self) -> str:
        return self.all[self._at]

    def leave(self, url: str) -> None:
        """Switch to the next server, unless another thread has switched already."""
        at = self._at
        if self.all[at] == url:
            self._at = (at + 1) % len(self.all)


def _checked(text: str) -> str:
    try:
        url = httpx2.URL(text)
    except (httpx2.InvalidURL, TypeError) as error:
        raise ConfigurationError(f"{text!r} is not a URL: {error}.", _URL_HINT) from error
    if url.userinfo:
        raise ConfigurationError("The URL has a password in it.", "Give a token instead.")
    if url.scheme not in ("http", "https") or not url.host or url.query or url.fragment:
        raise ConfigurationError(f"{text!r} is not the URL of a server.", _URL_HINT)
    return text.rstrip("/")


_URL_HINT = "Write it as http://127.0.0.1:11015."
_UNKNOWN = "It is not known whether the server carried out the request."


#: The transaction service: an address, the addresses of several servers of the same transactions, or a client.
Transactions = str | Sequence[str] | TransactionClient


def service_at(transactions: Transactions, timeouts: Timeouts) -> TransactionClient:
    """Return the client of a transaction service.

    Raises:
        ConfigurationError: an address is invalid or missing.
    """
    if isinstance(transactions, TransactionClient):
        return transactions
    addresses = [transactions] if isinstance(transactions, str) else list(transactions)
    if not addresses or not all(_ADDRESS.fullmatch(one) for one in addresses):
        raise ConfigurationError(f"{transactions!r} is not an address.", "Write HOST:PORT, like 127.0.0.1:15165.")
    return TransactionClient(addresses, timeouts.transaction_seconds)
