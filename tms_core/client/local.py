"""A client on a folder: server, transactions and janitor in this process, and nothing to configure or to start."""

from __future__ import annotations

import logging
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from tms_core.client.sync import Client

if TYPE_CHECKING:
    from tms_core.server.serving import Started

#: The server's own ports, where programs beside this one are not expected: any that are free on this machine.
_ANY_PORTS = {
    "TMS_SERVER__PORT": "0",
    "TMS_TRANSACTIONS__THRIFT": "127.0.0.1:0",
    "TMS_JANITOR__HTTP__PORT": "0",
}
#: The store in the folder; transactions and the janitor's state stand beside it, with its name before theirs.
_STORE = "messaging"


class LocalClient(Client):
    """A client of a server in this process, which stops with the client; made by :func:`open`.

    Attributes:
        server: where the server is, for other programs on this machine.
    """

    def __init__(self, server: Started, resources: ExitStack) -> None:
        super().__init__(server.url, transactions=server.transactions or "")
        self.server = server
        self._resources = resources
        # The program did not choose HTTP between it and its own server, so its log has no line for each request.
        logging.getLogger("httpx2").addFilter(self._is_wanted)
        # Where the program ends without having closed it: before the executors' threads are ended, which would be
        # waited for for ever otherwise.
        threading._register_atexit(self.close)  # type: ignore[attr-defined]  # as concurrent.futures does

    def close(self) -> None:
        """Publish the remaining messages, as :meth:`Client.close` does, and stop the server."""
        with self._resources:
            super().close()
        logging.getLogger("httpx2").removeFilter(self._is_wanted)

    def _is_wanted(self, record: logging.LogRecord) -> bool:
        """Return whether a line of the HTTP library is a warning, or of another server."""
        return record.levelno >= logging.WARNING or self.server.url not in record.getMessage()


def open(folder: Path | str) -> LocalClient:  # noqa: A001 it is called as tms_core.client.open
    """Return a client on a folder, with a server of its own, the transactions and the janitor, all in this process.

        with tms_core.client.open("data/") as client:
            client.create_topic("default:orders")

    One process has the folder at a time, until it closes the client. A folder that is new is adopted by the janitor at
    once. Environment and settings files are not read.

    Args:
        folder: where all of it is kept; made where there is none.

    Raises:
        StoreBusy: another process has the folder; the error names it.
        ConfigurationError: the folder cannot be used.
    """
    # What only opens connections to a server elsewhere does not import one.
    from tms_core.server.serving import serving  # noqa: PLC0415

    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = stack.enter_context(serving(None, _ANY_PORTS, {"leveldb": str(path / _STORE)}))
        return LocalClient(server, stack.pop_all())
