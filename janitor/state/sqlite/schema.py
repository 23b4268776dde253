"""The tables of the state file, and whether a file is one of ours.

The layout carries a version number, so that a janitor never guesses at a file of another one: it says so and stops.
"""

from __future__ import annotations

import sqlite3

from tms_core.errors import StateError

#: What ``PRAGMA user_version`` says of a file of this layout.
SCHEMA_VERSION = 4
#: What ``PRAGMA application_id`` says of a file of ours ("tmsj").
APPLICATION_ID = 0x746D736A

#: What it means to do without a state file.
LOSS = (
    "this loses which store was adopted, which jumps are held, the proven boundary and the history, but no message: "
    "the store is then a first contact and nothing is deleted until it is adopted."
)

_TABLES = (
    # With row ids, since SQLite reads a large value when it compares keys without them.
    "CREATE TABLE documents (key TEXT PRIMARY KEY, value BLOB NOT NULL)",
    "CREATE TABLE history (key BLOB PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID",
)


def is_new(connection: sqlite3.Connection, where: str) -> bool:
    """Whether the open file has no tables yet; else it has those of this layout.

    Args:
        where: the file, for messages.

    Raises:
        StateError: another program's database, or one of another layout.
    """
    # In this order tables that another process makes between two of the readings are taken for a janitor's.
    (tables,) = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    (application,) = connection.execute("PRAGMA application_id").fetchone()
    if application != APPLICATION_ID and (number or tables):
        raise StateError(f"{where} is another program's database.", "Name another folder in janitor.state.")
    if number > SCHEMA_VERSION:
        raise StateError(
            f"{where} was written by a newer janitor (layout {number}; this one knows {SCHEMA_VERSION}).",
            f"Use that version, or move the folder away: {LOSS}",
        )
    if number not in (0, SCHEMA_VERSION):
        raise StateError(
            f"{where} has layout {number}, which no released janitor wrote (this one knows {SCHEMA_VERSION}).",
            f"Move the folder away: {LOSS}",
        )
    return bool(number == 0)


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Make the tables if they are still not there; call it inside a transaction."""
    if is_new(connection, where):
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
