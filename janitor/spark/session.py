"""A Spark session for the janitor's commands, and the border where Spark's errors become sentences.

What goes wrong on Spark comes back as a stack of two languages. The sentence somebody can act on is in it, if the error
was one of ours: every one ends a Python traceback by its name and message. So the border looks for that line, raises
the same error here, and shows the first line of what Spark said only where there is none.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tms_core import errors
from tms_core.errors import ConfigurationError, TmsError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: The Java versions that Spark 4 runs on.
JAVA = (17, 21)
#: How long Java may take to say which version it is, in seconds.
_JAVA_SECONDS = 60
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
#: How the last line of a traceback names an error of ours.
_OURS = re.compile(r"^((?:tms_core|janitor)(?:\.\w+)+)\.(\w+): (.+)$", re.MULTILINE)
_INSTALL = "Install tms-janitor[spark]."
_JDK = "Install a JDK 17 (apt-get install openjdk-17-jdk-headless) and let JAVA_HOME or PATH name it."

#: What a session of ours asks of Spark: filters for sources in Python, and no progress bar in the middle of a report.
_WANTED = {
    "spark.sql.python.filterPushdown.enabled": "true",
    "spark.ui.showConsoleProgress": "false",
}


def require_pyspark() -> None:
    """Make sure that pyspark and pyarrow can be loaded, without loading them.

    Raises:
        ConfigurationError: one of them is not installed.
    """
    for name in ("pyspark", "pyarrow"):
        if find_spec(name) is None:
            raise ConfigurationError(f"janitor spark needs {name}, which is not installed.", _INSTALL)


def require_java(environ: Mapping[str, str]) -> None:
    """Make sure that Spark finds a Java it runs on.

    Raises:
        ConfigurationError: there is none, or it is of another version.
    """
    home = environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environ.get("PATH"))
    if found is None or not Path(found).is_file():
        where = f"JAVA_HOME is {home}, and there is no bin/java in it." if home else "There is no java on the PATH."
        raise ConfigurationError(f"Spark needs Java. {where}", _JDK)
    asked = subprocess.run([found, "-version"], capture_output=True, text=True, check=False, timeout=_JAVA_SECONDS)  # noqa: S603
    match = _VERSION.search(asked.stderr + asked.stdout)
    if match is None or int(match[1]) not in JAVA:
        version = f"Java {match[1]}" if match else "no Java that says its version"
        raise ConfigurationError(f"Spark runs on Java {' or '.join(map(str, JAVA))}, and {found} is {version}.", _JDK)


@contextmanager
def session(master: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[SparkSession]:
    """A session, stopped at the end unless it was there before.

    Args:
        master: Spark's name of a cluster (``local[*]``, ``spark://…``, ``k8s://…``, or ``sc://…`` for Spark Connect);
            None: what ``spark-submit`` says, or else ``local[*]``.

    Raises:
        ConfigurationError: pyspark or Java is missing.
        TmsError: Spark does not start.
    """
    require_pyspark()
    from pyspark.sql import SparkSession  # noqa: PLC0415

    submitted = "PYSPARK_GATEWAY_PORT" in environ
    remote = master is not None and master.startswith("sc://")
    builder = SparkSession.builder.appName("tms-janitor")
    for name, value in _WANTED.items():
        builder = builder.config(name, value)
    if remote:
        builder = builder.remote(str(master))
    elif not submitted:
        require_java(environ)
        # Tasks on this machine run in the interpreter that runs this.
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
        builder = builder.master(master or "local[*]").config("spark.ui.enabled", "false")
    with translated():
        before = None if remote else SparkSession.getActiveSession()
        spark = builder.getOrCreate()
        try:
            yield spark
        finally:
            if before is None:
                spark.stop()


@contextmanager
def translated() -> Iterator[None]:
    """Raise what failed on Spark as an error of ours.

    Raises:
        TmsError: the very error a task failed with, where it was one of ours.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped] # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise error_of(str(error)) from error


def error_of(text: str) -> TmsError:
    """What Spark said, as an error of ours."""
    if found := _OURS.findall(text):
        module, name, message = found[-1]
        kind = getattr(import_module(module), name, TmsError)
        return plain_kind(kind)(message.strip())
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it did not say why")
    return TmsError(f"Spark failed: {first}", "Spark's own log, on standard error, says more.")


def plain_kind(kind: type) -> type[TmsError]:
    """The nearest kind of error in the tree of :mod:`tms_core.errors` that is made of a message and a hint."""
    tree = (found for found in kind.__mro__ if found.__module__ == errors.__name__ and found is not errors.Conflict)
    found = next(tree, TmsError)
    return found if issubclass(found, TmsError) else TmsError
