"""The image: pinned versions, its list of contents, and its file system.

The image itself is made and run by ``make test-cluster``.
"""

from __future__ import annotations

import os
import re
import shutil
import ssl
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement

from image import rootfs, sbom, spark_start
from tests.support import require_or_skip, require_tool

ROOT = Path(__file__).parents[1]
DOCKERFILES = [(ROOT / name).read_text(encoding="utf-8") for name in ("Dockerfile", "image/spark.Dockerfile")]
LOCKS = ("runtime.lock", "archive.lock", "build.lock", "spark.lock")
#: Packages that only the build of images needs.
ONLY_BUILT_WITH = {"cython", "setuptools"}


def pins(path: Path) -> dict[str, str]:
    """Return the pinned requirements of a lock by name, with their hashes."""
    _, *blocks = re.split(r"^(?=[a-z0-9])", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {block.partition("==")[0]: block.strip() for block in blocks}


@pytest.mark.parametrize("name", LOCKS)
def test_lock_of_the_image_has_the_versions_of_the_tested_lock(name: str) -> None:
    tested, shipped = pins(ROOT / "requirements.lock"), pins(ROOT / "image" / name)
    assert shipped
    versions = {package: block.split()[0] for package, block in tested.items()}
    assert {
        package: block.split()[0] for package, block in shipped.items() if package not in ONLY_BUILT_WITH
    }.items() <= versions.items()
    assert all("--hash=sha256:" in block for block in shipped.values())


@pytest.mark.parametrize("name", [*LOCKS, "kerberos.lock"])
def test_locks_of_the_images_contain_no_index_url_or_path(name: str) -> None:
    text = (ROOT / "image" / name).read_text(encoding="utf-8")
    assert re.findall(r"://|\s@\s|^\s*-(?!-hash=sha256:)", text, flags=re.MULTILINE) == []


def test_no_test_tool_gets_into_the_image() -> None:
    tools = {"pytest", "hypothesis", "mypy", "hatchling", *ONLY_BUILT_WITH}
    assert not {*tools, "pyspark", "pyarrow", "kubernetes"} & set(pins(ROOT / "image/runtime.lock"))
    assert set(pins(ROOT / "image/archive.lock")) == {"pyarrow"}
    assert not tools & set(pins(ROOT / "image/spark.lock"))


def test_kerberos_is_compiled_into_either_image_with_the_lock_the_tests_ran_with() -> None:
    for text in DOCKERFILES:
        assert "${KERBEROS:+-r image/kerberos.lock}" in text
        assert "${KERBEROS:+,gssapi}" in text
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "--build-arg KERBEROS=$(KERBEROS)" in makefile
    assert "pip install --quiet --no-deps --require-hashes -r image/kerberos.lock" in makefile
    # pip compiles gssapi from source, without downloads.
    assert "cython" in pins(ROOT / "image/build.lock")


@pytest.mark.parametrize(("number", "stages"), [(0, ["${BASE_IMAGE}", "scratch"]), (1, ["${BASE_IMAGE}"] * 2)])
def test_image_runs_without_privileges_and_has_its_stages_and_labels(number: int, stages: list[str]) -> None:
    last = DOCKERFILES[number].rpartition("\nFROM ")[2]
    assert "USER 65532:65532" in last
    assert re.findall(r"^FROM (\S+)", DOCKERFILES[number], flags=re.MULTILINE) == stages
    assert "# syntax" not in DOCKERFILES[number]
    for name in ("VERSION", "REVISION", "SOURCE"):
        assert f'org.opencontainers.image.{name.lower()}="${{{name}}}"' in last


def test_last_stage_of_the_janitor_image_runs_no_command() -> None:
    last = DOCKERFILES[0].rpartition("\nFROM ")[2]
    assert 'ENTRYPOINT ["janitor"]' in last
    assert "RUN" not in last


def test_commands_of_the_images_start_with_sigterm_blocked() -> None:
    # tests/test_entry.py tests the effect.
    blocked = "/usr/bin/env -S --block-signal=TERM /opt/tms/bin/python|' /opt/tms/bin/janitor /opt/tms/bin/tms"
    assert blocked in DOCKERFILES[0]
    assert 'ENTRYPOINT ["/usr/bin/env", "--block-signal=TERM", ' in DOCKERFILES[1]


# --- its file system -------------------------------------------------------------------------------------------------


class Tree(NamedTuple):
    """A file system, and the path of its environment."""

    root: Path
    environment: Path

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment with this root."""
        inside = ["chroot", str(self.root), str(self.environment / "bin" / command[0]), *command[1:]]
        if os.geteuid() != 0:
            inside = [require_tool("unshare", "apt-get install util-linux"), "--map-root-user", *inside]
        environ = {"PATH": os.environ["PATH"], "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt"}
        return subprocess.run(inside, env=environ, capture_output=True, text=True, check=False, timeout=120)

    def files(self) -> list[Path]:
        return [path for path in self.root.rglob("*") if path.is_file() and not path.is_symlink()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Tree:
    """Create the file system of the image from the Python of this machine and the packages of the lock."""
    if sys.platform != "linux" or not shutil.which("ldd"):
        require_or_skip("ldd is missing; install it: apt-get install libc-bin")
    folder = tmp_path_factory.mktemp("image")
    environment = folder / "env"
    venv.create(environment, symlinks=True)
    [packages] = environment.glob("lib/python3*/site-packages")
    wanted = [Requirement(block.partition(" \\")[0]) for block in pins(ROOT / "image/runtime.lock").values()]
    here = {one.name for one in wanted if one.marker is None or one.marker.evaluate()}
    for name in {*here, "tms-janitor"} - {"tzdata"}:
        found = distribution(name)
        for file in found.files or ():
            if ".." not in file.parts:
                (packages / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(str(found.locate_file(file)), packages / file)
    for own in ("tms_core", "janitor"):
        shutil.copytree(ROOT / own, packages / own)
        command = environment / "bin" / own.removesuffix("_core")
        begin = f"#!/usr/bin/env -S --block-signal=TERM {environment}/bin/python\n"
        command.write_text(f"{begin}from {own}.cli.entry import main\nmain()\n", encoding="utf-8")
        command.chmod(0o755)
    (environment / "bin/uvicorn").touch()
    rootfs.create_root(environment, folder / "root")
    tree = Tree(folder / "root", environment)
    if "Operation not permitted" in (output := tree.run("python", "--version").stderr):
        require_or_skip(f"the root cannot be changed here: {output}")
    return tree


def test_image_is_smaller_than_200_megabytes(tree: Tree) -> None:
    assert sum(path.stat().st_size for path in tree.files()) < 200e6


def test_image_has_no_shell_package_manager_or_perl(tree: Tree) -> None:
    outside = [path for path in tree.files() if path.stat().st_mode & 0o111 and path.suffix not in (".py", ".so")]
    names = {path.name for path in outside if ".so." not in path.name}
    assert names == {"env", "janitor", "tms", Path(sys.executable).resolve().name}
    packages = {path.name for path in (tree.root / "var/lib/dpkg/status.d").glob("*")}
    assert not {"dash", "bash", "perl-base", "dpkg", "apt", "busybox"} & packages
    assert tree.run("python", "-c", "import pip").returncode == 1


def test_commands_of_the_image_start_and_import_their_modules(tree: Tree) -> None:
    for command in ("janitor", "tms"):
        done = tree.run(command, "--version")
        assert re.fullmatch(rf"{command}, version \d.*\n", done.stdout), done.stderr
    needed = "import httpx2, jwt, sqlite3, zoneinfo, ssl, tms_core.tables.hbase.store, tms_core.tables.leveldb.store"
    seen = "ssl.create_default_context().cert_store_stats()['x509_ca'], zoneinfo.ZoneInfo('Europe/Berlin')"
    output = tree.run("python", "-c", f"{needed}; print({seen})")
    authorities = ssl.create_default_context(cafile=rootfs.SYSTEM_FILES[1]).cert_store_stats()["x509_ca"]
    assert output.stdout == f"{authorities} Europe/Berlin\n", output.stderr


def test_image_has_compiled_modules(tree: Tree) -> None:
    [entry] = tree.root.rglob("tms_core/cli/entry.py")
    assert list((entry.parent / "__pycache__").glob("entry.*.pyc"))


def test_image_names_the_debian_packages_it_contains(tree: Tree) -> None:
    if not sbom.DPKG.exists():
        require_or_skip("this machine has no dpkg, so there are no packages to name; run the tests on Debian")
    names = {package["name"] for package in sbom.debian_packages(tree.root / "var/lib/dpkg/status.d")}
    assert {"libc6", "coreutils", "zlib1g"} <= names
    assert (tree.root / "usr/share/doc/libc6/copyright").exists()


def test_copy_path_keeps_the_links_on_the_path(tmp_path: Path) -> None:
    system, root = tmp_path / "system", tmp_path / "root"
    (system / "usr/lib").mkdir(parents=True)
    (system / "usr/lib/libx.so.1.0").write_text("x")
    (system / "usr/lib/libx.so.1").symlink_to("libx.so.1.0")
    (system / "lib").symlink_to("usr/lib")
    (system / "usr/bin").symlink_to(system / "usr/../lib")
    rootfs.copy_path(system / "usr/bin/libx.so.1", root)
    there = root / system.relative_to("/")
    assert (there / "lib/libx.so.1").read_text() == "x"
    assert (there / "usr/bin").readlink() == system / "usr/../lib"


def test_libraries_with_a_missing_library_exits_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    output = "/a/b.so:\n\tlibx.so.1 => not found\n\tliby.so => not found\n\tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n"
    monkeypatch.setattr("subprocess.run", lambda *_, **__: subprocess.CompletedProcess([], 0, output))
    with pytest.raises(SystemExit, match=r"\blibx\.so\.1;"):
        rootfs.libraries([Path("/a/b.so"), Path("/a/liby.so")])
    assert rootfs.libraries([Path("/a/libx.so.1"), Path("/a/liby.so")]) == {Path("/lib/libc.so.6")}


# --- entry point of the Spark image ----------------------------------------------------------------------------------

SPARK_ENVIRONMENT = {
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
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands and the folders instead of a start."""
    words: list[list[str]] = []
    monkeypatch.setattr("os.execvpe", lambda _, command, __: words.append(command))
    monkeypatch.setattr("os.chdir", lambda folder: words.append(["cd", folder]))
    return words


def test_command_line_is_the_janitors(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["spark_start.py", "spark", "stats"])
    spark_start.main()
    assert commands == [["janitor", "spark", "stats"]]


def test_entrypoint_of_spark_is_an_executor(commands: list[list[str]], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SPARK_ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.argv", ["spark_start.py", "executor"])
    spark_start.main()
    [there, [java, *words]] = commands
    assert there == ["cd", "/scratch"]
    assert (java, spark_start.BACKEND in words) == ("java", True)
    assert words[words.index("--hostname") + 1] == "10.0.0.2"


def test_executor_has_options_in_order_before_the_classes() -> None:
    options = {f"{spark_start.OPTION}{number}": f"-Da={number}" for number in range(11)}
    words = spark_start.executor({**SPARK_ENVIRONMENT, **options, "HADOOP_CONF_DIR": "/hadoop"}, Path("/spark"))
    assert words[1:12] == [f"-Da={number}" for number in range(11)]
    assert words[12:16] == ["-Xms512m", "-Xmx512m", "-cp", "/opt/spark/conf:/spark/jars/*:/hadoop"]
    assert words[16] == spark_start.BACKEND


def test_list_of_contents_names_the_installed_packages(tmp_path: Path) -> None:
    names = {package["name"]: package for package in sbom.python_packages()}
    assert names["tms-janitor"]["purl"].startswith("pkg:pypi/tms-janitor@")
    assert names["starlette"]["version"]
    assert {"plyvel", "plyvel-next"} & set(names)
    status = tmp_path / "status"
    entry = "Package: {0}\nStatus: install ok {1}\nArchitecture: amd64\nVersion: 1-2\nDescription: x\n Package: y\n"
    status.write_text("\n".join([entry.format("libc6", "installed"), entry.format("gone", "config-files")]))
    assert [package["purl"] for package in sbom.debian_packages(status)] == ["pkg:deb/debian/libc6@1-2?arch=amd64"]
    assert sbom.debian_packages(tmp_path / "none") == []
    assert len(sbom.debian_packages(tmp_path)) == 1  # the folder has a file for each
    assert any(each["purl"].startswith("pkg:generic/python@3.") for each in sbom.document()["components"])
    assert sbom.document()["metadata"]["component"]["name"] == "tms-janitor"


def test_contents_name_the_libraries_inside_wheels() -> None:
    inside = {
        library["purl"]: library.get("version")
        for package in sbom.python_packages()
        for library in package.get("components", ())
    }
    assert len(inside) > 300
    wanted = ("leveldb", "snappy", "openssl", "llhttp", "libuv", "libyaml", "arrow", "crc32c")
    missing = [name for name in wanted if not any(purl.startswith(f"pkg:generic/{name}") for purl in inside)]
    assert not missing
    assert [purl for purl in inside if re.fullmatch(r"pkg:maven/org\.apache\.hadoop/hadoop-client-api@\d.*", purl)]
    assert all(re.fullmatch(r"\d+(\.\d+)+", inside[purl]) for purl in inside if "leveldb" in purl or "libuv" in purl)
