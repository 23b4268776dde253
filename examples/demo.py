"""A demo of the janitor on a sample store, in a minute: ``make demo``.

CDAP's own classes wrote the store, which each run unpacks again. The janitor refuses an outdated transaction snapshot,
so the demo rewrites the sample's snapshot with the current time.
"""

from __future__ import annotations

import shutil
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import click

from janitor.cli import render
from janitor.cli.main import execute
from tms_core.clock import Clock, SystemClock
from tms_core.tables.base import CELLS, KEYS
from tms_core.tables.leveldb.clone import clone
from tms_core.transaction.codec.snapshot import read_snapshot, write_snapshot

ROOT = Path(__file__).parent.parent
SAMPLE = ROOT / "tests" / "vectors" / "cdap-leveldb" / "sample.tar.xz"
#: A limit above the size of the sample.
ALL_ROWS = 1_000_000
#: The name of the sample's newest usable snapshot.
SNAPSHOT = "snapshot.1699999999000"


def main(folder: Path = ROOT / "data" / "demo", clock: Clock | None = None) -> int:
    """Unpack the store, plan, run a sweep, and print the row counts before and after; return an exit code.

    Args:
        folder: the working folder; its previous contents are deleted.
        clock: the clock; None: the machine's.
    """
    clock = clock or SystemClock()
    if not SAMPLE.exists():
        click.echo(f"the sample store {SAMPLE} is missing; a checkout contains it, a package does not", err=True)
        return 1
    store, snapshots = unpack(folder, clock)
    where = ["--leveldb", _short(store), "--snapshots", _short(snapshots)]
    log_options = ["--log-format", "text"]
    _say("A messaging store that CDAP wrote: 8 topics, with live, expired and invalid rows.")
    _print_sizes(store, folder / "look")
    _say("1. What would a sweep do?   janitor plan")
    if code := execute(["plan", *where, *log_options], clock):
        return code
    _say("2. Run it; the first run must adopt the store.   janitor run --once --adopt")
    if code := execute(["run", "--once", "--adopt", *where, *log_options], clock):
        return code
    _say("3. The remaining rows")
    _print_sizes(store, folder / "look")
    shown = " ".join(where)
    _say("Now try:")
    for verb in (
        "inspect message --topic system:metadata --limit 5",
        "boundary --explain",
        "verify",
        "doctor",
        "--help",
    ):
        click.echo(f"  .venv/bin/janitor {verb}" + ("" if verb == "--help" else f" {shown}"))
    return 0


def unpack(folder: Path, clock: Clock) -> tuple[Path, Path]:
    """Unpack the sample with a snapshot of the current time; return the folders of the store and of the snapshots."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    with tarfile.open(SAMPLE) as archive:
        # Python 3.11.3 and older have no filters; the sample is part of the checkout.
        archive.extraction_filter = getattr(tarfile, "data_filter", None)
        archive.extractall(folder)  # noqa: S202 filtered above
    snapshots = folder / "tx.snapshot"
    with (snapshots / SNAPSHOT).open("rb") as stream:
        snapshot = read_snapshot(stream)
    now_ms = clock.now_ms()
    fresh = replace(snapshot, visibility=replace(snapshot.visibility, timestamp_ms=now_ms))
    with (snapshots / f"snapshot.{now_ms}").open("wb") as stream:
        write_snapshot(stream, fresh)
    return folder / "messaging", snapshots


def _print_sizes(store: Path, scratch: Path) -> None:
    with clone(store, scratch) as opened:
        messages = len(opened.message.read(KEYS, b"", None, ALL_ROWS).items)
        payloads = len(opened.payload.read(KEYS, b"", None, ALL_ROWS).items)
        hidden = sum(cell.pointer < 0 for cell in opened.message.read(CELLS, b"", None, ALL_ROWS).items)
    on_disk = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    click.echo(
        f"   {messages:,} messages, {hidden} of them hidden from transactions; {payloads:,} payloads; "
        f"{render.size(on_disk)} on disk"
    )


def _say(text: str) -> None:
    click.secho(f"\n{text}", bold=True)


def _short(path: Path) -> str:
    """Return the path relative to the checkout, as an operator types it."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


if __name__ == "__main__":
    sys.exit(main())
