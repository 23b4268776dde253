"""CDAP's clients in a JVM that executes one call per line.

``src/main/java/interop/Program.java`` calls CDAP's ``ClientMessagingService`` and Tephra's
``TransactionServiceClient`` with a server, like any CDAP program, or CDAP's messaging service on a store.
"""

from __future__ import annotations

from typing import Any

from tests.interop.java import Interop
from tests.maven import JavaProgram


class Refused(Exception):
    """An exception of CDAP's client; ``kind`` is the name of its class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Program(JavaProgram):
    """A JVM that runs the program; a test module uses one.

    Args:
        place: the ports of a server, or a store.
    """

    def __init__(self, java: Interop, *place: int | str) -> None:
        super().__init__([*java.command("interop.Program"), *map(str, place)])

    def call(self, name: str, topic: str = "none", **fields: Any) -> Any:
        """Call a method of the program."""
        answer = self.request(call=name, topic=topic, **fields)
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["result"]

    def publish(self, topic: str, *messages: bytes, **fields: Any) -> Any:
        return self.call("publish", topic, messages=[message.hex() for message in messages], **fields)

    def fetch(self, topic: str, **fields: Any) -> list[bytes]:
        return [bytes.fromhex(message["payload"]) for message in self.call("fetch", topic, **fields)]

    def ids(self, topic: str, **fields: Any) -> list[str]:
        return [message["id"] for message in self.call("fetch", topic, **fields)]
