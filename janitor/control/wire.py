"""The lines of the control socket: JSON objects and errors, one per line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from tms_core import errors
from tms_core.errors import StoreError, TmsError

#: The maximum size of a request and of a line of a response, in bytes; a plan of a million ranges needs about half.
MAX_BYTES = 256 << 20
#: The errors that a response can raise, by name; a janitor raises no errors of transactions.
KINDS: Mapping[str, type[TmsError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TmsError) and not issubclass(kind, errors.TransactionError)
}


def encode(message: Mapping[str, Any]) -> bytes:
    """Return one line.

    Raises:
        StoreError: the line is too long for the other side.
    """
    line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_BYTES:
        raise StoreError(
            f"{len(line) >> 20} MB exceed the limit of a message on the control socket ({MAX_BYTES >> 20} MB).",
            "Request fewer topics (--topic), or stop the janitor that holds the store first.",
        )
    return line


def lines(pieces: Iterable[bytes], max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """Yield the messages in the pieces of a response, without a truncated last message.

    Raises:
        ValueError: a line is not a message, or is too long.
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
    """Return an error as the last line of a response."""
    return encode({"error": pack_error(error)})


def read_error(found: Any) -> TmsError:
    """Return the error that the other side raised; for an unknown kind, the root of all errors."""
    fields = found if isinstance(found, dict) else {}
    kind = KINDS.get(str(fields.get("kind")), TmsError)
    return kind(str(fields.get("message", "no reason given")), str(fields.get("hint", "")))
