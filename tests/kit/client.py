"""Short functions of tests with the Python client, for the topics ``orders`` and ``bills``."""

from __future__ import annotations

from tms_core.client import Client, Participant
from tms_core.client.testing import InProcess

ORDERS, BILLS = "default:orders", "default:bills"


def payloads(client: Client, topic: str = ORDERS) -> list[bytes]:
    return [message.payload for message in client.poll(topic)]


def committed(client: Client, topic: str = BILLS) -> list[bytes]:
    """Return the messages of a topic that a new transaction reads."""
    with client.transaction() as tx:
        return [message.payload for message in tx.poll(topic)]


def visible(server: InProcess) -> list[bytes]:
    """Return the messages of both topics that a new transaction reads."""
    with server.client() as client, client.transaction() as tx:
        return [message.payload for topic in (ORDERS, BILLS) for message in tx.poll(topic)]


class Changes(Participant):
    """A participant with one changed key.

    Attributes:
        calls: the names of the called methods, in order.
    """

    def __init__(self, key: bytes = b"key") -> None:
        self.calls: list[str] = []
        self._key = key

    def tx_changes(self) -> list[bytes]:
        return [self._key]

    def commit_tx(self) -> None:
        self.calls.append("commit")

    def post_tx_commit(self) -> None:
        self.calls.append("post")

    def rollback_tx(self) -> None:
        self.calls.append("rollback")
