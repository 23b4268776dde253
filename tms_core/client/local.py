"""A client on a folder: server, transaction service and janitor run in this process, without any configuration."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tms_core.client.sync import Client

if TYPE_CHECKING:
    from tms_core.server.serving import RunningServer

#: Settings for free ports on this machine.
_ANY_PORTS = {
    "TMS_SERVER__PORT": "0",
    "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0",
    "TMS_JANITOR__HTTP__PORT": "0",
}
#: The name of the store's folder, and the prefix of the folders of the transactions and of the janitor's state.
_STORE = "messaging"


class LocalClient(Client):
    """A client of a server in this process, which stops with the client; see :func:`open`.

    Attributes:
        server: the addresses of the server for other programs on this machine.
    """

    def __init__(self, server: RunningServer, resources: ExitStack) -> None:
        super().__init__(server.url, transactions=server.transactions or "")
        self.server = server
        self._resources = resources
        # Do not log requests to the internal server, because HTTP is an implementation detail here.
        logging.getLogger("httpx2").addFilter(self._is_relevant)
        # If the program does not close the client, close it at exit, before the interpreter waits for executor threads,
        # which otherwise run forever.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]  # as concurrent.futures does

    def close(self) -> None:
        """Publish queued messages, as :meth:`Client.close`, and stop the server."""
        with self._resources:
            super().close()
        logging.getLogger("httpx2").removeFilter(self._is_relevant)

    def _is_relevant(self, record: logging.LogRecord) -> bool:
        """Return whether a log record of the HTTP library is a warning, or about another server."""
        return record.levelno >= logging.WARNING or self.server.url not in record.getMessage()


def open(folder: Path | str) -> LocalClient:  # noqa: A001 it is called as tms_core.client.open
    """Return a client on a folder; its server, the transaction service and the janitor run in this process.

        with tms_core.client.open("data/") as client:
            client.create_topic("default:orders")

    Only one process at a time can open the folder. The janitor adopts a new folder immediately. Environment variables
    and settings files are ignored.

    Args:
        folder: the folder of all data; created if it does not exist.

    Raises:
        StoreBusy: another process has opened the folder; the error names the process.
        ConfigurationError: the folder cannot be used.
    """
    # Import the server late, because most programs only connect to a remote server.
    from tms_core.server.serving import serving  # noqa: PLC0415

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(serving(None, _ANY_PORTS, {"leveldb": str(path / _STORE)}))
        return LocalClient(server, stack.pop_all())
