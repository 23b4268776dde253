"""CDAP's and Tephra's own Java classes, called from Python.

The proof that a store is still CDAP's is that CDAP reads it. ``src/`` holds a small Java program around the classes
of CDAP 5.1.2; Maven builds it once per checkout (about half a minute with an empty local repository, seconds
afterwards). A call of :class:`Interop` is a JVM of its own, a second of processor time; :class:`Resident` keeps one for
all its calls. Either way a store is held only while a command lasts, since only one side may open it.

``DIR`` is the folder of the three ``system.tms.*`` databases. Every command opens it in place, which rewrites log and
manifest as any start of CDAP does: hand over a copy where bytes matter. ``dump``, ``read-service`` and ``write`` take a
store on HBase as well, ``hbase:ZOOKEEPER_PORT:PREFIX``, and then CDAP's own HBase tables are asked; such a store tells
of live topics only, and ``write`` needs ``--snapshots``.

========================================  =============================================================================
``dump DIR``                              metadata of all topics, then every entry of the live ones, without ttl
``raw DIR meta|message|payload``          every row of a table: key in hex, SHA-256 of the value
``read-service DIR``                      what consumers get, by the system clock; ``--snapshot FILE`` adds what they
                                          get in a transaction, ``--messages`` lists the messages
``write DIR SEED``                        a random store and, beside it, ``tx.snapshot/``; ``--now MS``, ``--rows N``,
                                          ``--topics N``, ``--payload-bytes N``, ``--snapshots DIR``, ``--kill``
``fill DIR``                              plain messages, half of them past their ttl; ``--now MS``, ``--rows N``,
                                          ``--topics N``, ``--payload-bytes N``, ``--kill``
``prune DIR``                             one round of CDAP's own cleaning, timed; ``--now MS``
``snapshot FILE``                         a transaction snapshot of any version, decoded
``write-snapshot FILE``                   the same line from standard input, encoded as V4
========================================  =============================================================================

``--kill`` halts the JVM without closing the databases, as a crash would.
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

#: In a test (pytest says so by this variable) a JVM ends before a second compiler, a parallel collector or a proof that
#: thousands of classes are well formed has paid for itself; benchmarks measure Java as it is run.
_LITTLE = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
SHORT_LIVED = _LITTLE.split() if "PYTEST_VERSION" in os.environ else []
#: Java 17 locks its own insides; CDAP's libraries of 2018 reach into these. The serial collector starts fastest.
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
    """Maven or the Java program ended with an error; the text carries the end of what it said."""

    def __init__(self, command: list[str], status: int, output: str) -> None:
        super().__init__(f"{' '.join(command)} ended with {status}:\n{output[-4000:]}")


class Interop:
    """The Java program, built on demand."""

    @staticmethod
    def available() -> str | None:
        """Return why the program cannot run, with a command that helps, or None."""
        for tool, install in _TOOLS.items():
            if shutil.which(tool) is None:
                return f"{tool} is missing, so CDAP's own classes cannot be asked; install it: {install}"
        return None

    def build(self) -> None:
        """Compile the program unless that is done; safe to call from several processes at once."""
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
        """Call one command of the program; :meth:`build` comes first."""
        call = [*self.command("interop.Main"), command, *map(str, args)]
        return [json.loads(line) for line in _call(call, stdin).splitlines()]

    @staticmethod
    def command(main: str) -> list[str]:
        """Return the command of a JVM with one of the program's classes; call :meth:`build` first."""
        return ["java", *JVM_FLAGS, "-cp", ":".join(map(str, _class_path())), main]

    def raw(self, directory: Path, table: str) -> dict[bytes, str]:
        """Every row of ``meta``, ``message`` or ``payload`` as CDAP's LevelDB library reads it, unrecognized ones too.

        Returns:
            The SHA-256 of each value, in hex, by key and in key order.
        """
        return {bytes.fromhex(row["key"]): row["value_sha256"] for row in self.run("raw", directory, table)}


class Resident(Interop):
    """The Java program in one JVM for many commands; after ``--kill`` or a failure, the next gets a new one."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, command: str, *args: str | int | Path, stdin: str = "") -> list[dict[str, Any]]:
        words = [command, *map(str, args)]
        # Connections to HBase outlive a command, and standard input is for commands.
        if stdin or any(word.startswith("hbase:") for word in words):
            return super().run(command, *args, stdin=stdin)
        process = self._process = self._process or self._started()
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
        with self._complaints as complaints:
            complaints.seek(0)
            return complaints.read()

    def _started(self) -> subprocess.Popen[str]:
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command, pipe = self.command("interop.Main"), subprocess.PIPE
        return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._complaints, text=True)


def compile_project(project: Path) -> None:
    """Compile a folder with Maven, in a JVM for short programs unless ``MAVEN_OPTS`` is set."""
    _call(["mvn", "-q", "-B", "-f", str(project / "pom.xml"), "compile"], env={"MAVEN_OPTS": _LITTLE, **os.environ})


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
        # Maven complains on standard output, the program on standard error
        raise JavaFailed([word for word in command if len(word) < 200], done.returncode, done.stdout + done.stderr)
    return done.stdout
