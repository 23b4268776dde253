"""The options of ``spark.read.format("tms")``, parsed and checked.

Settings come from the same layers as in commands (file, environment, flags), so that a job and the janitor share them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, cast

from janitor.run.plan_file import WhatIf
from janitor.settings import load
from janitor.spark.access import Access
from janitor.spark.source.pages import RowFields
from tms_core.errors import ConfigurationError

#: The name under which Spark knows the source.
NAME = "tms"

SourceTable = Literal["message", "payload", "metadata", "claims"]

_OPTIONS = frozenset(
    {"config", "leveldb", "hbase", "snapshots", "table", "topics", "from", "to", "now", "partitions", "sizes"}
    | {"payload", "what_if"}
)
_TABLES = ("message", "payload", "metadata", "claims")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a query.

    Attributes:
        now_ms: the time at which the rules are evaluated; None: now.
        partitions: the approximate number of tasks; None: by the size of the data.
        changes: hypothetical changes of the policy.
    """

    access: Access
    table: SourceTable
    patterns: tuple[str, ...] = ()
    from_ms: int | None = None
    to_ms: int | None = None
    now_ms: int | None = None
    partitions: int | None = None
    ask: RowFields = field(default_factory=RowFields)
    changes: tuple[WhatIf, ...] = ()

    @classmethod
    def parse(cls, options: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> SourceOptions:
        """Parse Spark's options.

        Raises:
            ConfigurationError: an option is wrong; the error has its name and a valid value.
        """
        found = {name.lower(): value for name, value in options.items()}
        if unknown := sorted(set(found) - _OPTIONS):
            raise ConfigurationError(
                f"{unknown[0]} is not an option of format {NAME}.", f"Valid options: {', '.join(sorted(_OPTIONS))}."
            )
        table = found.get("table", "message")
        if table not in _TABLES:
            raise ConfigurationError(f"table is {table}.", f"Set it to one of {', '.join(_TABLES)}.")
        flags = {name: found.get(name) for name in ("leveldb", "hbase", "snapshots")}
        config = Path(found["config"]) if "config" in found else None
        patterns = tuple(pattern.strip() for pattern in found.get("topics", "").split(",") if pattern.strip())
        for pattern in patterns:
            if pattern.count(":") != 1:
                raise ConfigurationError(f"topics has {pattern}.", "Write namespace:topic, or a pattern: default:*")
        return cls(
            Access(load(config, environ, flags).settings),
            cast(SourceTable, table),
            patterns,
            _moment(found, "from"),
            _moment(found, "to"),
            _moment(found, "now"),
            _count(found, "partitions"),
            RowFields(_switch(found, "sizes"), _switch(found, "payload")),
            WhatIf.parse(found.get("what_if", "")),
        )


def _moment(found: Mapping[str, str], name: str) -> int | None:
    """Return a time from milliseconds since the epoch or from ISO 8601, in UTC unless it names a zone."""
    text = found.get(name)
    if text is None:
        return None
    try:
        if text.lstrip("-").isdigit():
            return int(text)
        moment = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigurationError(
            f"{name} is {text}, which is not a time.", "Write 1700000000000 (ms) or 2023-11-14T22:13:20Z."
        ) from error
    return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def _count(found: Mapping[str, str], name: str) -> int | None:
    text = found.get(name)
    if text is not None and (not text.isdigit() or int(text) < 1):
        raise ConfigurationError(f"{name} is {text}.", "Write a whole number, 1 or more.")
    return None if text is None else int(text)


def _switch(found: Mapping[str, str], name: str) -> bool:
    text = found.get(name, "false").lower()
    if text not in ("true", "false"):
        raise ConfigurationError(f"{name} is {text}.", "Write true or false.")
    return text == "true"
