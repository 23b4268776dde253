"""Options and output that the commands of a running server share: its address, the token, how the answer is written."""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click

from tms_core.cli.names import TopicType
from tms_core.client import Client, Options
from tms_core.errors import ConfigurationError, TmsError
from tms_core.settings.models import load
from tms_core.transaction.rpc.client import TransactionClient

#: How long a shell waits for the names of topics.
COMPLETION_SECONDS = 2.0
#: What stands for "on every address" where one listens, and where one can then ask.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 nothing is bound here


@dataclass(frozen=True)
class Remote:
    """The options of every command that asks a running server."""

    server: str | None
    token_file: Path | None
    ca_file: Path | None
    config: Path | None
    format: str

    def client(self) -> Client:
        """The server that is meant, and the transaction service of the settings.

        Raises:
            ConfigurationError: a setting is wrong, or the certificate cannot be read.
        """
        settings = load(self.config, os.environ, {}).settings
        wanted = settings.server
        host = _EVERYWHERE.get(wanted.host, wanted.host)
        url = f"{'https' if wanted.tls else 'http'}://{f'[{host}]' if ':' in host else host}:{wanted.port}"
        return Client(
            self.server.split(",") if self.server else url,
            token_file=self.token_file,
            options=Options(tls=self._tls()),
            transactions=TransactionClient.configured(settings.transactions),
        )

    def transactions(self) -> TransactionClient:
        """The transaction service of the settings.

        Raises:
            ConfigurationError: a setting is wrong.
        """
        return TransactionClient.configured(load(self.config, os.environ, {}).settings.transactions)

    def _tls(self) -> ssl.SSLContext | None:
        if self.ca_file is None:
            return None
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(
                f"--ca-file {self.ca_file} cannot be read: {error}.", "Give the file of a certificate in PEM."
            ) from error

    def print(self, value: Any, lines: Callable[[], Iterable[str]]) -> None:
        """The answer, as JSON or as text."""
        if self.format == "json":
            click.echo(json.dumps(value, indent=1))
        else:
            for line in lines():
                click.echo(line)


def remote(command: Callable[..., None]) -> Callable[..., None]:
    """The options of every such command, handed to it as one."""

    @click.option("--server", metavar="URL[,…]", envvar="TMS_URL", help="The server; by default that of the settings.")
    @click.option(
        "--token-file",
        type=click.Path(dir_okay=False, path_type=Path),
        envvar="TMS_TOKEN_FILE",
        help="A file with the token to show (server.auth).",
    )
    @click.option(
        "--ca-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Certificates (PEM) by which the server's one is checked.",
    )
    @click.option(
        "--config",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        envvar="TMS_CONFIG",
        help="A settings file.",
    )
    @click.option("--format", type=click.Choice(["table", "json"]), default="table", help="How the answer is written.")
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
        command(Remote(server, token_file, ca_file, config, format), **rest)

    return wrapped


def _topics(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """The server's topics that begin so, for a shell to complete; none where it does not answer soon."""
    namespace = incomplete.partition(":")[0] if ":" in incomplete else "default"
    server, token, authority, config = map(context.params.get, ("server", "token_file", "ca_file", "config"))
    try:
        with Remote(server, token, authority, config, "table").client() as client:
            found = map(str, client.within(COMPLETION_SECONDS).topics(namespace))
            return [name for name in found if name.startswith(incomplete)]
    except (TmsError, ValueError):
        return []


topic_argument = click.argument("topic", metavar="NS:TOPIC", type=TopicType(), shell_complete=_topics)
