"""What goes over the control socket: one JSON object per line, and where the socket is.

A connection carries one request, ``{"protocol", "method", "params"}``, then any number of ``{"progress": {...}}`` and
at last one ``{"result": ...}`` or ``{"error": {"kind", "message", "hint"}}``. Nothing is remembered between two
connections, so either side may die at any moment and the other one sees only an end of file too early.

The socket is a file of the state folder that only its owner may use. What an error is called is looked up in a closed
table, so an answer can raise errors of ours and nothing else.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tms_core import errors
from tms_core.errors import StoreError, TmsError

#: Counted up whenever the two sides would no longer understand each other; what this docstring says stays.
PROTOCOL = 1
#: The socket's name in the state folder.
SOCKET_NAME = "control.sock"
#: No line may be longer, in bytes: a plan of a million ranges is about half of that.
MAX_BYTES = 256 << 20
#: The longest address the kernel takes, in bytes (``sun_path`` without its last zero).
MAX_ADDRESS_BYTES = 107

_CHUNK_BYTES = 1 << 20
_CREDENTIALS = struct.Struct("iII")

#: Every error that an answer can raise; a janitor manages no transactions.
KINDS: Mapping[str, type[TmsError]] = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TmsError) and not issubclass(kind, errors.TransactionError)
}


@contextmanager
def address(folder: Path) -> Iterator[str]:
    """The address of a state folder's socket, while the block runs.

    The kernel takes 107 bytes, and a folder may lie deeper; then it is named by an open handle of it.

    Raises:
        OSError: the folder cannot be opened.
    """
    path = folder / SOCKET_NAME
    if len(os.fsencode(path)) <= MAX_ADDRESS_BYTES:
        yield str(path)
        return
    handle = os.open(folder, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{handle}/{SOCKET_NAME}"
    finally:
        os.close(handle)


def peer_uid(connection: socket.socket) -> int:
    """The user whose process is at the other end."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return int(uid)


def encode(message: Mapping[str, Any]) -> bytes:
    """One line.

    Raises:
        StoreError: it is longer than the other side takes.
    """
    line = json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"
    if len(line) > MAX_BYTES:
        raise StoreError(
            f"{len(line) >> 20} MB are too much to be handed from one process to the other ({MAX_BYTES >> 20} MB).",
            "Ask for fewer topics at once (--topic), or stop the janitor that holds the store meanwhile.",
        )
    return line


def lines(connection: socket.socket, max_bytes: int = MAX_BYTES) -> Iterator[dict[str, Any]]:
    """The other side's messages; ends where it hangs up, whatever it was about to say.

    Raises:
        ValueError: it says something that is no message, or too long.
        OSError: the connection broke, or was silent for longer than its time limit.
    """
    pending = bytearray()
    while chunk := connection.recv(_CHUNK_BYTES):
        searched = len(pending)
        pending += chunk
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
    """An error as it goes over the wire."""
    return {"kind": type(error).__name__, "message": error.message, "hint": error.hint}


def unpack_error(found: Any) -> TmsError:
    """The error that the other side raised; of an unknown kind: the root of ours."""
    given = found if isinstance(found, dict) else {}
    kind = KINDS.get(str(given.get("kind")), TmsError)
    return kind(str(given.get("message", "no reason was given")), str(given.get("hint", "")))
