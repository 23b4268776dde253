"""Options that many verbs share, and the kinds of values they take."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import wraps
from pathlib import Path
from typing import Any, Literal, cast

import click

from janitor.logs import LogFormat

Command = Callable[..., Any]

_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_RELATIVE = re.compile(r"now((?:[+-](?:\d{1,18}(?:ms|[smhd]))+)*)")
_TERM = re.compile(r"([+-])((?:\d+(?:ms|[smhd]))+)")
_AMOUNT = re.compile(r"(\d+)(ms|[smhd])")


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as it was given.

    Attributes:
        ms: milliseconds since the epoch, or since now where ``relative``.
    """

    ms: int
    relative: bool

    def at(self, now_ms: int) -> int:
        return now_ms + self.ms if self.relative else self.ms


class TimeType(click.ParamType[Moment]):
    """``1700000000000`` (ms), ``2023-11-14T22:13:20Z``, or ``now-1d12h``."""

    name = "time"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        if isinstance(value, Moment):
            return value
        moment = parse_time(str(value))
        if moment is None:
            self.fail(f"{value!r} is no time: write 1700000000000 (ms), 2023-11-14T22:13:20Z or now-1d12h", param, ctx)
        return moment


class PatternType(click.ParamType[str]):
    """A shell pattern on ``namespace:topic``."""

    name = "pattern"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        if str(value).count(":") != 1:
            self.fail(f"{value!r} is no topic: write namespace:topic, as in default:orders or 'default:*'", param, ctx)
        return str(value)


def parse_time(text: str) -> Moment | None:
    """Read a time in any of the three ways, or None."""
    if re.fullmatch(r"\d{1,19}", text):
        return Moment(int(text), relative=False)
    if match := _RELATIVE.fullmatch(text):
        return Moment(sum(_signed(sign, amounts) for sign, amounts in _TERM.findall(match[1])), relative=True)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return Moment(round(moment.timestamp() * 1000), relative=False)


def _signed(sign: str, amounts: str) -> int:
    total = sum(int(number) * _UNIT_MS[unit] for number, unit in _AMOUNT.findall(amounts))
    return -total if sign == "-" else total


@dataclass(slots=True)
class Common:
    """Options every verb takes; given before the verb or after it, the latter wins."""

    config: Path | None = None
    leveldb: str | None = None
    hbase: str | None = None
    snapshots: str | None = None
    format: Literal["table", "json"] = "table"
    log_format: LogFormat = "auto"


_COMMON = (
    click.option("--config", type=click.Path(path_type=Path), help="Settings file (YAML).", metavar="FILE"),
    click.option("--leveldb", metavar="DIR", help="A LevelDB store; the state goes to DIR.janitor."),
    click.option("--hbase", metavar="HOST:PORT[,...]", help="HBase Thrift servers."),
    click.option("--snapshots", metavar="DIR_OR_URL", help="Where the transaction snapshots are."),
    click.option("--format", type=click.Choice(["table", "json"]), help="Tables for people or JSON for programs."),
    click.option("--log-format", type=click.Choice(["auto", "text", "json"]), help="Default: text on a terminal."),
    click.version_option(package_name="tms-janitor", prog_name="janitor"),
)


def common_options(command: Command) -> Command:
    """Add the options every verb takes; they end up in the :class:`Common` of the context."""

    @wraps(command)
    def taken(*args: Any, **given: Any) -> Any:
        context = click.get_current_context()
        common = cast(Common, context.ensure_object(dict).setdefault("common", Common()))
        for name in ("config", "leveldb", "hbase", "snapshots", "format", "log_format"):
            value = given.pop(name)
            if value is not None:
                setattr(common, name, value)
        return command(*args, **given)

    for option in reversed(_COMMON):
        taken = option(taken)
    return taken


topic_patterns = click.option(
    "--topic", "patterns", type=PatternType(), multiple=True, help="Only these topics (shell pattern); repeatable."
)
