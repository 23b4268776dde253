"""The two repairs that let C++ LevelDB and CDAP's Java LevelDB share a folder.

Both libraries write the same format, but neither can read the other's files. Java records every compacted table 4 bytes
too large in the MANIFEST, and C++ finds a table's footer by that size. C++ names its tables ``.ldb``, and Java reads
only ``.sst``. Therefore, before C++ opens a folder, this module compares the recorded sizes with the files, and
replaces a wrong MANIFEST by a corrected one. Tables are named ``.sst`` whenever no C++ LevelDB has the folder open.

The two names have a risk. After a crash, LevelDB reuses the number of an unfinished table and overwrites the file.
Under the other name, the unfinished file would remain and count as the new table. Therefore numbers on disk are never
reused. If a live table has files of both names, the MANIFEST decides, or the folder is rejected.

The trade-off: this module writes one of LevelDB's files. It writes the file as LevelDB does, under a new name, and
switches CURRENT by a rename, so a crash leaves either the old or the new MANIFEST in force. Correct records are copied
byte for byte. If a record cannot be read exactly as LevelDB reads it, nothing is changed.
``docs/reference/formats/tables.md`` has the layouts with worked examples.
"""

from __future__ import annotations

import filecmp
import os
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path

from tms_core.errors import FormatError, StoreError, quoted
from tms_core.tables.leveldb.lock import convert_errors, hold_lock, sync
from tms_core.tables.leveldb.log import (
    NEW_TABLE,
    NEXT_FILE,
    Field,
    Version,
    find_damage,
    pack_edit,
    pack_records,
    parse_edit,
    read_records,
)

#: The last eight bytes of every complete table.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
#: The number of bytes by which the Java library overstates a compacted table.
_JAVA_EXCESS_BYTES = 4
_TABLE = re.compile(r"(\d+)\.(?:ldb|sst)")
_NUMBERED = re.compile(r"(?:MANIFEST-)?(\d+)(?:\.[a-z]+)?")
_LOG = re.compile(r"(\d+)\.log")
_CURRENT = re.compile(r"(MANIFEST-\d+)\n")

_RESTORE = "Nothing was changed. Restore the store from a backup, or try repair_db (plyvel) on a copy of that folder."
_CDAP_LOSES = "CDAP would open the folder nevertheless and lose, without an error,"


def prepare(*folders: Path, side: Path | None = None) -> None:
    """Make folders readable for the LevelDB of C++ and of Java, before they are opened.

    All folders are checked before the first one is changed.

    Args:
        folders: LevelDB folders with a ``CURRENT`` file.
        side: another folder to check; the caller opens it later.

    Raises:
        StoreBusy: a folder is open, in this or another process.
        StoreError: a folder is damaged; nothing was changed.
    """
    with ExitStack() as locks:
        checked = [*folders, *([] if side is None else [side])]
        for folder in checked:
            locks.enter_context(hold_lock(folder))
        # Check everything before the first change, so that a damaged folder leaves all folders unchanged.
        for folder in checked:
            check_logs(folder)
        for found in [_Repair(folder) for folder in folders]:
            found.execute()


def repair(folder: Path) -> int:
    """Repair a folder as :func:`prepare`, for a caller that holds its lock or owns it, and has checked its logs.

    The old MANIFEST stays until LevelDB has opened the folder and removes it.

    Returns:
        The number of tables with a wrong size in the MANIFEST.

    Raises:
        StoreError: the MANIFEST cannot be read, or a table in it is missing or incomplete; nothing was changed.
    """
    found = _Repair(folder)
    found.execute()
    return len(found.sizes)


class _Repair:
    """The repairs of a folder.

    Attributes:
        sizes: the actual sizes of tables that have another size in the MANIFEST.

    Raises:
        StoreError: as :func:`repair`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with convert_errors(folder):
            self._manifest = current_manifest(folder)
            version = read_manifest(self._manifest)
            live, present = version.live, table_files(folder)
            self._tables = {number: _live_table(folder, number, size, present) for number, size in live.items()}
            self.sizes = _corrected_sizes(self._tables, live)
            self._needs_manifest = bool(self.sizes) or max(present, default=0) >= version.next_file
            self._number = _free_number(folder, version)

    def execute(self) -> None:
        with convert_errors(self._folder):
            if self._needs_manifest:
                _replace_manifest(self._folder, self._manifest, self.sizes, self._number)
            _name_live_tables(self._folder, self._tables)


def check_logs(folder: Path) -> None:
    """Reject a folder in which LevelDB would drop rows without an error (:mod:`tms_core.tables.leveldb.log`).

    Args:
        folder: one LevelDB folder with a ``CURRENT`` file, without concurrent writes.

    Raises:
        StoreError: a log or the MANIFEST, which names the logs, is damaged; the error has the file and the offset.
    """
    with convert_errors(folder):
        for log in _live_logs(folder, read_manifest(current_manifest(folder))):
            if damage := find_damage(log.read_bytes()):
                lost = f"{_CDAP_LOSES} at least the rows up to byte {damage.stop}."
                raise StoreError(f"{log} is damaged at byte {damage.offset}: {damage.reason}. {lost}", _RESTORE)


def rename_tables(folder: Path) -> None:
    """Rename every table to ``.sst``, which both libraries read, after C++ LevelDB has closed the folder.

    The renames are safe even if another process has opened the folder since. C++ looks for ``.ldb`` first and then for
    ``.sst``, Java only for ``.sst``. C++ has read the ``.ldb`` file so far, so that file replaces an ``.sst`` file with
    the same number.

    Raises:
        StoreError: a table cannot be renamed.
    """
    with convert_errors(folder):
        tables = sorted(folder.glob("*.ldb"))
        for table in tables:
            with suppress(FileNotFoundError):  # another process has opened the folder and removed the obsolete table
                table.replace(table.with_suffix(".sst"))
        if tables:
            sync(folder)


def table_files(folder: Path) -> dict[int, list[Path]]:
    """Return the folder's table files by number; two files if both names exist."""
    found: dict[int, list[Path]] = defaultdict(list)
    for path in sorted(folder.iterdir()):
        if match := _TABLE.fullmatch(path.name):
            found[int(match[1])].append(path)
    return found


def current_manifest(folder: Path) -> Path:
    """Return the MANIFEST in force.

    Raises:
        StoreError: ``CURRENT`` does not name a MANIFEST.
    """
    current = folder / "CURRENT"
    text = current.read_bytes().decode("ascii", "replace")
    match = _CURRENT.fullmatch(text)
    if match is None:
        raise StoreError(f"{current} does not name a MANIFEST but {quoted(text)}.", _current_hint(current, text))
    return folder / match[1]


def _current_hint(current: Path, text: str) -> str:
    """Return the hint for a damaged ``CURRENT``: a command if its name is valid and only its form is wrong."""
    names = set(text.split())
    name = names.pop() if len(names) == 1 else ""
    if not (_CURRENT.fullmatch(f"{name}\n") and (current.parent / name).is_file()):
        return _RESTORE
    return f"Nothing was changed. Write the name in one line: echo {name} > {shlex.quote(str(current))}"


def read_manifest(manifest: Path) -> Version:
    """Return the contents of a MANIFEST.

    Raises:
        StoreError: LevelDB would not be able to read it.
    """
    version = Version()
    try:
        with manifest.open("rb") as stream:
            for record in read_records(stream):
                version.apply(parse_edit(record))
    except FormatError as error:
        raise StoreError(f"{manifest} cannot be read: {error}.", _RESTORE) from error
    if version.next_file == 0:
        raise StoreError(f"{manifest} cannot be read: it does not have the next file number.", _RESTORE)
    return version


def _live_logs(folder: Path, version: Version) -> list[Path]:
    """Return the logs that LevelDB reads when it opens the folder; LevelDB has made tables of older logs."""
    logs = {int(match[1]): path for path in folder.iterdir() if (match := _LOG.fullmatch(path.name))}
    return [path for number, path in sorted(logs.items()) if number >= version.log or number == version.previous_log]


def _live_table(folder: Path, number: int, size: int, present: Mapping[int, list[Path]]) -> Path:
    files = present.get(number, [])
    if not files:
        raise StoreError(f"{folder} lacks table {number:06d}.", _RESTORE)
    if len(files) == 1 or filecmp.cmp(files[0], files[1], shallow=False):
        return files[0]
    # One file is the unfinished table of a crashed process; the other library has issued its number again.
    candidates = [
        file for file in files if file.stat().st_size in (size, size - _JAVA_EXCESS_BYTES) and _is_complete(file)
    ]
    if len(candidates) != 1:
        raise StoreError(f"{folder} has two different tables {files[0].name} and {files[1].name}.", _RESTORE)
    return candidates[0]


def _corrected_sizes(tables: Mapping[int, Path], live: Mapping[int, int]) -> dict[int, int]:
    sizes = {number: table.stat().st_size for number, table in tables.items()}
    corrected = {number: size for number, size in sizes.items() if size != live[number]}
    for number in corrected:
        if not _is_complete(tables[number]):
            raise StoreError(f"{tables[number]} is not a complete table.", _RESTORE)
    return corrected


def _is_complete(table: Path) -> bool:
    """Return whether a table is complete; a truncated table also has another size, but cannot be repaired."""
    with table.open("rb") as file:
        file.seek(-min(len(_TABLE_MAGIC), table.stat().st_size), os.SEEK_END)
        return file.read() == _TABLE_MAGIC


def _with_sizes(record: bytes, sizes: Mapping[int, int]) -> bytes:
    edit = parse_edit(record)
    corrected = [_with_size(field, sizes) for field in edit]
    return record if corrected == edit else pack_edit(corrected)


def _with_size(field: Field, sizes: Mapping[int, int]) -> Field:
    if field.tag != NEW_TABLE:
        return field
    level, number, size = field.numbers
    return field._replace(numbers=(level, number, sizes.get(number, size)))


def _free_number(folder: Path, version: Version) -> int:
    """Return a file number above all used numbers and the next number, so that LevelDB does not issue it now."""
    used = [int(match[1]) for path in folder.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    return max([*used, version.next_file]) + 1


def _replace_manifest(folder: Path, old: Path, sizes: Mapping[int, int], number: int) -> None:
    name = f"MANIFEST-{number:06d}"
    after = pack_edit([Field(NEXT_FILE, (number + 1,))])
    with old.open("rb") as stream:
        corrected = (_with_sizes(record, sizes) for record in read_records(stream))
        _write_new(folder / name, pack_records(chain(corrected, [after])))
    # LevelDB's suffix for temporary files, so that both libraries remove a leftover file. The new MANIFEST is synced
    # before CURRENT names it, and CURRENT is switched by an atomic rename.
    temporary = folder / f"{number:06d}.dbtmp"
    _write_new(temporary, [f"{name}\n".encode()])
    sync(folder)
    temporary.replace(folder / "CURRENT")
    sync(folder)


def _write_new(path: Path, pieces: Iterable[bytes]) -> None:
    try:
        with path.open("xb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise


def _name_live_tables(folder: Path, tables: Mapping[int, Path]) -> None:
    """Rename live tables to ``.sst``. Other tables keep their names, so that C++ LevelDB removes or overwrites them."""
    changed = False
    for table in tables.values():
        twin = table.with_suffix(".ldb")
        if table.suffix == ".ldb":
            table.replace(table.with_suffix(".sst"))
            changed = True
        elif twin.exists():
            twin.unlink()
            changed = True
    if changed:
        sync(folder)
