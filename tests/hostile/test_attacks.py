"""Hostile and slow clients: the server stays within its memory, and serves probes and honest clients.

Sizes are 10 percent of the full sizes; set ``TMS_TEST_HOSTILE`` to another percentage. The tests print measurements and
assert no durations, which ``benchmarks/p22_hostile.py`` measures.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hostile import attacks
from tests.hostile.attacks import Watch
from tests.server.client import AVRO, Client, TopicClient
from tests.server.process import Serve, configure
from tests.support import size

PERCENT = size("TMS_TEST_HOSTILE", 10)
#: Minimum ``server.memory``, which small attacks reach, and the allowed memory of the process above it.
MEMORY_MB, OTHER_MB = 64, 100
#: Base of the connection limit of the attacked server.
CONNECTIONS = 50
_ROUNDS = 10
_MB = 1 << 20


def share(full: int) -> int:
    """Scale a full size by ``TMS_TEST_HOSTILE``."""
    return max(1, full * PERCENT // 100)


@pytest.fixture(params=[False, True], ids=["known heads", "parsed"])
def server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Serve]:
    # The access log parses every request.
    config = configure(tmp_path, memory=MEMORY_MB, max_connections=CONNECTIONS + share(100), access_log=request.param)
    with Serve(config) as serving:
        yield serving


def attack(server: Serve, attack_context: AbstractContextManager[None]) -> Watch:
    """Run honest clients before and during an attack; print and return the measurements."""
    with Watch(server) as watch:
        watch.until(_ROUNDS)
        watch.pings.clear()
        watch.rounds.clear()
        with attack_context:
            watch.until(_ROUNDS)
            time.sleep(share(10))
            watch.until(_ROUNDS)
    sys.stdout.write(f"\n{watch.figures()}\n")
    return watch


ATTACKS: dict[str, Callable[[int], AbstractContextManager[None]]] = {
    "unfinished bodies": lambda port: attacks.unfinished_bodies(port, share(60) + 10, 10 * _MB - 100),
    "gzip bombs": lambda port: attacks.gzip_bombs(port, share(16) + 2, 10 * _MB - 10),
    "json of objects": lambda port: attacks.json_of_objects(port, share(16), 6 * _MB),
    "stalled readers": lambda port: attacks.stalled_readers(port, share(100)),
    "slow senders": lambda port: attacks.slow_senders(port, share(500), 2),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_leaves_memory_bounded_and_others_served(server: Serve, name: str) -> None:
    attacks.prepare(server, large=10, large_bytes=9 * _MB)
    watch = attack(server, ATTACKS[name](server.port))
    assert watch.failures == []
    assert watch.grown_mb <= MEMORY_MB + OTHER_MB
    server.end()


def test_abandoned_polls_over_invisible_rows_end(server: Serve) -> None:
    attacks.prepare(server, invisible=share(2_000_000))
    answered, seconds = attacks.abandoned_polls(server, 16)
    sys.stdout.write(f"\n16 abandoned polls ended after {seconds:.2f} s, GET topic after {answered * 1000:.0f} ms\n")
    with Client(server.port) as client:
        assert TopicClient(client, attacks.HONEST).publish("still served").status == 200


def test_poll_of_a_million_empty_messages_has_bounded_memory(server: Serve) -> None:
    messages = share(655_360)
    attacks.prepare(server, empty=messages)
    with Client(server.port) as client:
        topic = TopicClient(client, attacks.EMPTY)
        for _ in range(2):
            before = attacks.anonymous_mb(server.process.pid)
            began = time.monotonic()
            client.send("POST", f"{topic.path}/poll", attacks.EVERYTHING, content_type=AVRO)
            assert client.socket.recv(1) == b"H"
            first = time.monotonic() - began
            while client.socket.recv(1 << 20)[-5:] != b"0\r\n\r\n":
                pass
            grown = attacks.anonymous_mb(server.process.pid) - before
            sys.stdout.write(
                f"\n{messages} empty messages: first byte after {first * 1000:.0f} ms, {grown:.1f} MB more\n"
            )
            assert grown <= MEMORY_MB


def test_long_names_are_not_kept_in_memory(server: Serve) -> None:
    attacks.prepare(server)
    before = attacks.anonymous_mb(server.process.pid)
    attacks.long_names(server, share(4096))
    grown = attacks.anonymous_mb(server.process.pid) - before
    sys.stdout.write(f"\n{share(4096)} long names of either kind: {grown:.1f} MB more\n")
    assert grown <= 30
