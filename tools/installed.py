"""Test a wheel as a user installs it: in a separate environment, with the commands and README's first example.

``make packages`` runs it: ``python -m tools.installed dist/tms_janitor-0.1.0-py3-none-any.whl``.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Test the wheel of the first argument, and print the output; a failed step raises its error."""
    with tempfile.TemporaryDirectory(prefix="installed-") as scratch:
        print(test_wheel(Path(sys.argv[1]).absolute(), Path(scratch)))


def test_wheel(wheel: Path, scratch: Path) -> str:
    """Install a wheel with its locked dependencies, and run it outside the checkout.

    Returns:
        The output of the commands and the example.

    Raises:
        CalledProcessError: a step failed.
    """
    venv.create(scratch / "venv")
    programs = scratch / "venv/bin"
    pip = [sys.executable, "-m", "pip", "--python", str(programs / "python")]
    install = [*pip, "install", "--quiet", "--no-deps"]
    # The steps run outside the checkout, from which Python would import the packages instead of the installed wheel.
    (scratch / "tests").symlink_to(ROOT / "tests")
    steps: list[list[str]] = [
        [*install, "--require-hashes", "-r", str(ROOT / "requirements-run.lock")],
        [*install, "--no-index", str(wheel)],
        [*pip, "check"],
        [str(programs / "janitor"), "--version"],
        [str(programs / "tms"), "--version"],
        ["sh", "-ec", first_example()],
    ]
    printed, environ = "", {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    for step in steps:
        done = subprocess.run(step, cwd=scratch, check=True, stdout=subprocess.PIPE, text=True, env=environ)  # noqa: S603 ours
        printed += done.stdout
    return printed


def first_example() -> str:
    """Return the commands of README's first example, which cleans the sample store."""
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(r"## Clean a store\n.*?\n\n((?:    [^\n]*\n)+)", page, re.DOTALL)
    if found is None:
        raise ValueError("README has no example under 'Clean a store'")
    return textwrap.dedent(found[1])


if __name__ == "__main__":
    main()
