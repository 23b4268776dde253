"""Names and keys of megabytes, which a program may put into a store: logs and reports stay short."""

from __future__ import annotations

import pytest

from tests.janitor.cli.conftest import CommandKit
from tms_core.tables.leveldb.store import LevelDBStore

LONG = 300_000
#: Far less than one of them, and enough for all that a run says otherwise.
SHORT = 20_000


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"default:" + b"x y" * (LONG // 3) + b":", b"{}"),
        (b"default:" + b"x" * LONG + b":", b"{}"),
        (b"default:" + b"x" * LONG + b":", b'{"generation":"1","ttl":"60"}'),
        (b"default:b:", b'{"generation":"' + b"9" * LONG + b'","ttl":"60"}'),
        (b"default:b:", b'{"generation":"1","ttl":"' + b"x " * (LONG // 2) + b'"}'),
    ],
    ids=["key", "unreadable", "topic", "generation", "ttl"],
)
@pytest.mark.parametrize("command", ["run --once --adopt", "plan"])
def test_command_on_a_long_name_writes_little(kit: CommandKit, key: bytes, value: bytes, command: str) -> None:
    with LevelDBStore(kit.store) as store:
        assert store.metadata.compare_and_set(key, None, value)
    outcome = kit.janitor(command)
    assert outcome.code == 0
    assert max(len(outcome.err), len(outcome.out)) < SHORT
