"""Publish the image and the chart to a registry: for both architectures, signed, with contents and provenance.

``python -m image.publish REGISTRY VERSION CHART --builder URL --invocation URL [--key FILE]``

The registry must already have each image of :data:`TAGS`, once for each architecture (``NAME:TAG-amd64``). Programs:
crane, cosign and helm (``make publisher tools``). Without a key, cosign signs as the workflow that runs it.
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
#: The published images: the plain one, and the one for archives.
TAGS = ("{version}", "{version}-archive")
ARCHITECTURES = ("amd64", "arm64")
#: Kinds of statements, by their names in cosign, and the suffixes of their files.
ENDINGS = {"cyclonedx": ".cdx.json", "slsaprovenance1": ".provenance.json"}
_MADE = "slsaprovenance1"
SBOM = "opt/tms/sbom.cdx.json"
LABEL = "org.opencontainers.image."
#: A private key is known only to its owner, so there is no public log to check or to write.
APART = ("--use-signing-config=false", "--tlog-upload=false")

#: Runs a program; returns its output.
Run: TypeAlias = Callable[[Sequence[str]], bytes]


class Maker(NamedTuple):
    """The publisher: the workflow's address, the address of this run, and a private key or nothing."""

    builder: str
    invocation: str
    key: str = ""


def run(words: Sequence[str]) -> bytes:
    """Run a program that must succeed; show its messages."""
    return subprocess.run(words, check=True, stdout=subprocess.PIPE).stdout  # noqa: S603 - what stands below


def labels(config: dict[str, Any], version: str) -> dict[str, str]:
    """Return an image's labels: ``version``, ``revision``, ``source``, ``base.name``.

    Raises:
        SystemExit: a label is missing, or the version differs.
    """
    given = config["config"].get("Labels") or {}
    found = {name: given.get(LABEL + name, "") for name in ("version", "revision", "source", "base.name")}
    if found["version"] != version or not all(found.values()):
        raise SystemExit(f"the image is not made for version {version}: its labels are {found}; see `make image`")
    return found


def provenance(about: dict[str, str], maker: Maker) -> dict[str, Any]:
    """Return the provenance of an artifact, as a predicate of SLSA's provenance, version 1."""
    base, _, digest = about["base.name"].partition("@sha256:")
    commit = {"uri": f"git+{about['source']}", "digest": {"gitCommit": about["revision"]}}
    image = {"uri": f"pkg:docker/{base}", **({"digest": {"sha256": digest}} if digest else {})}
    return {
        "buildDefinition": {
            "buildType": f"{about['source']}/blob/{about['revision']}/Makefile",
            "externalParameters": {"source": about["source"], "version": about["version"]},
            "resolvedDependencies": [commit, image],
        },
        "runDetails": {"builder": {"id": maker.builder}, "metadata": {"invocationId": maker.invocation}},
    }


def contents(archive: bytes) -> bytes:
    """Return the list of contents in an image's file system, which is a tar archive."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        file = files.extractfile(SBOM)
        return file.read() if file else b""


class Publisher:
    """A publisher of signed artifacts in a registry.

    Args:
        registry: the registry with a path, without a slash at the end.
        folder: the folder for each image's contents and provenance.
    """

    def __init__(self, registry: str, version: str, maker: Maker, folder: Path, run: Run = run) -> None:
        self._registry = registry
        self._version = version
        self._maker = maker
        self._folder = folder
        self._run = run
        self._signing = ["--yes", *(("--key", maker.key, *APART) if maker.key else ())]

    def image(self, tag: str) -> str:
        """Join the images of all architectures into one image of this tag, and sign all; return its name with its
        digest.
        """
        repository = f"{self._registry}/{NAME}"
        parts = {each: f"{repository}:{tag}-{each}" for each in ARCHITECTURES}
        configs = {each: json.loads(self._run(["crane", "config", part])) for each, part in parts.items()}
        abouts = {each: labels(config, self._version) for each, config in configs.items()}
        manifests = [word for part in parts.values() for word in ("--manifest", part)]
        self._run(["crane", "index", "append", *manifests, "--tag", f"{repository}:{tag}"])
        for each, part in parts.items():
            name, file = self._named(part), self._folder / f"{NAME}-{tag}-{each}"
            self._attest(name, "cyclonedx", file, contents(self._run(["crane", "export", name, "-"])))
            self._attest(name, "slsaprovenance1", file, json.dumps(provenance(abouts[each], self._maker)).encode())
        whole = self._named(f"{repository}:{tag}")
        self._run(["cosign", "sign", *self._signing, "--recursive", whole])
        return whole

    def chart(self, package: Path, *options: str) -> str:
        """Push the chart's package, and sign it; return its name with its digest.

        Args:
            options: options of ``helm push``.
        """
        self._run(["helm", "push", str(package), f"oci://{self._registry}/charts", *options])
        whole = self._named(f"{self._registry}/charts/{NAME}:{self._version.replace('+', '_')}")
        self._run(["cosign", "sign", *self._signing, whole])
        return whole

    def wheel(self, package: Path) -> None:
        """Attest the provenance of a wheel, in a bundle next to it: a registry of images does not store wheels."""
        config = json.loads(
            self._run(["crane", "config", f"{self._registry}/{NAME}:{self._version}-{ARCHITECTURES[0]}"])
        )
        made = provenance(labels(config, self._version), self._maker)
        # The base image does not contribute to it.
        del made["buildDefinition"]["resolvedDependencies"][1:]
        written, bundle = (package.with_name(f"{package.name}{end}") for end in (ENDINGS[_MADE], ".sigstore.json"))
        written.write_text(json.dumps(made), encoding="utf-8")
        said = ["--type", _MADE, "--predicate", str(written), "--bundle", str(bundle)]
        self._run(["cosign", "attest-blob", *self._signing, *said, str(package)])

    def _named(self, reference: str) -> str:
        """Return the name of a tag's present image, by digest, because tags move."""
        digest = self._run(["crane", "digest", reference]).decode().strip()
        return f"{reference.rpartition(':')[0]}@{digest}"

    def _attest(self, name: str, kind: str, file: Path, predicate: bytes) -> None:
        written = file.with_name(f"{file.name}{ENDINGS[kind]}")
        written.write_bytes(predicate)
        self._run(["cosign", "attest", *self._signing, "--type", kind, "--predicate", str(written), name])


def main(words: Sequence[str] | None = None, run: Run = run) -> None:
    """Publish everything; print each digest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    for name in ("registry", "version", "chart"):
        parser.add_argument(name)
    parser.add_argument("--builder", required=True)
    parser.add_argument("--invocation", required=True)
    parser.add_argument("--key", default="")
    given = parser.parse_args(words)
    maker, chart = Maker(given.builder, given.invocation, given.key), Path(given.chart)
    publisher = Publisher(given.registry, given.version, maker, chart.parent, run)
    local = given.registry.partition(":")[0] in ("localhost", "127.0.0.1")
    for tag in TAGS:
        print(publisher.image(tag.format(version=given.version)))  # noqa: T201 - what was published
    for package in sorted(chart.parent.glob("*.whl")):
        publisher.wheel(package)
    print(publisher.chart(chart, *(["--plain-http"] if local else [])))  # noqa: T201


if __name__ == "__main__":
    main()
