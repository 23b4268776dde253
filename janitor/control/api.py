"""The queries and decisions that a janitor accepts, in the same process or through a socket.

Commands use only this interface. The protocol has the same method names, and the annotations determine how arguments
and results are decoded (``janitor.state.values``), so there is one definition of all calls.

A call is ``POST /control/METHOD`` with the body ``{"protocol", "params"}``. The response has one JSON object per line:
any number of ``{"progress": {...}}``, then ``{"result": ...}`` or ``{"error": {"kind", "message", "hint"}}``. If this
last line is missing, the janitor has died. Calls are independent of each other. Kinds of errors are a closed table, so
a response can raise only errors of this project.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import threading
import typing
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from janitor.archive.restore import Request, RestoreResult
from janitor.boundary import Boundary
from janitor.inspect.answer import Why
from janitor.inspect.rows import Audit, InspectedRows
from janitor.report import Observer, Report, ignore_progress
from janitor.run.plan_file import PlanFile
from janitor.run.queries import PlanResult
from janitor.state import values
from janitor.state.base import ProvenBoundary
from janitor.status.status import Status
from tms_core.errors import StopRequested, StoreBusy, TmsError
from tms_core.rowkey import MessageId
from tms_core.tables.base import TableName
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: The protocol version, increased by each incompatible change; the format in the docstring above stays.
PROTOCOL = 2
#: The socket's name in the state folder.
SOCKET_NAME = "control.sock"
#: The maximum length of a socket address in the kernel, in bytes (``sun_path`` without the final zero).
MAX_ADDRESS_BYTES = 107

#: The interval at which a waiting decision checks whether it may start, in seconds.
LOOK_SECONDS = 0.2
#: The decisions that wait until no run is in progress.
WAITING = frozenset({"adopt", "apply", "restore"})

logger = logging.getLogger(__name__)


class ReadEngine(Protocol):
    """The queries of an engine, which do not change the store (:class:`~janitor.run.queries.Queries`)."""

    def plan(
        self, *, at_ms: int | None = None, patterns: tuple[str, ...] = (), digest: str = "", what_if: str = ""
    ) -> PlanResult: ...

    def inspect(self, table: TableName, patterns: tuple[str, ...], limit: int) -> InspectedRows: ...

    def boundary(self) -> tuple[ProvenBoundary | None, Boundary]: ...

    def verify(self) -> Audit: ...

    def why(self, topic: TopicId, message_id: MessageId) -> Why: ...

    def snapshot_figures(self, limit: int) -> dict[str, Any]: ...

    def restorable(self, folder: Path, request: Request) -> RestoreResult: ...


class OperatorCommands(Protocol):
    """The decisions of operators, and the commands that carry them out."""

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]: ...

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]: ...

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report: ...

    def restore(self, folder: Path, request: Request) -> RestoreResult: ...


class AnyEngine(ReadEngine, OperatorCommands, Protocol):
    """The interface of an engine, in this process or in another process."""


class Decider(OperatorCommands, Protocol):
    """The engine, or its wrapper, that carries out decisions in the process that holds the store."""

    def is_running(self) -> bool:
        """Return whether a run is in progress, so that the decisions in ``WAITING`` must wait."""
        ...


class Views(Protocol):
    """The views of a process that holds a store."""

    def status(self) -> Status:
        """Return the current status."""
        ...

    def refresh_status(self) -> None:
        """Collect the status again, because its data has changed."""
        ...

    def sweep_now(self) -> None:
        """Request a sweep as soon as possible; return before it starts."""
        ...


class ProcessIdentity(NamedTuple):
    """The identity of the responding process.

    Attributes:
        version: the version of the package.
        pid: the process id.
        store: the identity of its store (``Store.identity``).
        settings: the digest of its settings (``janitor.settings.config_digest``).
    """

    version: str
    pid: int
    store: str
    settings: str


def methods(kind: type) -> frozenset[str]:
    """Return the names of a protocol's methods."""
    return frozenset(name for name in vars(kind) if not name.startswith("_"))


#: Calls with effects, which the audit log records: decisions, backups, and requested sweeps.
DECISIONS = methods(OperatorCommands) | {"back_up", "sweep_now"}

#: Makes an engine for one query, from an observer and a stop condition.
MakeReader = Callable[[Observer, Callable[[], bool]], ReadEngine]


class Observers:
    """An observer that also notifies the client of the call that this thread handles.

    An engine that writes has one observer during its lifetime, and calls it in the working thread.

    Args:
        permanent: receives all progress.
    """

    def __init__(self, permanent: Observer = ignore_progress) -> None:
        self._permanent = permanent
        self._of_call = threading.local()

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        self._permanent(phase, topic, rows)
        observe: Observer = getattr(self._of_call, "observer", ignore_progress)
        observe(phase, topic, rows)

    @contextmanager
    def with_observer(self, observer: Observer) -> Iterator[None]:
        """Notify this observer, too, of the progress of this thread inside the block."""
        self._of_call.observer = observer
        try:
            yield
        finally:
            del self._of_call.observer


class ControlBackend(NamedTuple):
    """The objects that the server of the socket calls.

    Attributes:
        decider: the engine that writes; stop it before the server, which waits for it.
        make_reader: creates a read-only engine for one query.
        views: the views of the process.
        process_identity: the identity of the process (:func:`process_identity`).
        observers: the observers of the writing engine, so that a client sees the progress of its run.
        page: the status page and its API; None without a page.
        back_up: writes a backup into a new folder, and returns its size in bytes; None if backups are not possible.
    """

    decider: Decider
    make_reader: MakeReader
    views: Views
    process_identity: ProcessIdentity
    observers: Observers
    page: ASGIApp | None = None
    back_up: Callable[[Path], int] | None = None


def process_identity(store: str, settings: str) -> ProcessIdentity:
    """Return the identity of this process; arguments as of :class:`~janitor.control.api.ProcessIdentity`."""
    return ProcessIdentity(metadata.version("tms-janitor"), os.getpid(), store, settings)


def answer(backend: ControlBackend, method: str, body: bytes, observe: Observer, disconnect: Event) -> Any:
    """Return the result of a call, as JSON values.

    Args:
        observe: called with the progress.
        disconnect: set when the client has disconnected, or the janitor stops.

    Raises:
        StoreBusy: the client uses another protocol version.
        TmsError: the error of the engine, or an unknown method.
    """
    try:
        request = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid_request(str(error)) from error
    arguments = request.get("params") if isinstance(request, dict) else None
    if not isinstance(arguments, dict):
        raise invalid_request("params are missing")
    if request.get("protocol") != PROTOCOL:
        pid, version = backend.process_identity.pid, backend.process_identity.version
        raise StoreBusy(
            f"The janitor that holds the store (process {pid}, version {version}) uses protocol {PROTOCOL}, this "
            f"command {request.get('protocol')}.",
            "Use the same version for both: restart the janitor that holds the store.",
        )
    if method in methods(ReadEngine):
        reader = backend.make_reader(observe, disconnect.is_set)
        return _call(reader, ReadEngine, method, arguments)
    if method in methods(OperatorCommands):
        return _decide(backend, method, arguments, observe, disconnect)
    return _serve(backend, method, arguments)


def _serve(backend: ControlBackend, method: str, arguments: Mapping[str, Any]) -> Any:
    """Execute the calls that do not need an engine."""
    if method == "hello":
        return values.pack(backend.process_identity)
    if method == "status":
        return values.pack(backend.views.status())
    if method == "refresh_status":
        return backend.views.refresh_status()
    if method == "sweep_now":
        logger.info("received sweep-now on the control socket")
        return backend.views.sweep_now()
    if method == "back_up" and backend.back_up is not None:
        logger.info("received backup on the control socket")
        return backend.back_up(Path(str(arguments.get("folder"))))
    raise invalid_request(f"method {method} does not exist")


def _decide(
    backend: ControlBackend, method: str, arguments: Mapping[str, Any], observe: Observer, disconnect: Event
) -> Any:
    """Execute a decision with the writing engine; after its start it finishes even if the client disconnects."""
    if method in WAITING:
        _wait(backend.decider, observe, disconnect)
    logger.info("received %s on the control socket", method)
    with backend.observers.with_observer(observe):
        result = _call(backend.decider, OperatorCommands, method, arguments)
    backend.views.refresh_status()
    return result


def _wait(decider: Decider, observe: Observer, disconnect: Event) -> None:
    """Wait until no run is in progress.

    Raises:
        StopRequested: the client has disconnected, or the janitor is stopping.
    """
    while decider.is_running() and not disconnect.is_set():
        observe("wait", None, 0)
        disconnect.wait(LOOK_SECONDS)
    if disconnect.is_set():
        raise StopRequested("Nothing was done: the janitor is stopping.", "Try again after its restart.")


def _call(engine: object, protocol: type, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method with decoded arguments."""
    function = getattr(protocol, method)
    kinds = typing.get_type_hints(function)
    try:
        inspect.signature(function).bind(engine, **arguments)
        decoded = {name: values.unpack(kinds[name], value) for name, value in arguments.items()}
    except (ValueError, TypeError) as error:
        raise invalid_request(f"{method}: {error}") from error
    return values.pack(getattr(engine, method)(**decoded))


def invalid_request(why: str) -> TmsError:
    """Return the error for an invalid request."""
    return TmsError(f"The request is invalid: {why}.")


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Yield the address of the socket in a state folder, valid inside the block.

    The kernel accepts 107 bytes. For a longer path, the address uses an open handle of the folder.

    Raises:
        OSError: the folder cannot be opened.
    """
    path = folder / SOCKET_NAME
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)
