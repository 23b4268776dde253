"""Helpers of all tests: requirements of a test, the number of random histories, waits, event loops and ports.

A test that cannot run on a developer machine is skipped with a reason. With ``CI`` set it fails, because a skipped test
proves nothing. Tests over random histories read their size from the environment, so that the same test is short in
``make test`` and long overnight.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import os
import shutil
import socket
import tarfile
import time
from collections.abc import Callable, Coroutine
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

import pytest

#: The time after which a test that waits for a response or another thread fails: longer than any successful wait.
PATIENCE_SECONDS = 120


def in_ci() -> bool:
    """Return whether every test must run: ``CI`` is set to anything except 0 or false."""
    return os.environ.get("CI", "").lower() not in {"", "0", "false"}


def require_or_skip(reason: str) -> NoReturn:
    """Skip a test (or at import, a module) that cannot run on this machine; with ``CI`` set, fail.

    Args:
        reason: the missing requirement, and the command that installs it.
    """
    if in_ci():
        pytest.fail(f"cannot run here, and CI runs everything: {reason}", pytrace=False)
    pytest.skip(reason, allow_module_level=True)


def require_tool(name: str, install: str) -> str:
    """Return the path of a program, or skip the test by :func:`require_or_skip`.

    Args:
        name: the program, as a user types it.
        install: the command that installs it.
    """
    path = shutil.which(name)
    if path is None:
        require_or_skip(f"{name} is missing; install it: {install}")
    return path


def size(name: str, default: int) -> int:
    """Return the number of seeds, rows or examples of a proof: the environment variable ``name``, else ``default``.

    ``TMS_TEST_SEEDS=10000 make test PYTEST_ARGS=tests/simulation`` is the long run of the simulation.
    """
    return int(os.environ.get(name, default))


def seeds(default: int) -> range:
    """Return the seeds of a test's random histories.

    ``TMS_TEST_FIRST_SEED`` (0) is the first seed, and ``TMS_TEST_SEEDS`` (``default``) the number of seeds. Two runs of
    ``make test`` have the same histories; ``make fuzz`` sets another first seed in each round.
    """
    first = size("TMS_TEST_FIRST_SEED", 0)
    return range(first, first + size("TMS_TEST_SEEDS", default))


def unpack_archive(archive: Path, into: Path) -> None:
    """Unpack an archive of the tests into a folder."""
    with tarfile.open(archive) as opened:
        # Python 3.11.3 and older have no filters; the archives are part of the checkout.
        opened.extraction_filter = getattr(tarfile, "data_filter", None)
        opened.extractall(into)  # noqa: S202 filtered above


def file_digests(folder: Path) -> dict[str, tuple[str, int, int]]:
    """Return the content, inode and modification time of every file."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_ino,
            path.stat().st_mtime_ns,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition is true, or fail after :data:`PATIENCE_SECONDS`."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"the condition is false after {PATIENCE_SECONDS} s"
        time.sleep(0.005)


class TerminalStream(io.StringIO):
    def isatty(self) -> bool:
        return True


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """Return a function that always raises an error."""

    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def act_before(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]) -> None:
    """Run an action before the next call of a function, and not before later calls.

    Args:
        owner: the object, class or module with the function ``name``.
    """
    call = getattr(owner, name)

    def act_then_call(*arguments: Any, **named: Any) -> Any:
        patch.setattr(owner, name, call)
        act()
        return call(*arguments, **named)

    patch.setattr(owner, name, act_then_call)


def act_after(patch: pytest.MonkeyPatch, owner: object, name: str, act: Callable[[], object]) -> None:
    """Run an action after the next call of a function, before its caller continues; see :func:`act_before`."""
    call = getattr(owner, name)

    def call_then_act(*arguments: Any, **named: Any) -> Any:
        patch.setattr(owner, name, call)
        result = call(*arguments, **named)
        act()
        return result

    patch.setattr(owner, name, call_then_act)


def record_calls(patch: pytest.MonkeyPatch, owner: object, name: str) -> list[tuple[Any, ...]]:
    """Return a list that receives the positional arguments of each call of a function from now on."""
    calls, call = list[tuple[Any, ...]](), getattr(owner, name)

    def record_then_call(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return call(*arguments, **named)

    patch.setattr(owner, name, record_then_call)
    return calls


#: A function that plants a bug in the product.
Plant = Callable[[pytest.MonkeyPatch], None]


def replacing(owner: object, name: str, value: object) -> Plant:
    """Return a bug that replaces a function of an object, class or module."""
    return lambda patch: patch.setattr(owner, name, value)


def each_raises(
    error: type[BaseException] | tuple[type[BaseException], ...], *calls: Callable[[], object], match: str | None = None
) -> None:
    """Check that each of several calls raises an error."""
    for call in calls:
        with pytest.raises(error, match=match):
            call()


def in_event_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Return a test that runs a coroutine in a new event loop."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        asyncio.run(test(*arguments, **named))

    return run


def is_listening(port: int) -> bool:
    """Return whether a server listens on a port of the loopback address."""
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    """Return a free port of the loopback address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port
