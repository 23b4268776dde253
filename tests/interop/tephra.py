"""Tephra's client and manager in one JVM that executes one call per line."""

from __future__ import annotations

from typing import Any

from tests.interop.java import Interop
from tests.maven import JavaProgram


class JavaRaised(Exception):
    """An exception of Tephra, with its name and fields."""

    def __init__(self, answer: dict[str, Any]) -> None:
        super().__init__(f"{answer['error']}: {answer['message']}")
        self.name: str = answer["error"]
        self.fields = answer


class TephraSession(JavaProgram):
    """A JVM that runs ``interop.TransactionSession``; start it once for many calls."""

    def __init__(self, java: Interop) -> None:
        super().__init__(java.command("interop.TransactionSession"))

    def call(self, name: str, *args: object) -> Any:
        """Call a method in the JVM."""
        answer = self.request(call=name, args=args)
        if "error" in answer:
            raise JavaRaised(answer)
        return answer["result"]
