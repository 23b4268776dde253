"""What the image is made of: pins that agree with the tests', a list of its contents, and nothing that needs a network.

The image itself is made and run by ``make test-cluster``.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from image import sbom, spark_start

ROOT = Path(__file__).parents[1]
DOCKERFILES = [(ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "image/spark.Dockerfile")]
LOCKS = ("runtime.lock", "build.lock", "spark.lock")
#: Needed to build images, and nowhere else.
ONLY_BUILT_WITH = {"setuptools"}


def pins(path: Path) -> dict[str, str]:
    """Each pinned requirement of a lock, with its hashes."""
    _, *blocks = re.split(r"^(?=[a-z0-9])", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {block.partition("==")[0]: block.strip() for block in blocks}


@pytest.mark.parametrize("name", LOCKS)
def test_what_is_in_the_image_is_what_the_tests_ran_with(name: str) -> None:
    tested, shipped = pins(ROOT / "requirements.lock"), pins(ROOT / "image" / name)
    assert shipped
    versions = {package: block.split()[0] for package, block in tested.items()}
    assert {
        package: block.split()[0] for package, block in shipped.items() if package not in ONLY_BUILT_WITH
    }.items() <= versions.items()
    assert all("--hash=sha256:" in block for block in shipped.values())


@pytest.mark.parametrize("name", LOCKS)
def test_the_locks_name_no_index_no_address_and_no_place(name: str) -> None:
    text = (ROOT / "image" / name).read_text(encoding="utf-8")
    assert re.findall(r"://|\s@\s|^\s*-(?!-hash=sha256:)", text, flags=re.MULTILINE) == []


def test_no_test_tool_gets_into_the_image() -> None:
    tools = {"pytest", "hypothesis", "mypy", "hatchling", *ONLY_BUILT_WITH}
    assert not {*tools, "pyspark"} & set(pins(ROOT / "image/runtime.lock"))
    assert not tools & set(pins(ROOT / "image/spark.lock"))


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=["janitor", "spark"])
def test_an_image_runs_as_nobody_and_is_made_of_its_base_only(dockerfile: str) -> None:
    last = dockerfile.rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert set(re.findall(r"^FROM (\S+)", dockerfile, flags=re.MULTILINE)) == {"${BASE_IMAGE}"}
    assert "# syntax" not in dockerfile


def test_the_janitors_last_stage_installs_nothing() -> None:
    last = DOCKERFILES[0].rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["janitor"]' in last
    assert re.findall(r"^RUN (\S+)", last, flags=re.MULTILINE) == ["rm"]


def test_the_commands_of_the_images_keep_a_sigterm_until_they_can_hear_it() -> None:
    # tests/test_entry.py shows that this does it.
    blocked = "/usr/bin/env -S --block-signal=TERM /opt/tms/bin/python|' /opt/tms/bin/janitor /opt/tms/bin/tms"
    assert blocked in DOCKERFILES[0]
    assert 'ENTRYPOINT ["/usr/bin/env", "--block-signal=TERM", ' in DOCKERFILES[1]


# --- what the image for Spark starts ---------------------------------------------------------------------------------

TOLD = {
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@10.0.0.1:7078",
    "SPARK_EXECUTOR_ID": "1",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_EXECUTOR_MEMORY": "512m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.2",
    "SPARK_EXECUTOR_POD_NAME": "exec-1",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_CONF_DIR": "/opt/spark/conf",
    "SPARK_LOCAL_DIRS": "/scratch,/other",
}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What would have been started, and where: the start itself is left out."""
    words: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda _, command, __: words.append(command))
    monkeypatch.setattr("os.chdir", lambda folder: words.append(["cd", folder]))
    return words


def test_given_a_command_line_then_it_is_the_janitors(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["spark_start.py", "spark", "stats"])
    spark_start.main()
    assert started == [["janitor", "spark", "stats"]]


def test_given_that_spark_wants_an_executor_then_it_is_one(
    started: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["spark_start.py", "executor"])
    spark_start.main()
    [there, [java, *words]] = started
    assert there == ["cd", "/scratch"]
    assert (java, spark_start.BACKEND in words) == ("java", True)
    assert words[words.index("--hostname") + 1] == "10.0.0.2"


def test_an_executor_has_its_options_in_order_and_its_classes_behind_the_configuration() -> None:
    options = {f"{spark_start.OPTION}{number}": f"-Da={number}" for number in range(11)}
    words = spark_start.executor({**TOLD, **options, "HADOOP_CONF_DIR": "/hadoop"}, Path("/spark"))
    assert words[1:12] == [f"-Da={number}" for number in range(11)]
    assert words[12:16] == ["-Xms512m", "-Xmx512m", "-cp", "/opt/spark/conf:/spark/jars/*:/hadoop"]
    assert words[16] == spark_start.BACKEND


def test_the_list_of_contents_names_what_is_installed(tmp_path: Path) -> None:
    names = {package["name"]: package for package in sbom.python_packages()}
    assert names["tms-janitor"]["purl"].startswith("pkg:pypi/tms-janitor@")
    assert names["plyvel"]["version"]
    status = tmp_path / "status"
    entry = "Package: {0}\nStatus: install ok {1}\nArchitecture: amd64\nVersion: 1-2\nDescription: x\n Package: y\n"
    status.write_text("\n".join([entry.format("libc6", "installed"), entry.format("gone", "config-files")]))
    assert [package["purl"] for package in sbom.debian_packages(status)] == ["pkg:deb/debian/libc6@1-2?arch=amd64"]
    assert sbom.debian_packages(tmp_path / "none") == []
    assert sbom.document()["metadata"]["component"]["name"] == "tms-janitor"
