"""LevelDB's binding for Python: plyvel or plyvel-next, which only this module imports.

plyvel has no wheels for Python 3.13 and newer. plyvel-next is plyvel's source under another module name, with LevelDB
1.23, and has wheels from Python 3.12 on. If both are installed, this module imports plyvel-next, because plyvel's
wheels contain a Snappy that was compiled without optimization: it takes 50 % longer to read a block.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import plyvel
else:
    try:
        import plyvel_next as plyvel
    except ImportError:
        import plyvel

__all__ = ["Build", "build", "plyvel"]

#: An inline function of Snappy; only a build without optimization exports it.
_NOT_INLINED = b"_ZN6snappy12LittleEndian6Load32EPKv"
_MAPS = Path("/proc/self/maps")


class Build(NamedTuple):
    """The LevelDB that this process has loaded.

    Attributes:
        binding: the name of its distribution, ``plyvel`` or ``plyvel-next``, and its version.
        leveldb: the version of LevelDB.
        is_slow: whether its Snappy was compiled without optimization.
    """

    binding: str
    leveldb: str
    is_slow: bool


def build() -> Build:
    """Return the loaded library, as the files mapped into this process show it."""
    name = plyvel.__name__.replace("_", "-")
    return Build(f"{name} {plyvel.__version__}", plyvel.__leveldb_version__, any(map(_is_unoptimized, _libraries())))


def _libraries() -> set[Path]:
    """Return the files of LevelDB, of Snappy and of the binding; empty on a system without ``/proc``."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return set()
    paths = {Path(line.split(maxsplit=5)[5]) for line in lines if line.count("/")}
    return {path for path in paths if any(word in path.name for word in ("snappy", "leveldb", "plyvel"))}


def _is_unoptimized(library: Path) -> bool:
    try:
        return _NOT_INLINED in library.read_bytes()
    except OSError:
        # The file was replaced after the process had loaded it.
        return False
