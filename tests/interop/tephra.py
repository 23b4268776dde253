"""Tephra's client and manager in one JVM that executes one call per line."""

from __future__ import annotations

import json
import subprocess
from typing import Any, Self

from tests.interop.java import Interop


class JavaRaised(Exception):
    """An exception of Tephra, with its name and fields."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.name: str = answer["error"]
        self.fields = answer


class TephraSession:
    """A JVM that runs ``interop.TransactionSession``; start it once for many calls."""

    def __init__(self, java: Interop) -> None:
        command = java.command("interop.TransactionSession")
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def call(self, name: str, *args: object) -> Any:
        """Call a method in the JVM."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, "args": args}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise JavaRaised(answer)
        return answer["result"]
