"""Create the root file system of the image: Python, the environment and their libraries; no shell, no package manager.

``python rootfs.py ENVIRONMENT ROOT``, run with the Python and on the system of the environment.
``/var/lib/dpkg/status.d`` lists the contents (the Debian packages of copied files), with their copyrights.
"""

from __future__ import annotations

import compileall
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path

#: Parts of Python's library for tests, screens and building only, and files of environments or editors.
LEFT_OUT = (
    *("test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "turtle.*", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "config-*", "macholib", "*.opt-?.pyc", "ossaudiodev.*", "nis.*"),
    *("_tkinter.*", "_test*", "_ctypes_test.*", "_xx*", "xx*", "_dbm.*", "_gdbm.*", "readline.*", "_curses*"),
)
#: Parts of the environment's packages for building on them or testing them.
BUILT_WITH = ("tests", "include", "*.pyx", "*.pxd", "*.pxi", "*.h", "*.hpp", "*.c", "*.cpp", "*.opt-?.pyc")
#: The environment's commands that the image has.
COMMANDS = ("janitor", "tms", "python", "python3*")
#: In addition: the interpreter of the commands, certificates of authorities, time zones, and the name of the system.
TAKEN = ("/usr/bin/env", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/zoneinfo", "/etc/os-release")
USERS = "root:x:0:0:root:/:/sbin/nologin\ntms:x:65532:65532:tms:/var/lib/tms:/sbin/nologin\n"
GROUPS = "root:x:0:\ntms:x:65532:\n"


def bring(path: Path, root: Path, left_out: tuple[str, ...] = ()) -> Path:
    """Copy a file or a folder to its place below ``root``, with each link on the way; return the links' target."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            place = root / part.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(part.readlink())
            return bring(part.parent.joinpath(part.readlink(), path.relative_to(part)), root, left_out)
    path = Path(*_without_dots(path.parts))
    place = root / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        ignored = shutil.ignore_patterns(*left_out)
        shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    else:
        shutil.copy2(path, place)
    return path


def _without_dots(parts: Iterable[str]) -> list[str]:
    """Return the parts of a path without links and ``..``."""
    found: list[str] = []
    for part in parts:
        if part == "..":
            found.pop()
        else:
            found.append(part)
    return found


def programs(folders: Iterable[Path]) -> Iterator[Path]:
    """Return the programs and libraries in folders, by their first bytes."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def libraries(files: Sequence[Path]) -> set[Path]:
    """Return the libraries that programs load, including the libraries' own.

    Raises:
        SystemExit: a library is neither on this system nor among them. (A wheel's own library finds others of the wheel
            only after a module has loaded it.)
    """
    command = ["ldd", *map(str, files)]
    told = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603 - the system's own
    lost = set(re.findall(r"^\s+(\S+) => not found", told, flags=re.MULTILINE)) - {file.name for file in files}
    if lost:
        raise SystemExit(f"not on this system: {', '.join(sorted(lost))}; install what has them in the build stage")
    return {Path(name) for name in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", told, flags=re.MULTILINE)}


def packages(root: Path, system: Path = Path("/")) -> dict[str, str]:
    """Return dpkg's entry for each package with a file below ``root``; empty without dpkg."""
    there = {f"/{path.relative_to(root)}" for path in root.rglob("*") if path.is_file()}
    info, status = system / "var/lib/dpkg/info", system / "var/lib/dpkg/status"
    there |= {path.removeprefix("/usr") for path in there}  # /lib and /bin are links to folders there
    owners = {
        listed.stem.partition(":")[0]
        for listed in info.glob("*.list")
        if not there.isdisjoint(listed.read_text(encoding="utf-8").splitlines())
    }
    stanzas = status.read_text(encoding="utf-8").split("\n\n") if status.exists() else []
    said = {stanza.partition("\n")[0].removeprefix("Package: "): f"{stanza.strip()}\n" for stanza in stanzas}
    return {name: said[name] for name in sorted(owners)}


def lay_out(environment: Path, root: Path) -> None:
    """Create the whole root file system.

    Args:
        environment: the virtual environment; it has the same path below ``root``.
        root: a folder that does not exist yet.

    Raises:
        SystemExit: a library is missing.
    """
    commands = [path for path in (environment / "bin").iterdir() if any(fnmatch(path.name, each) for each in COMMANDS)]
    for path in commands:
        bring(path, root)
    bring(environment / "pyvenv.cfg", root)
    bring(environment / "lib", root, BUILT_WITH)
    for name in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        bring(Path(name), root, LEFT_OUT)
    for name in TAKEN:
        if Path(name).exists():
            bring(Path(name), root)
    _bring_libraries(root)
    owners = packages(root)
    for name, text in {
        "etc/passwd": USERS,
        "etc/group": GROUPS,
        "etc/nsswitch.conf": "hosts: files dns\n",
        **{f"var/lib/dpkg/status.d/{package}": said for package, said in owners.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for package in owners:
        if (licence := Path("/usr/share/doc") / package / "copyright").exists():
            bring(licence, root)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    # With bytecode, Python starts in a fifth of the time; programs in the image cannot write it.
    compileall.compile_dir(root, maxlevels=99, stripdir=str(root), prependdir="/", quiet=2)


def _bring_libraries(root: Path) -> None:
    """Copy the libraries of programs below ``root``; each program is resolved at its place in the system, next to its
    files.
    """
    inside = [Path("/") / path.relative_to(root) for path in programs([root])]
    for library in libraries(inside):
        if not (root / library.relative_to("/")).exists():
            bring(library, root)


if __name__ == "__main__":
    lay_out(Path(sys.argv[1]), Path(sys.argv[2]))
