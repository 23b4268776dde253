"""A folder of snapshots on HDFS, read over WebHDFS.

This module uses two requests of the REST interface (WebHDFS REST API of Hadoop 2 and 3; also HttpFS): LISTSTATUS lists
a folder, and OPEN returns a file after a redirect to a DataNode. A file is fetched completely before it is decoded, so
that a broken connection is not mistaken for a truncated file. If HDFS uses Kerberos, the NameNode requires a login
(SPNEGO), and its redirect to a DataNode contains a delegation token.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING, Any, BinaryIO, cast
from urllib.parse import quote

import httpx2

from tms_core.errors import ConfigurationError, LoginFailed, NoSnapshot
from tms_core.security.tls import ClientTls

if TYPE_CHECKING:
    from tms_core.security.kerberos import KerberosLogin

#: webhdfs://[USER@]HOST:PORT[,HOST:PORT…]/PATH
_URL = re.compile(
    r"(s?)webhdfs://(?:([^@/,:]+)@)?((?:[^@/,:]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}(?:,[^@/,]+:\d{1,5})*)(/[^?#]*)"
)
#: The timeout of a response of a NameNode or DataNode, and of each piece of a file, in seconds.
TIMEOUT_SECONDS = 30.0
#: The largest file that is held in memory while it is read; larger files are stored on disk.
_MEMORY_BYTES = 16 << 20
#: Hadoop's reason for rejecting a ticket, in an HTML page.
_GSS_FAILURE = re.compile(r"GSSException: ([^<\r\n]{1,300})")
_HINT = (
    "Check that transactions.directory is webhdfs://USER@NAMENODE:PORT/PATH of the folder, or set "
    "transactions.source: thrift."
)


class WebHdfsFolder:
    """A folder on HDFS, or one file.

    Args:
        url: ``webhdfs://[USER@]HOST:PORT[,HOST:PORT…]/PATH``; ``swebhdfs`` for HTTPS. Several addresses are NameNodes,
            one of them active. USER is the reader's name for HDFS (``user.name``).
        kerberos: the ``KerberosSettings`` of a login, typed as Any, because applications of the client need not import
            settings; None: no login.
        ca_file: the authorities of HTTPS; None: the system's.

    Raises:
        ConfigurationError: the URL is invalid, or a file cannot be used.
    """

    def __init__(self, url: str, kerberos: Any = None, ca_file: Path | None = None) -> None:
        match = _URL.fullmatch(url)
        if match is None:
            raise ConfigurationError(
                f"transactions.directory is {url}, which is not a folder on HDFS.",
                "Write webhdfs://NAMENODE:PORT/PATH, with USER@ before the host if HDFS needs a user.",
            )
        scheme = "https" if match[1] else "http"
        self._url = url
        self._user = match[2]
        self._roots = [f"{scheme}://{address}/webhdfs/v1" for address in match[3].split(",")]
        self._path = match[4].rstrip("/")
        self._tls = ClientTls("transactions.hdfs_", ca_file)
        self._login = None
        if kerberos is not None:
            # Imported here, because gssapi is an extra.
            from tms_core.security.kerberos import KerberosLogin  # noqa: PLC0415

            self._login = KerberosLogin("transactions.kerberos", kerberos)

    def __str__(self) -> str:
        return self._url

    def names(self) -> tuple[list[str], int]:
        """Return the names of files, and the number of other names; one empty name: the path is a file.

        Raises:
            NoSnapshot: no NameNode responds, or the active NameNode does not list the folder.
        """
        try:
            with self._request("", "LISTSTATUS") as answer:
                answer.read()
                found = answer.json()["FileStatuses"]["FileStatus"]
            files = [str(one["pathSuffix"]) for one in found if one["type"] == "FILE"]
        except OSError as error:
            raise NoSnapshot(f"no snapshots at {self}: {error}.", _HINT) from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NoSnapshot(f"no snapshots at {self}: the server there is not WebHDFS.", _HINT) from error
        return files, len(found) - len(files)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Yield the content of a file, fetched completely.

        Raises:
            OSError: the file cannot be read, or arrived incompletely.
            FileNotFoundError: the file was deleted.
        """
        with SpooledTemporaryFile(_MEMORY_BYTES) as whole:
            with self._request(f"/{name}" if name else "", "OPEN") as answer:
                try:
                    for piece in answer.iter_bytes():
                        whole.write(piece)
                except httpx2.HTTPError as error:
                    raise OSError(f"the response of the DataNode is incomplete: {error}") from error
            whole.seek(0)
            yield cast(BinaryIO, whole)

    @contextmanager
    def _request(self, suffix: str, operation: str) -> Iterator[httpx2.Response]:
        """Yield the response of the active NameNode, or of the DataNode of its redirect.

        Raises:
            OSError: no server responds, or the response is a rejection.
        """
        parameters = {"op": operation} | ({"user.name": self._user} if self._user else {})
        refusals = []
        hooks = {"request": [self._require_tls]}
        with httpx2.Client(
            timeout=TIMEOUT_SECONDS,
            follow_redirects=True,
            trust_env=False,
            event_hooks=hooks,
            verify=self._tls.context(),
            auth=None if self._login is None else _Negotiate(self._login),
        ) as client:
            for root in self._roots:
                request = client.build_request("GET", f"{root}{quote(self._path + suffix)}", params=parameters)
                try:
                    answer = client.send(request, stream=True)
                except httpx2.HTTPError as error:
                    refusals.append(f"{request.url.host}:{request.url.port} does not respond ({error})")
                    continue
                except LoginFailed as error:
                    raise OSError(f"{error.message.rstrip('.')} ({error.hint.rstrip('.')})") from error
                try:
                    refusal = _refusal(answer)
                    if refusal is None:
                        yield answer
                        return
                    refusals.append(f"{request.url.host}:{request.url.port} {refusal}")
                finally:
                    answer.close()
        raise OSError("; ".join(refusals))

    def _require_tls(self, request: httpx2.Request) -> None:
        """Reject a request without TLS, as after a redirect, if the folder's URL requires TLS.

        Raises:
            OSError: the request has no TLS.
        """
        if self._roots[0].startswith("https:") and request.url.scheme != "https":
            raise OSError(
                f"it redirects to {request.url.scheme}://{request.url.host}, which is not encrypted; set "
                "dfs.http.policy to HTTPS_ONLY in HDFS, or write webhdfs:// if the network is trusted"
            )


def _refusal(answer: httpx2.Response) -> str | None:
    """Return why another NameNode has to be tried; None if the response is valid.

    Raises:
        FileNotFoundError: the active NameNode reports that the file does not exist.
    """
    if answer.status_code == httpx2.codes.OK:
        return None
    answer.read()
    fields = _json_of(answer)
    kind, message = str(fields.get("exception", "")), str(fields.get("message", "")).partition("\n")[0].rstrip(".")
    if kind == "StandbyException":
        return "is on standby"
    if answer.status_code == httpx2.codes.NOT_FOUND:
        raise FileNotFoundError(message or "the path does not exist")
    if answer.status_code == httpx2.codes.UNAUTHORIZED:
        raise OSError("it requires a Kerberos login, and got none or rejected it; see transactions.kerberos")
    if found := _GSS_FAILURE.search(answer.text):
        raise OSError(f"it rejects the Kerberos login: {found[1].strip().rstrip('.')}")
    raise OSError(message or f"it responds with {answer.status_code}")


def _json_of(answer: httpx2.Response) -> dict[str, Any]:
    try:
        found = answer.json()["RemoteException"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


class _Negotiate(httpx2.Auth):
    """SPNEGO for an HTTP client (RFC 4559): sends a token only to a server that requires a login."""

    def __init__(self, login: KerberosLogin) -> None:
        self._login = login

    def auth_flow(self, request: httpx2.Request) -> Generator[httpx2.Request, httpx2.Response, None]:
        answer = yield request
        demands = answer.status_code == httpx2.codes.UNAUTHORIZED and self._token(answer) is not None
        # A DataNode gets no ticket: the redirect contains a delegation token for it.
        if not demands or answer.request.url.host != request.url.host:
            return
        exchange = self._login.exchange(f"HTTP/{request.url.host}", spnego=True)
        request.headers["authorization"] = exchange.authorization()
        answer = yield request
        # The first success or redirect is from the NameNode, which must prove its identity. Responses before it are
        # challenges; responses after it are from a DataNode.
        passed = (one for one in (*answer.history, answer) if one.is_success or one.is_redirect)
        if (first := next(passed, None)) is not None:
            if found := self._token(first):
                exchange.step(found)
            if not exchange.is_complete:
                raise LoginFailed("it does not prove its identity with Kerberos.", "Check which server listens there.")

    def _token(self, answer: httpx2.Response) -> bytes | None:
        return self._login.negotiated(answer.headers.get_list("www-authenticate", split_commas=True))
