"""The janitor's settings, each with its purpose, unit, default and the reason for the default.

``docs/reference/configuration.md`` is generated from the models.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from cronsim import CronSim, CronSimError
from pydantic import AfterValidator, Field, model_validator

from janitor.rules.ranges import Lifetime
from tms_core.settings import models as core
from tms_core.settings.fields import Section, invalid, setting
from tms_core.settings.layers import LoadedSettings, load_as
from tms_core.settings.models import Count, CountOrZero, HostName, Port, Switch, TopicPattern

#: The fields of a crontab: CronSim's names, the names in messages, and their ranges.
_CRON_FIELDS = (
    ("minute", "minute", "0 to 59"),
    ("hour", "hour", "0 to 23"),
    ("day-of-month", "day", "1 to 31, and a day of the given months"),
    ("month", "month", "1 to 12"),
    ("day-of-week", "weekday", "0 to 7"),
)


def crontab(text: str) -> str:
    """Check a crontab line and return it: five fields as in crontab(5) and Debian's cron, in UTC (:mod:`cronsim`).

    Raises:
        ValueError: a field is invalid, which the message names, or the line never fires.
    """
    parts = text.split()
    if len(parts) != len(_CRON_FIELDS):
        raise ValueError("write five fields: minute hour day month weekday")
    for first, last in re.findall(r"(\w+)-(\w+)/", text):
        # CronSim treats the range 4-4 as a single 4, so a step would run to the end of the field.
        if first.isdigit() != last.isdigit() or first.lower() == last.lower() or first.zfill(2) == last.zfill(2):
            raise ValueError(f"{first}-{last} with a step: write a range of at least two numbers, or of two names")
    try:
        first_run = next(CronSim(text, datetime(2000, 1, 1, tzinfo=UTC)), None)
    except CronSimError as error:
        for part, (crontab_name, name, numbers) in zip(parts, _CRON_FIELDS, strict=True):
            if str(error) == f"Bad {crontab_name}":
                raise ValueError(f"{part} is not a valid {name} ({numbers})") from error
        raise ValueError(str(error)) from error
    if first_run is None:
        raise ValueError("it never fires")
    return text


Cron = Annotated[str, AfterValidator(crontab)]


class LeaseSettings(Section):
    seconds: Count = setting(
        60, "duration of a lease without renewal", unit="seconds", reason="longer than a batch takes"
    )


class BoundarySettings(Section):
    feedback: Switch = setting(
        False,
        "removal of proven transactions from the manager's invalid list; needs transactions.source manager or "
        "thrift, transactions.max_lifetime_seconds, and messaging as the only participant",
        reason="all tables that use the same transactions share the list",
    )
    participants: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = setting(
        ("messaging",),
        "all systems that use these transactions; with another one than messaging, no transaction is removed from "
        "the invalid list, because the janitor does not know its boundary",
        reason="messaging is the only known participant",
    )


class ArchiveSettings(Section):
    enabled: Switch = setting(False, "archiving of rows before their deletion", reason="an archive needs disk space")
    path: str = setting("data/archive", "folder of archived rows", reason="next to the store", place=True)
    keep_days: Count = setting(7, "retention of archived rows", unit="days", reason="a week to notice a mistake")


class MetricsSettings(Section):
    per_topic: Literal["none", "top"] = setting(
        "top", "topics with separate series; other topics are summed up", reason="series need memory in Prometheus"
    )
    top: Count = setting(
        200, "number of the largest topics with separate series", unit="topics", reason="enough for a dashboard"
    )


class HttpSettings(Section):
    host: HostName = setting(
        "127.0.0.1",
        "address of metrics, health probes and status page",
        reason="they need no password, so only this machine may connect",
    )
    port: Port = setting(
        9847,
        "port of metrics, health probes and status page; 0: a free port, printed",
        reason="not a port of CDAP, HBase or HDFS",
    )
    token_file: Path | None = setting(
        None,
        "file with a token of 32 characters or more that status page and metrics require, as a bearer token or as"
        " the password in a browser; null: no token. /healthz and /readyz never require it",
        reason="only this machine can connect",
        place=True,
    )


class JanitorSettings(Section):
    apply: Switch = setting(
        True, "deletion of due rows; false: only plans", reason="suits a local machine; the Helm chart sets false"
    )
    every_seconds: Count | None = setting(
        60,
        "interval between sweeps; cannot be combined with cron",
        unit="seconds",
        reason="the cost of a sweep depends on the due rows, not on the table",
    )
    cron: Cron | None = setting(
        None,
        "schedule of sweeps instead of every_seconds: five crontab fields (minute hour day month weekday), in "
        "UTC. Sunday is 0 or 7. Day or weekday must match, or both if one of them starts with `*`",
        reason="an interval suits most stores",
    )
    started_by: str | None = setting(
        None,
        "text for the status: the scheduler of single runs, such as a CronJob and its schedule",
        reason="only the scheduler of single runs knows their schedule",
    )
    rate_rows_per_second: Count | None = setting(
        None,
        "maximum rate of deletions; null: unlimited",
        unit="rows per second",
        reason="small sweeps often need no limit",
    )
    batch_rows: Annotated[int, Field(strict=True, ge=1, le=100_000)] = setting(
        4000,
        "rows per batch; generation, TTL and lease are read again before each batch",
        unit="rows",
        reason="large enough to be fast, small enough to stop soon",
    )
    workers: Annotated[int, Field(strict=True, ge=1, le=256)] = setting(
        4,
        "parts of an HBase table that are swept in parallel",
        unit="threads",
        reason="as many as storage.hbase.connections",
    )
    hold_seconds: CountOrZero = setting(
        3600,
        "hold of rows after a cutoff jump (a shorter TTL, a deleted topic); 0: no hold",
        unit="seconds",
        reason="an hour to undo a mistake",
    )
    clock_allowance_seconds: CountOrZero = setting(
        300,
        "tolerated difference between clocks, and between a cutoff and the elapsed time",
        unit="seconds",
        reason="far beyond any NTP offset",
    )
    protect: tuple[TopicPattern, ...] = setting(
        (),
        "patterns of topics whose rows are never deleted; invalid transactions are still inverted",
        reason="no topic is protected",
    )
    lease: LeaseSettings = LeaseSettings()
    boundary: BoundarySettings = BoundarySettings()
    archive: ArchiveSettings = ArchiveSettings()
    history_days: Count = setting(30, "retention of past runs", unit="days", reason="a month to look back")
    metrics: MetricsSettings = MetricsSettings()
    http: HttpSettings = HttpSettings()
    state: Path = setting(
        Path("data/messaging.janitor"),
        "folder of the janitor's state, next to the store and never inside it",
        reason="next to the store: storage.leveldb.path with the suffix .janitor",
        place=True,
        suffix=".janitor",
    )

    @model_validator(mode="before")
    @classmethod
    def _cron_alone(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("cron") is not None and "every_seconds" not in fields:
            return {**fields, "every_seconds": None}
        return fields

    @model_validator(mode="after")
    def _one_schedule(self) -> Self:
        if self.cron is not None and self.every_seconds is not None:
            raise invalid("cron", "every_seconds is set, too; set one of them, and the other to null")
        if self.cron is None and self.every_seconds is None:
            raise invalid("every_seconds", "neither every_seconds nor cron is set; set one of them")
        return self


class AllSettings(core.Settings):
    """All settings, as ``janitor`` reads them."""

    ignored_names: ClassVar[frozenset[str]] = frozenset()

    janitor: JanitorSettings = JanitorSettings()

    @property
    def lifetime(self) -> Lifetime:
        """Return the lifetime of transactions; CDAP's default if it is not set."""
        return Lifetime(
            max_ms=(self.transactions.max_lifetime_seconds or core.ASSUMED_LIFETIME_SECONDS) * 1000,
            grace_ms=self.transactions.grace_seconds * 1000,
            allowance_ms=self.janitor.clock_allowance_seconds * 1000,
        )

    @model_validator(mode="after")
    def _check_folders(self) -> Self:
        """Reject paths inside the store to which the janitor would write; the server checks its own paths."""
        self.require_outside_store("janitor.state", self.janitor.state)
        if self.janitor.archive.enabled:
            self.require_outside_store("janitor.archive.path", self.janitor.archive.path)
        return self


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> LoadedSettings[AllSettings]:
    """Load the settings of ``janitor``, including the section that :func:`tms_core.settings.models.load` skips.

    Raises:
        ConfigurationError: a setting is invalid; the error has its name, its source and a valid value.
    """
    return load_as(AllSettings, file, environ, flags, core.FLAGS)


def config_digest(settings: AllSettings) -> str:
    """Return the SHA-256, in hex, of the settings that affect deletions; a plan is valid only for the same settings.

    The digest does not include the store, because a plan names its store separately.
    """
    transactions, janitor = settings.transactions, settings.janitor
    places = {"manager": transactions.directory, "directory": transactions.directory, "thrift": transactions.thrift}
    deciding = {
        "source": transactions.source,
        "source_place": places.get(transactions.source),
        "snapshot_interval_seconds": transactions.snapshot_interval_seconds,
        "max_lifetime_seconds": transactions.max_lifetime_seconds,
        "grace_seconds": transactions.grace_seconds,
        "hold_seconds": janitor.hold_seconds,
        "clock_allowance_seconds": janitor.clock_allowance_seconds,
        "protect": sorted(janitor.protect),
        "consumer_hold_seconds": settings.server.consumers.hold_seconds,
    }
    return hashlib.sha256(json.dumps(deciding, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
