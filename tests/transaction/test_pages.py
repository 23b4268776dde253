"""The pages about transactions: served methods, messages of the program, and bytes of Tephra."""

from __future__ import annotations

import re
from pathlib import Path

from tests.transaction.vectors import TEPHRA, load
from tms_core.transaction.manager.manager import MAX_CLIENT_CHARACTERS
from tms_core.transaction.rpc.calls import METHODS
from tms_core.transaction.rpc.service import (
    LARGE_BYTES,
    LARGE_SECONDS,
    MAX_CONNECTIONS,
    MAX_UNREAD_BYTES,
    REQUEST_SECONDS,
)

ROOT = Path(__file__).parents[2]
PAGE, MESSAGES, FORMATS = (
    (ROOT / f"docs/reference/{name}.md").read_text(encoding="utf-8")
    for name in ("conformance/transactions", "messages/servers", "formats/tephra")
)


def section(title: str, page: str = PAGE) -> str:
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_page_lists_every_method_that_is_served() -> None:
    assert set(re.findall(r"^\| `(\w+)` \|", section("Methods"), flags=re.MULTILINE)) == METHODS


def test_the_page_has_the_limits() -> None:
    text = section("Transport")
    assert f"{MAX_CONNECTIONS:,}, and at most a quarter of the process's open files" in text
    assert f"within {REQUEST_SECONDS} s, or" in text
    assert f"the next {LARGE_BYTES >> 10} KiB do not come within {LARGE_SECONDS} s" in text
    assert f"{MAX_UNREAD_BYTES >> 20} MiB" in text
    assert f"their first {MAX_CLIENT_CHARACTERS} characters" in section("Intended differences")


def test_quoted_messages_of_the_page_are_in_the_source() -> None:
    files = [path for room in ("transaction", "server/ha") for path in (ROOT / "tms_core" / room).rglob("*.py")]
    # The source breaks texts over lines, and inserts values.
    source = " ".join(re.sub(r'"\s+f?"', "", path.read_text(encoding="utf-8")) for path in files)
    source = re.sub(r"\{[^{}]*\}", "…", source)
    quoted = re.findall(
        r"^\| `([^`]+)` \|", section("Messages of the transaction manager", MESSAGES), flags=re.MULTILINE
    )
    assert len(quoted) == 10
    for message in quoted:
        pieces = [piece.strip(" .:") for piece in message.split("…")]
        assert max(pieces, key=len) in source, message


def examples() -> list[bytes]:
    """Return the bytes of the fenced examples, without the explanations."""
    blocks = re.findall(r"```hex\n(.*?)```", FORMATS, flags=re.DOTALL)
    return [bytes.fromhex("".join(re.split(r" {3,}", line)[0] for line in block.splitlines())) for block in blocks]


def test_the_worked_examples_are_tephras_bytes() -> None:
    snapshot, edit, transaction = examples()
    assert snapshot == (TEPHRA / "snapshots/v4-small.bin").read_bytes()
    assert edit.hex() == load("txlog/edits-v4.json")[0]["hex"]
    assert transaction.hex() == load("thrift/ttransaction.json")[0]["hex"]


def test_the_bytes_quoted_in_the_text_occur_in_the_files_named() -> None:
    quoted = re.findall(r"`((?:[0-9a-f]{2,}\s+)+[0-9a-f]{2,})`", FORMATS)
    files = {path: path.read_bytes() for folder in ("snapshots", "txlog") for path in (TEPHRA / folder).iterdir()}
    long = [bytes.fromhex(text) for text in quoted if len(text) > 40]
    assert len(long) >= 3
    for data in long:
        assert any(data in content for content in files.values()), data.hex()
