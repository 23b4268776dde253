"""Java programs of tests: compiled once per checkout by Maven, then started without it."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
import subprocess
from pathlib import Path

from tests.interop.java import TARGET as INTEROP_TARGET
from tests.interop.java import Interop, compile_project

#: Java 24 took away what Hadoop 3.3 logs in with.
OLDEST_JAVA, NEWEST_JAVA = 17, 23


def missing() -> str | None:
    """Return why nothing can be built or started here, with the command that helps; None: it can."""
    if reason := Interop.available():
        return reason
    output = subprocess.run(["java", "-version"], capture_output=True, text=True, check=False).stderr
    version = re.search(r'version "(\d+)', output)
    if version is None or not OLDEST_JAVA <= int(version[1]) <= NEWEST_JAVA:
        return "HBase needs Java 17 to 23 first on PATH; install it: apt-get install openjdk-17-jdk-headless"
    return None


def build(project: Path) -> list[Path]:
    """Compile the Maven project in a folder unless that is done; safe to call from several processes at once.

    Its ``pom.xml`` writes ``target/classpath``. All projects share one lock, because they share one local repository.

    Returns:
        The class path.

    Raises:
        JavaFailed: Maven could not.
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


def _class_path(target: Path) -> list[Path]:
    return [target / "classes", *map(Path, (target / "classpath").read_text().split(":"))]


def _digest(project: Path) -> str:
    digest = hashlib.sha256()
    for path in [project / "pom.xml", *sorted(project.glob("src/**/*.*"))]:
        digest.update(str(path.relative_to(project)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
