"""Lines and addresses."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from janitor.control import api, wire
from tms_core.errors import StoreError


def test_given_lines_in_pieces_then_each_comes_as_a_whole_and_a_cut_one_not_at_all() -> None:
    pieces = [b'{"a": "long, ', b'long"}\n{}\n', b'{"b": 2}\n{"c": ', b'3}\n{"d": 4}']
    assert list(wire.lines(pieces)) == [{"a": "long, long"}, {}, {"b": 2}, {"c": 3}]


@pytest.mark.parametrize("said", [b"x" * 11, b"[1]\n", b"no json\n"])
def test_given_what_is_no_message_then_that_is_an_error(said: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        list(wire.lines([said], 10))


def test_given_a_message_longer_than_is_taken_then_it_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BYTES", 20)
    assert wire.encode({"a": "x"}) == b'{"a":"x"}\n'
    with pytest.raises(StoreError, match="too much"):
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
