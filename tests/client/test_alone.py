"""The client in an environment without the packages of the server and the janitor."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import tms_core.client

ROOT = Path(__file__).parents[2]

#: A program that publishes, reads and prints the imported modules.
APPLICATION = """
import sys
before = set(sys.modules)
from tms_core.client import Client

with Client(sys.argv[1], transactions=sys.argv[2]) as client:
    client.create_topic("default:orders")
    client.publish("default:orders", [b"one"])
    with client.transaction() as transaction:
        transaction.publish("default:orders", [b"two"])
    print("read:", *(message.payload.decode() for message in client.poll("default:orders")))
print("imported:", *sorted({name.partition(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names))
print("rooms:", *sorted({".".join(name.split(".")[:3]) for name in sys.modules if name.startswith("tms_core.")}))
"""


def closure(name: str, seen: set[str]) -> Iterator[Distribution]:
    """Yield a distribution and all its dependencies on this machine."""
    if name in seen:
        return
    seen.add(name)
    found = distribution(name)
    yield found
    for line in found.requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield from closure(requirement.name, seen)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of an environment with the wheel, httpx2 and its dependencies only."""
    folder = tmp_path_factory.mktemp("alone")
    pip = [sys.executable, "-m", "pip"]
    wheel = [*pip, "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir", str(folder)]
    subprocess.run([*wheel, str(ROOT)], check=True, capture_output=True, timeout=240)
    venv.create(folder / "venv")
    python = folder / "venv/bin/python"
    install = [*pip, "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, *map(str, folder.glob("*.whl"))], check=True, capture_output=True, timeout=240)
    [packages] = (folder / "venv/lib").glob("python*/site-packages")
    for found in closure("httpx2", set()):
        for file in found.files or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
    return python


def test_client_with_httpx2_alone_publishes_reads_and_has_transactions(alone: Path, tmp_path: Path) -> None:
    with tms_core.client.open(tmp_path / "data") as server:
        command = [str(alone), "-I", "-c", APPLICATION, server.server.url, server.server.transactions or ""]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.stderr == ""
    output = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert output["read"] == "one two"
    allowed = {found.name.replace("-", "_") for found in closure("httpx2", set())} | {"tms_core"}
    assert {name for name in output["imported"].split() if not name.startswith("_")} <= allowed
    assert {name for name in output["rooms"].split() if "client" not in name} == {
        "tms_core.clock",
        "tms_core.errors",
        "tms_core.messaging",
        "tms_core.messaging.model",
        "tms_core.messaging.topics",
        "tms_core.rowkey",
        "tms_core.security",
        "tms_core.security.files",
        "tms_core.security.tls",
        "tms_core.topic",
        "tms_core.transaction",
        "tms_core.transaction.codec",
        "tms_core.transaction.model",
        "tms_core.transaction.rpc",
        "tms_core.transaction.source",
    }


def test_page_of_the_client_names_the_httpx2_that_the_project_declares() -> None:
    page = (ROOT / "docs/how-to/python-client.md").read_text(encoding="utf-8")
    typed = re.findall(r"^pip install (?:--no-deps )?'?([^'\n]+)'?$", page, flags=re.MULTILINE)
    dependencies = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    [declared] = [line for line in dependencies if line.startswith("httpx2")]
    assert typed == [declared, "."]
