"""The control socket's server, in the process that holds a store.

LevelDB lets one process open a store, so whoever else wants to look or decide has to ask that one. It listens on a
socket in its state folder, which only its own user may use; a thread answers each client, so a long audit keeps nobody
from looking at the status. A handful of clients is enough for an operator and a timer: more than that are sent away.

Nothing a client does can stop the janitor: what it says is checked, and what it does not take is dropped.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import time
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from importlib import metadata
from pathlib import Path
from threading import Event, Lock, Thread

from janitor.control import wire
from janitor.control.answers import Answers, MakeReader
from janitor.control.audience import Audience
from janitor.control.desk import Decider, Greeting, Views
from janitor.control.link import REQUEST_SECONDS, Link
from tms_core.errors import StoreBusy, StoreError, TmsError

#: How many clients are answered at once.
MAX_CLIENTS = 16
#: How often every client hears that its janitor is alive, in seconds.
PULSE_SECONDS = 5.0
#: How long a stop waits for answers under way, in seconds; questions end within a page, and runs within a batch.
STOP_SECONDS = 30.0

logger = logging.getLogger(__name__)


class ControlServer:
    """Answers on the socket of a state folder, from :meth:`start` to :meth:`stop`.

    Args:
        folder: the state folder.
        decider: the engine that writes; it must be stopped by other means before :meth:`stop`, or that waits for it.
        make_reader: makes an engine that cannot write, for one question.
        views: what the process shows of itself.
        store: the identity of the store that this process holds.
        settings: names the settings it works by.
        audience: the observer of the engine that writes, so that who asked for a run hears how far it is.
        request_seconds: how long a client may be silent before its request is complete.
        pulse_seconds: how often every client hears that this janitor is alive.
    """

    def __init__(
        self,
        folder: Path,
        decider: Decider,
        make_reader: MakeReader,
        views: Views,
        *,
        store: str,
        settings: str,
        audience: Audience | None = None,
        request_seconds: float = REQUEST_SECONDS,
        pulse_seconds: float = PULSE_SECONDS,
    ) -> None:
        self._folder = folder
        self._path = folder / wire.SOCKET_NAME
        self._stop = Event()
        self._request_seconds = request_seconds
        self._pulse_seconds = pulse_seconds
        greeting = Greeting(metadata.version("tms-janitor"), os.getpid(), store, settings)
        self._answers = Answers(decider, make_reader, views, greeting, audience or Audience(), self._stop)
        self._lock = Lock()
        self._links: dict[Link, Thread] = {}
        self._listening: socket.socket | None = None
        self._inode = 0
        self._threads: list[Thread] = []

    def start(self) -> None:
        """Listen. The caller holds the store, so a socket that nobody answers on is a dead process's.

        Raises:
            StoreBusy: another process answers there.
            StoreError: there can be no socket in that folder.
        """
        with ExitStack() as stack:
            listening = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            try:
                self._bind(listening)
            except OSError as error:
                raise StoreError(
                    f"There can be no control socket {self._path}: {error.strerror or error}.",
                    "Put the state (janitor.state) into a folder of your own on a local disk.",
                ) from error
            stack.pop_all()
        self._listening = listening
        self._threads = [
            Thread(target=self._accept, args=(listening,), name="control", daemon=True),
            Thread(target=self._pulse, name="control-pulse", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Take no more clients, end what they asked for, and remove the socket. Without effect where it has stopped."""
        if self._stop.is_set() or self._listening is None:
            return
        self._stop.set()
        with suppress(OSError):
            if self._path.stat().st_ino == self._inode:
                self._path.unlink()
        with suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)  # wakes accept()
        ends = time.monotonic() + STOP_SECONDS
        self._join(self._threads, ends)
        with self._lock:
            links = dict(self._links)
        for link in links:
            link.hang_up()
        self._join(links.values(), ends)
        self._listening.close()

    def _join(self, threads: Iterable[Thread], ends: float) -> None:
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                logger.warning("an answer through the control socket is still under way; it is left behind")

    def _bind(self, listening: socket.socket) -> None:
        with wire.address(self._folder) as address:
            self._remove_stale(address)
            listening.bind(address)
        # Nobody can connect before listen(), so there is no moment at which others could.
        self._path.chmod(0o600)
        self._inode = self._path.stat().st_ino
        listening.listen(MAX_CLIENTS)

    def _remove_stale(self, address: str) -> None:
        """Remove the socket of a process that is dead."""
        try:
            if not stat.S_ISSOCK(self._path.lstat().st_mode):
                raise StoreError(f"{self._path} is no socket.", "Remove it, if it is of no use to anybody else.")
        except FileNotFoundError:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
            try:
                asking.connect(address)
            except ConnectionRefusedError:
                self._path.unlink()
                return
        raise StoreBusy(
            f"Another janitor answers on {self._path}.",
            "Give each store a state folder of its own (janitor.state), or stop the other janitor.",
        )

    def _accept(self, listening: socket.socket) -> None:
        while not self._stop.is_set():
            try:
                connection, _ = listening.accept()
            except OSError as error:
                if not self._stop.is_set():
                    logger.error("the control socket cannot take clients for a moment: %s", error)
                self._stop.wait(1.0)
                continue
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        """Give a client a thread, unless it is a stranger or one too many."""
        link = Link(connection, request_seconds=self._request_seconds)
        if wire.peer_uid(connection) not in (0, os.geteuid()):
            link.refuse(StoreBusy("The janitor that holds the store is another user's.", "Ask as that user."))
            return
        with self._lock:
            full = len(self._links) >= MAX_CLIENTS
            thread = Thread(target=self._attend, args=(link,), name="control-client", daemon=True)
            if not full:
                self._links[link] = thread
        if full:
            link.refuse(
                StoreBusy(f"The janitor that holds the store is answering {MAX_CLIENTS} others.", "Try again later.")
            )
            return
        thread.start()

    def _attend(self, link: Link) -> None:
        """Answer one client; nothing that goes wrong with it goes further than here."""
        with link:
            try:
                request = link.request()
                if request is not None:
                    link.answer({"result": self._answers.answer(request, link)})
            except TmsError as error:
                link.answer({"error": wire.pack_error(error)})
            # A bug: the client is told that there is one, the log where, and the janitor goes on.
            except Exception as error:
                logger.exception("a question could not be answered")
                bug = TmsError(f"The janitor that holds the store failed: {error!r}.", "Its log says more.")
                link.answer({"error": wire.pack_error(bug)})
            finally:
                with self._lock:
                    del self._links[link]

    def _pulse(self) -> None:
        """Let clients know that they are not forgotten, however long a batch takes."""
        while not self._stop.wait(self._pulse_seconds):
            with self._lock:
                links = list(self._links)
            for link in links:
                link.tell({})
