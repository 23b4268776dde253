"""``make publish`` to a local registry, and verification by its users."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
import pytest
import yaml

from tests.chart.programs import KUBERNETES, program, run
from tests.cluster.engine import SOURCE, Engine
from tests.cluster.plane import ROOT, ControlPlane, free_ports, until

VERSION = version("tms-janitor")
WITHOUT_LOG = ("--insecure-ignore-tlog=true",)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    [port] = free_ports(1)
    folder = tmp_path_factory.mktemp("registry")
    serve = [
        program("crane", "publisher"),
        "registry",
        "serve",
        "--address",
        f"127.0.0.1:{port}",
        "--disk",
        str(folder),
    ]
    process = subprocess.Popen(serve, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        try:
            return httpx2.get(f"http://127.0.0.1:{port}/v2/").status_code == 200
        except httpx2.HTTPError:
            return False

    try:
        until(answers, "the registry answers")
        yield f"127.0.0.1:{port}/team"
    finally:
        process.terminate()
        process.wait()


class Published(NamedTuple):
    """A registry with the published images and chart, and the keys to verify them.

    Attributes:
        folder: a folder with two key pairs, ``ours.*`` and ``theirs.*``.
    """

    registry: str
    folder: Path

    def tool(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        environ = {**os.environ, "COSIGN_PASSWORD": "", "HOME": str(self.folder)}
        command = [program(name, "publisher"), *map(str, words)]
        return subprocess.run(command, env=environ, cwd=self.folder, capture_output=True, text=True, check=False)

    def name(self, what: str = f"tms-janitor:{VERSION}") -> str:
        found = self.tool("crane", "digest", f"{self.registry}/{what}")
        assert found.returncode == 0, found.stderr
        return f"{self.registry}/{what.partition(':')[0]}@{found.stdout.strip()}"

    def verify(self, name: str, key: str = "ours") -> bool:
        return self.tool("cosign", "verify", *WITHOUT_LOG, "--key", f"{key}.pub", name).returncode == 0

    def statement(self, kind: str, name: str) -> dict[str, Any]:
        """Return a signed statement of an image."""
        output = self.tool("cosign", "verify-attestation", *WITHOUT_LOG, "--key", "ours.pub", "--type", kind, name)
        assert output.returncode == 0, output.stderr
        found: dict[str, Any] = json.loads(base64.b64decode(json.loads(output.stdout.splitlines()[0])["payload"]))
        return found


@pytest.fixture(scope="module")
def published(
    engine: Engine, image: str, archive_image: str, registry: str, tmp_path_factory: pytest.TempPathFactory
) -> Published:
    """Publish images and chart like the release workflow, but sign them with a key."""
    found = Published(registry, tmp_path_factory.mktemp("keys"))
    for key in ("ours", "theirs"):
        made = found.tool("cosign", "generate-key-pair", "--output-key-prefix", key)
        assert made.returncode == 0, made.stderr
    for tag, local in ((VERSION, image), (f"{VERSION}-archive", archive_image)):
        name = f"{registry}/tms-janitor:{tag}"
        engine.docker("tag", local, f"{name}-amd64")
        engine.docker("push", f"{name}-amd64")
        # This machine has one architecture; the image of the other one has the same files.
        other = ("--set-platform", "linux/arm64", "--tag", f"{name}-arm64")
        assert found.tool("crane", "mutate", f"{name}-amd64", *other).returncode == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COSIGN_PASSWORD", "")
        engine.make("publish", REGISTRY=registry, SOURCE=SOURCE, SIGN_KEY=str(found.folder / "ours.key"))
    return found


def test_image_pulled_by_digest_starts(engine: Engine, published: Published) -> None:
    name = published.name()
    engine.docker("pull", name)
    assert engine.run(name, "--version").stdout == f"janitor, version {VERSION}\n"


def test_image_index_has_each_architecture(published: Published) -> None:
    index = json.loads(published.tool("crane", "manifest", published.name()).stdout)
    platforms = [(each["platform"]["os"], each["platform"]["architecture"]) for each in index["manifests"]]
    assert platforms == [("linux", "amd64"), ("linux", "arm64")]


@pytest.mark.parametrize(
    "what", [f"tms-janitor:{VERSION}", f"tms-janitor:{VERSION}-archive", f"charts/tms-janitor:{VERSION}"]
)
def test_artifact_signature_verifies_only_with_its_key(published: Published, what: str) -> None:
    name = published.name(what)
    assert published.verify(name)
    assert not published.verify(name, "theirs")


def test_image_of_each_architecture_is_signed_and_another_is_not(published: Published) -> None:
    for each in ("amd64", "arm64"):
        assert published.verify(published.name(f"tms-janitor:{VERSION}-{each}"))
    other = (f"{published.registry}/tms-janitor:{VERSION}-amd64", "--label", "x=y", "--tag")
    assert published.tool("crane", "mutate", *other, f"{published.registry}/tms-janitor:other").returncode == 0
    assert not published.verify(published.name("tms-janitor:other"))


@pytest.mark.parametrize("each", ["amd64", "arm64"])
def test_image_has_signed_sbom_and_provenance(published: Published, each: str) -> None:
    name = published.name(f"tms-janitor:{VERSION}-{each}")
    contents = published.statement("cyclonedx", name)
    assert contents["subject"][0]["digest"]["sha256"] == name.rpartition(":")[2]
    assert {"libc6", "starlette"} <= {component["name"] for component in contents["predicate"]["components"]}
    made = published.statement("slsaprovenance1", name)["predicate"]
    revision = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    [commit, _] = made["buildDefinition"]["resolvedDependencies"]
    assert commit == {"uri": f"git+{SOURCE}", "digest": {"gitCommit": revision.strip()}}


def helm(published: Published, *words: str, kubeconfig: Path | None = None) -> str:
    there = (f"oci://{published.registry}/charts/tms-janitor", "--plain-http", "--version", VERSION)
    done = run("helm", *words, *there, kubeconfig=kubeconfig)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_chart_in_the_registry_names_its_origin_and_starts_the_image(published: Published) -> None:
    about = yaml.safe_load(helm(published, "show", "chart"))
    assert (about["home"], about["sources"], about["appVersion"]) == (SOURCE, [SOURCE], VERSION)
    made = list(yaml.safe_load_all(helm(published, "template", "x", "--kube-version", KUBERNETES)))
    pods = [each["spec"]["template"]["spec"] for each in made if each and each["kind"] == "Deployment"]
    images = [container["image"] for pod in pods for container in pod["containers"]]
    assert images == [f"{published.registry}/tms-janitor:{VERSION}"]


def test_chart_is_installed_from_the_registry(plane: ControlPlane, published: Published) -> None:
    helm(published, "install", "fetched", "--namespace", "apps", "--no-hooks", kubeconfig=plane.kubeconfig)
    assert "fetched-tms-janitor" in plane.named("/apis/apps/v1/namespaces/apps/deployments")
    gone = run("helm", "uninstall", "fetched", "--namespace", "apps", "--no-hooks", kubeconfig=plane.kubeconfig)
    assert gone.returncode == 0, gone.stderr
