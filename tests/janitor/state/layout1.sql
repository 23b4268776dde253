-- A state file as layout 1 had it, with something in every table. What a later version makes of it is tested; never change it.
PRAGMA application_id = 1953330026;
PRAGMA user_version = 1;
CREATE TABLE store (only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    mark TEXT NOT NULL,
    identity TEXT NOT NULL,
    adopted_ms INTEGER,
    snapshot_timestamp_ms INTEGER,
    snapshot_write_pointer INTEGER);
CREATE TABLE anchor (only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    wall_ms INTEGER NOT NULL,
    running_ms INTEGER NOT NULL,
    boot_id TEXT NOT NULL);
CREATE TABLE frontiers (namespace TEXT NOT NULL,
    topic TEXT NOT NULL,
    generation INTEGER NOT NULL,
    cutoff_ms INTEGER NOT NULL,
    at_wall_ms INTEGER NOT NULL,
    at_running_ms INTEGER NOT NULL,
    at_boot_id TEXT NOT NULL,
    first_seen_ms INTEGER NOT NULL,
    pending_generation INTEGER,
    pending_ttl_seconds INTEGER,
    pending_wall_ms INTEGER,
    pending_running_ms INTEGER,
    pending_boot_id TEXT,
    approved_generation INTEGER,
    approved_ttl_seconds INTEGER,
    PRIMARY KEY (namespace, topic)) WITHOUT ROWID;
CREATE TABLE open_ids (pointer INTEGER PRIMARY KEY,
    first_seen_ms INTEGER NOT NULL,
    scanned_ms INTEGER,
    closed_ms INTEGER);
CREATE TABLE runs (id TEXT PRIMARY KEY,
    mode TEXT NOT NULL,
    started_ms INTEGER NOT NULL,
    finished_ms INTEGER,
    result TEXT NOT NULL,
    report TEXT NOT NULL);
CREATE INDEX runs_by_start ON runs (started_ms);
CREATE TABLE evidence (start BLOB PRIMARY KEY,
    stop BLOB,
    snapshot_timestamp_ms INTEGER NOT NULL,
    bound INTEGER NOT NULL,
    started_ms INTEGER NOT NULL,
    run_id TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE claim (only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    bound INTEGER NOT NULL,
    made_ms INTEGER NOT NULL,
    run_id TEXT NOT NULL);
CREATE TABLE thorough (only_row INTEGER PRIMARY KEY CHECK (only_row = 1),
    completed_ms INTEGER NOT NULL);
INSERT INTO store VALUES (1, '00112233445566778899aabbccddeeff', 'leveldb:/data/messaging:42', 5, 6, 7);
INSERT INTO anchor VALUES (1, 1000, 10, 'boot');
INSERT INTO frontiers VALUES ('default', 'orders', 1, 500, 1000, 10, 'boot', 400, NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO frontiers VALUES ('default', 'bills', -2, 500, 1000, 10, 'boot', 400, 3, 60, 900, 9, 'boot', 3, 60);
INSERT INTO open_ids VALUES (1699985600000000000, 1, 2, NULL);
INSERT INTO runs VALUES ('1000-0a0b0c0d', 'apply', 1000, 2000, 'done', '{"id": "1000-0a0b0c0d"}');
INSERT INTO runs VALUES ('3000-0a0b0c0d', 'apply', 3000, NULL, '', '');
INSERT INTO evidence VALUES (x'', NULL, 6, 7, 1000, '1000-0a0b0c0d');
INSERT INTO claim VALUES (1, 7, 1000, '1000-0a0b0c0d');
INSERT INTO thorough VALUES (1, 1500);
