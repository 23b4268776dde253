"""What is in an image, as CycloneDX in JSON: Python, the packages of its environment, and Debian's.

``python sbom.py [STATUS]``: what dpkg says of packages, as the file of a whole system or a folder with a file for each.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")


def python_packages() -> list[dict[str, Any]]:
    """The distributions that this Python finds."""
    found = []
    for each in metadata.distributions():
        name, version = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version
        licence = each.metadata.json.get("license_expression")
        found.append(
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                **({"licenses": [{"expression": licence}]} if licence else {}),
            }
        )
    return sorted(found, key=lambda each: str(each["name"]))


def debian_packages(status: Path = DPKG) -> list[dict[str, Any]]:
    """The packages that dpkg knows, from a file or a folder of files; none where there is no dpkg."""
    found = []
    files = sorted(status.iterdir()) if status.is_dir() else [status] if status.exists() else []
    for entry in "\n\n".join(file.read_text(encoding="utf-8") for file in files).split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.+)$", entry, flags=re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/debian/{name}@{version}?arch={arch}"
            found.append({"type": "library", "name": name, "version": version, "purl": purl})
    return found


def document(status: Path = DPKG) -> dict[str, Any]:
    """The whole of it."""
    packages = python_packages()
    version = platform.python_version()
    python = {"type": "library", "name": "python", "version": version, "purl": f"pkg:generic/python@{version}"}
    [own] = [each for each in packages if each["name"] == "tms-janitor"]
    others = [each for each in packages if each is not own]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**own, "type": "application"}},
        "components": [python, *others, *debian_packages(status)],
    }


if __name__ == "__main__":
    json.dump(document(*map(Path, sys.argv[1:])), sys.stdout, indent=1)
