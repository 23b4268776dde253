"""Detection of the LevelDB binding and of slow builds."""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from tms_core.tables.leveldb import library

#: A symbol of a Snappy library that was compiled without optimization.
SYMBOL = b"\0_ZN6snappy12LittleEndian6Load32EPKv\0"


@pytest.fixture
def maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file that lists the mapped libraries of the process."""
    monkeypatch.setattr(library, "_MAPS", tmp_path / "maps")
    return tmp_path / "maps"


def map_lines(*paths: Path | str) -> str:
    return "".join(f"7f00-7f01 r-xp 00000000 fe:00 4711   {path}\n" for path in paths)


def test_build_names_the_installed_binding() -> None:
    used = library.build()
    name, _, number = used.binding.partition(" ")
    assert name == ("plyvel-next" if sys.version_info >= (3, 12) else "plyvel")
    assert number == version(name)
    assert used.leveldb.startswith("1.2")


@pytest.mark.parametrize(("content", "is_slow"), [(b"ELF" + SYMBOL, True), (b"ELF" + SYMBOL[9:], False)])
def test_build_is_slow_if_snappy_has_an_uninlined_function(maps: Path, content: bytes, is_slow: bool) -> None:
    snappy = maps.with_name("my libsnappy-2c75d721.so.1.1.9")
    snappy.write_bytes(content)
    maps.write_text(map_lines("[heap]", maps.with_name("libc.so.6"), snappy))
    assert library.build().is_slow is is_slow


def test_build_without_maps_or_with_deleted_library_is_not_slow(maps: Path) -> None:
    assert not library.build().is_slow
    maps.write_text(map_lines(f"{maps.with_name('libsnappy.so.1')} (deleted)"))
    assert not library.build().is_slow
