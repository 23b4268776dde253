"""The janitor's HTTP server, which sends small responses from memory.

A hanging request never prevents the process from stopping.
"""

from __future__ import annotations

import uvicorn
from starlette.types import ASGIApp

from tms_core.web.protocol import limited_protocol
from tms_core.web.thread import ThreadedServer, listen

#: The time limit for running responses when the server stops, in seconds.
STOP_SECONDS = 2

#: The maximum number of connections that wait to be accepted.
BACKLOG = 128

#: The maximum number of connections, sufficient for a few browsers, Prometheus and probes.
MAX_CONNECTIONS = 100


#: The setting of the address, and the program that may have its port, for errors.
SETTING, OTHER = "janitor.http", "another janitor"


def check_port(host: str, port: int) -> None:
    """Check that a server could listen.

    Raises:
        ConfigurationError: the address or the port is not available.
    """
    listen(host, port, setting=SETTING, other=OTHER).close()


class HttpServer(ThreadedServer):
    """A server of an application in a separate thread.

    Args:
        host, port: as for :class:`~tms_core.web.thread.ThreadedServer`.
    """

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=limited_protocol(MAX_CONNECTIONS),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=STOP_SECONDS,
        )
        super().__init__(
            config,
            host,
            port,
            setting=SETTING,
            other=OTHER,
            backlog=BACKLOG,
            give_up_seconds=STOP_SECONDS + 1,
        )
