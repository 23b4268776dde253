"""The entry point of the image for Spark: runs the janitor, or an executor if Spark starts the container.

On Kubernetes, Spark starts the pods of its executors with ``executor`` as their only argument and their settings in
the environment (see Spark's ``BasicExecutorFeatureStep``). Spark's own images have a shell script for that. This module
replaces the script, so that driver and executors share one image with the same Python and the same packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from sysconfig import get_path

#: The environment variable of each flag of an executor.
FLAGS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
#: The environment variables with class paths that precede or follow Spark's own jars.
PATHS_BEFORE, PATHS_AFTER = ("SPARK_CLASSPATH", "SPARK_CONF_DIR"), ("HADOOP_CONF_DIR", "SPARK_DIST_CLASSPATH")
OPTION = "SPARK_JAVA_OPT_"
BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def executor(environ: Mapping[str, str], spark: Path) -> list[str]:
    """Return the command line of an executor.

    Args:
        environ: the environment with the settings.
        spark: Spark's folder, which contains ``jars``.

    Raises:
        KeyError: a setting is missing.
    """
    numbers = sorted(int(name.removeprefix(OPTION)) for name in environ if name.startswith(OPTION))
    options = [environ[f"{OPTION}{number}"] for number in numbers]
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    before, after = ([environ[name] for name in names if environ.get(name)] for names in (PATHS_BEFORE, PATHS_AFTER))
    classes = ":".join([*before, f"{spark}/jars/*", *after])
    flags = [word for flag, name in FLAGS.items() for word in (flag, environ[name])]
    return ["java", *options, f"-Xms{memory}", f"-Xmx{memory}", "-cp", classes, BACKEND, *flags]


def main() -> None:
    """Replace this process with the janitor, or with an executor if the first argument is ``executor``."""
    words, environ = ["janitor", *sys.argv[1:]], dict(os.environ)
    if sys.argv[1:2] == ["executor"]:
        spark = Path(get_path("purelib")) / "pyspark"
        words = executor(environ, spark)
        environ["SPARK_HOME"] = str(spark)
        # An executor stores its session's files in the working folder; only Spark's local folders are writable.
        os.chdir(environ["SPARK_LOCAL_DIRS"].partition(",")[0])
    os.execvpe(words[0], words, environ)  # noqa: S606 - an entry point replaces itself


if __name__ == "__main__":
    main()
