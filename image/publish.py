"""Publish the image and the chart to a registry: for both architectures, signed, with SBOM and provenance.

``python -m image.publish REGISTRY VERSION CHART --builder URL --invocation URL [--key FILE]``

The registry must already have each image of :data:`TAGS` for each architecture (``NAME:TAG-amd64``). This program needs
crane, cosign and helm (``make publisher tools``). Without a key, cosign signs with the identity of the workflow.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

NAME = "tms-janitor"
#: The tags of the published images: without and with Parquet for archives.
TAGS = ("{version}", "{version}-archive")
ARCHITECTURES = ("amd64", "arm64")
#: The file suffix of each attestation type of cosign.
SUFFIXES = {"cyclonedx": ".cdx.json", "slsaprovenance1": ".provenance.json"}
_PROVENANCE = "slsaprovenance1"
SBOM = "opt/tms/sbom.cdx.json"
LABEL = "org.opencontainers.image."
#: The options for a private key, whose signatures must not go to the public transparency log.
PRIVATE_KEY_OPTIONS = ("--use-signing-config=false", "--tlog-upload=false")

#: Runs a program; returns its output.
Run: TypeAlias = Callable[[Sequence[str]], bytes]


class Identity(NamedTuple):
    """The identity of the publisher: the URLs of its workflow and of this run, and a private key if it has one."""

    builder: str
    invocation: str
    key: str = ""


def run(words: Sequence[str]) -> bytes:
    """Run a program that must succeed; show its messages."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - programs named in this file


def labels(config: dict[str, Any], version: str) -> dict[str, str]:
    """Return the labels ``version``, ``revision``, ``source`` and ``base.name`` of an image's configuration.

    Raises:
        SystemExit: a label is missing, or the image has a different version.
    """
    given = config["config"].get("Labels") or {}
    found = {name: given.get(LABEL + name, "") for name in ("version", "revision", "source", "base.name")}
    if found["version"] != version or not all(found.values()):
        raise SystemExit(f"the image is not made for version {version}: its labels are {found}; run `make image`")
    return found


def provenance(image: dict[str, str], identity: Identity) -> dict[str, Any]:
    """Return the provenance of an artifact, as a predicate of SLSA provenance version 1."""
    base, _, digest = image["base.name"].partition("@sha256:")
    commit = {"uri": f"git+{image['source']}", "digest": {"gitCommit": image["revision"]}}
    base_image = {"uri": f"pkg:docker/{base}", **({"digest": {"sha256": digest}} if digest else {})}
    return {
        "buildDefinition": {
            "buildType": f"{image['source']}/blob/{image['revision']}/Makefile",
            "externalParameters": {"source": image["source"], "version": image["version"]},
            "resolvedDependencies": [commit, base_image],
        },
        "runDetails": {"builder": {"id": identity.builder}, "metadata": {"invocationId": identity.invocation}},
    }


def contents(archive: bytes) -> bytes:
    """Return the SBOM in the file system of an image, which is a tar archive; empty without an SBOM."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile(SBOM)
        return file.read() if file else b""


class Publisher:
    """A publisher of signed artifacts in a registry.

    Args:
        registry: the registry with a path, without a trailing slash.
        folder: the folder for each image's SBOM and provenance.
    """

    def __init__(self, registry: str, version: str, identity: Identity, folder: Path, run: Run = run) -> None:
        self._registry = registry
        self._version = version
        self._identity = identity
        self._folder = folder
        self._run = run
        self._signing = ["--yes", *(("--key", identity.key, *PRIVATE_KEY_OPTIONS) if identity.key else ())]

    def image(self, tag: str) -> str:
        """Join the images of all architectures under one tag, and sign them; return the name with its digest."""
        repository = f"{self._registry}/{NAME}"
        parts = {each: f"{repository}:{tag}-{each}" for each in ARCHITECTURES}
        configs = {each: json.loads(self._run(["crane", "config", part])) for each, part in parts.items()}
        all_labels = {each: labels(config, self._version) for each, config in configs.items()}
        manifests = [word for part in parts.values() for word in ("--manifest", part)]
        self._run(["crane", "index", "append", *manifests, "--tag", f"{repository}:{tag}"])
        for each, part in parts.items():
            name, file = self._pinned(part), self._folder / f"{NAME}-{tag}-{each}"
            self._attest(name, "cyclonedx", file, contents(self._run(["crane", "export", name, "-"])))
            predicate = json.dumps(provenance(all_labels[each], self._identity)).encode()
            self._attest(name, _PROVENANCE, file, predicate)
        whole = self._pinned(f"{repository}:{tag}")
        self._run(["cosign", "sign", *self._signing, "--recursive", whole])
        return whole

    def chart(self, package: Path, *options: str) -> str:
        """Push the chart's package, and sign it; return the name with its digest.

        Args:
            options: options of ``helm push``.
        """
        self._run(["helm", "push", str(package), f"oci://{self._registry}/charts", *options])
        whole = self._pinned(f"{self._registry}/charts/{NAME}:{self._version.replace('+', '_')}")
        self._run(["cosign", "sign", *self._signing, whole])
        return whole

    def wheel(self, package: Path) -> None:
        """Attest the provenance of a wheel, in a bundle next to it, because an image registry does not store wheels."""
        config = json.loads(
            self._run(["crane", "config", f"{self._registry}/{NAME}:{self._version}-{ARCHITECTURES[0]}"])
        )
        made = provenance(labels(config, self._version), self._identity)
        # A wheel is built from the commit alone, without the base image.
        del made["buildDefinition"]["resolvedDependencies"][1:]
        suffixes = (SUFFIXES[_PROVENANCE], ".sigstore.json")
        written, bundle = (package.with_name(package.name + suffix) for suffix in suffixes)
        written.write_text(json.dumps(made), encoding="utf-8")
        options = ["--type", _PROVENANCE, "--predicate", str(written), "--bundle", str(bundle)]
        self._run(["cosign", "attest-blob", *self._signing, *options, str(package)])

    def _pinned(self, reference: str) -> str:
        """Return the name of a tag's current image by digest, because a tag can move."""
        digest = self._run(["crane", "digest", reference]).decode().strip()
        return f"{reference.rpartition(':')[0]}@{digest}"

    def _attest(self, name: str, kind: str, file: Path, predicate: bytes) -> None:
        written = file.with_name(f"{file.name}{SUFFIXES[kind]}")
        written.write_bytes(predicate)
        self._run(["cosign", "attest", *self._signing, "--type", kind, "--predicate", str(written), name])


def main(words: Sequence[str] | None = None, run: Run = run) -> None:
    """Publish all artifacts, and print the name of each with its digest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    for name in ("registry", "version", "chart"):
        parser.add_argument(name)
    parser.add_argument("--builder", required=True)
    parser.add_argument("--invocation", required=True)
    parser.add_argument("--key", default="")
    given = parser.parse_args(words)
    identity, chart = Identity(given.builder, given.invocation, given.key), Path(given.chart)
    publisher = Publisher(given.registry, given.version, identity, chart.parent, run)
    local = given.registry.partition(":")[0] in ("localhost", "127.0.0.1")
    for tag in TAGS:
        print(publisher.image(tag.format(version=given.version)))  # noqa: T201 - the result
    for package in sorted(chart.parent.glob("*.whl")):
        publisher.wheel(package)
    print(publisher.chart(chart, *(["--plain-http"] if local else [])))  # noqa: T201


if __name__ == "__main__":
    main()
