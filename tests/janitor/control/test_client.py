"""The client of the control socket, with servers that misbehave."""

from __future__ import annotations

import errno
import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest

from janitor.control import api, wire
from janitor.control.api import ProcessIdentity
from janitor.control.client import Caller, RemoteEngine
from tests.support import raising
from tms_core.errors import StoreBusy, StoreError, TmsError

IDENTITY = ProcessIdentity("0", 1, "memory:1", "digest")


@contextmanager
def server(folder: Path, handle: Callable[[socket.socket], None], answer_seconds: float = 60) -> Iterator[RemoteEngine]:
    """Yield a client of a server in a folder, which handles one connection with a function."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(folder / api.SOCKET_NAME))
        listening.listen()

        def serve() -> None:
            knocking, _ = listening.accept()
            knocking.close()
            connection, _ = listening.accept()
            with connection:
                handle(connection)

        thread = Thread(target=serve)
        thread.start()
        try:
            yield RemoteEngine(Caller(folder, answer_seconds=answer_seconds), IDENTITY)
        finally:
            thread.join()


def respond_with(raw: bytes) -> Callable[[socket.socket], None]:
    def handle(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(raw)
        end(connection)

    return handle


def end(connection: socket.socket) -> None:
    """Send no more, and read the rest of the request, or the client would get a connection error."""
    connection.shutdown(socket.SHUT_WR)
    while connection.recv(1 << 20):
        pass


#: The head of a response with more bytes than a test sends.
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 100000\r\n\r\n"


def test_identity_without_a_lock_holder_is_none(tmp_path: Path) -> None:
    assert Caller(tmp_path).process_identity() is None
    assert Caller(tmp_path / "missing").process_identity() is None


def test_client_of_a_stopped_holder_raises_that_it_stopped(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="stopped before it responded"):
        RemoteEngine(Caller(tmp_path), IDENTITY).verify()


def test_identity_of_a_process_that_ends_is_none(tmp_path: Path) -> None:
    with server(tmp_path, lambda _: None):
        assert Caller(tmp_path).process_identity() is None


def test_client_of_a_silent_server_times_out(tmp_path: Path) -> None:
    def silent(connection: socket.socket) -> None:
        while connection.recv(1 << 20):
            pass

    with server(tmp_path, silent, 0.05) as remote, pytest.raises(StoreBusy, match="does not respond"):
        remote.verify()


ENDED, UNREADABLE = "stopped before it responded", "cannot be read"


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ENDED),
        (b"HTTP/1.1 20", ENDED),
        (b"SSH-2.0-OpenSSH\r\n\r\n", UNREADABLE),
        (b'{"error": {"kind": "TmsError"}}\n\n', UNREADABLE),
        (HEAD, ENDED),
        (HEAD + b'{"progress": {}}\n', ENDED),
        (HEAD + b'{"result": {"cells"', ENDED),
        (HEAD + b"no json\n", UNREADABLE),
        (HEAD + b"[]\n", UNREADABLE),
        (HEAD + b'{"result": 5}\n', UNREADABLE),
        (HEAD + b'{"result": {"cells": "many"}}\n', UNREADABLE),
        (HEAD + b'{"progress": {"phase": "read", "topic": "no topic", "rows": 1}}\n', UNREADABLE),
    ],
)
def test_client_of_a_server_that_ends_or_sends_garbage_fails(tmp_path: Path, data: bytes, error: str) -> None:
    with server(tmp_path, respond_with(data)) as remote, pytest.raises(StoreError, match=error):
        remote.verify()


@pytest.mark.parametrize(("kind", "raised"), [(name, kind) for name, kind in wire.KINDS.items()])
def test_client_raises_a_received_error_with_its_class(tmp_path: Path, kind: str, raised: type[TmsError]) -> None:
    data = json.dumps({"error": {"kind": kind, "message": "No.", "hint": "Try."}}).encode() + b"\n"
    with server(tmp_path, respond_with(HEAD + data)) as remote, pytest.raises(TmsError) as found:
        remote.verify()
    assert (type(found.value), found.value.message, found.value.hint) == (raised, "No.", "Try.")


@pytest.mark.parametrize("error", [{"kind": "SystemExit", "message": "No."}, {"kind": 5}, None])
def test_client_raises_an_unknown_error_as_tms_error(tmp_path: Path, error: object) -> None:
    data = json.dumps({"error": error}).encode() + b"\n"
    with server(tmp_path, respond_with(HEAD + data)) as remote, pytest.raises(TmsError) as found:
        remote.verify()
    assert type(found.value) is TmsError


def test_client_rejected_before_its_request_is_read_raises_the_reason(tmp_path: Path) -> None:
    def refuse(connection: socket.socket) -> None:
        body = b'{"error": {"kind": "StoreBusy", "message": "Too many.", "hint": ""}}\n'
        connection.sendall(b"HTTP/1.1 503 Busy\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        end(connection)

    with server(tmp_path, refuse) as remote, pytest.raises(StoreBusy, match="Too many"):
        remote.approve(("default:" + "x" * (1 << 20),))


def test_identity_of_another_users_socket_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / api.SOCKET_NAME).touch()
    monkeypatch.setattr(api, "address", raising(PermissionError(errno.EACCES, "Permission denied")))
    with pytest.raises(StoreBusy, match="runs as another user"):
        Caller(tmp_path).process_identity()


def test_lines_in_pieces_are_joined_and_an_incomplete_line_is_dropped() -> None:
    pieces = [b'{"a": "long, ', b'long"}\n{}\n', b'{"b": 2}\n{"c": ', b'3}\n{"d": 4}']
    assert list(wire.lines(pieces)) == [{"a": "long, long"}, {}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize("data", [b"x" * 11, b"[1]\n", b"no json\n"])
def test_lines_of_an_invalid_message_raise(data: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        list(wire.lines([data], 10))


def test_encode_of_a_message_above_the_limit_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 20)
    assert wire.encode({"a": "x"}) == b'{"a":"x"}\n'
    with pytest.raises(StoreError, match="exceed the limit"):
        wire.encode({"a": "x" * 20})


@pytest.mark.parametrize("length", [api.MAX_ADDRESS_BYTES, api.MAX_ADDRESS_BYTES + 1])
def test_address_of_a_path_of_any_length_exists(tmp_path: Path, length: int) -> None:
    missing = length - len(os.fsencode(tmp_path / "x" / api.SOCKET_NAME))
    folder = tmp_path / ("x" * (missing + 1))
    folder.mkdir()
    assert len(os.fsencode(folder / api.SOCKET_NAME)) == length
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        with api.address(folder) as address:
            listening.bind(address)
        assert (folder / api.SOCKET_NAME).is_socket()


def test_identity_of_the_socket_of_a_dead_process_is_none(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
        dead.bind(str(tmp_path / api.SOCKET_NAME))
    assert Caller(tmp_path).process_identity() is None
