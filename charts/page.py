"""The chart's README: its values, what goes together, the program's settings, and the figures of the alerts."""

from __future__ import annotations

from typing import Any

from charts.combinations import COMBINATIONS
from charts.values import comments, defaults
from janitor.settings import AllSettings
from tms_core.settings.fields import extra, fields, text
from tools.monitoring.rules import THRESHOLDS

_HEAD = """\
# tms-janitor

Made by `python -m charts.generate`; change `values.yaml`, the settings' models or what is in `charts/`, not this page.

Cleans CDAP's Transactional Messaging System in HBase from outside, or serves and cleans a store of its own in a volume.
How to install it, look at the plan, switch on, upgrade and roll back: `docs/how-to/kubernetes.md`. What to do when an
alert
fires: `docs/operate/alerts.md`.

    helm install janitor charts/tms-janitor --set 'storage.hbase.thrift={thrift-1:9090,thrift-2:9090}'

installs a daemon that plans and deletes nothing. `helm test janitor` asks it whether it is well. Files under `ci/` are
examples of values; each is installed by a test.

## Values

| value | default | meaning |
|---|---|---|
"""

_COMBINED = """
## What goes together

The schema refuses anything else, and one pod's ports being the same is refused by the templates.

"""

_SETTINGS = """
## Settings

Under `storage`, `transactions`, `server` and `janitor` stand the settings of the program as they are in its file; the
defaults are those of the program, or of the table above where there are others. `docs/reference/configuration.md` has
the
reasons.

| value | default | meaning |
|---|---|---|
"""

_FIGURES = """
## Figures of the alerts

`prometheusRule.thresholds` has other defaults with `mode: cronjob`, where runs are started from outside. Those below
are for a run a day; `downSeconds`, `newSeconds`, `successSeconds` and `windowSeconds` follow
`cronjob.schedule`: the longest time between two turns, and two hours. A daemon's figures grow with
`janitor.every_seconds`, or follow `janitor.cron` in the same way.

| value | deployment | cronjob | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The chart's README."""
    values = defaults()
    own = [_row(path, _at(values, path), meaning) for path, meaning in comments().items()]
    told = [f"- {why}" for why, _, _ in COMBINATIONS]
    settings = [
        _row(path, "must be given" if field.is_required() else field.default, _with_unit(field))
        for path, field in fields(AllSettings)
    ]
    figures = [f"| `{each.name}` | {each.daemon} | {each.cronjob} | {each.meaning} |" for each in THRESHOLDS]
    parts = [_HEAD, *own, _COMBINED, *told, _SETTINGS, *settings, _FIGURES, *figures]
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
