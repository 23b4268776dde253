"""Topics and messages as they are named on a command line."""

from __future__ import annotations

from typing import Any

import click

from tms_core.errors import KeyFormatError
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId


class TopicType(click.ParamType[TopicId]):
    """``namespace:topic``, one and no pattern."""

    name = "topic"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TopicId:
        if isinstance(value, TopicId):
            return value
        try:
            return TopicId.parse(str(value))
        except ValueError as error:
            self.fail(f"{error}", param, ctx)


class MessageIdType(click.ParamType[MessageId]):
    """40 hex digits, as a consumer sees them."""

    name = "message_id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> MessageId:
        if isinstance(value, MessageId):
            return value
        try:
            return MessageId.from_hex(str(value))
        except KeyFormatError as error:
            self.fail(f"{error}", param, ctx)
