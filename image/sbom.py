"""What is in the image, as CycloneDX in JSON: the Python packages of its environment, and Debian's."""

from __future__ import annotations

import json
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
    """The packages that dpkg knows; none where there is no dpkg."""
    found = []
    for entry in status.read_text(encoding="utf-8").split("\n\n") if status.exists() else ():
        fields = dict(re.findall(r"^(Package|Version|Architecture|Status): (.+)$", entry, flags=re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            name, version, arch = fields["Package"], fields["Version"], fields["Architecture"]
            purl = f"pkg:deb/debian/{name}@{version}?arch={arch}"
            found.append({"type": "library", "name": name, "version": version, "purl": purl})
    return found


def document() -> dict[str, Any]:
    """The whole of it."""
    packages = python_packages()
    [own] = [each for each in packages if each["name"] == "tms-janitor"]
    others = [each for each in packages if each is not own]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {**own, "type": "application"}},
        "components": others + debian_packages(),
    }


if __name__ == "__main__":
    json.dump(document(), sys.stdout, indent=1)
