"""Which HBase a test run uses, and how its worker processes share one.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests import maven
from tests.hbase.server import Address, HBaseServer, ServerFailed, of_folder, start
from tests.support import require_or_skip

THRIFT_PORT, THRIFT2_PORT = 9090, 9091


@contextmanager
def running(common: Path) -> Iterator[HBaseServer]:
    """The HBase of this test run; the last process out stops what was started for it.

    Args:
        common: a folder that all processes of the run share, and no other run.
    """
    if address := os.environ.get("HBASE_TEST_ADDRESS"):
        yield HBaseServer(Address.parse(address))
    elif image := _image():
        with _contained(image) as server:
            yield server
    elif reason := maven.missing():
        require_or_skip(reason)
    else:
        with _shared(common) as server:
            yield server


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
    """The server another process of this run has started, if it is still there."""
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


def _image() -> str | None:
    """The image to make a container of, if that can be done here."""
    image = os.environ.get("HBASE_TEST_IMAGE")
    if not image or not shutil.which("docker") or importlib.util.find_spec("testcontainers") is None:
        return None
    asked = ["docker", "image", "inspect", image]
    try:
        return image if subprocess.run(asked, capture_output=True, check=False, timeout=10).returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None


@contextmanager
def _contained(image: str) -> Iterator[HBaseServer]:
    """A container of this process alone; its image must serve Thrift 1 and 2 at their usual ports."""
    container = importlib.import_module("testcontainers.core.container")
    with container.DockerContainer(image).with_exposed_ports(THRIFT_PORT, THRIFT2_PORT) as one:
        ports = (int(one.get_exposed_port(port)) for port in (THRIFT_PORT, THRIFT2_PORT))
        yield HBaseServer(Address(one.get_container_host_ip(), *ports))
