"""Create the root file system of the image: Python, the environment and their libraries; no shell, no package manager.

Run ``python rootfs.py ENVIRONMENT ROOT`` with the Python and on the system of the environment.
``/var/lib/dpkg/status.d`` lists the Debian packages of the copied files for scanners; their copyrights are copied, too.
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

#: Excluded parts of Python's library: tests, user interfaces, build tools, and files of environments.
LIBRARY_EXCLUDES = (
    *("test", "tests", "idlelib", "ensurepip", "tkinter", "turtledemo", "turtle.*", "lib2to3", "pydoc_data"),
    *("site-packages", "dist-packages", "config-*", "macholib", "*.opt-?.pyc", "ossaudiodev.*", "nis.*"),
    *("_tkinter.*", "_test*", "_ctypes_test.*", "_xx*", "xx*", "_dbm.*", "_gdbm.*", "readline.*", "_curses*"),
)
#: Excluded parts of the environment's packages: tests, and sources to build against.
PACKAGE_EXCLUDES = ("tests", "include", "*.pyx", "*.pxd", "*.pxi", "*.h", "*.hpp", "*.c", "*.cpp", "*.opt-?.pyc")
#: The included commands of the environment.
COMMANDS = ("janitor", "tms", "python", "python3*")
#: The included files of the system: the commands' interpreter, CA certificates, time zones, and the system's name.
SYSTEM_FILES = ("/usr/bin/env", "/etc/ssl/certs/ca-certificates.crt", "/usr/share/zoneinfo", "/etc/os-release")
USERS = "root:x:0:0:root:/:/sbin/nologin\ntms:x:65532:65532:tms:/var/lib/tms:/sbin/nologin\n"
GROUPS = "root:x:0:\ntms:x:65532:\n"


def copy_path(path: Path, root: Path, excludes: tuple[str, ...] = ()) -> Path:
    """Copy a file or a folder to the same path below ``root``, with each link on its path; return its real path."""
    for part in (*reversed(path.parents), path):
        if part.is_symlink():
            place = root / part.relative_to("/")
            place.parent.mkdir(parents=True, exist_ok=True)
            if not place.is_symlink():
                place.symlink_to(part.readlink())
            return copy_path(part.parent.joinpath(part.readlink(), path.relative_to(part)), root, excludes)
    path = Path(*_without_dots(path.parts))
    place = root / path.relative_to("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        ignored = shutil.ignore_patterns(*excludes)
        shutil.copytree(path, place, symlinks=True, dirs_exist_ok=True, ignore=ignored)
    else:
        shutil.copy2(path, place)
    return path


def _without_dots(parts: Iterable[str]) -> list[str]:
    """Return the parts of a path without links, with each ``..`` resolved."""
    found: list[str] = []
    for part in parts:
        if part == "..":
            found.pop()
        else:
            found.append(part)
    return found


def programs(folders: Iterable[Path]) -> Iterator[Path]:
    """Yield the programs and libraries in folders, which start with ELF's magic number."""
    for path in (path for folder in folders for path in sorted(folder.rglob("*"))):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def libraries(files: Sequence[Path]) -> set[Path]:
    """Return the libraries that programs load, directly or through other libraries.

    Raises:
        SystemExit: a library is neither on this system nor among ``files``. (``ldd`` does not find the libraries inside
            a wheel, because only the wheel's module loads them.)
    """
    command = ["ldd", *map(str, files)]
    output = subprocess.run(command, capture_output=True, text=True, check=False).stdout  # noqa: S603 - a program of the system
    missing = set(re.findall(r"^\s+(\S+) => not found", output, flags=re.MULTILINE)) - {file.name for file in files}
    if missing:
        raise SystemExit(f"not on this system: {', '.join(sorted(missing))}; install their packages in the build stage")
    return {Path(name) for name in re.findall(r"(?:=> |^\s+)(/\S+) \(0x", output, flags=re.MULTILINE)}


def packages(root: Path, system: Path = Path("/")) -> dict[str, str]:
    """Return dpkg's status entry of each package with a file below ``root``; empty without dpkg."""
    files = {f"/{path.relative_to(root)}" for path in root.rglob("*") if path.is_file()}
    info, status = system / "var/lib/dpkg/info", system / "var/lib/dpkg/status"
    files |= {path.removeprefix("/usr") for path in files}  # /lib and /bin are links into /usr
    owners = {
        listed.stem.partition(":")[0]
        for listed in info.glob("*.list")
        if not files.isdisjoint(listed.read_text(encoding="utf-8").splitlines())
    }
    stanzas = status.read_text(encoding="utf-8").split("\n\n") if status.exists() else []
    entries = {stanza.partition("\n")[0].removeprefix("Package: "): f"{stanza.strip()}\n" for stanza in stanzas}
    return {name: entries[name] for name in sorted(owners)}


def create_root(environment: Path, root: Path) -> None:
    """Create the whole root file system.

    Args:
        environment: the virtual environment; it has the same path below ``root``.
        root: a folder that does not exist yet.

    Raises:
        SystemExit: a library is missing.
    """
    commands = [path for path in (environment / "bin").iterdir() if any(fnmatch(path.name, each) for each in COMMANDS)]
    for path in commands:
        copy_path(path, root)
    copy_path(environment / "pyvenv.cfg", root)
    copy_path(environment / "lib", root, PACKAGE_EXCLUDES)
    for name in {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}:
        copy_path(Path(name), root, LIBRARY_EXCLUDES)
    for name in SYSTEM_FILES:
        if Path(name).exists():
            copy_path(Path(name), root)
    _copy_libraries(root)
    owners = packages(root)
    for name, text in {
        "etc/passwd": USERS,
        "etc/group": GROUPS,
        "etc/nsswitch.conf": "hosts: files dns\n",
        **{f"var/lib/dpkg/status.d/{package}": entry for package, entry in owners.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    for package in owners:
        if (licence := Path("/usr/share/doc") / package / "copyright").exists():
            copy_path(licence, root)
    (root / "tmp").mkdir(exist_ok=True)
    (root / "tmp").chmod(0o1777)
    # With bytecode, Python starts in a fifth of the time; the image's user cannot write it later.
    compileall.compile_dir(root, maxlevels=99, stripdir=str(root), prependdir="/", quiet=2)


def _copy_libraries(root: Path) -> None:
    """Copy the libraries of the programs below ``root``, which ``ldd`` resolves at the programs' original paths."""
    inside = [Path("/") / path.relative_to(root) for path in programs([root])]
    for library in libraries(inside):
        if not (root / library.relative_to("/")).exists():
            copy_path(library, root)


if __name__ == "__main__":
    create_root(Path(sys.argv[1]), Path(sys.argv[2]))
