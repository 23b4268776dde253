"""Topics as streams: read by message id, published once."""

from __future__ import annotations

from collections.abc import Mapping

_CONNECTION_OPTIONS = ("url", "topic", "transactions", "token_file", "ca_file", "committed", "partitions")
_SPARK_OPTIONS = ("startingPosition", "maxMessagesPerBatch", "failOnDataLoss")
#: The options of a stream, by name in lower case. They are defined here because every use of the format checks them,
#: and the other modules of this package import the client, which is slow.
OPTIONS = {name.lower(): name for name in (*_CONNECTION_OPTIONS, *_SPARK_OPTIONS)}
#: The options that only a stream has, and a store does not.
_STREAM_OPTIONS = frozenset(OPTIONS) - {"partitions"}


def is_stream(options: Mapping[str, str]) -> bool:
    """Return whether options select a stream rather than a store."""
    return not _STREAM_OPTIONS.isdisjoint(name.lower() for name in options)
