"""The lines of the control socket: JSON objects and errors, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tms_core import errors
from tms_core.errors import StoreError, TmsError

#: No question and no line of an answer may be longer, in bytes: a plan of a million ranges is about half of that.
MAX_BYTES = 256 << 20
#: Every error that an answer can raise; a janitor manages no transactions.
KINDS: Mapping[str, type[TmsError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TmsError) and not issubclass(kind, errors.TransactionError)
}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return one line.

    Raises:
        StoreError: it is longer than the other side takes.
    """
    line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_BYTES:
        raise StoreError(
            f"{len(line) >> 20} MB are too much for one response on the control socket ({MAX_BYTES >> 20} MB).",
            "Ask for fewer topics at once (--topic), or stop the janitor that holds the store first.",
        )
    return line


def lines(pieces: Iterable[bytes], max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the messages in the pieces of a response, without a truncated last one.

    Raises:
        ValueError: a line is not a message, or too long.
    """
    pending = bytearray()
    for piece in pieces:
        searched = len(pending)
        pending += piece
        while (end := pending.find(b"\n", searched)) >= 0:
            message = json.loads(pending[:end])
            if not isinstance(message, dict):
                raise ValueError("not a JSON object")
            yield message
            del pending[: end + 1]
            searched = 0
        if len(pending) > max_bytes:
            raise ValueError(f"a line of more than {max_bytes} bytes")


def pack_error(error: TmsError) -> dict[str, str]:
    """Return an error as JSON values."""
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def encode_error(error: TmsError) -> bytes:
    """Return an error as the last line of an answer."""
    return encode({"error": pack_error(error)})


def read_error(found: Any) -> TmsError:
    """Return the error that the other side raised; for an unknown kind, the root of all errors."""
    fields = found if isinstance(found, dict) else {}
    kind = KINDS.get(str(fields.get("kind")), TmsError)
    return kind(str(fields.get("message", "no reason given")), str(fields.get("hint", "")))
