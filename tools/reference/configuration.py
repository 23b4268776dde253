"""Write ``configuration.md`` from the models of the settings.

Run it from the root of a checkout: ``python -m tools.reference.configuration``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from janitor.settings import AllSettings
from tms_core.settings.fields import extra, fields, kinds, text

PAGE = Path(__file__).parents[2] / "docs/reference/configuration.md"

HEAD = """\
# Configuration

This page lists each setting of `janitor` and `tms` with its default and the reason for it. `make generate` writes the
page from the code.

Settings come from four sources. The first source with a value counts: **options**, **environment**, **file** (`--config
FILE`, or `TMS_CONFIG`), **defaults**. `janitor config show` prints all settings with their sources. Without a file, the
settings are those of `conf/standalone.yaml`; `conf/hbase.yaml` is a template for a cluster.

* **File.** YAML with the sections below, at most 1 MiB. An unknown or repeated setting is an error. Relative paths,
  including the default ones, start at the folder of the file, or without a file at the working directory. A path may
  not start with `~`.
* **Environment.** `TMS_`, then the path of the setting in capitals with two underscores for each dot:
  `TMS_STORAGE__LEVELDB__PATH=/srv/messaging`. Text needs no quotes; other values are YAML: `TMS_JANITOR__APPLY=false`,
  `TMS_JANITOR__PROTECT='["default:audit*"]'`. `null` or an empty value is null. A name that starts with `TMS_` and the
  name of a section but is not a setting is an error. Kubernetes adds such variables to every pod for a Service named
  `tms-server` or `tms-janitor` (`TMS_SERVER_PORT`): set `enableServiceLinks: false` in the pod.
* **Options** of every command, in the table. Their paths start at the working directory.

| option | sets |
|---|---|
| `--leveldb DIR` | `storage.kind: leveldb`, `storage.leveldb.path: DIR` |
| `--hbase HOST:PORT[,…]` | `storage.kind: hbase`, `storage.hbase.thrift` |
| `--snapshots DIR_OR_URL` | `transactions.source: directory`, `transactions.directory` |

Two defaults follow the LevelDB store: `transactions.directory` is `DIR.tx` and `janitor.state` is `DIR.janitor`. A
symbolic link to the store leads to the same folders as the store itself.

A janitor outside `tms serve` cannot call a manager (`transactions.source: manager`). It reads the snapshots that the
manager writes into `transactions.directory`, or works without snapshots if that folder does not exist.

In YAML, `off` and `no` are `false`, `on` and `yes` are `true`. Topics are written `NAMESPACE:TOPIC`; patterns are shell
patterns for topics.
"""


def page() -> str:
    """Return the page."""
    return HEAD + "".join(_table(section) for section in AllSettings.model_fields)


def _table(section: str) -> str:
    lines = [f"\n## {section}\n", "| setting | default | unit | meaning | why this default |", "|---|---|---|---|---|"]
    lines += [_row(path, field) for path, field in fields(AllSettings) if path.startswith(f"{section}.")]
    return "\n".join(lines) + "\n"


def _row(path: str, field: FieldInfo) -> str:
    default = "required" if field.is_required() else f"`{text(field.default)}`"
    unit, reason = extra(field, "unit") or _choices(field), extra(field, "reason")
    return f"| `{path}` | {default} | {unit} | {field.description} | {reason} |"


def _choices(field: FieldInfo) -> str:
    return ", ".join(
        f"`{choice}`" for kind in kinds(field.annotation) if get_origin(kind) is Literal for choice in get_args(kind)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
