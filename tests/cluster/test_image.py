"""The image in a real container engine: its contents, and that its programs work without capabilities."""

from __future__ import annotations

import json
import os
import re
import stat
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from testcontainers.core.container import DockerContainer

from tests.builders import DAY, HOUR, topic
from tests.cluster.engine import SOURCE, Engine
from tests.cluster.plane import PATIENCE_SECONDS, free_ports, until
from tests.cluster.release import USER
from tests.hbase.server import HBaseServer
from tests.hbase.tables import Tables
from tests.server.client import Client
from tms_core.clock import SystemClock
from tms_core.settings.models import HBaseSettings
from tms_core.tables.hbase.store import HBaseStore
from tms_core.tables.leveldb.store import LevelDBStore


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Create a store with two expired rows and one other row in a folder of the container's user."""
    folder = tmp_path / "data"
    now_ms = SystemClock().now_ms()
    with LevelDBStore(folder / "messaging", create=True) as store:
        topic(store, "default:orders", ttl_seconds=86_400).plain(now_ms - 3 * DAY, now_ms - 2 * DAY, now_ms - HOUR)
    for path in (folder, *folder.rglob("*")):
        os.chown(path, USER, USER)
    for parent in list(folder.parents)[:3]:
        parent.chmod(parent.stat().st_mode | stat.S_IXOTH)
    return folder


def test_image_runs_the_janitor_without_root(engine: Engine, image: str) -> None:
    [about] = json.loads(engine.docker("image", "inspect", image))
    assert about["Config"]["Entrypoint"] == ["janitor"]
    assert about["Config"]["User"] == f"{USER}:{USER}"
    assert re.fullmatch(r"janitor, version \d.*\n", engine.run(image, "--version").stdout)
    assert "serve" in engine.run(image, "--help", options=("--entrypoint=tms",)).stdout


@pytest.mark.parametrize("name", ["image", "spark_image"])
def test_image_has_no_tools_to_build_or_install(engine: Engine, name: str, request: pytest.FixtureRequest) -> None:
    image = request.getfixturevalue(name)
    look = (
        "import shutil, importlib.util as i; print([n for n in ('gcc', 'cc', 'make', 'pip', 'pip3') if shutil.which(n)]"
    )
    look += " + [n for n in ('pip', 'hatchling', 'setuptools') if i.find_spec(n)])"
    found = engine.run(image, "-c", look, options=("--entrypoint=/opt/tms/bin/python",))
    assert found.stdout == "[]\n", found.stderr


def test_image_is_small_has_no_shell_and_labels_its_source(engine: Engine, image: str) -> None:
    [about] = json.loads(engine.docker("image", "inspect", image))
    assert about["Size"] < 200e6
    labels = {name.rpartition(".")[2]: value for name, value in about["Config"]["Labels"].items()}
    assert (labels["version"], labels["source"]) == (version("tms-janitor"), SOURCE)
    assert re.fullmatch("[0-9a-f]{40}", labels["revision"])
    for program in ("sh", "bash", "dash", "perl", "apt", "dpkg", "cat"):
        assert "executable file not found" in engine.run(image, options=(f"--entrypoint={program}",)).stderr


def test_image_contains_its_sbom(engine: Engine, image: str) -> None:
    show = "print(open('/opt/tms/sbom.cdx.json').read())"
    found: dict[str, Any] = json.loads(engine.run(image, "-c", show, options=("--entrypoint=python",)).stdout)
    assert (found["bomFormat"], found["metadata"]["component"]["name"]) == ("CycloneDX", "tms-janitor")
    names = {component["name"] for component in found["components"]}
    assert {"starlette", "libc6", "python"} <= names
    assert {"plyvel", "plyvel-next"} & names
    assert not {"pytest", "pyarrow", "dash", "apt"} & names


def test_spark_image_counts_expired_rows_in_a_volume(engine: Engine, spark_image: str, data: Path) -> None:
    contents = json.loads(engine.run(spark_image, "/opt/tms/sbom.cdx.json", options=("--entrypoint=cat",)).stdout)
    assert {"pyspark", "openjdk-21-jre-headless"} <= {component["name"] for component in contents["components"]}
    mounted = ("--volume", f"{data}:/var/lib/tms")
    words = ("spark", "stats", "--leveldb", "/var/lib/tms/messaging", "--format", "json")
    counted = engine.run(spark_image, *words, options=mounted)
    assert counted.returncode == 0, counted.stderr
    assert [one["overdue"]["expired"] for one in json.loads(counted.stdout)["topics"]] == [2]


def test_every_extra_of_the_image_can_be_loaded(engine: Engine, image: str, archive_image: str) -> None:
    for each, load in ((image, "httpx2, jwt, tms_core.tables.hbase"), (archive_image, "pyarrow.parquet, jwt")):
        loaded = engine.run(each, "-c", f"import {load}", options=("--entrypoint=/opt/tms/bin/python",))
        assert loaded.returncode == 0, loaded.stderr


def test_store_in_a_volume_is_cleaned_without_permissions(engine: Engine, image: str, data: Path) -> None:
    mounted = ("--volume", f"{data}:/var/lib/tms")
    options = ("--leveldb", "/var/lib/tms/messaging", "--format", "json")
    planned = engine.run(image, "plan", *options, options=mounted)
    assert json.loads(planned.stdout)["totals"]["expired"] == 2, planned.stderr
    assert engine.run(image, "run", "--once", *options, options=mounted).returncode == 3
    done = engine.run(image, "run", "--once", "--adopt", *options, options=mounted)
    assert json.loads(done.stdout)["totals"]["expired"] == 2, done.stderr


def test_daemon_in_a_container_stops_cleanly(engine: Engine, image: str, data: Path) -> None:
    [port] = free_ports(1)
    least = ("--network=host", "--read-only", "--cap-drop=ALL", "--tmpfs=/tmp", "--volume", f"{data}:/var/lib/tms")
    settings = ("--env", f"TMS_JANITOR__HTTP__PORT={port}")
    name = engine.docker(
        "run", "--detach", *least, *settings, image, "run", "--leveldb", "/var/lib/tms/messaging"
    ).strip()
    try:

        def is_alive() -> bool:
            try:
                with Client(port) as client:
                    return client.ask("GET", "/readyz").text == "ok"
            except OSError:
                return False

        until(is_alive, "the daemon is ready")
        engine.docker("stop", "--time", PATIENCE_SECONDS, name)
        [about] = json.loads(engine.docker("inspect", name))
        assert about["State"]["ExitCode"] == 0
    finally:
        engine.docker("rm", "--force", name)


def test_container_deletes_expired_rows_in_hbase(
    engine: Engine, image: str, hbase: HBaseServer, hbase_tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", engine.host)
    monkeypatch.setattr("testcontainers.core.config.testcontainers_config.ryuk_disabled", True)
    namespace = hbase_tables.make()
    now_ms = SystemClock().now_ms()
    with HBaseStore(HBaseSettings(thrift=(hbase.thrift,), namespace=namespace, buckets=4)) as store:
        orders = topic(store, "default:orders", ttl_seconds=3600)
        orders.plain(*range(now_ms - 2 * HOUR, now_ms - 2 * HOUR + 40))
        command = f"run --once --adopt --hbase {hbase.thrift} --format json"
        container = DockerContainer(image, network_mode="host", read_only=True, cap_drop=["ALL"])
        container.with_tmpfs_mount("/tmp")  # noqa: S108
        container.with_command(command).with_env("TMS_STORAGE__HBASE__NAMESPACE", namespace)
        with container.with_env("TMS_TRANSACTIONS__SOURCE", "none") as running:
            ended = running.get_wrapped_container().wait(timeout=PATIENCE_SECONDS)
            out, err = running.get_logs()
        assert ended["StatusCode"] == 0, err.decode()
        assert json.loads(out)["totals"]["expired"] == 40
        assert orders.times() == []
