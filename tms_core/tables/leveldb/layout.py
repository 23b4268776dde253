"""The folders of a store's tables, the rejected layouts, and the identity of a store.

CDAP changed its folders twice after 5.1 and kept the name of the metadata table, so a store of CDAP 6 looks like an
empty store of this project. The layout is checked before the first table is opened, because opening changes files.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from tms_core.errors import StoreError, StoreLayoutError, StoreNotFound
from tms_core.tables.base import TableName
from tms_core.tables.leveldb.lock import convert_errors

#: CDAP's names (LevelDBTableFactory).
FOLDERS: Mapping[TableName, str] = {
    "metadata": "system.tms.meta",
    "message": "system.tms.message",
    "payload": "system.tms.payload",
}
#: Folders of CDAP 6: per topic and generation, in later versions per time partition (LevelDBTableFactory).
_CDAP_6 = re.compile(r"(v2\.)?\w+\.tms\.(message|payload)\.[\w-]+\.-?\d+", re.ASCII)


def identity(path: Path) -> str:
    """Return the identity of a store: its resolved path, and the inode of its metadata folder (invariant S13).

    A copy has another path; another store moved to the same path has another inode.
    :mod:`tms_core.tables.leveldb.lineage` checks whether the folders have their recorded contents. The identity does
    not include the device, whose number changes with each mount, and the two other folders, which CDAP creates on
    demand.

    Raises:
        StoreError: the store does not exist.
    """
    with convert_errors(path):
        return f"leveldb:{path.resolve()}:{(path / FOLDERS['metadata']).stat().st_ino}"


def disk_bytes(path: Path) -> int | None:
    """Return the size of the files in the three folders; None if they cannot be read.

    LevelDB may delete files during the count; a deleted file counts as 0.
    """
    total = 0
    try:
        for folder in FOLDERS.values():
            for file in (path / folder).glob("*"):
                with suppress(FileNotFoundError):
                    total += file.stat().st_size
    except OSError:
        return None
    return total


def written_ms(path: Path) -> int:
    """Return the time of the last write to a file in the three folders, in milliseconds; 0 if they cannot be read."""
    newest_ns = 0
    with suppress(OSError):
        for folder in FOLDERS.values():
            newest_ns = max([newest_ns, *(file.stat().st_mtime_ns for file in (path / folder).glob("*"))])
    return newest_ns // 1_000_000


def find_tables(path: Path, *, create: bool = False) -> dict[TableName, Path]:
    """Return the folders of existing tables; with ``create``, all three folders.

    Raises:
        StoreNotFound, StoreLayoutError, StoreError: as :class:`LevelDBStore`.
    """
    with convert_errors(path):
        if not path.is_dir():
            raise StoreNotFound(
                f"Folder {path} does not exist.",
                "Set the folder that contains system.tms.meta (--leveldb, or storage.leveldb.path).",
            )
        _refuse_cdap_6(path)
        folders: dict[TableName, Path] = {name: path / folder for name, folder in FOLDERS.items()}
        found = {name: folder for name, folder in folders.items() if holds_database(folder)}
    if create:
        return folders
    if "metadata" not in found:
        raise StoreNotFound(
            f"{path} has no metadata table (system.tms.meta).",
            "Set the folder that contains it (CDAP: messaging.local.data.dir), or create a store: tms serve",
        )
    return found


def holds_database(folder: Path) -> bool:
    """Return whether a folder has a LevelDB database.

    Raises:
        StoreError: the folder has the files of a database, but not ``CURRENT``, which names its MANIFEST; or it cannot
            be read.
    """
    with convert_errors(folder):
        if not folder.is_dir():
            return False
        if (folder / "CURRENT").exists():
            return True
        names = sorted(entry.name for entry in folder.iterdir() if entry.suffix in (".ldb", ".sst", ".log"))
    if names:
        # LevelDB would create an empty database here and remove the files.
        raise StoreError(
            f"{folder} has data ({names[0]}) but no CURRENT file.",
            "Nothing was changed. Restore the folder from a backup, or try repair_db (plyvel) on a copy of it.",
        )
    return False


def _refuse_cdap_6(path: Path) -> None:
    # The metadata table has the same name in CDAP 6 and in layout A; only the other tables differ.
    for entry in sorted(path.iterdir()):
        if _CDAP_6.fullmatch(entry.name) or (entry.name == "meta" and entry.is_file()):
            raise StoreLayoutError(
                f"{path} is in a layout of CDAP 6 ({entry.name}).",
                "Use a store of CDAP 4.0 to 5.1 or of this project; nothing was opened.",
            )
