"""The client for applications.

    from tms_core.client import Client

    with Client("http://127.0.0.1:11015") as client:
        client.publish("default:orders", [b"one", b"two"])
        for message in client.poll("default:orders"):
            print(message.id, message.payload)

``docs/how-to/python-client.md`` describes it with examples. :mod:`tms_core.client.testing` runs a server in a test.
"""

from __future__ import annotations

from tms_core.client.asynchronous import AsyncClient
from tms_core.client.consume.iterators import AsyncConsumption, AsyncMessages, Consumption, Messages
from tms_core.client.contexts import AsyncTransactionContext, TransactionContext
from tms_core.client.local import LocalClient, open  # noqa: A004 it is called as tms_core.client.open
from tms_core.client.producer import AsyncProducer, Producer
from tms_core.client.protocol.consumer_calls import ConsumerPosition, FailedMessages, OpenClaim
from tms_core.client.protocol.endpoint import Attempt, Options
from tms_core.client.protocol.messages import Message
from tms_core.client.protocol.producer_calls import PreviousTransaction, ProducerState
from tms_core.client.protocol.values import Buffer, Limits, Measured, Retry, Timeouts, WhenFull
from tms_core.client.publish.buffer import PublishFigures
from tms_core.client.sync import Client
from tms_core.client.transactions.participant import Participant
from tms_core.client.work import AsyncGroupWork, GroupWork
from tms_core.errors import (
    BadArgument,
    BadRequest,
    BufferFull,
    ClientClosed,
    ConfigurationError,
    Conflict,
    ConsumerConflict,
    ConsumerNotFound,
    Forbidden,
    Invalidated,
    MessagingError,
    NotInProgress,
    NotPublished,
    PartitionsChanged,
    PostCommitFailed,
    ProducerFenced,
    ProducerNotFound,
    QuotaExceeded,
    ServerFailed,
    StoreBusy,
    TmsError,
    TopicExists,
    TopicNotFound,
    TransactionEnded,
    TransactionError,
    Unanswered,
    Unauthorized,
    Unavailable,
)
from tms_core.messaging.model import Ages, RollbackRange
from tms_core.rowkey import MessageId
from tms_core.topic import TopicId, TopicMetadata
from tms_core.transaction.model import Transaction
from tms_core.transaction.rpc.client import TransactionClient
from tms_core.transaction.rpc.connection import OutcomeUnknown, ServiceUnavailable

__all__ = [
    "Ages",
    "AsyncClient",
    "AsyncConsumption",
    "AsyncGroupWork",
    "AsyncMessages",
    "AsyncProducer",
    "AsyncTransactionContext",
    "Attempt",
    "BadArgument",
    "BadRequest",
    "Buffer",
    "BufferFull",
    "Client",
    "ClientClosed",
    "ConfigurationError",
    "Conflict",
    "ConsumerConflict",
    "ConsumerNotFound",
    "ConsumerPosition",
    "Consumption",
    "FailedMessages",
    "Forbidden",
    "GroupWork",
    "Invalidated",
    "Limits",
    "LocalClient",
    "Measured",
    "Message",
    "MessageId",
    "Messages",
    "MessagingError",
    "NotInProgress",
    "NotPublished",
    "OpenClaim",
    "Options",
    "OutcomeUnknown",
    "Participant",
    "PartitionsChanged",
    "PostCommitFailed",
    "PreviousTransaction",
    "Producer",
    "ProducerFenced",
    "ProducerNotFound",
    "ProducerState",
    "PublishFigures",
    "QuotaExceeded",
    "Retry",
    "RollbackRange",
    "ServerFailed",
    "ServiceUnavailable",
    "StoreBusy",
    "Timeouts",
    "TmsError",
    "TopicExists",
    "TopicId",
    "TopicMetadata",
    "TopicNotFound",
    "Transaction",
    "TransactionClient",
    "TransactionContext",
    "TransactionEnded",
    "TransactionError",
    "Unanswered",
    "Unauthorized",
    "Unavailable",
    "WhenFull",
    "open",
]
