"""The page about Tephra's formats: its worked examples are Tephra's bytes."""

from __future__ import annotations

import re
from pathlib import Path

from tests.transaction.vectors import TEPHRA, load

PAGE = (Path(__file__).parents[2] / "docs/reference/formats/tephra.md").read_text(encoding="utf-8")


def examples() -> list[bytes]:
    """Return the bytes of the fenced examples, without the explanations."""
    blocks = re.findall(r"```hex\n(.*?)```", PAGE, flags=re.DOTALL)
    return [bytes.fromhex("".join(re.split(r" {3,}", line)[0] for line in block.splitlines())) for block in blocks]


def test_the_worked_examples_are_tephras_bytes() -> None:
    snapshot, edit, transaction = examples()
    assert snapshot == (TEPHRA / "snapshots/v4-small.bin").read_bytes()
    assert edit.hex() == load("txlog/edits-v4.json")[0]["hex"]
    assert transaction.hex() == load("thrift/ttransaction.json")[0]["hex"]


def test_the_bytes_quoted_in_the_text_occur_in_the_files_named() -> None:
    quoted = re.findall(r"`((?:[0-9a-f]{2,}\s+)+[0-9a-f]{2,})`", PAGE)
    files = {path: path.read_bytes() for folder in ("snapshots", "txlog") for path in (TEPHRA / folder).iterdir()}
    long = [bytes.fromhex(text) for text in quoted if len(text) > 40]
    assert len(long) >= 3
    for data in long:
        assert any(data in content for content in files.values()), data.hex()
