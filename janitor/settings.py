"""The janitor's own settings, each with its meaning, unit, default and the reason for it.

``docs/reference/configuration.md`` is made from the models.
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

from janitor.rules.references import Lifetime
from tms_core.settings import models as core
from tms_core.settings.fields import Section, setting, wrong
from tms_core.settings.layers import LoadedSettings, load_as
from tms_core.settings.models import Count, CountOrZero, HostName, Port, Switch, TopicPattern

#: A crontab's fields: as CronSim's errors call them, as we do, and what numbers they take.
_CRON_FIELDS = (
    ("minute", "minute", "0 to 59"),
    ("hour", "hour", "0 to 23"),
    ("day-of-month", "day", "1 to 31, and one that the months have"),
    ("month", "month", "1 to 12"),
    ("day-of-week", "weekday", "0 to 7"),
)


def crontab(text: str) -> str:
    """Return a crontab line, checked: five fields as crontab(5) and Debian's cron read them, in UTC (:mod:`cronsim`).

    Raises:
        ValueError: it is none, says which field is wrong; or it never fires.
    """
    parts = text.split()
    if len(parts) != len(_CRON_FIELDS):
        raise ValueError("write five fields: minute hour day month weekday")
    for first, last in re.findall(r"(\w+)-(\w+)/", text):
        # CronSim takes the range 4-4 for a single 4, and a step after that runs to the end of the field.
        if first.isdigit() != last.isdigit() or first.lower() == last.lower() or first.zfill(2) == last.zfill(2):
            raise ValueError(f"{first}-{last} with a step: write a range of several numbers, or of several names")
    try:
        first_run = next(CronSim(text, datetime(2000, 1, 1, tzinfo=UTC)), None)
    except CronSimError as error:
        for part, (theirs, name, numbers) in zip(parts, _CRON_FIELDS, strict=True):
            if str(error) == f"Bad {theirs}":
                raise ValueError(f"{part} is not a valid {name} ({numbers})") from error
        raise ValueError(str(error)) from error
    if first_run is None:
        raise ValueError("there is no day on which it fires")
    return text


Cron = Annotated[str, AfterValidator(crontab)]


class LeaseSettings(Section):
    seconds: Count = setting(
        60, "how long a lease lasts that is not renewed", unit="seconds", reason="longer than any one batch takes"
    )


class BoundarySettings(Section):
    feedback: Switch = setting(
        False,
        "whether the manager removes transactions proven clean from its invalid list; it takes "
        "transactions.source manager or thrift, a known lifetime, and no other participant than messaging",
        reason="the list is shared with every table that uses the same transactions",
    )
    participants: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(min_length=1)] = setting(
        ("messaging",),
        "everything that takes part in these transactions; the smallest of their boundaries counts, and where one of "
        "them is not known, as of any but messaging, nothing is handed over",
        reason="messaging is the one we know of",
    )


class ArchiveSettings(Section):
    enabled: Switch = setting(False, "whether rows are archived before they are deleted", reason="it costs their space")
    path: str = setting(
        "data/archive", "where archived rows are: a path or a URL", reason="beside the store", place=True
    )
    keep_days: Count = setting(7, "how long archived rows are kept", unit="days", reason="a week to notice a mistake")


class MetricsSettings(Section):
    per_topic: Literal["none", "top"] = setting(
        "top", "which topics have metrics of their own; the others are summed", reason="series cost memory everywhere"
    )
    top: Count = setting(
        200, "how many topics, by size, `per_topic: top` means", unit="topics", reason="a page of a dashboard"
    )


class HttpSettings(Section):
    host: HostName = setting(
        "127.0.0.1",
        "the address of metrics, health and status page",
        reason="they need no password, so only this machine may ask",
    )
    port: Port = setting(9847, "their port; 0: a free one, printed", reason="none of CDAP's, HBase's or HDFS'")
    token_file: Path | None = setting(
        None,
        "a file with a token of 32 characters or more that status page and metrics demand, as a bearer token or "
        "as the password a browser asks for; null: they demand none. /healthz and /readyz never do",
        reason="on this machine nobody else asks",
        place=True,
    )


class JanitorSettings(Section):
    apply: Switch = setting(
        True, "whether to delete; false only plans", reason="on one's own machine; the Helm chart sets false"
    )
    every_seconds: Count | None = setting(
        60,
        "how often to sweep; never together with cron",
        unit="seconds",
        reason="the cost of a sweep depends on the due rows, not on the table",
    )
    cron: Cron | None = setting(
        None,
        "when to sweep, instead of every_seconds: a crontab's five fields (minute hour day month weekday), in UTC. "
        "Sunday is 0 or 7. Of day and weekday one has to fit, or both if one of them starts with `*`",
        reason="an interval fits most",
    )
    started_by: str | None = setting(
        None,
        "what starts single runs, for people to read, such as a CronJob and its schedule; the status shows it",
        reason="the schedule of single runs is kept by what starts them",
    )
    rate_rows_per_second: Count | None = setting(
        None, "how fast to delete; null: unlimited", unit="rows per second", reason="small sweeps often need no brake"
    )
    batch_rows: Annotated[int, Field(strict=True, ge=1, le=100_000)] = setting(
        2000,
        "rows deleted at once; generation, ttl and lease are read again before each batch",
        unit="rows",
        reason="large enough to be fast, small enough to stop soon",
    )
    workers: Annotated[int, Field(strict=True, ge=1, le=256)] = setting(
        4, "parts of an HBase table worked on at once", unit="threads", reason="as many as storage.hbase.connections"
    )
    hold_seconds: CountOrZero = setting(
        3600,
        "how long a frontier that jumps (a ttl shortened, a topic deleted) is held; 0: never",
        unit="seconds",
        reason="an hour to undo a mistake",
    )
    clock_allowance_seconds: CountOrZero = setting(
        300,
        "how far clocks may disagree, and a cut-off run ahead of the time that passed",
        unit="seconds",
        reason="far beyond any NTP offset",
    )
    protect: tuple[TopicPattern, ...] = setting(
        (),
        "patterns of topics whose rows are never deleted; invalid transactions are still inverted",
        reason="no topic is",
    )
    lease: LeaseSettings = LeaseSettings()
    boundary: BoundarySettings = BoundarySettings()
    archive: ArchiveSettings = ArchiveSettings()
    history_days: Count = setting(30, "how long past runs are remembered", unit="days", reason="a month to look back")
    metrics: MetricsSettings = MetricsSettings()
    http: HttpSettings = HttpSettings()
    state: Path = setting(
        Path("data/messaging.janitor"),
        "the folder of the janitor's state, next to the store and never inside it",
        reason="next to the store: storage.leveldb.path with the suffix .janitor",
        place=True,
        beside=".janitor",
    )

    @model_validator(mode="before")
    @classmethod
    def _cron_alone(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("cron") is not None and "every_seconds" not in given:
            return {**given, "every_seconds": None}
        return given

    @model_validator(mode="after")
    def _one_schedule(self) -> Self:
        if self.cron is not None and self.every_seconds is not None:
            raise wrong("cron", "every_seconds is set as well; write one of the two, and null for the other")
        if self.cron is None and self.every_seconds is None:
            raise wrong("every_seconds", "neither every_seconds nor cron is set; write one of the two")
        return self


class AllSettings(core.Settings):
    """What ``janitor`` reads: everything."""

    left_alone: ClassVar[frozenset[str]] = frozenset()

    janitor: JanitorSettings = JanitorSettings()

    @property
    def lifetime(self) -> Lifetime:
        """Return how long transactions may write; assumed where it is not set."""
        return Lifetime(
            max_ms=(self.transactions.max_lifetime_seconds or core.ASSUMED_LIFETIME_SECONDS) * 1000,
            grace_ms=self.transactions.grace_seconds * 1000,
            allowance_ms=self.janitor.clock_allowance_seconds * 1000,
        )

    @model_validator(mode="after")
    def _beside_the_store(self) -> Self:
        """Of the janitor's writes; where the server would write is the server's to refuse."""
        self.require_beside_store("janitor.state", self.janitor.state)
        if self.janitor.archive.enabled:
            self.require_beside_store("janitor.archive.path", self.janitor.archive.path)
        return self


def load(file: Path | None, environ: Mapping[str, str], flags: Mapping[str, object]) -> LoadedSettings[AllSettings]:
    """Return the settings of ``janitor``; like :func:`tms_core.settings.models.load`, which reads all but its own
    section.

    Raises:
        ConfigurationError: names the setting, where it came from and what to write.
    """
    return load_as(AllSettings, file, environ, flags, core.FLAGS)


def config_digest(settings: AllSettings) -> str:
    """Return a SHA-256, in hex, over what decides which rows may go; a plan fits only where it is the same.

    Which store it is, is not part of it: a plan names its store apart.
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
