"""Selection of the HBase for tests: an address, a container, Maven's jars, or none."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from janitor.rules.policy import Rule
from tests.builders import NOW_MS, janitor
from tests.hbase.fixture import Choice, choose, has_image, run_container, running
from tests.hbase.server import Address, HBaseServer, at_default_ports
from tests.hbase.tables import fill_tables
from tests.tables.fake_thrift import FakeThrift, Request
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.store import HBaseStore

ADDRESS, IMAGE = {"HBASE_TEST_ADDRESS": "h:1,2"}, {"HBASE_TEST_IMAGE": "hbase:2.6"}
FROM_ADDRESS, CONTAINER, MAVEN = Choice("address", "h:1,2"), Choice("container", "hbase:2.6"), Choice("maven")
NONE = Choice("none", "no Java")


@pytest.mark.parametrize(
    ("environment", "engine", "java", "choice"),
    [
        (ADDRESS | IMAGE, True, True, FROM_ADDRESS),
        (ADDRESS, False, False, FROM_ADDRESS),
        (IMAGE, True, True, CONTAINER),
        (IMAGE, True, False, CONTAINER),
        (IMAGE, False, True, MAVEN),
        ({"HBASE_TEST_ADDRESS": "", "HBASE_TEST_IMAGE": ""}, True, True, MAVEN),
        ({}, True, True, MAVEN),
        ({}, True, False, NONE),
        (IMAGE, False, False, NONE),
    ],
)
def test_address_has_precedence_over_container(
    environment: dict[str, str], engine: bool, java: bool, choice: Choice
) -> None:
    assert choose(environment, lambda image: engine and image == "hbase:2.6", lambda: None if java else "no Java") == (
        choice
    )


@pytest.mark.parametrize("ci", ["1", ""])
def test_missing_hbase_skips_locally_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.delenv("HBASE_TEST_ADDRESS", raising=False)
    monkeypatch.delenv("HBASE_TEST_IMAGE", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    outcome = pytest.fail.Exception if ci else pytest.skip.Exception
    with pytest.raises(outcome, match=r"is missing"), running(tmp_path):
        raise AssertionError("the HBase is not missing")


@pytest.mark.parametrize("ci", ["1", ""])
def test_hbase_without_commands_skips_locally_and_fails_in_ci(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str
) -> None:
    monkeypatch.setenv("CI", ci)
    monkeypatch.setenv("HBASE_TEST_ADDRESS", "h:1,2")
    with running(tmp_path) as server:
        assert (server.thrift, server.thrift2) == ("h:1", "h:2")
        with pytest.raises(pytest.fail.Exception if ci else pytest.skip.Exception, match="accepts no commands"):
            server.command("servers")


@pytest.fixture
def docker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[int], None]:
    """Return a function that installs a fake docker command with the given exit code."""

    def make(status: int) -> None:
        command = tmp_path / "docker"
        command.write_text(f'#!/bin/sh\n[ "$*" = "image inspect hbase:2.6" ] && exit {status}\nexit 3\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return make


@pytest.fixture
def testcontainers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Install a fake library whose containers are servers that already run."""
    package = tmp_path / "lib" / "testcontainers" / "core"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "container.py").write_text(
        """
import os


class DockerContainer:
    def __init__(self, image):
        self.image, self.ports = image, None

    def with_exposed_ports(self, *ports):
        self.ports = dict(zip(ports, os.environ["FAKE_PORTS"].split(","), strict=True))
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        os.environ["FAKE_PORTS"] = ""

    def get_container_host_ip(self):
        return "127.0.0.1"

    def get_exposed_port(self, port):
        return self.ports[port]
"""
    )
    monkeypatch.syspath_prepend(tmp_path / "lib")


@pytest.mark.usefixtures("testcontainers")
def test_docker_engine_without_image_is_unusable(docker: Callable[[int], None]) -> None:
    docker(0)
    assert has_image("hbase:2.6")
    assert not has_image("hbase:1.0")
    docker(1)
    assert not has_image("hbase:2.6")


def test_docker_engine_without_library_is_unusable(
    docker: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    docker(0)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not has_image("hbase:2.6")


@pytest.fixture
def servers() -> Iterator[list[FakeThrift]]:
    """Yield two Thrift servers that close the first connections and respond later."""

    def slow(request: Request) -> None:
        if sum(server.connections for server in (one, other)) < 4:
            request.cut()
        else:
            request.reply([])

    with ExitStack() as stack:
        one = stack.enter_context(FakeThrift(slow))
        other = stack.enter_context(FakeThrift(slow, service="HbaseAdmin"))
        yield [one, other]


@pytest.mark.usefixtures("testcontainers")
def test_started_container_is_stopped_on_exit(servers: list[FakeThrift], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PORTS", ",".join(str(server.port) for server in servers))
    with run_container("hbase:2.6") as server:
        assert isinstance(server, HBaseServer)
        assert server.address == Address("127.0.0.1", servers[0].port, servers[1].port)
        assert all(thrift.connections > 0 for thrift in servers)
        assert os.environ["FAKE_PORTS"]
    assert not os.environ["FAKE_PORTS"], "the container still runs"


def test_fill_tables_expires_half_of_the_messages(hbase: HBaseServer) -> None:
    namespace = f"filled_{secrets.token_hex(4)}"
    with at_default_ports(hbase, 0, 0) as served:
        assert served.address.thrift != hbase.address.thrift
        assert fill_tables(served, namespace, 400, NOW_MS) == 400
        with HBaseStore(HBaseSettings(thrift=(served.thrift,), namespace=namespace)) as store:
            report = janitor(store).engine.preview()
        assert report.total(Rule.EXPIRED) == 199, "a message whose age equals the ttl is live"
