"""Prepare the chart for publication: add its source, the images that it uses, and the changes of the version.

``python -m charts.package FOLDER VERSION SOURCE REGISTRY``
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from typing import Any

import yaml

from charts.values import CHART

CHANGELOG = CHART.parents[1] / "CHANGELOG.md"
#: The kinds of changes that Artifact Hub knows.
KINDS = ("added", "changed", "deprecated", "removed", "fixed", "security")


def changes(changelog: str, version: str) -> list[dict[str, str]]:
    """Return the changes of a version in the changelog for Artifact Hub, each with its kind and description."""
    found: list[dict[str, str]] = []
    _, _, following = f"\n{changelog}".partition(f"\n## [{version}]")
    for section in re.split(r"^### ", re.split(r"^## ", following, flags=re.MULTILINE)[0], flags=re.MULTILINE)[1:]:
        kind = section.partition("\n")[0].strip().lower()
        kind = kind if kind in KINDS else "changed"
        points = re.findall(r"^- (.+(?:\n  .+)*)", section, flags=re.MULTILINE)
        found += ({"kind": kind, "description": re.sub(r"\s+", " ", point)} for point in points)
    return found


def add_metadata(chart: dict[str, Any], version: str, source: str, images: dict[str, str], news: Any) -> dict[str, Any]:
    """Return the contents of a Chart.yaml with the data for publication.

    Args:
        chart: the contents of the source tree's Chart.yaml.
        source: the URL of the repository.
        images: the images that a release may start, by name.
        news: the result of :func:`changes`.
    """
    own = {
        "artifacthub.io/changes": yaml.safe_dump(news, sort_keys=False, allow_unicode=True, width=10_000),
        "artifacthub.io/images": yaml.safe_dump([{"name": n, "image": i} for n, i in images.items()], sort_keys=False),
        "artifacthub.io/links": yaml.safe_dump([{"name": "source", "url": source}]),
        "artifacthub.io/prerelease": str("-" in version).lower(),
    }
    return {
        **chart,
        "version": version,
        "appVersion": version,
        "home": source,
        "sources": [source],
        "annotations": {**chart["annotations"], **own},
    }


def stage(folder: Path, version: str, source: str, registry: str) -> Path:
    """Copy the chart into ``folder``, add its metadata, and set the registry of its images; return the copy."""
    target = folder / CHART.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(CHART, target)
    image = f"{registry}/tms-janitor:{version}"
    images = {"janitor": image, "janitor-with-an-archive": f"{image}-archive"}
    file, values = target / "Chart.yaml", target / "values.yaml"
    news = changes(CHANGELOG.read_text(encoding="utf-8"), version)
    chart = add_metadata(yaml.safe_load(file.read_text(encoding="utf-8")), version, source, images, news)
    file.write_text(yaml.safe_dump(chart, sort_keys=False, allow_unicode=True, width=10_000), encoding="utf-8")
    given = values.read_text(encoding="utf-8")
    values.write_text(given.replace('\n  registry: ""\n', f'\n  registry: "{registry}"\n', 1), encoding="utf-8")
    return target


if __name__ == "__main__":
    stage(Path(sys.argv[1]), *sys.argv[2:5])
