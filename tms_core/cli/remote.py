"""Options and output of the commands for a running server: its address, the token and the output format.

Functions import the client and the settings, because help texts and completion need neither.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from tms_core.cli.help import CONFIG_FILE, shared
from tms_core.cli.outcome import complete_hints
from tms_core.cli.typed import TopicType
from tms_core.errors import ConfigurationError, TmsError
from tms_core.logs.printable import printable
from tms_core.security.files import read_token

if TYPE_CHECKING:
    import ssl

    from tms_core.client import Client
    from tms_core.settings.models import Settings
    from tms_core.transaction.rpc.client import TransactionClient

#: Addresses on which a server accepts connections to all its addresses, and the address for local clients.
_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 nothing is bound here
#: The timeout of shell completion for each server, in seconds.
_TIMEOUT_SECONDS = 2.0
#: The maximum size of a list of topics that completes a word, in bytes; without an end of JSON, nothing is completed.
_MAX_LIST_BYTES = 16 << 20


config_option = shared("--config", **CONFIG_FILE)
format_option = shared(
    "--format",
    type=click.Choice(["table", "json"]),
    default="table",
    shown="table",
    help="Output format: table for reading, json for programs.",
)


class OutputOptions:
    """The options of a command that determine its output."""

    format: str

    def print(self, value: Any, lines: Callable[[], Iterable[str]]) -> None:
        """Print the value as JSON, or the lines as text."""
        if self.format == "json":
            click.echo(json.dumps(value, indent=1))
        else:
            for line in lines():
                click.echo(printable(line))


@dataclass(frozen=True)
class Remote(OutputOptions):
    """The options of a command for a running server."""

    server: str | None
    token_file: Path | None
    ca_file: Path | None
    config: Path | None
    format: str

    def client(self) -> Client:
        """Return a client for the selected server and the configured transaction service.

        Raises:
            ConfigurationError: a URL or a setting is invalid, or the certificate cannot be read.
        """
        from tms_core.client import Client, Options  # noqa: PLC0415

        urls, options, transactions = self.urls(), Options(tls=self.tls()), self.transactions()
        try:
            return Client(urls, token_file=self.token_file, options=options, transactions=transactions)
        except ConfigurationError as error:
            is_typed = click.get_current_context().get_parameter_source("server") is ParameterSource.COMMANDLINE
            source = "--server" if is_typed else "TMS_URL" if self.server else "server.host"
            raise ConfigurationError(f"{source}: {error.message}", error.hint) from error

    def urls(self) -> list[str]:
        """Return the URLs of ``--server``, by default the URL in the settings.

        Raises:
            ConfigurationError: a setting is invalid.
        """
        if self.server:
            return self.server.split(",")
        server = self._settings.server
        host = _ANY_ADDRESS.get(server.host, server.host)
        return [f"{'https' if server.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{server.port}"]

    def transactions(self) -> TransactionClient:
        """Return a client for the configured transaction service.

        Raises:
            ConfigurationError: a setting is invalid.
        """
        from tms_core.transaction.rpc.client import TransactionClient  # noqa: PLC0415

        return TransactionClient.configured(self._settings.transactions)

    def tls(self) -> ssl.SSLContext | None:
        """Return the context that verifies the server's certificate; None: the system's trusted certificates.

        Raises:
            ConfigurationError: the file cannot be read.
        """
        if self.ca_file is None:
            return None
        import ssl  # noqa: PLC0415

        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--ca-file {self.ca_file} cannot be read: {error}.", "Give a file of certificates in PEM."
            ) from error

    @cached_property
    def _settings(self) -> Settings:
        from tms_core.settings.models import load  # noqa: PLC0415

        return load(self.config, os.environ, {}).settings


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options for a running server to a command, which receives them as one :class:`Remote`."""

    @shared(
        "--server",
        metavar="URL[,…]",
        envvar="TMS_URL",
        help="Message server; default: the server in the settings.",
    )
    @shared(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        envvar="TMS_TOKEN_FILE",
        help="File with the token for the server (server.auth).",
    )
    @shared(
        "--ca-file",
        type=click.Path(dir_okay=False, path_type=Path),
        metavar="FILE",
        help="CA certificates (PEM) to verify the server's certificate with.",
    )
    @config_option
    @format_option
    @wraps(command)
    def wrapped(
        *,
        server: str | None,
        token_file: Path | None,
        ca_file: Path | None,
        config: Path | None,
        format: str,  # noqa: A002
        **rest: Any,
    ) -> None:
        with complete_hints():
            command(Remote(server, token_file, ca_file, config, format), **rest)

    return wrapped


def _topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the topics that complete a word, from the first server that responds; none if all servers are slow."""
    namespace = incomplete.partition(":")[0] if ":" in incomplete else "default"
    server, token, authority, config = map(context.params.get, ("server", "token_file", "ca_file", "config"))
    remote = Remote(server, token, authority, config, "table")
    try:
        urls, tls = remote.urls(), remote.tls()
    except TmsError:
        return []
    for url in urls:
        with suppress(OSError, ValueError, ConfigurationError):
            return [name for name in _fetch_topics(url, namespace, token, tls) if name.startswith(incomplete)]
    return []


def _fetch_topics(url: str, namespace: str, token_file: Path | None, tls: ssl.SSLContext | None) -> list[str]:
    """Return the topics of a namespace without the client, because its import is too slow for shell completion."""
    from http.client import HTTPConnection, HTTPException, HTTPSConnection  # noqa: PLC0415
    from urllib.parse import quote, urlsplit  # noqa: PLC0415

    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(url)
    token = None if token_file is None else read_token("--token-file", token_file, 1).decode("ascii")
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    if parts.scheme == "https":
        connection: HTTPConnection = HTTPSConnection(parts.hostname, parts.port, timeout=_TIMEOUT_SECONDS, context=tls)
    else:
        connection = HTTPConnection(parts.hostname, parts.port, timeout=_TIMEOUT_SECONDS)
    try:
        path = f"{parts.path.rstrip('/')}/v1/namespaces/{quote(namespace, safe='')}/topics"
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        found = json.loads(answer.read(_MAX_LIST_BYTES)) if answer.status == 200 else None
    except HTTPException as error:
        raise ValueError(url) from error
    finally:
        connection.close()
    if not isinstance(found, list):
        raise ValueError(url)
    return [f"{namespace}:{name}" for name in found]


topic_argument = click.argument("topic", metavar="NS:TOPIC", type=TopicType(), shell_complete=_topics)
