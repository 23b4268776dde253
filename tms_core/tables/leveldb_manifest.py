"""The two cures that let C++ LevelDB and CDAP's Java LevelDB share a folder.

Both libraries write the same format, and neither can read what the other leaves behind: Java records every table it
compacted 4 bytes too large in the MANIFEST, and C++ looks for a table's end by that number; C++ names its tables
``.ldb``, and Java knows only ``.sst``. So before C++ opens a folder the recorded sizes are compared with the files, and
a corrected MANIFEST takes the old one's place; and tables carry their ``.sst`` name whenever no C++ LevelDB is at work.

The trade: we read and write a file of LevelDB's own. It is written as LevelDB writes it, to a new name, and CURRENT is
switched to it by a rename, so a crash at any moment leaves either the old MANIFEST or the new one in force. Every
record that is not wrong is copied byte for byte; whatever cannot be read exactly as LevelDB would read it stops us
before anything is changed. Layouts with worked examples: ``docs/formats/leveldb.md``.
"""

from __future__ import annotations

import filecmp
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tms_core.errors import FormatError, StoreError
from tms_core.tables.leveldb_codec import (
    NEW_TABLE,
    NEXT_FILE,
    Field,
    live_tables,
    pack_edit,
    parse_edit,
    read_records,
    write_records,
)
from tms_core.tables.leveldb_folder import locked, sync, translated

#: The last eight bytes of every complete table.
_TABLE_MAGIC = bytes.fromhex("57fb808b247547db")
_TABLE = re.compile(r"(\d+)\.(?:ldb|sst)")
_NUMBERED = re.compile(r"(?:MANIFEST-)?(\d+)(?:\.[a-z]+)?")
_CURRENT = re.compile(r"(MANIFEST-\d+)\n")

_RESTORE = "Nothing was changed. Restore the store from a backup, or try plyvel.repair_db on a copy of that folder."


def prepare(folder: Path) -> int:
    """Make a folder that nobody has open readable for C++ LevelDB and for Java's alike.

    Args:
        folder: one LevelDB folder with a ``CURRENT`` file.

    Returns:
        How many tables had a wrong size in the MANIFEST.

    Raises:
        StoreBusy: the folder is open, here or elsewhere.
        StoreError: the folder is damaged; nothing was changed.
    """
    with locked(folder):
        corrected = correct_sizes(folder)
        rename_tables(folder)
        return corrected


def correct_sizes(folder: Path) -> int:
    """Put the files' own sizes into the MANIFEST where it has others. The caller holds the lock, or owns the folder.

    The old MANIFEST stays: LevelDB removes it once it has opened the folder well.

    Returns:
        How many tables had a wrong size.

    Raises:
        StoreError: the MANIFEST cannot be read, or a table it names is missing or incomplete; nothing was changed.
    """
    with translated(folder):
        name = current_manifest(folder)
        try:
            records = read_records((folder / name).read_bytes())
            edits = [parse_edit(record) for record in records]
        except FormatError as error:
            raise StoreError(f"{folder / name} cannot be read: {error}.", _RESTORE) from error
        wrong = _wrong_sizes(folder, live_tables(edits))
        if wrong:
            corrected = [_with_sizes(record, edit, wrong) for record, edit in zip(records, edits, strict=True)]
            _replace_manifest(folder, corrected, _free_number(folder, edits))
    return len(wrong)


def rename_tables(folder: Path) -> int:
    """Give every table its ``.sst`` name, which both libraries read.

    Safe whoever has the folder open: C++ looks for ``.ldb`` first and ``.sst`` next, Java for ``.sst`` alone.

    Returns:
        How many were renamed.

    Raises:
        StoreError: one table number has two different files; nothing was changed.
    """
    with translated(folder):
        named = [path for path in table_files(folder).values() if path.suffix == ".ldb"]
        for path in named:
            with suppress(FileNotFoundError):  # removed as obsolete by a process that has opened the folder since
                path.replace(path.with_suffix(".sst"))
        if named:
            sync(folder)
    return len(named)


def table_files(folder: Path) -> dict[int, Path]:
    """The folder's tables by number.

    Raises:
        StoreError: both names of a number are there and the files differ. LevelDB never leaves that behind, and the
            two libraries would each read another one.
    """
    found: dict[int, Path] = {}
    for path in sorted(folder.iterdir()):
        match = _TABLE.fullmatch(path.name)
        if match is None:
            continue
        twin = found.setdefault(int(match[1]), path)
        if twin != path and not filecmp.cmp(twin, path, shallow=False):
            raise StoreError(
                f"{folder} has two different tables of one number: {twin.name} and {path.name}.",
                "Nothing was changed. Two stores were mixed in that folder: restore it from a backup.",
            )
    return found


def current_manifest(folder: Path) -> str:
    """The name of the MANIFEST in force.

    Raises:
        StoreError: ``CURRENT`` does not name one.
    """
    text = (folder / "CURRENT").read_bytes().decode("ascii", "replace")
    match = _CURRENT.fullmatch(text)
    if match is None:
        raise StoreError(f"{folder / 'CURRENT'} does not name a MANIFEST but {text!r}.", _RESTORE)
    return match[1]


def _wrong_sizes(folder: Path, live: Mapping[int, int]) -> dict[int, int]:
    files = table_files(folder)
    missing = sorted(live.keys() - files.keys())
    if missing:
        raise StoreError(f"{folder} lacks table {missing[0]:06d} and {len(missing) - 1} more.", _RESTORE)
    sizes = {number: files[number].stat().st_size for number in live}
    wrong = {number: size for number, size in sizes.items() if size != live[number]}
    for number in wrong:
        if not _is_complete(files[number]):
            raise StoreError(f"{files[number]} is not a complete table.", _RESTORE)
    return wrong


def _is_complete(table: Path) -> bool:
    """A table that was cut short has another size too, and no size in the MANIFEST would make it readable."""
    with table.open("rb") as file:
        file.seek(-min(len(_TABLE_MAGIC), table.stat().st_size), os.SEEK_END)
        return file.read() == _TABLE_MAGIC


def _with_sizes(record: bytes, edit: Sequence[Field], sizes: Mapping[int, int]) -> bytes:
    corrected = [_with_size(field, sizes) for field in edit]
    return record if corrected == edit else pack_edit(corrected)


def _with_size(field: Field, sizes: Mapping[int, int]) -> Field:
    if field.tag != NEW_TABLE:
        return field
    level, number, size = field.numbers
    return field._replace(numbers=(level, number, sizes.get(number, size)))


def _free_number(folder: Path, edits: Sequence[Sequence[Field]]) -> int:
    """A file number nobody has used and, once recorded, nobody will."""
    used = [int(match[1]) for path in folder.iterdir() if (match := _NUMBERED.fullmatch(path.name))]
    promised = [field.numbers[0] for edit in edits for field in edit if field.tag == NEXT_FILE]
    return max(used + promised) + 1


def _replace_manifest(folder: Path, records: list[bytes], number: int) -> None:
    name = f"MANIFEST-{number:06d}"
    after = pack_edit([Field(NEXT_FILE, (number + 1,))])
    _write_new(folder / name, write_records([*records, after]))
    # LevelDB's own name for a temporary file: whichever library opens the folder next removes a forgotten one.
    temporary = folder / f"{number:06d}.dbtmp"
    _write_new(temporary, f"{name}\n".encode())
    sync(folder)
    temporary.replace(folder / "CURRENT")
    sync(folder)


def _write_new(path: Path, data: bytes) -> None:
    try:
        with path.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        path.unlink(missing_ok=True)
        raise
