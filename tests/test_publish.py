"""Published artifacts and their signatures; ``make test-cluster`` repeats this with a registry."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from charts.package import changes, stage
from charts.values import CHART
from image import publish

REGISTRY, SOURCE, VERSION = "registry.example/team", "https://example.org/tms-janitor", "1.2.3"
LABELS = {"version": VERSION, "revision": "0" * 40, "source": SOURCE, "base.name": "python:3@sha256:abc"}
MAKER = ("--builder", f"{SOURCE}/release.yaml", "--invocation", f"{SOURCE}/runs/7")


class Programs:
    """Replacements for crane, cosign and helm, which record their command lines.

    Args:
        labels: the labels of every image.
    """

    def __init__(self, labels: dict[str, str]) -> None:
        self.commands: list[list[str]] = []
        self._labels = {publish.LABEL + name: value for name, value in labels.items()}

    def __call__(self, words: Sequence[str]) -> bytes:
        self.commands.append(list(words))
        match words[:2]:
            case ["crane", "config"]:
                return json.dumps({"config": {"Labels": self._labels}}).encode()
            case ["crane", "digest"]:
                return f"{digest(words[2])}\n".encode()
            case ["crane", "export"]:
                return archive(words[2].encode())
        return b""

    def all(self, *words: str) -> list[list[str]]:
        return [commands for commands in self.commands if commands[: len(words)] == list(words)]


def digest(reference: str) -> str:
    return f"sha256:{hashlib.sha256(reference.encode()).hexdigest()}"


def archive(contents: bytes) -> bytes:
    """Return the file system of an image that only has a list of contents."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as files:
        member = tarfile.TarInfo(publish.SBOM)
        member.size = len(contents)
        files.addfile(member, io.BytesIO(contents))
    return made.getvalue()


def publish_version(folder: Path, *options: str, labels: dict[str, str] = LABELS) -> Programs:
    programs = Programs(labels)
    publish.main([REGISTRY, VERSION, str(folder / "chart.tgz"), *MAKER, *options], programs)
    return programs


@pytest.mark.parametrize("tag", ["1.2.3", "1.2.3-archive"])
def test_image_index_joins_its_architectures_and_is_signed_by_digest(tmp_path: Path, tag: str) -> None:
    programs, name = publish_version(tmp_path), f"{REGISTRY}/tms-janitor"
    manifests = [word for each in ("amd64", "arm64") for word in ("--manifest", f"{name}:{tag}-{each}")]
    assert programs.all("crane", "index", "append", *manifests) == [
        ["crane", "index", "append", *manifests, "--tag", f"{name}:{tag}"]
    ]
    signed = ["cosign", "sign", "--yes", "--recursive", f"{name}@{digest(f'{name}:{tag}')}"]
    assert programs.commands.count(signed) == 1


def test_signatures_refer_to_digests_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    programs = publish_version(tmp_path)
    signed = [commands[-1] for commands in programs.all("cosign")]
    assert len(signed) == 2 * (1 + 2 * 2) + 1  # each image; two attestations for each architecture; the chart
    assert [name for name in signed if "@sha256:" not in name] == []
    assert capsys.readouterr().out.split() == [commands[-1] for commands in programs.all("cosign", "sign")]


def test_image_of_each_architecture_has_its_contents_and_provenance(tmp_path: Path) -> None:
    programs = publish_version(tmp_path)
    for each in ("amd64", "arm64"):
        part = f"{REGISTRY}/tms-janitor:1.2.3-{each}"
        name = f"{REGISTRY}/tms-janitor@{digest(part)}"
        file = tmp_path / f"tms-janitor-1.2.3-{each}"
        for kind, ending in publish.SUFFIXES.items():
            written = str(file) + ending
            assert ["cosign", "attest", "--yes", "--type", kind, "--predicate", written, name] in programs.commands
        assert Path(f"{file}.cdx.json").read_text() == name
        made: dict[str, Any] = json.loads(Path(f"{file}.provenance.json").read_text())
        assert made["runDetails"]["builder"]["id"] == f"{SOURCE}/release.yaml"
        [commit, base] = made["buildDefinition"]["resolvedDependencies"]
        assert commit == {"uri": f"git+{SOURCE}", "digest": {"gitCommit": "0" * 40}}
        assert base == {"uri": "pkg:docker/python:3", "digest": {"sha256": "abc"}}


def test_publish_with_a_key_uses_no_signing_service_or_log(tmp_path: Path) -> None:
    for commands in publish_version(tmp_path, "--key", "k").all("cosign"):
        assert commands[2:6] == ["--yes", "--key", "k", "--use-signing-config=false"]
        assert "--tlog-upload=false" in commands


def test_wheel_is_attested_in_a_bundle(tmp_path: Path) -> None:
    wheel = tmp_path / "tms_janitor-1.2.3-py3-none-any.whl"
    wheel.touch()
    [commands] = publish_version(tmp_path).all("cosign", "attest-blob")
    written = f"{wheel}.provenance.json"
    arguments = ["--type", "slsaprovenance1", "--predicate", written, "--bundle", f"{wheel}.sigstore.json"]
    assert commands == ["cosign", "attest-blob", "--yes", *arguments, str(wheel)]
    made: dict[str, Any] = json.loads(Path(written).read_text())
    commit = {"uri": f"git+{SOURCE}", "digest": {"gitCommit": "0" * 40}}
    assert made["buildDefinition"]["resolvedDependencies"] == [commit]
    assert made["runDetails"]["builder"]["id"] == f"{SOURCE}/release.yaml"


@pytest.mark.parametrize("wrong", [{"version": "1.2.2"}, {"revision": ""}, {"source": ""}, {"base.name": ""}])
def test_image_without_origin_labels_is_not_published(tmp_path: Path, wrong: dict[str, str]) -> None:
    with pytest.raises(SystemExit, match=r"\b1\.2\.3\b"):
        publish_version(tmp_path, labels={**LABELS, **wrong})


def test_published_chart_names_its_source_and_its_image(tmp_path: Path) -> None:
    made = stage(tmp_path, "0.1.0", SOURCE, REGISTRY)
    chart = yaml.safe_load((made / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["home"], chart["sources"], chart["version"]) == (SOURCE, [SOURCE], "0.1.0")
    assert chart["maintainers"] == [{"name": "tms-janitor"}]
    assert chart["icon"].startswith("data:image/svg+xml;base64,")
    images = yaml.safe_load(chart["annotations"]["artifacthub.io/images"])
    assert {each["image"] for each in images} == {f"{REGISTRY}/tms-janitor:0.1.0{end}" for end in ("", "-archive")}
    news = yaml.safe_load(chart["annotations"]["artifacthub.io/changes"])
    assert len(news) > 10
    assert all(set(each) == {"kind", "description"} for each in news)
    own, given = (yaml.safe_load((each / "values.yaml").read_text(encoding="utf-8")) for each in (made, CHART))
    assert own == {**given, "image": {**given["image"], "registry": REGISTRY}}


def test_changes_of_a_version_are_its_entries_with_their_kinds() -> None:
    text = "# C\n\n## [2.0.0]\n\n### Fixed\n\n- one\n  and more\n- two\n\n### Odd\n\n- three\n\n"
    text += "## [1.0.0]\n\n### Added\n\n- old\n"
    assert changes(text, "2.0.0") == [
        {"kind": "fixed", "description": "one and more"},
        {"kind": "fixed", "description": "two"},
        {"kind": "changed", "description": "three"},
    ]
    assert changes(text, "3.0.0") == []
