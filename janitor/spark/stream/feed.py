"""The options of ``spark.readStream.format("tms")``: parsing and validation.

The token is not an option but a file, because Spark shows options in plans, logs and the checkpoint.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from janitor.spark.stream import OPTIONS
from janitor.spark.stream.offsets import EARLIEST, StreamPosition
from tms_core.client import Client, ConfigurationError, Options, Retry, TopicId, TransactionClient
from tms_core.client.protocol.messages import milliseconds, time_at
from tms_core.client.sync import DEFAULT_TRANSACTIONS
from tms_core.errors import TmsError
from tms_core.rowkey import MessageId

#: The value of ``startingPosition`` for a stream of new messages only.
LATEST = "latest"
#: The retries for a server that does not respond: a few seconds, enough for a restart.
RETRIES = Retry(attempts=8)
#: The default of ``maxMessagesPerBatch``: a few seconds of work, well within a transaction's timeout.
MAX_MESSAGES = 50_000

_HIGHEST_COUNT = 1_000_000_000
_ID_DIGITS = 40


@dataclass(frozen=True, slots=True)
class Feed:
    """A topic of a server, and the options for reading it.

    Attributes:
        url: the server's URL.
        topic: the topic.
        begin: the start of a query without a checkpoint; None: after the present messages.
        max_messages: the maximum number of messages in a batch.
        stretch_messages: the maximum number of messages in a task.
        fail_on_loss: whether the query fails if messages may be lost.
        committed: whether the query reads only committed messages.
        transactions: ``HOST:PORT`` of the transaction service.
        token_file, ca_file: the files of the client's token and of the server's CA; executors read them, too.
    """

    url: str
    topic: TopicId
    begin: StreamPosition | None = EARLIEST
    max_messages: int = MAX_MESSAGES
    stretch_messages: int = MAX_MESSAGES
    fail_on_loss: bool = True
    committed: bool = True
    transactions: str = DEFAULT_TRANSACTIONS
    token_file: str | None = None
    ca_file: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> Feed:
        """Parse the options of a query; their names are case-insensitive.

        Raises:
            ConfigurationError: an option is unknown, missing or invalid.
        """
        found = {name.lower(): value for name, value in options.items()}
        if "token" in found:
            raise ConfigurationError(
                "token is not an option, because Spark shows options in plans.",
                "Write the token to a file, and set token_file to its path.",
            )
        if unknown := sorted(set(found) - set(OPTIONS)):
            raise ConfigurationError(
                f"{unknown[0]} is not an option of a stream.", f"Use one of {', '.join(sorted(OPTIONS.values()))}."
            )
        for name, example in (("url", "http://127.0.0.1:11015"), ("topic", "default:orders")):
            if name not in found:
                raise ConfigurationError(f"{name} is missing.", f"Set it, for example to {example}.")
        max_messages = _parse_count(found, "maxMessagesPerBatch", MAX_MESSAGES)
        feed = cls(
            found["url"],
            parse_topic(found["topic"]),
            parse_position(found.get("startingposition", "earliest")),
            max_messages,
            -(-max_messages // _parse_count(found, "partitions", 1)),
            _parse_boolean(found, "failOnDataLoss"),
            _parse_boolean(found, "committed"),
            found.get("transactions", DEFAULT_TRANSACTIONS),
            found.get("token_file"),
            found.get("ca_file"),
        )
        feed.client().close()
        return feed

    def client(self) -> Client:
        """Return a client of the server; send no request.

        Raises:
            ConfigurationError: an address is invalid, or ``ca_file`` is not a readable certificate.
        """
        return connect(self.url, self.transactions, self.token_file, self.ca_file)


def connect(url: str, transactions: str | TransactionClient, token_file: str | None, ca_file: str | None) -> Client:
    """Return a client for these options; raises as :meth:`Feed.client` does."""
    try:
        tls = None if ca_file is None else ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"ca_file is {ca_file}, which cannot be read: {error}.", "Set ca_file to a certificate file in PEM format."
        ) from error
    services = transactions.split(",") if isinstance(transactions, str) else transactions
    return Client(url.split(","), transactions=services, token_file=token_file, options=Options(tls=tls, retry=RETRIES))


def parse_topic(topic: str) -> TopicId:
    """Return the topic of the form ``namespace:topic``.

    Raises:
        ConfigurationError: the name is invalid.
    """
    try:
        return TopicId.parse(topic)
    except ValueError as error:
        raise ConfigurationError(f"topic is {topic}, which is not a topic.", "Write it as namespace:topic.") from error


def parse_position(text: str) -> StreamPosition | None:
    """Return the position for a value of ``startingPosition``; None: ``latest``.

    Raises:
        ConfigurationError: the value is not a position.
    """
    if text == LATEST:
        return None
    if text == "earliest":
        return EARLIEST
    try:
        if len(text) == _ID_DIGITS:
            return StreamPosition(MessageId.from_hex(text))
        if text.isdecimal() and text.isascii():
            return StreamPosition(milliseconds(time_at(int(text))))
        return StreamPosition(milliseconds(datetime.fromisoformat(text)))
    except (ValueError, OverflowError, TmsError) as error:
        raise ConfigurationError(
            f"startingPosition is {text}, which is not a position in a topic.",
            "Write earliest, latest, 1700000000000 (ms), 2023-11-14T22:13:20Z (with its zone), or a message's id.",
        ) from error


def _parse_count(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name.lower(), str(default))
    if not (text.isascii() and text.isdecimal() and 1 <= int(text) <= _HIGHEST_COUNT):
        raise ConfigurationError(f"{name} is {text}.", f"Write a whole number from 1 to {_HIGHEST_COUNT}.")
    return int(text)


def _parse_boolean(found: Mapping[str, str], name: str) -> bool:
    text = found.get(name.lower(), "true").lower()
    if text not in ("true", "false"):
        raise ConfigurationError(f"{name} is {text}.", "Write true or false.")
    return text == "true"
