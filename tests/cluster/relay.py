"""A relay of TCP connections across a network namespace, through Unix sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self


class Relay:
    """Joins each connection that comes with one to somewhere else; it runs as long as the block."""

    def __init__(self, listener: socket.socket, connect: Callable[[], socket.socket]) -> None:
        self._listener = listener
        self._connect = connect

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would not wake who waits for the next one.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                came, _ = self._listener.accept()
                threading.Thread(target=self._join, args=[came], daemon=True).start()

    def _join(self, came: socket.socket) -> None:
        with ExitStack() as stack, suppress(OSError):
            stack.enter_context(came)
            other = stack.enter_context(self._connect())
            back = threading.Thread(target=_pass_on, args=[other, came], daemon=True)
            back.start()
            _pass_on(came, other)
            back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def listen_at(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen(128)
    return listener


def connect_to(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
    except OSError:
        connection.close()
        raise
    return connection
