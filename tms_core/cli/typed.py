"""The types of command-line arguments: times, durations, topics, addresses, and ids of transactions and messages."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import click

from tms_core.clock import SPAN, parse_span
from tms_core.errors import KeyFormatError, quoted
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId

_RELATIVE = re.compile(rf"now((?:[+-]{SPAN})*)")
_TERM = re.compile(r"([+-])((?:\d+(?:ms|[smhd]))+)")
_LAST_PORT = 65535
#: The last millisecond that ``datetime`` can represent: 9999-12-31T23:59:59.999Z.
_LAST_MS = 253_402_300_799_999
#: The maximum distance of a relative time from now, in milliseconds, within the range of ``datetime``: 7,000 years.
_MAX_OFFSET_MS = 220_000_000_000_000


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in time from the command line.

    Attributes:
        ms: milliseconds since the epoch, or from now if ``relative``; within the range of ``datetime``.
    """

    ms: int
    relative: bool

    def at(self, now_ms: int) -> int:
        return now_ms + self.ms if self.relative else self.ms


class TimeType(click.ParamType[Moment]):
    """A time: ``1700000000000`` (ms), ``2023-11-14T22:13:20Z``, or ``now-1d12h``."""

    name = "time"
    #: The accepted forms, for the error message.
    forms = "2023-11-14T22:13:20Z, 1700000000000 or now-1d12h"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        moment = value if isinstance(value, Moment) else parse_time(str(value))
        if moment is None:
            self.fail(f"invalid time {value!r}: use {self.forms}", param, ctx)
        return moment


class SinceType(TimeType):
    """A time, or a duration before now: ``10m`` means ten minutes ago."""

    forms = f"10m (ago), {TimeType.forms}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Moment:
        span_ms = None if isinstance(value, Moment) else parse_span(str(value))
        since = None if span_ms is None else _limit_range(Moment(-span_ms, relative=True))
        return since or super().convert(value, param, ctx)


class TtlType(click.ParamType[int]):
    """A time to live in whole seconds: ``604800``, ``7d``, ``1h30m``."""

    name = "ttl"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value)
        span_ms = int(text) * 1000 if text.isdecimal() and text.isascii() else parse_span(text)
        if not span_ms or span_ms % 1000:
            self.fail(f"invalid ttl {text!r}: use 7d, 1h30m or 604800 (seconds), of at least 1 s", param, ctx)
        return span_ms // 1000


def parse_time(text: str) -> Moment | None:
    """Parse a time in any of its three forms; None: the text is not a time, or is outside the range of ``datetime``."""
    if re.fullmatch(r"[0-9]{1,19}", text):
        return _limit_range(Moment(int(text), relative=False))
    if match := _RELATIVE.fullmatch(text):
        return _limit_range(
            Moment(sum(_apply_sign(sign, span) for sign, span in _TERM.findall(match[1])), relative=True)
        )
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return _limit_range(Moment(round(moment.timestamp() * 1000), relative=False))


def _limit_range(moment: Moment) -> Moment | None:
    return moment if abs(moment.ms) <= (_MAX_OFFSET_MS if moment.relative else _LAST_MS) else None


def _apply_sign(sign: str, span: str) -> int:
    milliseconds = parse_span(span) or 0
    return -milliseconds if sign == "-" else milliseconds


class TopicType(click.ParamType[TopicId]):
    """A topic, ``namespace:topic``, not a pattern."""

    name = "topic"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TopicId:
        if isinstance(value, TopicId):
            return value
        try:
            return TopicId.parse(str(value))
        except ValueError as error:
            self.fail(f"{error}", param, ctx)


class AddressType(click.ParamType[str]):
    """An address, ``HOST:PORT``; an empty text means no address."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        text = str(value)
        host, _, port = text.rpartition(":")
        if text and not (host and port.isdecimal() and 0 < int(port) <= _LAST_PORT):
            self.fail(f"invalid address {text!r}: use HOST:PORT, as in tephra-1:15165", param, ctx)
        return text


class TransactionIdType(click.ParamType[int]):
    """The id of a transaction, or the write pointer of a checkpoint."""

    name = "transaction_id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        text = str(value)
        if not (re.fullmatch("[0-9]{1,19}", text) and int(text) < 2**63):
            self.fail(f"invalid transaction {quoted(text)}; list the transactions: tms tx list", param, ctx)
        return int(text)


class MessageIdType(click.ParamType[MessageId]):
    """The id of a message, 40 hex digits."""

    name = "message_id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> MessageId:
        if isinstance(value, MessageId):
            return value
        try:
            return MessageId.from_hex(str(value))
        except KeyFormatError as error:
            self.fail(f"{error}", param, ctx)
