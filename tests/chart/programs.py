"""Helm and the chart checkers, which ``make`` builds inside the tree from the versions in ``tests/chart/tools``."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import require_or_skip

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/tms-janitor"
#: The Kubernetes the chart is checked for; that of ``tests/chart/recorded``.
KUBERNETES = "1.35.4"


def program(name: str, target: str = "tools") -> str:
    """A program's path, or out of the test by ``require_or_skip``.

    Args:
        target: the target of ``make`` that builds it.
    """
    path = ROOT / ".tools/bin" / name
    if not path.exists():
        require_or_skip(f"{name} is missing; build it: make {target} (needs Go 1.26)")
    return str(path)


def run(name: str, *words: object, given: str = "", kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run one of the programs, with nothing of the user's own settings; what it keeps is kept beside the kubeconfig."""
    home = ROOT / ".tools/home" if kubeconfig is None else kubeconfig.parent
    clean = {"PATH": os.environ["PATH"], "HOME": str(home), "HELM_NO_PLUGINS": "1", "KUBECONFIG": str(kubeconfig or "")}
    return subprocess.run(
        [program(name), *map(str, words)],
        input=given,
        env=clean,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


def template(*words: object) -> subprocess.CompletedProcess[str]:
    """The chart's objects with these options."""
    return run("helm", "template", "x", CHART, "--namespace", "apps", "--kube-version", KUBERNETES, *words)
