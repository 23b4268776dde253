"""The tables of the state file, and whether a file is one of ours.

The layout carries a version number, so that a janitor never guesses at a file of another one: it says so and stops.
"""

from __future__ import annotations

import sqlite3

from tms_core.errors import StateError

#: What ``PRAGMA user_version`` says of a file of this layout.
SCHEMA_VERSION = 3
#: A layout without the last column of ``frontiers``, which is brought up to date.
_WITHOUT_CONSUMED = 2
#: What ``PRAGMA application_id`` says of a file of ours ("tmsj").
APPLICATION_ID = 0x746D736A

#: What it means to do without a state file.
LOSS = (
    "this loses which store was adopted, which jumps are held, the proven boundary and the history, but no message: "
    "the store is then a first contact and nothing is deleted until it is adopted."
)

#: Rule L7: 1: rows that were processed went, 2: the pending jump wants that, 4: it was approved.
_CONSUMED = "consumed INTEGER NOT NULL DEFAULT 0"

_TABLES = (
    """CREATE TABLE store (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1), mark TEXT NOT NULL, identity TEXT NOT NULL,
        adopted_ms INTEGER, snapshot_timestamp_ms INTEGER, snapshot_write_pointer INTEGER)""",
    """CREATE TABLE anchor (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        wall_ms INTEGER NOT NULL, running_ms INTEGER NOT NULL, boot_id TEXT NOT NULL)""",
    f"""CREATE TABLE frontiers (
        namespace TEXT NOT NULL, topic TEXT NOT NULL, generation INTEGER NOT NULL, cutoff_ms INTEGER NOT NULL,
        at_wall_ms INTEGER NOT NULL, at_running_ms INTEGER NOT NULL, at_boot_id TEXT NOT NULL,
        first_seen_ms INTEGER NOT NULL,
        pending_generation INTEGER, pending_ttl_seconds INTEGER,
        pending_wall_ms INTEGER, pending_running_ms INTEGER, pending_boot_id TEXT,
        approved_generation INTEGER, approved_ttl_seconds INTEGER, {_CONSUMED},
        PRIMARY KEY (namespace, topic)) WITHOUT ROWID""",
    """CREATE TABLE open_ids (
        pointer INTEGER PRIMARY KEY, first_seen_ms INTEGER NOT NULL, scanned_ms INTEGER, closed_ms INTEGER)""",
    """CREATE TABLE runs (
        id TEXT PRIMARY KEY, mode TEXT NOT NULL, started_ms INTEGER NOT NULL, finished_ms INTEGER,
        result TEXT NOT NULL, report TEXT NOT NULL, heartbeat_ms INTEGER)""",
    "CREATE INDEX runs_by_start ON runs (started_ms)",
    """CREATE TABLE evidence (
        start BLOB PRIMARY KEY, stop BLOB, snapshot_timestamp_ms INTEGER NOT NULL, bound INTEGER NOT NULL,
        started_ms INTEGER NOT NULL, run_id TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE claim (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
        bound INTEGER NOT NULL, made_ms INTEGER NOT NULL, run_id TEXT NOT NULL)""",
    """CREATE TABLE thorough (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1), completed_ms INTEGER NOT NULL)""",
    """CREATE TABLE created (
        only_row INTEGER PRIMARY KEY CHECK (only_row = 1), created_ms INTEGER NOT NULL)""",
    "CREATE TABLE pauses (pattern TEXT PRIMARY KEY, since_ms INTEGER NOT NULL) WITHOUT ROWID",
    """CREATE TABLE strikes (
        namespace TEXT NOT NULL, topic TEXT NOT NULL, count INTEGER NOT NULL, last_ms INTEGER NOT NULL,
        error TEXT NOT NULL, quarantined_ms INTEGER, probe_ms INTEGER,
        PRIMARY KEY (namespace, topic)) WITHOUT ROWID""",
    "CREATE TABLE lease (only_row INTEGER PRIMARY KEY CHECK (only_row = 1), value BLOB NOT NULL)",
    """CREATE TABLE ledger (
        number INTEGER PRIMARY KEY, run_id TEXT NOT NULL, at_ms INTEGER NOT NULL,
        namespace TEXT NOT NULL, topic TEXT NOT NULL, generation INTEGER NOT NULL,
        data_table TEXT NOT NULL, rule TEXT NOT NULL, start BLOB NOT NULL, stop BLOB NOT NULL,
        row_count INTEGER, oldest_ms INTEGER, newest_ms INTEGER,
        metadata_generation INTEGER NOT NULL, ttl_seconds INTEGER NOT NULL, cutoff_ms INTEGER NOT NULL,
        snapshot_timestamp_ms INTEGER)""",
    "CREATE INDEX ledger_by_topic ON ledger (namespace, topic, number)",
    "CREATE INDEX ledger_by_run ON ledger (run_id)",
    "CREATE INDEX ledger_by_time ON ledger (at_ms)",
    """CREATE TABLE counters (
        name TEXT NOT NULL, labels TEXT NOT NULL, value REAL NOT NULL,
        PRIMARY KEY (name, labels)) WITHOUT ROWID""",
    """CREATE TABLE counts (
        namespace TEXT NOT NULL, topic TEXT NOT NULL, messages INTEGER NOT NULL, size_bytes INTEGER NOT NULL,
        oldest_ms INTEGER, newest_ms INTEGER, counted_ms INTEGER NOT NULL,
        PRIMARY KEY (namespace, topic)) WITHOUT ROWID""",
    "CREATE TABLE notes (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    # The open ids are few, and asked for every minute; the closed ones may be a million.
    "CREATE INDEX open_ids_not_closed ON open_ids (pointer) WHERE closed_ms IS NULL",
)


def is_behind(connection: sqlite3.Connection, where: str) -> bool:
    """Whether the open file has no tables yet, or those of the layout before; else it has those of this one.

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
    if number not in (0, _WITHOUT_CONSUMED, SCHEMA_VERSION):
        raise StateError(
            f"{where} has layout {number}, which no released janitor wrote (this one knows {SCHEMA_VERSION}).",
            f"Move the folder away: {LOSS}",
        )
    return bool(number < SCHEMA_VERSION)


def make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Make the tables, or bring them up to date, if they are still behind; call it inside a transaction."""
    if not is_behind(connection, where):
        return
    (number,) = connection.execute("PRAGMA user_version").fetchone()
    for statement in (f"ALTER TABLE frontiers ADD COLUMN {_CONSUMED}",) if number else _TABLES:
        connection.execute(statement)
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
