"""The entry point of the image for Spark: the janitor, or an executor if Spark starts one.

On Kubernetes, Spark creates the pods of its executors with ``executor`` as their only argument, and with their
settings in the environment (Spark's ``BasicExecutorFeatureStep`` sets them). Spark's own images have a shell script for
that. This module replaces it, so that driver and executors use one image: the same Python and the same packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from sysconfig import get_path

#: The settings of an executor, by the flag that passes them on.
TOLD = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
#: Additional class paths, if they are set: before Spark's own, and after.
BEFORE, BEHIND = ("SPARK_CLASSPATH", "SPARK_CONF_DIR"), ("HADOOP_CONF_DIR", "SPARK_DIST_CLASSPATH")
OPTION = "SPARK_JAVA_OPT_"
BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def executor(environ: Mapping[str, str], spark: Path) -> list[str]:
    """Return the command line of an executor.

    Args:
        environ: the environment with the settings.
        spark: Spark's folder, which has its jars.

    Raises:
        KeyError: a setting is missing.
    """
    numbers = sorted(int(name.removeprefix(OPTION)) for name in environ if name.startswith(OPTION))
    options = [environ[f"{OPTION}{number}"] for number in numbers]
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    before, behind = ([environ[name] for name in names if environ.get(name)] for names in (BEFORE, BEHIND))
    classes = ":".join([*before, f"{spark}/jars/*", *behind])
    told = [word for flag, name in TOLD.items() for word in (flag, environ[name])]
    return ["java", *options, f"-Xms{memory}", f"-Xmx{memory}", "-cp", classes, BACKEND, *told]


def main() -> None:
    """Replace this process with the program of the first argument."""
    words, environ = ["janitor", *sys.argv[1:]], dict(os.environ)
    if sys.argv[1:2] == ["executor"]:
        spark = Path(get_path("purelib")) / "pyspark"
        words = executor(environ, spark)
        environ["SPARK_HOME"] = str(spark)
        # A session's files are stored in the working folder, and no other folder is writable.
        os.chdir(environ["SPARK_LOCAL_DIRS"].partition(",")[0])
    os.execvpe(words[0], words, environ)  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()
