"""Write the generated files: the rules of alerts, the dashboard, and the chart's schema and README.

Run it from the root of a checkout: ``python -m charts.generate``. A test fails if a file is out of date.
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
    """Return the contents of each generated file."""
    board = json.dumps(dashboard(), indent=2) + "\n"
    return {
        ROOT / "conf/prometheus/rules.yaml": _HEAD + _rules(),
        CHART / "files/rules.yaml": _HEAD + _rules(as_template=True),
        ROOT / "conf/grafana/tms-janitor.json": board,
        CHART / "files/dashboard.json": board,
        CHART / "files/thresholds.yaml": _HEAD
        + yaml.safe_dump({"daemon": thresholds("daemon"), "cronjob": thresholds("cronjob")}, sort_keys=False),
        CHART / "values.schema.json": json.dumps(schema(), indent=2) + "\n",
        CHART / "README.md": page(),
        GUIDE: _replace_section(GUIDE.read_text(encoding="utf-8"), "alerts", _alerts()),
    }


def _rules(*, as_template: bool = False) -> str:
    """Return the rules in YAML; a template has placeholders, which the chart replaces with its values."""
    if not as_template:
        document = rules()
    else:
        placeholders = {threshold.name: f"${{{threshold.name}}}" for threshold in THRESHOLDS}
        document = rules(placeholders, scope="${scope}", runbook="${runbook}", servers="${servers}")
    return yaml.safe_dump(document, sort_keys=False, width=10_000)


def _alerts() -> str:
    """Return the table of alerts for ``docs/operate/alerts.md``."""
    lines = ["| alert | severity | for | expression |", "|---|---|---|---|"]
    by_name = {alert.name: alert for alert in ALERTS}
    for rule in rules()["groups"][0]["rules"]:
        name, severity = rule["alert"], by_name[rule["alert"]].severity
        lines.append(f"| [{name}](#{name.lower()}) | {severity} | {rule.get('for', 'at once')} | `{rule['expr']}` |")
    return "\n".join(lines)


def _replace_section(page: str, mark: str, text: str) -> str:
    """Return a page with new text between the start and end comments of ``mark``."""
    begin, end = f"<!-- {mark}: made by python -m charts.generate -->", f"<!-- /{mark} -->"
    before, _, rest = page.partition(begin)
    return f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"


def main() -> None:
    """Write the files."""
    for path, text in files().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
