"""A program on CDAP that executes one command per line, in one JVM for a test module.

CDAP's ``ClientMessagingService`` and Tephra's ``TransactionServiceClient`` in a process of their own, as in any CDAP
program, or CDAP's own service on a store; ``src/main/java/interop/Program.java`` hands on what a test says and answers
what they gave back.
"""

from __future__ import annotations

import json
import subprocess
from typing import Any, Self

from tests.interop.java import Interop

#: How long the JVM may take to end once its input ended, in seconds.
_END_SECONDS = 120


class Refused(Exception):
    """CDAP's client threw; ``kind`` is the exception's class."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")
        self.kind = kind


class Program:
    """A JVM that runs the program."""

    def __init__(self, java: Interop, *place: int | str) -> None:
        command = [*java.command("interop.Program"), *map(str, place)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=_END_SECONDS)

    def call(self, name: str, topic: str = "none", **fields: Any) -> Any:
        """Call a method of the program."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, "topic": topic, **fields}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise EOFError("the JVM has ended")
        answer = json.loads(line)
        if "error" in answer:
            raise Refused(answer["error"], answer["message"])
        return answer["result"]

    def publish(self, topic: str, *messages: bytes, **fields: Any) -> Any:
        return self.call("publish", topic, messages=[message.hex() for message in messages], **fields)

    def fetch(self, topic: str, **fields: Any) -> list[bytes]:
        return [bytes.fromhex(message["payload"]) for message in self.call("fetch", topic, **fields)]

    def ids(self, topic: str, **fields: Any) -> list[str]:
        return [message["id"] for message in self.call("fetch", topic, **fields)]
