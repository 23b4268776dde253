"""A janitor that runs in another process, as if its engine were here.

Each question is a connection of its own, so nothing has to be kept alive between two of them and either side may be
started anew. An answer is read whole before anything is made of it: whoever asked prints all of it or nothing.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from janitor.boundary import Boundary
from janitor.control import values, wire
from janitor.control.desk import Greeting
from janitor.inquiry import Planned
from janitor.inspect import Audit, Inspected, Table
from janitor.observe import Observer, tell_nobody
from janitor.picture import Picture
from janitor.plan import PlanFile
from janitor.report import Report
from janitor.restore import Request, Restored
from janitor.state.base import Claim
from janitor.why import Why
from tms_core.errors import StoreBusy, StoreError
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

#: How long to wait until a janitor says who it is, and how long one may be silent, in seconds. While it works it says
#: every few seconds that it is alive.
GREETING_SECONDS, SILENCE_SECONDS = 10.0, 60.0

#: How asking fails where no process listens, or no longer.
_NOBODY = (FileNotFoundError, NotADirectoryError, ConnectionError)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Caller:
    """Asks whoever listens in a state folder.

    Args:
        folder: the state folder.
        observer: told how far the other one is.
        silence_seconds: how long it may say nothing.
    """

    def __init__(
        self, folder: Path, observer: Observer = tell_nobody, *, silence_seconds: float = SILENCE_SECONDS
    ) -> None:
        self.folder = folder
        self._observer = observer
        self._silence_seconds = silence_seconds

    def greeting(self) -> Greeting | None:
        """Who answers; None where nobody does.

        Raises:
            StoreBusy: somebody listens, and does not answer, is of another version or another user's.
            StoreError: what answers is no janitor.
        """
        try:
            return self._ask("hello", Greeting, {}, min(GREETING_SECONDS, self._silence_seconds))
        except _NOBODY:
            return None

    def ask(self, method: str, kind: type[T], **arguments: Any) -> T:
        """Ask one thing.

        Args:
            method: as the wire has it.
            kind: the type of the answer.

        Raises:
            TmsError: what the other side raised; :class:`StoreBusy` where it does not answer.
            StoreError: it has ended, or is not understood.
        """
        try:
            return self._ask(method, kind, arguments, self._silence_seconds)
        except _NOBODY as error:
            raise StoreError(
                "The janitor that holds the store ended before it had answered.",
                "Try again; janitor status says what it did last.",
            ) from error

    def _ask(self, method: str, kind: type[T], arguments: Mapping[str, Any], silence_seconds: float) -> T:
        params = {name: values.pack(value) for name, value in arguments.items()}
        request = wire.encode({"protocol": wire.PROTOCOL, "method": method, "params": params})
        with self._connected(silence_seconds) as connection:
            _send(connection, request)
            try:
                answer: T = values.unpack(kind, self._result(connection))
            except (ValueError, TypeError) as error:
                raise StoreError(
                    f"What answers on {self._path} is not understood: {error}.", "Use one version for both sides."
                ) from error
        return answer

    @property
    def _path(self) -> Path:
        return self.folder / wire.SOCKET_NAME

    @contextmanager
    def _connected(self, silence_seconds: float) -> Iterator[socket.socket]:
        """A connection; what goes wrong with it is an error of ours, but for that nobody is there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.settimeout(silence_seconds)
                with wire.address(self.folder) as address:
                    connection.connect(address)
                yield connection
            except _NOBODY:
                raise
            except OSError as error:
                self._fail(error)

    def _fail(self, error: OSError) -> NoReturn:
        if isinstance(error, PermissionError):
            raise StoreBusy(
                f"The janitor that holds the store is another user's, and {self._path} is for that user only.",
                "Run this as that user.",
            ) from error
        if isinstance(error, TimeoutError):
            raise StoreBusy(
                f"The janitor that holds the store does not answer on {self._path}.",
                "Look at its log; if it hangs, start it anew.",
            ) from error
        raise StoreError(
            f"The janitor that holds the store cannot be asked on {self._path}: {error.strerror or error}.",
            "Look at its log, then try again.",
        ) from error

    def _result(self, connection: socket.socket) -> Any:
        for message in wire.lines(connection):
            if "result" in message:
                return message["result"]
            if "error" in message:
                raise wire.unpack_error(message["error"])
            self._observe(message.get("progress"))
        raise ConnectionResetError("the other side has hung up")

    def _observe(self, progress: Any) -> None:
        if isinstance(progress, Mapping) and isinstance(progress.get("phase"), str):
            topic = progress.get("topic")
            self._observer(progress["phase"], TopicId.parse(topic) if topic else None, int(progress.get("rows", 0)))


class RemoteEngine:
    """An engine in another process (``janitor.control.desk.Desk``).

    Args:
        caller: reaches it.
        greeting: what it said of itself.
    """

    def __init__(self, caller: Caller, greeting: Greeting) -> None:
        self._caller = caller
        self.greeting = greeting

    def plan(self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "") -> Planned:
        """What the other one would do, by its own settings; they are what ``digest`` names then."""
        return self._caller.ask(
            "plan", Planned, at_ms=at_ms, patterns=patterns, digest=self.greeting.settings or digest
        )

    def inspect(self, table: Table, patterns: tuple[str, ...], limit: int) -> Inspected:
        return self._caller.ask("inspect", Inspected, table=table, patterns=patterns, limit=limit)

    def boundary(self) -> tuple[Claim | None, Boundary]:
        return self._caller.ask("boundary", tuple[Claim | None, Boundary])

    def audit(self) -> Audit:
        return self._caller.ask("audit", Audit)

    def why(self, topic: TopicId, message_id: MessageId) -> Why:
        return self._caller.ask("why", Why, topic=topic, message_id=message_id)

    def snapshot_figures(self, limit: int) -> dict[str, Any]:
        return self._caller.ask("snapshot_figures", dict[str, Any], limit=limit)

    def restorable(self, folder: Path, request: Request) -> Restored:
        return self._caller.ask("restorable", Restored, folder=folder, request=request)

    def adopt(self) -> list[TopicId]:
        return self._caller.ask("adopt", list[TopicId])

    def approve(self, patterns: tuple[str, ...] = ()) -> list[TopicId]:
        return self._caller.ask("approve", list[TopicId], patterns=patterns)

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        with self._finished_anyway():
            return self._caller.ask("apply", Report, wanted=wanted, adopt=adopt)

    def restore(self, folder: Path, request: Request) -> Restored:
        with self._finished_anyway():
            return self._caller.ask("restore", Restored, folder=folder, request=request)

    def picture(self) -> Picture:
        return self._caller.ask("status", Picture)

    def nudge(self) -> None:
        self._caller.ask("nudge", type(None))

    @contextmanager
    def _finished_anyway(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            logger.warning("process %d finishes what it has begun; see janitor status", self.greeting.pid)
            raise


def _send(connection: socket.socket, request: bytes) -> None:
    """Send a request; where the other side hangs up early, its answer says why."""
    try:
        connection.sendall(request)
    except (BrokenPipeError, ConnectionResetError):
        return
