"""Which engine answers what.

Questions go to an engine of their own over the store's read-only face, so that asking can neither change anything nor
wait for a sweep (rule S5). Decisions go to the engine that sweeps, which does one thing at a time.
"""

from __future__ import annotations

import inspect
import logging
import typing
from collections.abc import Callable, Mapping
from threading import Event
from typing import Any

from janitor.control import values
from janitor.control.audience import Audience
from janitor.control.desk import WAITING, Asks, Decider, Decides, Greeting, Views, methods
from janitor.control.link import Link
from janitor.control.wire import PROTOCOL
from janitor.observe import Observer
from tms_core.errors import Halted, StoreBusy, TmsError

#: Makes an engine for one question, given who watches it and what ends it.
MakeReader = Callable[[Observer, Callable[[], bool]], Asks]

#: How often a decision that waits looks whether it may begin, in seconds.
LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


class Answers:
    """Answers one request after the other; any number of threads may ask at once.

    Args:
        decider: the engine that writes.
        make_reader: makes an engine that cannot.
        views: what the process shows of itself.
        greeting: who this is.
        audience: the observer of the engine that writes.
        stop: set when the process ends.
    """

    def __init__(
        self,
        decider: Decider,
        make_reader: MakeReader,
        views: Views,
        greeting: Greeting,
        audience: Audience,
        stop: Event,
    ) -> None:
        self._decider = decider
        self._make_reader = make_reader
        self._views = views
        self._greeting = greeting
        self._audience = audience
        self._stop = stop
        self._asks, self._decides = methods(Asks), methods(Decides)

    def answer(self, request: Mapping[str, Any], link: Link) -> Any:
        """The result of a request, as JSON values.

        Raises:
            StoreBusy: the client speaks another protocol.
            TmsError: what the engine raises, or there is no such request.
        """
        self._refuse_other_protocols(request)
        method, arguments = request.get("method"), request.get("params")
        if not isinstance(method, str) or not isinstance(arguments, dict):
            raise _not_understood("it has no method or no params")
        if method in self._asks:
            reader = self._make_reader(link.observe, link.is_gone)
            return _call(reader, Asks, method, arguments)
        if method in self._decides:
            return self._decide(method, arguments, link)
        if method == "hello":
            return values.pack(self._greeting)
        if method == "status":
            return values.pack(self._views.picture())
        if method == "nudge":
            return self._views.nudge()
        raise _not_understood(f"there is no method {method}")

    def _refuse_other_protocols(self, request: Mapping[str, Any]) -> None:
        if request.get("protocol") != PROTOCOL:
            raise StoreBusy(
                f"The janitor that holds the store (process {self._greeting.pid}, version {self._greeting.version}) "
                f"speaks protocol {PROTOCOL}, this one {request.get('protocol')}.",
                "Use one version for both: start the one that holds the store anew.",
            )

    def _decide(self, method: str, arguments: Mapping[str, Any], link: Link) -> Any:
        """Let the engine that writes do something; once begun, it is finished even if the client goes away."""
        if method in WAITING:
            self._wait(link)
        logger.info("%s was asked for through the control socket", method)
        with self._audience.joined(link.observe):
            result = _call(self._decider, Decides, method, arguments)
        self._views.nudge()
        return result

    def _wait(self, link: Link) -> None:
        """Return when no run is under way; who goes away meanwhile has changed his mind."""
        while self._decider.at_work():
            if link.is_gone() or self._stop.is_set():
                raise Halted("Nothing was done: the janitor is stopping.", "Try again when it is back.")
            link.tell({"phase": "wait", "topic": None, "rows": 0})
            self._stop.wait(LOOK_SECONDS)


def _call(engine: object, protocol: type, method: str, arguments: Mapping[str, Any]) -> Any:
    """Call a method with arguments as they came over the wire."""
    function = getattr(protocol, method)
    kinds = typing.get_type_hints(function)
    try:
        inspect.signature(function).bind(engine, **arguments)
        given = {name: values.unpack(kinds[name], value) for name, value in arguments.items()}
    except (ValueError, TypeError) as error:
        raise _not_understood(f"{method}: {error}") from error
    return values.pack(getattr(engine, method)(**given))


def _not_understood(why: str) -> TmsError:
    return TmsError(f"The request was not understood: {why}.")
