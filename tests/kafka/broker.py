"""A Kafka broker and its client in a JVM that executes one command per line (``src/``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests import maven
from tests.interop.java import SHORT_LIVED
from tests.support import free_port

#: The exceptions of Kafka's client in an instance that a newer instance has fenced.
FENCED = ("ProducerFencedException", "InvalidProducerEpochException")


class Refused(Exception):
    """An exception of Kafka's client; the message is the name of its class."""


class Broker(maven.JavaProgram):
    """A broker with a client.

    Args:
        folder: the folder of its files.
        port: the port on which the broker listens.
        advertised_port: the port to which clients connect, for example of a proxy.
    """

    def __init__(self, folder: Path, port: int, advertised_port: int) -> None:
        path = ":".join(map(str, maven.build(Path(__file__).parent)))
        arguments = map(str, (folder, port, advertised_port, free_port()))
        super().__init__(["java", *SHORT_LIVED, "-cp", path, "oracle.Oracle", *arguments])
        _result(self.read())

    def call(self, name: str, /, **fields: Any) -> Any:
        """Make one call.

        Raises:
            Refused: Kafka's client raised an exception.
        """
        return _result(self.request(call=name, **fields))


def _result(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        raise Refused(answer["error"])
    return answer["result"]
