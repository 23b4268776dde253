"""CDAP's and Tephra's Java classes, called from Python.

The small Java program in ``src/`` uses the classes of CDAP 5.1.2, to prove that CDAP can read a store. Maven builds it
once per checkout (about half a minute with an empty local repository, seconds afterwards). Each call of
:class:`Interop` starts a JVM, which takes a second of processor time; :class:`Resident` keeps one JVM for all calls. A
command closes its store at the end, because only one process may open a store.

``DIR`` is the folder of the three ``system.tms.*`` databases. Every command opens it in place, which rewrites the log
and the manifest like any start of CDAP, so pass a copy if bytes matter. ``dump``, ``read-service`` and ``write`` also
accept a store on HBase, ``hbase:ZOOKEEPER_PORT:PREFIX``, and use CDAP's HBase tables; there, ``dump`` returns only live
topics, and ``write`` needs ``--snapshots``.

========================================  =============================================================================
``dump DIR``                              metadata of all topics, and every entry of live topics, expired or not
``raw DIR meta|message|payload``          every row of a table: key in hex, SHA-256 of the value
``read-service DIR``                      the messages that consumers get, by the system clock; ``--snapshot FILE``
                                          adds reads in a transaction, ``--messages`` lists the messages
``write DIR SEED``                        a random store, and ``tx.snapshot/`` next to it; ``--now MS``, ``--rows N``,
                                          ``--topics N``, ``--payload-bytes N``, ``--snapshots DIR``, ``--kill``
``fill DIR``                              plain messages, half of them expired; ``--now MS``, ``--rows N``,
                                          ``--topics N``, ``--payload-bytes N``, ``--kill``
``prune DIR``                             one run of CDAP's cleaning, with its duration; ``--now MS``
``snapshot FILE``                         a decoded transaction snapshot of any version
``write-snapshot FILE``                   encode a snapshot from standard input as V4
========================================  =============================================================================

``--kill`` halts the JVM without closing the databases, like a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TARGET = HERE / "target"

#: The options of a JVM in a test, which pytest marks with a variable: it ends before a second compiler, a parallel
#: collector or the verification of thousands of classes would save time. Benchmarks measure Java without them.
_SHORT_LIVED = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
SHORT_LIVED = _SHORT_LIVED.split() if "PYTEST_VERSION" in os.environ else []
#: CDAP's libraries of 2018 use internals of Java that Java 17 hides. The serial collector starts fastest.
JVM_FLAGS = [
    *SHORT_LIVED,
    "-XX:+UseSerialGC",
    *(
        f"--add-opens=java.base/{package}=ALL-UNNAMED"
        for package in ("java.lang", "java.nio", "sun.nio.ch", "java.net")
    ),
]

_TOOLS = {
    "java": "apt-get install openjdk-17-jdk-headless",
    "javac": "apt-get install openjdk-17-jdk-headless",
    "mvn": "apt-get install maven",
}


class JavaFailed(Exception):
    """Maven or the Java program failed; the message contains the end of its output."""

    def __init__(self, command: list[str], status: int, output: str) -> None:
        super().__init__(f"{' '.join(command)} ended with {status}:\n{output[-4000:]}")


class Interop:
    """The Java program, in a new JVM for each command."""

    @staticmethod
    def available() -> str | None:
        """Return why the program cannot run, with a command that helps, or None."""
        for tool, install in _TOOLS.items():
            if shutil.which(tool) is None:
                return f"{tool} is missing, so CDAP's classes cannot run; install it: {install}"
        return None

    def build(self) -> None:
        """Compile the program unless it is up to date; several processes may call this method."""
        TARGET.mkdir(exist_ok=True)
        with (TARGET / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stamp, digest = TARGET / "stamp", _digest_of_sources()
            if stamp.exists() and stamp.read_text() == digest and all(map(Path.exists, _class_path())):
                return
            stamp.unlink(missing_ok=True)
            shutil.rmtree(TARGET / "classes", ignore_errors=True)
            compile_project(HERE)
            stamp.write_text(digest)

    def run(self, command: str, *args: str | int | Path, stdin: str = "") -> list[dict[str, Any]]:
        """Run one command; call :meth:`build` first."""
        call = [*self.command("interop.Main"), command, *map(str, args)]
        return [json.loads(line) for line in _call(call, stdin).splitlines()]

    @staticmethod
    def command(main: str) -> list[str]:
        """Return the command of a JVM with one of the program's classes; call :meth:`build` first."""
        return ["java", *JVM_FLAGS, "-cp", ":".join(map(str, _class_path())), main]

    def raw(self, directory: Path, table: str) -> dict[bytes, str]:
        """Read every row of ``meta``, ``message`` or ``payload`` with CDAP's LevelDB library, also unrecognized rows.

        Returns:
            The SHA-256 of each value, in hex, by key and in key order.
        """
        return {bytes.fromhex(row["key"]): row["value_sha256"] for row in self.run("raw", directory, table)}


class Resident(Interop):
    """The Java program in one JVM for many commands, which starts again after ``--kill`` or a failure."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: str, *args: str | int | Path, stdin: str = "") -> list[dict[str, Any]]:
        words = [command, *map(str, args)]
        # Connections to HBase would stay open after the command, and standard input is for commands.
        if stdin or any(word.startswith("hbase:") for word in words):
            return super().run(command, *args, stdin=stdin)
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(words) + "\n")
        process.stdin.flush()
        lines: list[dict[str, Any]] = []
        for line in iter(process.stdout.readline, ""):
            if line == "\n":
                return lines
            lines.append(json.loads(line))
        output = self.close()
        if process.returncode:
            raise JavaFailed(words, process.returncode, output)
        return lines

    def close(self) -> str:
        """Stop the JVM and return its error output."""
        process, self._process = self._process, None
        if process is None:
            return ""
        process.communicate()
        with self._errors as errors:
            errors.seek(0)
            return errors.read()

    def _start(self) -> subprocess.Popen[str]:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, pipe = self.command("interop.Main"), subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._errors, text=True)


def compile_project(project: Path) -> None:
    """Compile a folder with Maven, in a JVM for short programs unless ``MAVEN_OPTS`` is set."""
    command = ["mvn", "-q", "-B", "-f", str(project / "pom.xml"), "compile"]
    _call(command, env={"MAVEN_OPTS": _SHORT_LIVED, **os.environ})


def _class_path() -> list[Path]:
    return [TARGET / "classes", *map(Path, (TARGET / "classpath").read_text().split(":"))]


def _digest_of_sources() -> str:
    digest = hashlib.sha256()
    for path in [HERE / "pom.xml", *sorted(HERE.glob("src/**/*.*"))]:
        digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _call(command: list[str], stdin: str = "", env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        # Maven writes errors to standard output, and the program to standard error.
        raise JavaFailed([word for word in command if len(word) < 200], done.returncode, done.stdout + done.stderr)
    return done.stdout
