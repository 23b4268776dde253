"""Topics as streams: read by message id, published once."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = ("url", "topic", "transactions", "token_file", "ca_file", "committed", "partitions")
_NAMES_OF_SPARK = ("startingPosition", "maxMessagesPerBatch", "failOnDataLoss")
#: The options of a stream by their names in small letters; they stand here because every use of the format looks at
#: them, and the rest of the room imports the client, which takes time.
OPTIONS = {name.lower(): name for name in (*_NAMES, *_NAMES_OF_SPARK)}
#: Options that no other use of the format has.
_STREAM_OPTIONS = frozenset(OPTIONS) - {"partitions"}


def is_stream(options: Mapping[str, str]) -> bool:
    """Return whether options describe a stream, not a store."""
    return not _STREAM_OPTIONS.isdisjoint(name.lower() for name in options)
