"""The Spark session of the janitor's commands, and the conversion of Spark's errors.

Spark reports an error as a stack trace of two languages. For an error of this project, the last line of the traceback
has its name and message. The conversion searches for that line and raises the same error here; otherwise it shows the
line with Spark's reason.

The session of a command hides Spark's log, which would repeat the stack trace. To see the log, set SPARK_CONF_DIR to a
folder with a log4j2.properties file.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from threading import current_thread, main_thread
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tms_core import errors
from tms_core.errors import ConfigurationError, Interrupted, TmsError, hint_for_extra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["translated"]

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: The Java versions that Spark 4 runs on.
JAVA = (17, 21)
#: The time limit for Java to report its version, in seconds.
_JAVA_SECONDS = 60
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
#: The form of the last line of a traceback with an error of this project.
_PROJECT_ERROR = re.compile(r"^((?:tms_core|janitor)(?:\.\w+)+)\.(\w+): (.+)$", re.MULTILINE)
#: The form of the last lines of Python's tracebacks, and of Java's causes.
_RAISED = re.compile(r"^((?:\w+\.)*\w*(?:Error|Exception|Exit|Interrupt): .+)$", re.MULTILINE)
_CAUSED = re.compile(r"^(?:Caused by: |: )(?:[\w$]+\.)+([\w$]+: .+)$", re.MULTILINE)
#: The default ports of Spark Connect and of a Spark master.
_PORTS = {"sc": 15002, "spark": 7077}
#: The timeout for a connection to them, in seconds; Spark itself would retry for minutes.
_ANSWER_SECONDS = 10
#: The interval at which the thread that waits for Spark checks other conditions, in seconds.
LOOK_SECONDS = 1.0
#: The interval at which progress is logged, in seconds.
TELL_SECONDS = 10.0
_JDK = "Install a JDK 17 (apt-get install openjdk-17-jdk-headless), and set JAVA_HOME or PATH."
_QUIET_LOG = Path(__file__).with_name("log4j2.properties")
_LOG = "To see Spark's log, set SPARK_CONF_DIR to a folder with a log4j2.properties file."

#: The number of attempts of each task on a single machine, as on a cluster.
LOCAL = "local[*,4]"


def require_pyspark() -> None:
    """Check that pyspark and pyarrow are installed, without loading them.

    Raises:
        ConfigurationError: pyspark or pyarrow is not installed.
    """
    for name in ("pyspark", "pyarrow"):
        if find_spec(name) is None:
            raise ConfigurationError(f"janitor spark needs {name}, which is not installed.", hint_for_extra("spark"))


def require_java(environ: Mapping[str, str]) -> None:
    """Check that Spark finds a supported Java.

    Raises:
        ConfigurationError: no Java was found, or its version is not supported.
    """
    home = environ.get("JAVA_HOME")
    found = str(Path(home) / "bin" / "java") if home else shutil.which("java", path=environ.get("PATH"))
    if found is None or not Path(found).is_file():
        where = f"JAVA_HOME is {home}, but it has no bin/java." if home else "The PATH has no java."
        raise ConfigurationError(f"Spark needs Java. {where}", _JDK)
    output = subprocess.run([found, "-version"], capture_output=True, text=True, check=False, timeout=_JAVA_SECONDS)  # noqa: S603
    match = _VERSION.search(output.stderr + output.stdout)
    if match is None or int(match[1]) not in JAVA:
        version = f"Java {match[1]}" if match else "an unknown version"
        raise ConfigurationError(f"Spark needs Java {' or '.join(map(str, JAVA))}, but {found} is {version}.", _JDK)


@contextmanager
def session(master: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[SparkSession]:
    """Yield a session; stop it afterwards unless it existed before.

    Args:
        master: the Spark master (``local[*]``, ``spark://…``, ``k8s://…``, or ``sc://…`` for Spark Connect); None for
            the master of ``spark-submit``, or all cores of this machine.

    Raises:
        ConfigurationError: pyspark or Java is missing.
        TmsError: Spark is not available, or does not start.
    """
    require_pyspark()
    from pyspark.sql import SparkSession  # noqa: PLC0415

    submitted = "PYSPARK_GATEWAY_PORT" in environ
    remote = master is not None and master.startswith("sc://")
    if master is not None and not submitted:
        require_answer(master)
    builder = SparkSession.builder.appName("tms-janitor")
    # Filters for sources in Python.
    builder = builder.config("spark.sql.python.filterPushdown.enabled", "true")
    with translated():
        if remote:
            builder = builder.remote(str(master))
        elif submitted:
            builder = builder.config("spark.log.level", _read_log_level())
        else:
            require_java(environ)
            builder = builder.master(master or LOCAL).config("spark.ui.enabled", "false")
            builder = builder.config("spark.ui.showConsoleProgress", str(sys.stderr.isatty()).lower())
        before = None if remote else SparkSession.getActiveSession()
        with _own_interrupts(), nullcontext() if remote or submitted else _environment(master or LOCAL, environ):
            spark = builder.getOrCreate()
        try:
            yield spark
        except BaseException:
            # Without a JVM (see run_on_spark), stop fails, too; raise the first error.
            if before is None:
                with suppress(Exception):
                    spark.stop()
            raise
        if before is None:
            spark.stop()


@contextmanager
def _own_interrupts() -> Iterator[None]:
    """Keep the handler of Ctrl-C: PySpark's own handler calls the JVM in the middle of another call."""
    before = signal.getsignal(signal.SIGINT)
    yield
    if current_thread() is main_thread():
        signal.signal(signal.SIGINT, before)


@contextmanager
def convert_sigterm() -> Iterator[None]:
    """Make SIGTERM stop commands that only read, like Ctrl-C; the first process of a container would ignore it."""
    if current_thread() is not main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def run_on_spark(
    spark: SparkSession, work: Callable[[], T], keep_alive: Callable[[], None] = lambda: None, *, name: str = ""
) -> T:
    """Do work on Spark, and cancel it if ``keep_alive`` raises an error.

    Args:
        spark: a session whose jobs all belong to the caller.
        keep_alive: called at intervals during the wait.
        name: the name of the work in the log and in Spark's UI; empty to log no progress.

    Raises:
        Interrupted: ``keep_alive`` raised it.
        KeyboardInterrupt: Ctrl-C, or a signal to stop.
    """
    with ThreadPoolExecutor(1, "spark") as thread, _Progress(spark, name) as progress:
        future = thread.submit(progress.described, work)
        try:
            while not wait([future], LOOK_SECONDS).done:
                keep_alive()
                progress.log()
        except (Interrupted, KeyboardInterrupt):
            # The JVM may have stopped: systemd and timeout send signals to the whole process group.
            with suppress(Exception):
                # Cancel all jobs: a classic session applies a tag only in the thread that has set it.
                spark.interruptAll()
            raise
        return future.result()


class _Progress:
    """The progress of Spark, logged at intervals; short work is not logged.

    Args:
        name: as of :func:`run_on_spark`.
    """

    def __init__(self, spark: SparkSession, name: str) -> None:
        self._spark = spark
        self._name = name
        # A session of Spark Connect has no context; its server reports progress.
        self._remote = "connect" in type(spark).__module__
        self._reported: list[tuple[int, int]] = []
        self._began = self._logged = time.monotonic()
        self._has_logged = False
        # PySpark declares a class, but calls the handler as a function.
        self._handler = cast("Any", self._on_progress)

    def __enter__(self) -> Self:
        if self._name and self._remote:
            self._spark.registerProgressHandler(self._handler)
        return self

    def __exit__(self, *_: object) -> None:
        if self._name and self._remote:
            self._spark.removeProgressHandler(self._handler)
        if self._has_logged:
            logger.info("%s: finished after %.0f s", self._name, time.monotonic() - self._began)

    def described(self, work: Callable[[], T]) -> T:
        """Do the work in this thread, with its name in Spark's UI."""
        if not self._name or self._remote:
            return work()
        self._spark.sparkContext.setJobDescription(self._name)
        return work()

    def log(self) -> None:
        """Log the number of finished tasks, if it has changed."""
        now = time.monotonic()
        if not self._name or (self._has_logged and now - self._logged < TELL_SECONDS):
            return
        self._logged, self._has_logged = now, True
        stages = self._reported if self._remote else self._stages()
        done, tasks = (sum(numbers) for numbers in zip(*stages, strict=True)) if stages else (0, 0)
        # Spark plans before the first stage and between stages, which may take longer than the tasks.
        progress = f"{done} of {tasks} tasks done" if tasks else "no tasks running"
        logger.info("%s: %s after %.0f s", self._name, progress, now - self._began)

    def _stages(self) -> list[tuple[int, int]]:
        """Return the finished tasks and all tasks of each running stage."""
        tracker = self._spark.sparkContext.statusTracker()
        found = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
        return [(stage.numCompletedTasks, stage.numTasks) for stage in found if stage is not None]

    def _on_progress(
        self, stages: Iterable[Any] | None, inflight_tasks: int, operation_id: str | None, done: bool
    ) -> None:
        self._reported = [(stage.num_completed_tasks, stage.num_tasks) for stage in stages or ()]


def require_answer(master: str) -> None:
    """Check that a program listens at the address of the master, if the master has an address.

    Raises:
        TmsError: no program listens there.
    """
    scheme, _, rest = master.partition("://")
    if scheme not in _PORTS:
        return
    for address in rest.partition("/")[0].split(","):
        host, _, port = address.partition(":")
        try:
            with socket.create_connection((host, int(port or _PORTS[scheme])), _ANSWER_SECONDS):
                return
        except (OSError, ValueError):
            continue
    raise TmsError(f"No Spark responds at {master}.", "Start Spark there, or correct --master.")


@contextmanager
def _environment(master: str, environ: Mapping[str, str]) -> Iterator[None]:
    """Set the environment variables of a new JVM inside the block."""
    # Tasks on this machine run in the interpreter of this process.
    variables = {"PYSPARK_PYTHON": environ.get("PYSPARK_PYTHON", sys.executable)}
    if master.startswith("local"):
        variables["SPARK_LOCAL_IP"] = environ.get("SPARK_LOCAL_IP", "127.0.0.1")
    options = environ.get("SPARK_SUBMIT_OPTS", "")
    if "SPARK_CONF_DIR" not in environ and "log4j" not in options:
        variables["SPARK_SUBMIT_OPTS"] = f"{options} -Dlog4j2.configurationFile={_QUIET_LOG.as_uri()}".strip()
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _read_log_level() -> str:
    """Return the log level of ``spark-submit``; empty if it is not set."""
    from pyspark import SparkConf  # noqa: PLC0415

    return str(SparkConf().get("spark.log.level", "FATAL"))


@contextmanager
def translated() -> Iterator[None]:
    """Convert errors of Spark.

    Raises:
        TmsError: the error that a task raised, if it is an error of this project.
    """
    from py4j.protocol import Py4JError  # type: ignore[import-untyped] # noqa: PLC0415
    from pyspark.errors import PySparkException  # noqa: PLC0415

    try:
        with warnings.catch_warnings():
            # A warning about pandas, which is loaded but not used.
            warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
            yield
    except (PySparkException, Py4JError) as error:
        raise error_of(str(error)) from error
    except ConnectionError as error:
        raise TmsError("Spark's driver process is gone.", _LOG) from error


def error_of(text: str) -> TmsError:
    """Return the error of this project in a text of Spark."""
    if found := _PROJECT_ERROR.findall(text):
        module, name, message = found[-1]
        kind = getattr(import_module(module), name, TmsError)
        return plain_kind(kind)(message.strip())
    return TmsError(f"Spark failed: {_reason(text)}", _LOG)


def _reason(text: str) -> str:
    """Return the line of a stack trace that describes the error."""
    first = next((line.strip() for line in text.splitlines() if line.strip()), "it did not say why")
    if "Traceback (most recent call last)" in text and (raised := _RAISED.findall(text)):
        return str(raised[-1])
    if first.startswith("An error occurred while calling") and (caused := _CAUSED.findall(text)):
        return str(caused[-1])
    return first


def plain_kind(kind: type) -> type[TmsError]:
    """Return the nearest class of error in :mod:`tms_core.errors` that takes a message and a hint."""
    tree = (found for found in kind.__mro__ if found.__module__ == errors.__name__ and found is not errors.Conflict)
    found = next(tree, TmsError)
    return found if issubclass(found, TmsError) else TmsError
