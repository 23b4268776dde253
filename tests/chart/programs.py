"""Helm and the programs that check the chart; ``make`` builds the versions of ``tests/chart/tools`` in the tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from tests.support import require_or_skip

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/tms-janitor"
#: The Kubernetes version to render the chart for, which ``tests/chart/recorded`` has schemas of.
KUBERNETES = "1.35.4"


def program(name: str, target: str = "tools") -> str:
    """Return the path of a program, or skip the test by ``require_or_skip``.

    Args:
        target: the target of ``make`` that builds it.
    """
    path = ROOT / ".tools/bin" / name
    if not path.exists():
        require_or_skip(f"{name} is missing; build it: make {target} (needs Go 1.26)")
    return str(path)


def run(name: str, *words: object, given: str = "", kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program without the user's settings; its files are kept next to the kubeconfig."""
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
    """Render the chart's objects with these options."""
    return run("helm", "template", "x", CHART, "--namespace", "apps", "--kube-version", KUBERNETES, *words)
