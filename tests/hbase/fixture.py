"""The selection of the HBase for a test run, which its worker processes share.

In this order: an address in ``HBASE_TEST_ADDRESS`` (``make hbase`` prints one); a container, when a Docker engine
answers, has the image that ``HBASE_TEST_IMAGE`` names and testcontainers is installed; else Maven's.
"""

from __future__ import annotations

import fcntl
import importlib
import importlib.util
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from tests import maven
from tests.hbase.server import (
    START_SECONDS,
    THRIFT2_PORT,
    THRIFT_PORT,
    Address,
    HBaseServer,
    ServerFailed,
    of_folder,
    start,
)
from tests.support import require_or_skip
from tms_core.errors import StoreError
from tms_core.tables.hbase.pool import HBasePool

#: How long a Docker engine may take to say what it has: one that hangs is none.
ENGINE_SECONDS = 60


class Choice(NamedTuple):
    """Where an HBase comes from, and the address, the image, nothing, or why there is none."""

    source: Literal["address", "container", "maven", "nowhere"]
    detail: str = ""


def choose(
    environment: Mapping[str, str], has_image: Callable[[str], bool], missing: Callable[[], str | None]
) -> Choice:
    """Choose the HBase by what is available."""
    if address := environment.get("HBASE_TEST_ADDRESS"):
        return Choice("address", address)
    if (image := environment.get("HBASE_TEST_IMAGE")) and has_image(image):
        return Choice("container", image)
    reason = missing()
    return Choice("nowhere", reason) if reason else Choice("maven")


@contextmanager
def running(common: Path) -> Iterator[HBaseServer]:
    """Yield the HBase of this test run; the last process stops its servers."""
    source, detail = choose(os.environ, has_image, maven.missing)
    with ExitStack() as stack:
        match source:
            case "address":
                yield HBaseServer(Address.parse(detail))
            case "container":
                yield stack.enter_context(contained(detail))
            case "maven":
                yield stack.enter_context(_shared(common))
            case "nowhere":
                require_or_skip(detail)


@contextmanager
def _shared(common: Path) -> Iterator[HBaseServer]:
    folder = common / "hbase"
    with _locked(common):
        server = _joined(folder) or start(folder)
    try:
        yield server
    finally:
        with _locked(common):
            server.leave()


def _joined(folder: Path) -> HBaseServer | None:
    """Return the server that another process of this run has started, if it still runs."""
    try:
        server = of_folder(folder)
        server.join()
    except (OSError, ServerFailed):
        return None
    return server


@contextmanager
def _locked(common: Path) -> Iterator[None]:
    with (common / "hbase.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def has_image(image: str) -> bool:
    """Return whether testcontainers is installed and a Docker engine has the image."""
    if not shutil.which("docker") or importlib.util.find_spec("testcontainers") is None:
        return False
    command = ["docker", "image", "inspect", image]
    try:
        return subprocess.run(command, capture_output=True, check=False, timeout=ENGINE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def contained(image: str) -> Iterator[HBaseServer]:
    """Yield a container of this process; its image must serve Thrift 1 and 2 at their default ports."""
    container = importlib.import_module("testcontainers.core.container")
    with container.DockerContainer(image).with_exposed_ports(THRIFT_PORT, THRIFT2_PORT) as one:
        ports = (int(one.get_exposed_port(port)) for port in (THRIFT_PORT, THRIFT2_PORT))
        server = HBaseServer(Address(one.get_container_host_ip(), *ports))
        _await(server)
        yield server


def _await(server: HBaseServer) -> None:
    """Return when HBase answers at both: ports of a container are open long before anybody listens inside."""
    assert server.thrift2 is not None
    deadline = time.monotonic() + START_SECONDS
    with ExitStack() as stack:
        one = HBasePool([server.thrift], timeout_seconds=ENGINE_SECONDS)
        other = HBasePool([server.thrift2], timeout_seconds=ENGINE_SECONDS, service="HbaseAdmin")
        for pool, call in ((one, "getTableNames"), (other, "listNamespaces")):
            stack.callback(pool.close)
            while not _answers(pool, call):
                if time.monotonic() > deadline:
                    raise ServerFailed(f"the HBase in the container at {server.address} does not answer {call}")
                time.sleep(0.5)


def _answers(pool: HBasePool, call: str) -> bool:
    try:
        pool.call(call)
    except StoreError:
        return False
    return True
