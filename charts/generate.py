"""Writes what is made from code: rules, the dashboard, and the chart's schema and page.

Run it from the root of a checkout: ``python -m charts.generate``. A test says so when a file is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from janitor.monitoring import THRESHOLDS, dashboard, rules

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts/tms-janitor"

_HEAD = "# Made by `python -m charts.generate` from janitor/monitoring; change that, not this file.\n"


def files() -> dict[Path, str]:
    """Every file that is made, with its contents."""
    board = json.dumps(dashboard(), indent=2) + "\n"
    return {
        ROOT / "conf/prometheus/rules.yaml": _HEAD + _rules(),
        CHART / "files/rules.yaml": _HEAD + _rules(open_ended=True),
        ROOT / "conf/grafana/tms-janitor.json": board,
        CHART / "files/dashboard.json": board,
    }


def _rules(*, open_ended: bool = False) -> str:
    """The rules in YAML; ``open_ended`` ones have names in braces where the chart puts what its values say."""
    if not open_ended:
        document = rules()
    else:
        holes = {threshold.name: f"${{{threshold.name}}}" for threshold in THRESHOLDS}
        document = rules(holes, scope="${scope}", runbook="${runbook}")
    return yaml.safe_dump(document, sort_keys=False, width=10_000)


def main() -> None:
    """Write them."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
