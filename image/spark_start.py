"""What the image for Spark starts: the janitor, or an executor where Spark says so.

On Kubernetes Spark makes the pods of its executors itself, with ``executor`` as their only argument, and says in their
environment what they are to be (Spark's ``BasicExecutorFeatureStep`` writes it). Its own images have a shell script for
that; this stands in for it, so that driver and executors are one image: the same Python, the same packages.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from sysconfig import get_path

#: What an executor is told, by the flag it goes on with.
TOLD = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
#: Further places of classes, if they are told: before Spark's own, and behind them.
BEFORE, BEHIND = ("SPARK_CLASSPATH", "SPARK_CONF_DIR"), ("HADOOP_CONF_DIR", "SPARK_DIST_CLASSPATH")
OPTION = "SPARK_JAVA_OPT_"
BACKEND = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"


def executor(environ: Mapping[str, str], spark: Path) -> list[str]:
    """The command line of an executor.

    Args:
        environ: what it is told.
        spark: where Spark is; its jars are in there.

    Raises:
        KeyError: something is not told.
    """
    numbers = sorted(int(name.removeprefix(OPTION)) for name in environ if name.startswith(OPTION))
    options = [environ[f"{OPTION}{number}"] for number in numbers]
    memory = environ["SPARK_EXECUTOR_MEMORY"]
    before, behind = ([environ[name] for name in names if environ.get(name)] for names in (BEFORE, BEHIND))
    classes = ":".join([*before, f"{spark}/jars/*", *behind])
    told = [word for flag, name in TOLD.items() for word in (flag, environ[name])]
    return ["java", *options, f"-Xms{memory}", f"-Xmx{memory}", "-cp", classes, BACKEND, *told]


def main() -> None:
    """Become what the first argument says."""
    words, environ = ["janitor", *sys.argv[1:]], dict(os.environ)
    if sys.argv[1:2] == ["executor"]:
        spark = Path(get_path("purelib")) / "pyspark"
        words = executor(environ, spark)
        environ["SPARK_HOME"] = str(spark)
        # A session's files are put where it stands, and nothing else can be written.
        os.chdir(environ["SPARK_LOCAL_DIRS"].partition(",")[0])
    os.execvpe(words[0], words, environ)  # noqa: S606 - that is what it is for


if __name__ == "__main__":
    main()
