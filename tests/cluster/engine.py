"""A container engine for tests, from Debian's packages unpacked inside the tree, and its images.

Nothing is installed on the machine: the packages are unpacked into ``.tools/engine``, and the daemon keeps its sockets
and images in a temporary folder. It changes no network settings; containers use the machine's network. With
``DOCKER_HOST`` set, the tests use that engine instead.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from tests.cluster.plane import PATIENCE_SECONDS, ROOT, until
from tests.support import require_or_skip, require_tool

PACKAGES = ROOT / ".tools/engine"
#: A base image with Python.
BASE = ROOT / ".tools/base-image.tar"
#: The source label of the images.
SOURCE = "https://example.org/tms-janitor"
#: The time limit of an image build, in seconds.
BUILD_SECONDS = 1800
#: Paths left out of the base image: files that apt can download again, and documentation.
LEFT_OUT = (
    "proc",
    "sys",
    "dev",
    "var/cache/apt",
    "var/lib/apt/lists",
    "usr/share/doc",
    "usr/share/man",
    "usr/share/locale",
)


class Engine:
    """A container engine that runs until the block ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.host = os.environ.get("DOCKER_HOST", "")

    @property
    def environ(self) -> dict[str, str]:
        """The environment variables to run the engine's programs with."""
        own = f"{PACKAGES}/usr/sbin:{PACKAGES}/usr/bin"
        libraries = f"{PACKAGES}/usr/lib/x86_64-linux-gnu:{PACKAGES}/lib/x86_64-linux-gnu"
        return {
            **os.environ,
            "PATH": f"{own}:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": libraries,
            "DEBOOTSTRAP_DIR": f"{PACKAGES}/usr/share/debootstrap",
            "DOCKER_HOST": self.host,
            "DOCKER_BUILDKIT": "1",
        }

    def __enter__(self) -> Self:
        if not self.host:
            if not (PACKAGES / "usr/sbin/dockerd").exists() or os.geteuid() != 0:
                require_or_skip("there is no container engine; as root on Debian: make engine, or set DOCKER_HOST")
            self.host = f"unix://{self._folder}/docker.sock"
            command = [
                "dockerd",
                *("--host", self.host, "--data-root", str(self._folder / "data")),
                *("--exec-root", str(self._folder / "exec"), "--pidfile", str(self._folder / "dockerd.pid")),
                *("--iptables=false", "--ip6tables=false", "--ip-forward=false", "--bridge=none"),
            ]
            with (self._folder / "log").open("w") as log:
                self._process = subprocess.Popen(command, env=self.environ, stdout=log, stderr=log)
        until(self._answers, "the container engine answers")
        return self

    def _answers(self) -> bool:
        if self._process is not None:
            assert self._process.poll() is None, (self._folder / "log").read_text()[-3000:]
        return self._docker("version").returncode == 0

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(timeout=PATIENCE_SECONDS)
            # Pytest cannot remove the mounted network namespace, and images are large.
            subprocess.run(["umount", str(self._folder / "exec/netns/default")], capture_output=True, check=False)
            shutil.rmtree(self._folder / "data", ignore_errors=True)

    def _docker(self, *words: object, timeout: float = PATIENCE_SECONDS) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["docker", *map(str, words)],
            env=self.environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    def docker(self, *words: object, timeout: float = PATIENCE_SECONDS) -> str:
        done = self._docker(*words, timeout=timeout)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    def run(self, image: str, *command: str, options: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
        """Run a container until it exits, with the permissions of the chart's pods."""
        least = ("--rm", "--network=host", "--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges")
        return self._docker("run", *least, "--tmpfs=/tmp", *options, image, *command)

    def base(self) -> str:
        """Return the image that has only Python; build it once from Debian's packages and keep it in the tree."""
        if not BASE.exists():
            require_tool("tar", "apt-get install tar")
            root = self._folder / "root"
            wanted = "--include=python3,python3-venv,ca-certificates"
            made = subprocess.run(
                ["debootstrap", "--variant=minbase", wanted, "trixie", str(root)],
                env=self.environ,
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
                check=False,
            )
            assert made.returncode == 0, made.stdout[-3000:]
            excluded = [f"--exclude=./{path}/*" for path in LEFT_OUT]
            half = BASE.with_suffix(".half")
            subprocess.run(["tar", "-C", root, "--numeric-owner", *excluded, "-cf", half, "."], check=True)
            half.rename(BASE)
            shutil.rmtree(root, ignore_errors=True)
        # Another import would have another id, and every image built on it would be built again.
        if self._docker("image", "inspect", "python-base:local").returncode != 0:
            self.docker("import", "--change", "ENV LANG=C.UTF-8", BASE, "python-base:local")
        return "python-base:local"

    def make(self, target: str, **variables: str) -> None:
        """Build one of the project's images with ``make``."""
        given = {"BASE_IMAGE": self.base(), "BUILD_OPTIONS": "--network=host", **variables}
        words = [f"{name}={value}" for name, value in given.items()]
        # Without the variables of the make that may have started the tests.
        environ = {name: value for name, value in self.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
        made = subprocess.run(
            ["make", target, *words],
            env=environ,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            check=False,
        )
        assert made.returncode == 0, made.stderr[-3000:]

    def save(self, archive: Path, *images: str) -> Path:
        """Save images and an idle image (``localhost/pause:local``) to an archive that a node can load."""
        idle = 'ENTRYPOINT ["/bin/sleep", "infinity"]'
        self.docker("import", "--change", idle, BASE, "localhost/pause:local")
        self.docker("save", "--output", archive, "localhost/pause:local", *images)
        return archive
