"""The common options of all verbs."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tms_core.logs.loggers import LogFormat


@dataclass(slots=True)
class Common:
    """The common options of all verbs; an option after the verb overrides the same option before the verb."""

    config: Path | None = None
    leveldb: str | None = None
    hbase: str | None = None
    snapshots: str | None = None
    format: Literal["table", "json"] = "table"
    log_format: LogFormat = "auto"

    def arguments(self, *, anywhere: bool = False) -> str:
        """Return the options that select the store, for use with another verb.

        Args:
            anywhere: whether to use absolute paths, which are valid in any folder.
        """
        names = ("config", "leveldb", "hbase", "snapshots")
        values = {name: getattr(self, name) for name in names}
        if anywhere:
            is_path = {name: name != "hbase" and "://" not in str(value) for name, value in values.items()}
            values = {
                name: Path(value).absolute() if value and is_path[name] else value for name, value in values.items()
            }
        return " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in values.items() if value is not None)
