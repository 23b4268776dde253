"""Writes what is made from code: rules, the dashboard, and the chart's schema and page.

Run it from the root of a checkout: ``python -m charts.generate``. A test says so when a file is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from charts.page import page
from charts.schema import schema
from charts.values import CHART
from tools.monitoring.dashboard import dashboard
from tools.monitoring.rules import ALERTS, THRESHOLDS, rules, thresholds

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs/operate/alerts.md"

_HEAD = "# Made by `python -m charts.generate` from tools/monitoring; change that, not this file.\n"


def files() -> dict[Path, str]:
    """Every file that is made, with its contents."""
    board = json.dumps(dashboard(), indent=2) + "\n"
    return {
        ROOT / "conf/prometheus/rules.yaml": _HEAD + _rules(),
        CHART / "files/rules.yaml": _HEAD + _rules(open_ended=True),
        ROOT / "conf/grafana/tms-janitor.json": board,
        CHART / "files/dashboard.json": board,
        CHART / "files/thresholds.yaml": _HEAD
        + yaml.safe_dump({"daemon": thresholds("daemon"), "cronjob": thresholds("cronjob")}, sort_keys=False),
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        CHART / "README.md": page(),
        GUIDE: _between(GUIDE.read_text(encoding="utf-8"), "alerts", _alerts()),
    }


def _rules(*, open_ended: bool = False) -> str:
    """The rules in YAML; ``open_ended`` ones have names in braces where the chart puts what its values say."""
    if not open_ended:
        document = rules()
    else:
        holes = {threshold.name: f"${{{threshold.name}}}" for threshold in THRESHOLDS}
        document = rules(holes, scope="${scope}", runbook="${runbook}", servers="${servers}")
    return yaml.safe_dump(document, sort_keys=False, width=10_000)


def _alerts() -> str:
    """The table of alerts, as ``docs/operate/alerts.md`` has it."""
    lines = ["| alert | severity | for | expression |", "|---|---|---|---|"]
    by_name = {alert.name: alert for alert in ALERTS}
    for rule in rules()["groups"][0]["rules"]:
        name, severity = rule["alert"], by_name[rule["alert"]].severity
        lines.append(f"| [{name}](#{name.lower()}) | {severity} | {rule.get('for', 'at once')} | `{rule['expr']}` |")
    return "\n".join(lines)


def _between(page: str, mark: str, made: str) -> str:
    """A page with what stands between two marks made anew."""
    begin, end = f"<!-- {mark}: made by python -m charts.generate -->", f"<!-- /{mark} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{made}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Write them."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
