"""The selection of the HBase for a test run, which its worker processes share.

The first available one is used: the address in ``HBASE_TEST_ADDRESS``, which ``make hbase`` prints; a container of
the image in ``HBASE_TEST_IMAGE``, if a Docker engine has the image and testcontainers is installed; an HBase from
Maven's jars.
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
    server_of,
    start,
)
from tests.support import require_or_skip
from tms_core.errors import StoreError
from tms_core.tables.hbase.pool import HBasePool

#: The time limit for a response of the Docker engine or of HBase, after which it counts as missing.
RESPONSE_SECONDS = 60


class Choice(NamedTuple):
    """The source of an HBase, and its address, its image, or the reason why no source is available."""

    source: Literal["address", "container", "maven", "none"]
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
    return Choice("none", reason) if reason else Choice("maven")


@contextmanager
def running(common: Path) -> Iterator[HBaseServer]:
    """Yield the HBase of this test run; the last process stops its servers."""
    source, detail = choose(os.environ, has_image, maven.missing)
    with ExitStack() as stack:
        match source:
            case "address":
                yield HBaseServer(Address.parse(detail))
            case "container":
                yield stack.enter_context(run_container(detail))
            case "maven":
                yield stack.enter_context(_shared(common))
            case "none":
                require_or_skip(detail)


@contextmanager
def _shared(common: Path) -> Iterator[HBaseServer]:
    folder = common / "hbase"
    with _locked(common):
        server = _join(folder) or start(folder)
    try:
        yield server
    finally:
        with _locked(common):
            server.leave()


def _join(folder: Path) -> HBaseServer | None:
    """Return the server that another process of this run has started, if it still runs."""
    try:
        server = server_of(folder)
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
        return subprocess.run(command, capture_output=True, check=False, timeout=RESPONSE_SECONDS).returncode == 0
    except subprocess.TimeoutExpired:
        return False


@contextmanager
def run_container(image: str) -> Iterator[HBaseServer]:
    """Run a container for this process; its image must serve Thrift 1 and 2 on their default ports."""
    module = importlib.import_module("testcontainers.core.container")
    with module.DockerContainer(image).with_exposed_ports(THRIFT_PORT, THRIFT2_PORT) as container:
        ports = (int(container.get_exposed_port(port)) for port in (THRIFT_PORT, THRIFT2_PORT))
        server = HBaseServer(Address(container.get_container_host_ip(), *ports))
        _wait_for_responses(server)
        yield server


def _wait_for_responses(server: HBaseServer) -> None:
    """Wait until both interfaces respond: the ports of a container are open long before HBase listens."""
    assert server.thrift2 is not None
    deadline = time.monotonic() + START_SECONDS
    with ExitStack() as stack:
        thrift = HBasePool([server.thrift], timeout_seconds=RESPONSE_SECONDS)
        thrift2 = HBasePool([server.thrift2], timeout_seconds=RESPONSE_SECONDS, service="HbaseAdmin")
        for pool, call in ((thrift, "getTableNames"), (thrift2, "listNamespaces")):
            stack.callback(pool.close)
            while not _responds(pool, call):
                if time.monotonic() > deadline:
                    raise ServerFailed(f"the HBase in the container at {server.address} does not respond to {call}")
                time.sleep(0.5)


def _responds(pool: HBasePool, call: str) -> bool:
    try:
        pool.call(call)
    except StoreError:
        return False
    return True
