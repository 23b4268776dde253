"""Print an SBOM in CycloneDX JSON: Python, the packages of its environment, and the Debian packages.

``python sbom.py [STATUS]``: ``STATUS`` is dpkg's status file, or a folder with one status file per package.

A package's component contains components for the libraries inside its wheel, because a scanner finds a vulnerability
of LevelDB or OpenSSL by their names, not by the name of the wheel. Their sources are the SBOMs in a wheel (PEP 770),
its shared libraries, its jars, and a table of statically linked libraries.
"""

from __future__ import annotations

import json
import platform
import re
import sys
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

DPKG = Path("/var/lib/dpkg/status")


def _libuv(module: Any) -> str:
    number = module.libuv_get_version()
    return f"{number >> 16}.{number >> 8 & 0xFF}.{number & 0xFF}"


#: The libraries that are linked statically into a wheel, by package: the name of the library, the module that exposes
#: its version, and the function that reads the version; None: the module does not expose it.
_STATIC: dict[str, tuple[str, str, Callable[[Any], str] | None]] = {
    "httptools": ("llhttp", "httptools", None),
    "plyvel-next": ("leveldb", "plyvel_next", lambda module: str(module.__leveldb_version__)),
    "pyarrow": ("arrow", "pyarrow", lambda module: str(module.cpp_version)),
    "pyyaml": ("libyaml", "yaml._yaml", lambda module: str(module.get_version_string())),
    "uvloop": ("libuv", "uvloop.loop", _libuv),
}


def python_packages() -> list[dict[str, Any]]:
    """Return a component for each distribution that is installed in this Python."""
    found = []
    for each in metadata.distributions():
        name, version = re.sub(r"[-_.]+", "-", each.metadata["Name"]).lower(), each.version
        licence, inside = each.metadata.json.get("license_expression"), list(bundled(name, each))
        found.append(
            {
                "type": "library",
                "name": name,
                "version": version,
                "purl": f"pkg:pypi/{name}@{version}",
                **({"licenses": [{"expression": licence}]} if licence else {}),
                **({"components": inside} if inside else {}),
            }
        )
    return sorted(found, key=lambda each: str(each["name"]))


def bundled(name: str, package: metadata.Distribution) -> Iterator[dict[str, Any]]:
    """Yield a component for each library inside the wheel of an installed package.

    Args:
        name: the normalized name of the package.
    """
    for file in package.files or ():
        if re.fullmatch(r"[^/]+\.dist-info/sboms/.+\.json", file.as_posix()):
            listed = json.loads(file.read_text()).get("components", [])
            yield from ({"type": "library"} | {key: one[key] for key in _KEPT if key in one} for one in listed)
        elif library := re.fullmatch(r"[^/]+\.libs/lib(.+?)(?:-[0-9a-f]{8})+\.so(?:\.(.+))?", file.as_posix()):
            yield _library(library[1], library[2])
        elif file.suffix == ".jar":
            yield _jar(Path(str(file.locate())))
    if name in _STATIC:
        library_name, module, ask = _STATIC[name]
        yield _library(library_name, ask(import_module(module)) if ask else None)


#: The fields to copy from a component in a wheel's SBOM.
_KEPT = ("name", "version", "purl", "licenses")


def _library(name: str, version: str | None) -> dict[str, Any]:
    known = (
        {"version": version, "purl": f"pkg:generic/{name}@{version}"} if version else {"purl": f"pkg:generic/{name}"}
    )
    return {"type": "library", "name": name, **known}


def _jar(path: Path) -> dict[str, Any]:
    """Return the component of a jar: by its Maven coordinates, or by its file name if it has none."""
    name, version = re.fullmatch(r"(.+?)-(\d.*)|(.+)", path.stem).group(1, 2)  # type: ignore[union-attr]
    if version is None:
        return _library(path.stem, None)
    with zipfile.ZipFile(path) as archive:
        [*groups] = (
            entry.split("/")[2]
            for entry in archive.namelist()
            if re.fullmatch(rf"META-INF/maven/[^/]+/{re.escape(name)}/pom\.properties", entry)
        )
    if not groups:
        return _library(name, version)
    return {"type": "library", "name": name, "version": version, "purl": f"pkg:maven/{groups[0]}/{name}@{version}"}


def debian_packages(status: Path = DPKG) -> list[dict[str, Any]]:
    """Return a component for each installed package in dpkg's status, a file or a folder; empty without dpkg."""
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
    """Return the SBOM."""
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
