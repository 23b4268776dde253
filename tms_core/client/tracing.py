"""What a program may do around each request: count it, time it, or have it traced.

A hook is called for each attempt and returns a context manager, which is what tracing libraries give out. What is put
into the headers goes with the request, so a trace goes on in the server's proxies and logs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field


@dataclass(slots=True)
class Attempt:
    """A request that is being sent; one that is tried again is another attempt.

    Attributes:
        method, url: where to.
        headers: more headers to send with it; those of the client itself, the token's among them, cannot be replaced.
        status: of the answer, when the context manager is left; None: there was no answer.
    """

    method: str
    url: str
    headers: dict[str, str] = field(default_factory=dict)
    status: int | None = None


#: Called for each attempt. The request is sent when what it returns was entered, and an error that comes of it passes
#: through that; what it raises itself goes to the caller.
Hook = Callable[[Attempt], AbstractContextManager[object]]


def no_hook(_: Attempt) -> AbstractContextManager[object]:
    """Nothing is done around requests."""
    return nullcontext()
