"""The questions and decisions that a janitor accepts, for an engine in this process or behind a socket.

Commands use only this interface. The names of its methods are also those of the protocol, and their annotations
determine how arguments and results are decoded (``janitor.state.values``), so there is one definition of all calls.

A call is ``POST /control/METHOD`` with the body ``{"protocol", "params"}``. The response is one JSON object per line:
any number of ``{"progress": {...}}``, then ``{"result": ...}`` or ``{"error": {"kind", "message", "hint"}}``. A
response without that last line means that the janitor has died. Calls are independent of each other. Kinds of errors
are a closed table, so a response can only raise errors of this project.
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
from janitor.run.questions import PlanResult
from janitor.state import values
from janitor.state.base import ProvenBoundary
from janitor.status.status import Status
from tms_core.errors import StopRequested, StoreBusy, TmsError
from tms_core.rowkey import MessageId
from tms_core.tables.base import TableName
from tms_core.topic import TopicId

if TYPE_CHECKING:
    from starlette.types import ASGIApp

#: Increased whenever the two sides can no longer understand each other; the form in the docstring above stays.
PROTOCOL = 2
#: The socket's name in the state folder.
SOCKET_NAME = "control.sock"
#: The longest socket address of the kernel, in bytes (``sun_path`` without its last zero).
MAX_ADDRESS_BYTES = 107

#: The interval at which a waiting decision checks whether it may start, in seconds.
LOOK_SECONDS = 0.2
#: Decisions that wait until no run is in progress.
WAITING = frozenset({"adopt", "apply", "restore"})

logger = logging.getLogger(__name__)


class ReadEngine(Protocol):
    """The questions of an engine; they do not change the store (:class:`~janitor.run.questions.Questions`)."""

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
    """The decisions of an operator, and the commands that write because of them."""

    def adopt(self, *, once_for: str | None = None, store_id: str | None = None) -> list[TopicId]: ...

    def approve(
        self, patterns: tuple[str, ...] = (), *, clock: bool = False, once_for: str | None = None
    ) -> list[TopicId]: ...

    def apply(self, wanted: PlanFile, *, adopt: bool = False) -> Report: ...

    def restore(self, folder: Path, request: Request) -> RestoreResult: ...


class AnyEngine(ReadEngine, OperatorCommands, Protocol):
    """The interface of an engine, in this process or another one."""


class Decider(OperatorCommands, Protocol):
    """The engine, or its wrapper, that makes decisions in the process that holds the store."""

    def at_work(self) -> bool:
        """Return whether a run is in progress, for which a decision of ``WAITING`` has to wait."""
        ...


class Views(Protocol):
    """The views of a process that holds a store."""

    def status(self) -> Status:
        """Return the current status."""
        ...

    def refresh_status(self) -> None:
        """Collect the status again, because shown data has changed."""
        ...

    def sweep_now(self) -> None:
        """Start a sweep as soon as possible; return before it has started."""
        ...


class Greeting(NamedTuple):
    """The identity of the responding process.

    Attributes:
        version: the version of the package.
        pid: the process id.
        store: the identity of the store it holds (``Store.identity``).
        settings: the digest of its settings (``janitor.settings.config_digest``).
    """

    version: str
    pid: int
    store: str
    settings: str


def methods(kind: type) -> frozenset[str]:
    """Return the names of a protocol's methods."""
    return frozenset(name for name in vars(kind) if not name.startswith("_"))


#: Calls that change something: the decisions, and an early sweep.
DECISIONS = methods(OperatorCommands) | {"back_up", "sweep_now"}

#: Makes an engine for one query, from an observer and a stop condition.
MakeReader = Callable[[Observer, Callable[[], bool]], ReadEngine]


class Observers:
    """An observer that also notifies the client of the call that this thread handles.

    An engine that writes has one observer for its whole life, and calls it in the working thread.

    Args:
        always: notified of all progress.
    """

    def __init__(self, always: Observer = ignore_progress) -> None:
        self._always = always
        self._asking = threading.local()

    def __call__(self, phase: str, topic: TopicId | None, rows: int) -> None:
        self._always(phase, topic, rows)
        asking: Observer = getattr(self._asking, "observer", ignore_progress)
        asking(phase, topic, rows)

    @contextmanager
    def joined(self, observer: Observer) -> Iterator[None]:
        """Also notify this observer of the work of this thread while the block runs."""
        self._asking.observer = observer
        try:
            yield
        finally:
            del self._asking.observer


class ControlBackend(NamedTuple):
    """The parts that the socket's server calls.

    Attributes:
        decider: the engine that writes; stop it before the server, which waits for it.
        make_reader: makes an engine that cannot write, for one question.
        views: the views of the process.
        greeting: the identity of the process (:func:`greeting`).
        observers: the observers of the writing engine, so that a client sees the progress of its run.
        page: the status page and its API; None: there is no page.
        back_up: writes a backup into a new folder, and returns its bytes. None: there is nothing to back up.
    """

    decider: Decider
    make_reader: MakeReader
    views: Views
    greeting: Greeting
    observers: Observers
    page: ASGIApp | None = None
    back_up: Callable[[Path], int] | None = None


def greeting(store: str, settings: str) -> Greeting:
    """Return the identity of this process; arguments as of :class:`~janitor.control.api.Greeting`."""
    return Greeting(metadata.version("tms-janitor"), os.getpid(), store, settings)


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
    except ValueError as error:
        raise not_understood(str(error)) from error
    arguments = request.get("params") if isinstance(request, dict) else None
    if not isinstance(arguments, dict):
        raise not_understood("it has no params")
    if request.get("protocol") != PROTOCOL:
        pid, version = backend.greeting.pid, backend.greeting.version
        raise StoreBusy(
            f"The janitor that holds the store (process {pid}, version {version}) speaks protocol {PROTOCOL}, this one "
            f"{request.get('protocol')}.",
            "Use one version for both: restart the one that holds the store.",
        )
    if method in methods(ReadEngine):
        reader = backend.make_reader(observe, disconnect.is_set)
        return _call(reader, ReadEngine, method, arguments)
    if method in methods(OperatorCommands):
        return _decide(backend, method, arguments, observe, disconnect)
    return _serve(backend, method, arguments)


def _serve(backend: ControlBackend, method: str, arguments: Mapping[str, Any]) -> Any:
    """Execute the calls that need no engine."""
    if method == "hello":
        return values.pack(backend.greeting)
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
    raise not_understood(f"there is no method {method}")


def _decide(
    backend: ControlBackend, method: str, arguments: Mapping[str, Any], observe: Observer, disconnect: Event
) -> Any:
    """Execute a decision with the writing engine; once started, it finishes even if the client disconnects."""
    if method in WAITING:
        _wait(backend.decider, observe, disconnect)
    logger.info("received %s on the control socket", method)
    with backend.observers.joined(observe):
        result = _call(backend.decider, OperatorCommands, method, arguments)
    backend.views.refresh_status()
    return result


def _wait(decider: Decider, observe: Observer, disconnect: Event) -> None:
    """Wait until no run is active; the request of a client that disconnects in the meantime is dropped."""
    while decider.at_work() and not disconnect.is_set():
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
        raise not_understood(f"{method}: {error}") from error
    return values.pack(getattr(engine, method)(**decoded))


def not_understood(why: str) -> TmsError:
    """Return the error for an invalid request."""
    return TmsError(f"The request was not understood: {why}.")


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """Yield the address of a state folder's socket, while the block runs.

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
