"""The generator of the chart's README: values, required combinations, settings, and thresholds of the alerts."""

from __future__ import annotations

from typing import Any

from charts.combinations import COMBINATIONS
from charts.values import comments, defaults
from janitor.settings import AllSettings
from tms_core.settings.fields import extra, fields, text
from tools.monitoring.rules import THRESHOLDS

_HEAD = """\
# tms-janitor

This chart cleans CDAP's Transactional Messaging System in HBase, or serves and cleans a store in a volume. This page
lists all values. `docs/how-to/kubernetes.md` describes installation, upgrades and rollbacks, and
`docs/operate/alerts.md` the alerts. `make generate` writes this page from `values.yaml` and the code.

This command installs a daemon that only plans:

    helm install janitor charts/tms-janitor --set 'storage.hbase.thrift={thrift-1:9090,thrift-2:9090}'

`helm test janitor` checks its health. `ci/` has examples of values; a test installs each of them.

## Values

| value | default | meaning |
|---|---|---|
"""

_COMBINATIONS = """
## Required combinations

Helm rejects values that violate one of these rules, or that give one pod the same port twice.

"""

_SETTINGS = """
## Settings

The values under `storage`, `transactions`, `server` and `janitor` are the program's settings. Defaults of the table
above override the defaults below. `docs/reference/configuration.md` has the reasons.

| value | default | meaning |
|---|---|---|
"""

_THRESHOLDS = """
## Thresholds of the alerts

The defaults of `prometheusRule.thresholds` depend on `mode`. The table shows the defaults for a daemon, and for a
CronJob with one run a day. `downSeconds`, `newSeconds`, `successSeconds` and `windowSeconds` follow `cronjob.schedule`:
the longest interval between two runs plus two hours. A daemon's thresholds grow with `janitor.every_seconds`, or follow
`janitor.cron` in the same way.

| value | deployment | cronjob | meaning |
|---|---|---|---|
"""


def page() -> str:
    """Return the chart's README."""
    values = defaults()
    own = [_row(path, _at(values, path), meaning) for path, meaning in comments().items()]
    combinations = [f"- {why}" for why, _, _ in COMBINATIONS]
    settings = [
        _row(path, "required" if field.is_required() else field.default, _with_unit(field))
        for path, field in fields(AllSettings)
    ]
    alert_thresholds = [f"| `{each.name}` | {each.daemon} | {each.cronjob} | {each.meaning} |" for each in THRESHOLDS]
    parts = [_HEAD, *own, _COMBINATIONS, *combinations, _SETTINGS, *settings, _THRESHOLDS, *alert_thresholds]
    return "".join(part if part.startswith(("#", "\n#")) else f"{part}\n" for part in parts)


def _with_unit(field: Any) -> str:
    unit = extra(field, "unit")
    return f"{field.description} ({unit})" if unit else str(field.description)


def _row(path: str, default: object, meaning: str) -> str:
    return f"| `{path}` | `{text(default)}` | {meaning} |"


def _at(values: Any, path: str) -> Any:
    for name in path.split("."):
        values = values[name]
    return values
