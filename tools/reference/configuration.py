"""Writes ``configuration.md`` from the models, so that it cannot say anything else.

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

Made from the models by `python -m tools.reference.configuration`; change the models, not this page.

Four layers, the first that says something wins: **flags**, **environment**, **file** (`--config FILE`), **defaults**.
`janitor config show` prints the settings in force and where each came from. No file means the built-in standalone
configuration, which is `conf/standalone.yaml`; `conf/hbase.yaml` is a start for a cluster.

* **File.** YAML with the sections below. A setting that does not exist, or one written twice, is an error. Relative
  paths, the default ones too, start at the folder of the file, without a file at the working directory. A path may not
  start with `~`.
* **Environment.** `TMS_`, then the path of the setting in capitals with two underscores for each dot:
  `TMS_STORAGE__LEVELDB__PATH=/srv/messaging`. Text needs no quotes, anything else is YAML:
  `TMS_JANITOR__APPLY=false`, `TMS_JANITOR__PROTECT='["default:audit*"]'`; `null` or nothing is null. A name that starts
  with `TMS_` and the name of a section but is not a setting is an error. Kubernetes puts such names into every pod for
  a Service called `tms-server` or `tms-janitor` (`TMS_SERVER_PORT`): set `enableServiceLinks: false` in the pod.
* **Flags** of every command. Their paths start at the working directory.

  | flag | sets |
  |---|---|
  | `--leveldb DIR` | `storage.kind: leveldb`, `storage.leveldb.path: DIR` |
  | `--hbase HOST:PORT[,…]` | `storage.kind: hbase`, `storage.hbase.thrift` |
  | `--snapshots DIR_OR_URL` | `transactions.source: directory`, `transactions.directory` |

  Two defaults follow the LevelDB store, whatever names it: `transactions.directory` is `DIR.tx` and `janitor.state` is
  `DIR.janitor`. A symbolic link to the store leads to the same folders as the store itself.

A program of the janitor's outside `tms serve` cannot ask a manager (`transactions.source: manager`). It reads the
snapshots that the manager writes into `transactions.directory`, if that folder is there, and else works without any.

`off`, `on`, `no` and `yes` are `false` and `true` in YAML. Topics are written `NAMESPACE:TOPIC`, patterns are shell
patterns on that.
"""


def page() -> str:
    """The whole page."""
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
