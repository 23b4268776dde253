"""A client of a janitor in another process, with the interface of an engine.

Each call opens a connection, so either side may restart between two calls. A response is read completely before it is
decoded, so a command prints the complete result or nothing.

The HTTP library is imported on the first call, because the import takes a tenth of a second, and most commands find no
running janitor.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from janitor.archive.restore import Request, RestoreResult
from janitor.boundary import Boundary
from janitor.control import api, wire
from janitor.control.api import ProcessIdentity
from janitor.inspect.answer import Why
from janitor.inspect.rows import Audit, InspectedRows
from janitor.report import EXPECTED, Observer, Report, ignore_progress
from janitor.run.plan_file import PlanFile
from janitor.run.queries import PlanResult
from janitor.state import values
from janitor.state.base import ProvenBoundary
from janitor.state.sqlite.state import is_present
from janitor.status.status import Status
from tms_core.errors import StoreBusy, StoreError
from tms_core.rowkey import MessageId
from tms_core.tables.base import TableName
from tms_core.topic import TopicId

if TYPE_CHECKING:
    import httpx2

#: The timeouts for the process identity and for the next line of a response, in seconds; a running janitor sends a line
#: every few seconds.
IDENTITY_SECONDS, ANSWER_SECONDS = 10.0, 60.0

#: The errors of a connection to a socket on which no process listens.
_CONNECTION_ERRORS = (FileNotFoundError, NotADirectoryError, ConnectionError)

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Caller:
    """A client of the janitor that listens in a state folder.

    Args:
        folder: the state folder.
        observer: receives the progress.
        answer_seconds: the timeout for the next line of a response.
    """

    def __init__(
        self, folder: Path, observer: Observer = ignore_progress, *, answer_seconds: float = ANSWER_SECONDS
    ) -> None:
        self.folder = folder
        self._observer = observer
        self._answer_seconds = answer_seconds

    def process_identity(self) -> ProcessIdentity | None:
        """Return the identity of the listening janitor; None if no janitor listens.

        Raises:
            StoreBusy: a janitor listens but does not respond, has another version, or belongs to another user.
            StoreError: the response is not a response of a janitor.
            StateError: this user cannot enter the folder of the state.
        """
        if not is_present(self._path):
            return None
        try:
            return self._ask("hello", ProcessIdentity, {}, min(IDENTITY_SECONDS, self._answer_seconds))
        except _CONNECTION_ERRORS:
            return None

    def ask(self, method: str, kind: type[T], **arguments: Any) -> T:
        """Send a call; return its result.

        Args:
            method: the name of the method in the protocol.
            kind: the type of the result.

        Raises:
            TmsError: the error of the other side; :class:`StoreBusy` if it does not respond.
            StoreError: the other side has stopped, or the response cannot be read.
        """
        try:
            return self._ask(method, kind, arguments, self._answer_seconds)
        except _CONNECTION_ERRORS as error:
            raise StoreError(
                "The process of the janitor that holds the store stopped before it responded.",
                "Try again; janitor status shows its last run.",
            ) from error

    def _ask(self, method: str, kind: type[T], arguments: Mapping[str, Any], answer_seconds: float) -> T:
        params = {name: values.pack(value) for name, value in arguments.items()}
        request = wire.encode({"protocol": api.PROTOCOL, "params": params})
        with self._answering(method, request, answer_seconds) as answer:
            try:
                found: T = values.unpack(kind, self._result(answer))
            except (ValueError, TypeError) as error:
                raise self._invalid_response(error) from error
        return found

    @property
    def _path(self) -> Path:
        return self.folder / api.SOCKET_NAME

    @contextmanager
    def _answering(self, method: str, request: bytes, answer_seconds: float) -> Iterator[httpx2.Response]:
        """Yield the response to a call; convert all errors, except that the process no longer listens."""
        import httpx2  # noqa: PLC0415 see the module's docstring

        is_started = False
        try:
            with (
                self._connect(answer_seconds) as uds,
                httpx2.HTTPTransport(uds=uds) as transport,
                httpx2.Client(transport=transport, timeout=answer_seconds, base_url="http://localhost") as client,
                client.stream("POST", f"/control/{method}", content=request) as answer,
            ):
                is_started = True
                yield answer
        except httpx2.TimeoutException as error:
            raise self._silent() from error
        except httpx2.RemoteProtocolError as error:
            # If the connection closed before or during the response, the janitor has stopped. Otherwise the response is
            # not HTTP, so another program listens.
            if is_started or "disconnected" in str(error):
                raise ConnectionResetError("the other side closed the connection") from error
            raise self._invalid_response(error) from error
        except httpx2.NetworkError as error:
            raise ConnectionResetError("the other side closed the connection") from error

    @contextmanager
    def _connect(self, answer_seconds: float) -> Iterator[str]:
        """Yield the address of the socket, if a process listens on it.

        Test the connection first, because the HTTP library does not close a socket that it could not connect.
        """
        try:
            with api.address(self.folder) as uds:
                with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                    connection.settimeout(answer_seconds)
                    connection.connect(uds)
                yield uds
        except _CONNECTION_ERRORS:
            raise
        except TimeoutError as error:
            raise self._silent() from error
        except PermissionError as error:
            raise StoreBusy(
                f"The janitor that holds the store runs as another user, and only that user may use {self._path}.",
                "Run this command as that user.",
            ) from error
        except OSError as error:
            raise StoreError(
                f"The janitor that holds the store cannot be reached on {self._path}: {error.strerror or error}.",
                "Check its log, then try again.",
            ) from error

    def _silent(self) -> StoreBusy:
        return StoreBusy(
            f"The janitor that holds the store does not respond on {self._path}.",
            "Check its log; if it hangs, restart it.",
        )

    def _invalid_response(self, error: Exception) -> StoreError:
        return StoreError(
            f"The response from {self._path} cannot be read: {error}.", "Use the same version on both sides."
        )

    def _result(self, answer: httpx2.Response) -> Any:
        for message in wire.lines(answer.iter_raw()):
            if "result" in message:
                return message["result"]
            if "error" in message:
                raise wire.read_error(message["error"])
            self._observe(message.get("progress"))
        raise ConnectionResetError("the other side closed the connection")

    def _observe(self, progress: Any) -> None:
        if isinstance(progress, Mapping) and isinstance(progress.get("phase"), str):
            topic = progress.get("topic")
            if "expected" in progress:
                self._observer(EXPECTED, None, int(progress["expected"]))
            self._observer(progress["phase"], TopicId.parse(topic) if topic else None, int(progress.get("rows", 0)))


class RemoteEngine:
    """An engine in another process (``janitor.control.api.AnyEngine``).

    Args:
        caller: the client of that process.
        identity: the identity of that process.
    """

    def __init__(self, caller: Caller, identity: ProcessIdentity) -> None:
        self._caller = caller
        self.process_identity = identity

    def plan(
        self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "", what_if: str = ""
    ) -> PlanResult:
        """Return a plan with the settings of the other janitor, whose digest replaces ``digest``."""
        settings = self.process_identity.settings or digest
        return self._caller.ask("plan", PlanResult, at_ms=at_ms, patterns=patterns, digest=settings, what_if=what_if)

    def inspect(self, table: TableName, patterns: tuple[str, ...], limit: int) -> InspectedRows:
        return self._caller.ask("inspect", InspectedRows, table=table, patterns=patterns, limit=limit)

    def boundary(self) -> tuple[ProvenBoundary | None, Boundary]:
        return self._caller.ask("boundary", tuple[ProvenBoundary | None, Boundary])

    def verify(self) -> Audit:
        return self._caller.ask("verify", Audit)

    def why(self, topic: TopicId, message_id: MessageId) -> Why:
        return self._caller.ask("why", Why, topic=topic, message_id=message_id)

    def snapshot_figures(self, limit: int) -> dict[str, Any]:
        return self._caller.ask("snapshot_figures", dict[str, Any], limit=limit)

    def restorable(self, folder: Path, request: Request) -> RestoreResult:
        return self._caller.ask("restorable", RestoreResult, folder=folder, request=request)

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]:
        return self._caller.ask("adopt", list[TopicId], once_for=once_for, store_id=store_id)

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]:
        return self._caller.ask("approve", list[TopicId], patterns=patterns, clock=clock, once_for=once_for)

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report:
        with self._finished_anyway():
            return self._caller.ask("apply", Report, wanted=wanted, adopt=adopt)

    def restore(self, folder: Path, request: Request) -> RestoreResult:
        with self._finished_anyway():
            return self._caller.ask("restore", RestoreResult, folder=folder, request=request)

    def status(self) -> Status:
        return self._caller.ask("status", Status)

    def refresh_status(self) -> None:
        self._caller.ask("refresh_status", type(None))

    def back_up(self, folder: Path) -> int:
        """Request a backup into a new folder; return its size in bytes."""
        return self._caller.ask("back_up", int, folder=str(folder))

    def sweep_now(self) -> None:
        self._caller.ask("sweep_now", type(None))

    @contextmanager
    def _finished_anyway(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            logger.warning("process %d finishes the command; its progress: janitor status", self.process_identity.pid)
            raise
