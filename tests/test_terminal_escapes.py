"""Every command on a pseudo-terminal, with hostile text in names and payloads."""

from __future__ import annotations

import os
import pty
import re
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import quote

import click
import pyarrow.parquet as pq
import pytest

from janitor.cli import main as janitor
from janitor.state.sqlite.state import SqliteState
from tests.archives import Undo
from tests.builders import DAY, NOW_MS, topic, visibility
from tests.janitor.cli.conftest import INVALID, SETTINGS, CommandKit, kit
from tests.server.client import JSON, Client
from tests.server.process import IN_MEMORY
from tms_core.cli import main as tms
from tms_core.client import Client as TmsClient
from tms_core.server.serving import serving
from tms_core.tables.leveldb.store import LevelDBStore
from tms_core.topic import encode_properties
from tms_core.transaction.rpc.client import TransactionClient

__all__ = ["kit"]

#: A text that sets the title of a window, clears the screen with a C1 character, reverses text, and forges a line.
HOSTILE = "x\x1b]0;owned\x07\x9b2J\u202e\r\nFORGED"
#: A part of the escaped text.
SHOWN = "\\x1b]0;owned"
#: The colors and the progress of a publish, which commands send.
COLOR = re.compile(r"\x1b\[[0-9;]*m|^\r(?=[0-9,]+ messages)")
Run = Callable[[str], str]

#: The arguments of each command of ``janitor`` for the store of the fixture.
JANITOR = {
    "adopt": "",
    "apply": "plan.json",
    "approve": "",
    "archive list": "",
    "archive restore": "default:orders --dry-run",
    "backup": "copy",
    "boundary": "--explain",
    "config show": "",
    "doctor": "",
    "history": "",
    "inspect message": "",
    "inspect meta": "",
    "inspect payload": "",
    "inspect snapshot": "",
    "ledger": "",
    "pause": "default:orders",
    "plan": "",
    "restore": "copy",
    "resume": "default:orders",
    "run": "--once",
    "status": "",
    "sweep-now": "",
    "topic": "default:orders",
    "verify": "",
    "why": "default:orders 0000018bcfe56800000000000000000000000000",
}
#: The arguments of each command of ``tms``, in this order, with deletions at the end.
TMS = {
    "topic list": "",
    "topic show": "default:orders",
    "topic create": f"default:other --property {shlex.quote(f'owner={HOSTILE}')}",
    "topic update": f"default:other --property {shlex.quote(f'owner={HOSTILE}')}",
    "publish": f"default:orders -m {shlex.quote(HOSTILE)}",
    "poll": "default:orders",
    "producer list": "default:orders",
    "producer show": "default:orders p",
    "consumer set": "default:orders c --to latest",
    "consumer list": "default:orders",
    "consumer show": "default:orders c",
    "consumer release": "default:orders c",
    "consumer redrive": "default:orders c",
    "tx list": "",
    "tx show": "TRANSACTION",
    "tx abort": "TRANSACTION --yes",
    "tx invalidate": "TRANSACTION",
    "tx truncate": "TRANSACTION --yes",
    "producer fence": "default:orders p",
    "producer delete": "default:orders p",
    "consumer delete": "default:orders c",
    "topic delete": "default:other --yes",
}
#: Commands that start a service, or whose output does not contain names or payloads.
NOT_TYPED = {
    "janitor completion", "janitor exporter", "janitor spark stats", "janitor spark sweep", "tms completion",
    "tms serve", "tms admin accept", "tms admin backup", "tms admin create-tables", "tms admin release",
    "tms admin restore", "tms admin token",
}  # fmt: skip


def commands(command: click.Command, name: str, above: click.Context | None = None) -> Iterator[str]:
    """Yield the words of each command of a group."""
    context = click.Context(command, parent=above, info_name=name)
    if not isinstance(command, click.Group):
        yield context.command_path
        return
    for word in command.list_commands(context):
        below = command.get_command(context, word)
        assert below is not None
        yield from commands(below, word, context)


def test_every_command_has_a_case() -> None:
    found = {*commands(janitor.cli, "janitor"), *commands(tms.cli, "tms")}
    assert found == {*(f"janitor {name}" for name in JANITOR), *(f"tms {name}" for name in TMS), *NOT_TYPED}


def run_on_terminal(monkeypatch: pytest.MonkeyPatch, run: Callable[[], int]) -> str:
    """Return what a command sends to a terminal, including standard error."""
    reader, terminal = pty.openpty()
    found: list[bytes] = []

    def read() -> None:
        while True:
            try:
                found.append(os.read(reader, 65536))
            except OSError:  # the other end is closed
                return

    thread = threading.Thread(target=read)
    thread.start()
    with os.fdopen(terminal, "w") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        patch.setattr(sys, "stderr", stream)
        run()
    thread.join()
    os.close(reader)
    return b"".join(found).decode()


def check(printed: str) -> None:
    lines = COLOR.sub("", printed).replace("\r\n", "\n").split("\n")
    assert [line for line in lines if not line.isprintable()] == []
    assert [line for line in lines if line.startswith("FORGED")] == []


# --- janitor ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def hostile_kit(kit: CommandKit) -> CommandKit:
    """Create a store, an archive, a state and a snapshot folder with hostile text."""
    kit.set(SETTINGS.replace("janitor: {", "janitor: {archive: {enabled: true, path: data/archive}, "))
    with LevelDBStore(kit.store) as store:
        orders = topic(store, "default:made", ttl_seconds=86_400).plain(NOW_MS - 2 * DAY)
        orders.write_metadata(
            encode_properties({"generation": "1", "ttl": "86400", HOSTILE: HOSTILE, "owner": HOSTILE})
        )
        store.metadata.compare_and_set(
            b"default:bad:", None, encode_properties({"generation": HOSTILE, "ttl": HOSTILE})
        )
        store.metadata.compare_and_set(f"default:{HOSTILE}:".encode(), None, b"{}")
        undo = Undo(store, Path("data/archive"), kit.clock)
        [saved] = undo.sweep(orders, snapshot=visibility(NOW_MS, invalid=[INVALID]))
    assert saved.path is not None
    table = pq.read_table(saved.path)
    columns = [
        [HOSTILE] * len(table) if name in ("run_id", "rule") else table.column(name) for name in table.column_names
    ]
    metadata = pq.ParquetFile(saved.path).metadata.metadata
    with pq.ParquetWriter(saved.path, table.schema, use_dictionary=False) as writer:
        writer.write_table(table.from_arrays(columns, schema=table.schema))
        writer.add_key_value_metadata({name: value for name, value in metadata.items() if name != b"ARROW:schema"})
    (kit.folder / "data" / "tx" / f"snapshot.{NOW_MS}").write_bytes(HOSTILE.encode())
    kit.janitor("plan --out plan.json")
    kit.janitor("adopt")
    with SqliteState(kit.folder / "data" / "janitor") as state:
        state.pause(f"default:{HOSTILE}", NOW_MS)
    return kit


def test_janitor_command_over_hostile_text_escapes_it(hostile_kit: CommandKit, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    shown = set()
    for name, words in JANITOR.items():
        arguments = [*shlex.split(name), *shlex.split(words), "--config", "janitor.yaml"]

        def run(arguments: list[str] = arguments) -> int:
            return janitor.execute(arguments, hostile_kit.clock)

        printed = run_on_terminal(monkeypatch, run)
        check(printed)
        if SHOWN in printed:
            shown.add(name)
    assert shown >= {"archive list", "inspect meta", "status"}


# --- tms -------------------------------------------------------------------------------------------------------------


def test_tms_command_over_hostile_text_escapes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = set()
    with serving(None, IN_MEMORY, {}, janitor=False) as server, TransactionClient(str(server.transactions)) as service:
        monkeypatch.setenv("TMS_URL", server.url)
        monkeypatch.setenv("TMS_TRANSACTIONS__THRIFT", str(server.transactions))
        with TmsClient(server.url) as client:
            client.create_topic("default:orders", properties={"owner": HOSTILE, HOSTILE: "x"})
            client.publish("default:orders", [HOSTILE.encode()])
        transaction = service.start_long(HOSTILE)
        register(int(server.url.rpartition(":")[2]), transaction.write_pointer)
        for name, words in TMS.items():
            line = f"{name} {words}".replace("TRANSACTION", str(transaction.transaction_id))
            printed = run_on_terminal(monkeypatch, lambda line=line: tms.execute(shlex.split(line)))  # type: ignore[misc]
            check(printed)
            if SHOWN in printed:
                shown.add(name)
    assert shown >= {"topic show", "poll", "producer show", "tx list", "tx show"}


def register(port: int, pointer: int) -> None:
    """Publish as the producer ``p`` in a transaction with a hostile label."""
    with Client(port) as client:
        home = "/v1/namespaces/default/topics/orders"
        instance = client.ask("POST", f"{home}/producers/p", b'{"instance": "00000000000000000000000000000001"}')
        assert instance.status == 200, instance.text
        outputs = {
            "x_tms_producer": "default:orders/p",
            "x_tms_generation": instance.json["generation"],
            "x_tms_sequence": "1",
            "x_tms_label": quote(HOSTILE),
        }
        body = b'{"messages": ["a"], "transactionWritePointer": %d}' % pointer
        published = client.ask("POST", f"{home}/publish", body, content_type=JSON, **outputs)
        assert published.status == 200, published.text
