"""The alerts: each fires only for its condition, and links its runbook."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import yaml

from janitor.metrics.catalogue import CATALOGUE
from tests.monitoring.prometheus import label_values
from tests.support import require_tool
from tms_core.server.managing import UNDECIDED
from tools.monitoring.rules import ALERTS, THRESHOLDS, rules, thresholds

ROOT = Path(__file__).parents[2]
CASES = sorted(Path(__file__).parent.glob("cases_*.yaml"))
CRONJOB_CASES = sorted(Path(__file__).parent.glob("cronjob_*.yaml"))

#: The names of alerts, which routes and silences of operators refer to.
NAMES = {
    "TmsJanitorDown", "TmsJanitorNotKeepingUp", "TmsOverdueBudgetBurn", "TmsSnapshotStale", "TmsInvalidListGrowing",
    "TmsInvalidListLarge",
    "TmsBoundaryStuck", "TmsGuardTripped", "TmsTopicQuarantined", "TmsPausedTooLong", "TmsPlanOnlyLeftOn",
    "TmsDeleteErrors", "TmsClockSkew", "TmsTopicGrowing", "TmsConsumerLagging", "TmsReadersBlocked",
    "TmsUnauthorizedRequests",
    "TmsMessagesAhead",
}  # fmt: skip


def promtool(*arguments: object) -> subprocess.CompletedProcess[str]:
    program = require_tool("promtool", "apt-get install prometheus, or make system-deps")
    command = [program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def rules_of(document: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in document["groups"] for rule in group["rules"]]


def try_cases(folder: Path, document: dict[str, Any], cases: Sequence[Path] = CASES) -> tuple[int, str]:
    """Run the cases against these rules without annotations; return promtool's exit code and output.

    Each case has only the rules that it tests, because days of all rules take a minute.
    """
    bare = [{key: value for key, value in rule.items() if key != "annotations"} for rule in rules_of(document)]
    written = []
    for path in cases:
        given = yaml.safe_load(path.read_text(encoding="utf-8"))
        for number, test in enumerate(given["tests"]):
            tested = {case["alertname"] for case in test["alert_rule_test"]}
            found = {"name": "g", "rules": [rule for rule in bare if rule["alert"] in tested]}
            rule_file, case_file = (folder / f"{kind}-{path.stem}-{number}.yaml" for kind in ("rules", "case"))
            rule_file.write_text(yaml.safe_dump({"groups": [found]}), encoding="utf-8")
            case = {**given, "rule_files": [rule_file.name], "tests": [test]}
            case_file.write_text(yaml.safe_dump(case, sort_keys=False), encoding="utf-8")
            written.append(case_file)
    tried = promtool("test", "rules", *written)
    return tried.returncode, tried.stdout + tried.stderr


def test_alerts_have_stable_names_and_severities() -> None:
    assert {alert.name for alert in ALERTS} == NAMES
    severities = {rule["alert"]: rule["labels"]["severity"] for rule in rules_of(rules())}
    assert {name for name, severity in severities.items() if severity == "critical"} == {
        "TmsJanitorDown",
        "TmsGuardTripped",
    }
    assert set(severities.values()) == {"critical", "warning", "info"}


@pytest.mark.parametrize("mode", ["daemon", "cronjob"])
def test_promtool_finds_nothing_wrong_with_the_rules(mode: Any, tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump(rules(thresholds(mode), scope='job="j"', servers='job="j"')), encoding="utf-8")
    checked = promtool("check", "rules", file)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert f"{len(ALERTS)} rules found" in checked.stdout


def test_alerts_fire_as_their_cases_expect(tmp_path: Path) -> None:
    assert try_cases(tmp_path, rules(scope='job="j"', servers='job="j"')) == (0, ANY)


def test_alerts_of_cronjobs_fire_as_their_cases_expect(tmp_path: Path) -> None:
    document = rules(thresholds("cronjob"), scope='job="j"', servers='job="j"')
    assert try_cases(tmp_path, document, CRONJOB_CASES) == (0, ANY)


def test_each_alert_has_a_firing_and_a_silent_case() -> None:
    tests = [test for path in CASES for test in yaml.safe_load(path.read_text(encoding="utf-8"))["tests"]]
    tested = [case for test in tests for case in test["alert_rule_test"]]
    assert {case["alertname"] for case in tested if case.get("exp_alerts")} == NAMES
    assert {case["alertname"] for case in tested if not case.get("exp_alerts")} == NAMES


@pytest.mark.parametrize("wrong", ["vector(1)", "vector(1) < 0"])
def test_cases_reject_alerts_that_always_or_never_fire(tmp_path: Path, wrong: str) -> None:
    document = rules()
    for rule in rules_of(document):
        rule["expr"] = wrong
    code, output = try_cases(tmp_path, document)
    assert code == 1
    assert set(re.findall(r"alertname: (\w+),", output)) == NAMES


def test_rules_use_only_existing_metrics_and_label_values() -> None:
    known = {definition.name: label_values(definition) for definition in CATALOGUE}
    known |= {UNDECIDED: {}, "tms_requests_total": {"code": frozenset({"401"})}}
    for rule in rules_of(rules()):
        for name, selector in re.findall(r"\b(tms_(?!namespace\b)\w+)(?:\{([^}]*)\})?", rule["expr"]):
            assert name in known, rule["alert"]
            for label, value in re.findall(r'(\w+)!?="(\w+)"', selector):
                assert value in (known[name][label] or ()), rule["alert"]


@pytest.mark.parametrize("page", ["explanation/scale.md", "operate/alerts.md", "reference/metrics.md"])
def test_expressions_of_a_page_are_valid_promql(page: str, tmp_path: Path) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8").replace("\\|", "|")
    shown = re.findall(r"`([^`]*\btms_(?!namespace)[^`]*)`", text)
    tested = [each for each in shown if re.search(r" [-<>=]+ |\(", each)]
    assert tested
    found = [{"record": f"tms:{number}", "expr": expression} for number, expression in enumerate(tested)]
    file = tmp_path / "rules.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "g", "rules": found}]}), encoding="utf-8")
    checked = promtool("check", "rules", file)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_every_threshold_is_used_with_its_value() -> None:
    text = " ".join(f"{alert.expression} ${{{alert.wait}}}" for alert in ALERTS)
    used = set(re.findall(r"\$\{(\w+)\}", text)) - {"scope", "servers", "now"}
    assert used == {threshold.name for threshold in THRESHOLDS}


def test_scope_is_in_every_selector() -> None:
    for rule in rules_of(rules(scope='job="j"', servers='job="j"')):
        named = re.findall(r"\btms_(?!namespace\b)\w+", rule["expr"])
        assert rule["expr"].count('job="j"') == len(named), rule["alert"]


def test_every_alert_links_to_its_section_of_the_page() -> None:
    guide = (ROOT / "docs/operate/alerts.md").read_text(encoding="utf-8")
    headings = set(re.findall(r"^## (\w+)$", guide, flags=re.MULTILINE))
    for rule in rules_of(rules(runbook="https://wiki/alerts.md")):
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert page == "https://wiki/alerts.md"
        assert rule["alert"] in headings
        assert anchor == rule["alert"].lower()


def test_rules_without_a_page_of_alerts_have_no_links() -> None:
    assert all("runbook_url" not in rule["annotations"] for rule in rules_of(rules()))
    assert "example" not in (ROOT / "conf/prometheus/rules.yaml").read_text(encoding="utf-8")
