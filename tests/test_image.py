"""What the image is made of: pins that agree with the tests', a list of its contents, and nothing that needs a network.

The image itself is made and run by ``make test-cluster``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image import sbom

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LOCKS = ("runtime.lock", "build.lock")


def pins(path: Path) -> dict[str, str]:
    """Each pinned requirement of a lock, with its hashes."""
    _, *blocks = re.split(r"^(?=[a-z0-9])", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {block.partition("==")[0]: block.strip() for block in blocks}


@pytest.mark.parametrize("name", LOCKS)
def test_what_is_in_the_image_is_what_the_tests_ran_with(name: str) -> None:
    tested, shipped = pins(ROOT / "requirements.lock"), pins(ROOT / "image" / name)
    assert shipped
    versions = {package: block.split()[0] for package, block in tested.items()}
    assert {package: block.split()[0] for package, block in shipped.items()}.items() <= versions.items()
    assert all("--hash=sha256:" in block for block in shipped.values())


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_name_no_index_no_address_and_no_place(name: str) -> None:
    text = (ROOT / "image" / name).read_text(encoding="utf-8")
    assert re.findall(r"://|\s@\s|^\s*-(?!-hash=sha256:)", text, flags=re.MULTILINE) == []


def test_no_test_tool_gets_into_the_image() -> None:
    assert not {"pytest", "hypothesis", "mypy", "pyspark", "hatchling"} & set(pins(ROOT / "image/runtime.lock"))


def test_the_last_stage_runs_as_nobody_and_installs_nothing() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert 'ENTRYPOINT ["janitor"]' in last
    assert re.findall(r"^RUN (\S+)", last, flags=re.MULTILINE) == ["rm"]
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert "# syntax" not in DOCKERFILE


def test_the_list_of_contents_names_what_is_installed(tmp_path: Path) -> None:
    names = {package["name"]: package for package in sbom.python_packages()}
    assert names["tms-janitor"]["purl"].startswith("pkg:pypi/tms-janitor@")
    assert names["plyvel"]["version"]
    status = tmp_path / "status"
    entry = "Package: {0}\nStatus: install ok {1}\nArchitecture: amd64\nVersion: 1-2\nDescription: x\n Package: y\n"
    status.write_text("\n".join([entry.format("libc6", "installed"), entry.format("gone", "config-files")]))
    assert [package["purl"] for package in sbom.debian_packages(status)] == ["pkg:deb/debian/libc6@1-2?arch=amd64"]
    assert sbom.debian_packages(tmp_path / "none") == []
    assert sbom.document()["metadata"]["component"]["name"] == "tms-janitor"
