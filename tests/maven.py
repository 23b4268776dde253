"""Java programs of tests, which Maven compiles once per checkout."""

from __future__ import annotations

import fcntl
import hashlib
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, Self

from tests.interop.java import TARGET as INTEROP_TARGET
from tests.interop.java import Interop, compile_project

#: Java 24 removed an API that Hadoop 3.3 needs for logins.
OLDEST_JAVA, NEWEST_JAVA = 17, 23
#: The time limit for the end of a program after the end of its input, in seconds.
_END_SECONDS = 120


def missing() -> str | None:
    """Return the missing requirement of Java programs with an install command; None: nothing is missing."""
    if reason := Interop.available():
        return reason
    output = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', output)
    if version is None or not OLDEST_JAVA <= int(version[1]) <= NEWEST_JAVA:
        return "HBase needs Java 17 to 23 first on PATH; install it: apt-get install openjdk-17-jdk-headless"
    return None


def build(project: Path) -> list[Path]:
    """Compile the Maven project in a folder unless it is up to date; several processes may call this function.

    Its ``pom.xml`` writes ``target/classpath``. All projects share one lock, because they share one local repository.

    Returns:
        The class path.

    Raises:
        JavaFailed: Maven failed.
    """
    target = project / "target"
    for folder in (target, INTEROP_TARGET):
        folder.mkdir(exist_ok=True)
    with (INTEROP_TARGET / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stamp, digest = target / "stamp", _digest(project)
        if not (stamp.exists() and stamp.read_text() == digest and all(map(Path.exists, _class_path(target)))):
            stamp.unlink(missing_ok=True)
            shutil.rmtree(target / "classes", ignore_errors=True)
            compile_project(project)
            stamp.write_text(digest)
        return _class_path(target)


class JavaProgram:
    """A running Java program that executes one call per line, in JSON."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_END_SECONDS)

    def request(self, **fields: Any) -> dict[str, Any]:
        """Send a call and return the response."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """Return the next response."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError("the JVM has ended")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _class_path(target: Path) -> list[Path]:
    return [target / "classes", *map(Path, (target / "classpath").read_text().split(":"))]


def _digest(project: Path) -> str:
    digest = hashlib.sha256()
    for path in [project / "pom.xml", *sorted(project.glob("src/**/*.*"))]:
        digest.update(str(path.relative_to(project)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
