"""A Kafka broker and its client in a JVM that executes one command per line (``src/``)."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any, Self

from tests import maven
from tests.interop.java import SHORT_LIVED
from tests.support import free_port

#: How long the JVM may take to end once its input ended, in seconds.
_END_SECONDS = 60
#: What Kafka's client raises when a newer instance counts.
FENCED = ("ProducerFencedException", "InvalidProducerEpochException")


class Refused(Exception):
    """Kafka's client threw; its text is the exception's class."""


class Broker:
    """The broker.

    Args:
        folder: for its files.
        port: its own.
        seen: the port that clients are told, a proxy's say.
    """

    def __init__(self, folder: Path, port: int, seen: int) -> None:
        path = ":".join(map(str, maven.build(Path(__file__).parent)))
        command = [
            "java",
            *SHORT_LIVED,
            "-cp",
            path,
            "oracle.Oracle",
            str(folder),
            str(port),
            str(seen),
            str(free_port()),
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_END_SECONDS)

    def call(self, name: str, /, **fields: Any) -> Any:
        """Do one call.

        Raises:
            Refused: Kafka's client threw.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"call": name, **fields}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise EOFError("the JVM has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"])
        return answer["result"]
