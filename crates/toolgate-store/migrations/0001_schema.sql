-- Version 1 of the schema. Every store has the same version numbers.
--
-- Times are nanoseconds since 1970, windows are nanoseconds (-1: none), amounts are exact decimals.

CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT, WITHOUT ROWID;

-- The ledger. `body` is the canonical JSON of the row; the other columns are for searches.
CREATE TABLE ledger (
    seq      INTEGER PRIMARY KEY,
    session  INTEGER NOT NULL,
    n        INTEGER NOT NULL,
    call     BLOB    NOT NULL,
    at       INTEGER NOT NULL,
    tool     TEXT    NOT NULL,
    decision TEXT    NOT NULL,
    gate     TEXT    NOT NULL,
    code     TEXT,
    rule     TEXT,
    hash     BLOB    NOT NULL,
    chain    BLOB    NOT NULL,
    body     TEXT    NOT NULL
) STRICT;
CREATE UNIQUE INDEX ledger_by_session ON ledger (session, n);
CREATE UNIQUE INDEX ledger_by_call    ON ledger (call);
CREATE INDEX        ledger_by_time    ON ledger (at);
CREATE INDEX        ledger_by_tool    ON ledger (tool, seq);

CREATE TABLE entities (
    name  TEXT    NOT NULL,
    value TEXT    NOT NULL,
    seq   INTEGER NOT NULL,
    PRIMARY KEY (name, value, seq)
) STRICT, WITHOUT ROWID;

-- Tables with large rows have an integer key. A lookup in a `WITHOUT ROWID` table would read the
-- large rows along its way.
CREATE TABLE configs (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;

CREATE TABLE checkpoints (seq INTEGER NOT NULL, body TEXT NOT NULL, key TEXT NOT NULL, signature TEXT NOT NULL) STRICT;
CREATE TABLE prunes      (seq INTEGER PRIMARY KEY, body TEXT NOT NULL, key TEXT NOT NULL, signature TEXT NOT NULL) STRICT;

-- Sessions with the head of their chain. Rows up to `pruned` are gone; `anchor` is the head there.
CREATE TABLE sessions (
    id        INTEGER PRIMARY KEY,
    agent     TEXT    NOT NULL,
    principal TEXT    NOT NULL,
    session   TEXT    NOT NULL,
    version   INTEGER NOT NULL DEFAULT 0,
    stamp     INTEGER NOT NULL DEFAULT 0,
    opened    INTEGER,
    progress  TEXT,
    memory    TEXT,
    revokes   INTEGER NOT NULL DEFAULT 0,
    rows      INTEGER NOT NULL DEFAULT 0,
    head      BLOB    NOT NULL,
    pruned    INTEGER NOT NULL DEFAULT 0,
    anchor    BLOB,
    UNIQUE (session, principal, agent)
) STRICT;

CREATE TABLE slices      (session INTEGER, name TEXT, value TEXT NOT NULL, PRIMARY KEY (session, name)) STRICT, WITHOUT ROWID;
CREATE TABLE marks       (session INTEGER, name TEXT, value TEXT NOT NULL, PRIMARY KEY (session, name)) STRICT, WITHOUT ROWID;
CREATE TABLE logs        (session INTEGER, name TEXT, n INTEGER, entry TEXT NOT NULL, PRIMARY KEY (session, name, n)) STRICT, WITHOUT ROWID;
CREATE TABLE evidence    (session INTEGER, key TEXT, proof TEXT NOT NULL, PRIMARY KEY (session, key)) STRICT, WITHOUT ROWID;
CREATE TABLE revocations (session INTEGER, key TEXT, stamp INTEGER NOT NULL, PRIMARY KEY (session, key)) STRICT, WITHOUT ROWID;
-- Items that the store keeps in order, encrypted.
CREATE TABLE items       (session INTEGER, n INTEGER, body BLOB NOT NULL, PRIMARY KEY (session, n)) STRICT, WITHOUT ROWID;

-- Provenance of values: fingerprints only.
CREATE TABLE untrusted (session INTEGER, print INTEGER, whole INTEGER NOT NULL, PRIMARY KEY (session, print)) STRICT, WITHOUT ROWID;
CREATE TABLE written   (session INTEGER, print INTEGER, PRIMARY KEY (session, print)) STRICT, WITHOUT ROWID;
CREATE TABLE trusted   (session INTEGER, print BLOB, sources TEXT NOT NULL, PRIMARY KEY (session, print)) STRICT, WITHOUT ROWID;
CREATE TABLE carriers  (carrier TEXT PRIMARY KEY, untrusted INTEGER NOT NULL) STRICT, WITHOUT ROWID;

-- Limits. The next write to a counter subtracts expired charges from the total.
CREATE TABLE counters (counter TEXT, win INTEGER, total TEXT NOT NULL, PRIMARY KEY (counter, win)) STRICT, WITHOUT ROWID;
CREATE TABLE charges  (counter TEXT, win INTEGER, at INTEGER, call BLOB, n INTEGER, amount TEXT NOT NULL,
                       PRIMARY KEY (counter, win, at, call, n)) STRICT, WITHOUT ROWID;

-- Claims, durable before the effect. `term` identifies the owning process; without one, the session
-- of a client owns the claim. If the owner dies, `draft` becomes the row. `outcome` is encrypted, and
-- so is `pass`: the state of a deferred call, by the client's name for the call.
CREATE TABLE claims (
    id      INTEGER PRIMARY KEY,
    call    BLOB    NOT NULL UNIQUE,
    session INTEGER NOT NULL,
    state   TEXT    NOT NULL CHECK (state IN ('open', 'pending', 'settled')),
    term    TEXT,
    lease   INTEGER NOT NULL,
    effect  INTEGER NOT NULL,
    intent  TEXT    NOT NULL,
    charges TEXT    NOT NULL,
    used    TEXT    NOT NULL,
    draft   TEXT,
    outcome BLOB,
    ended   INTEGER,
    client  TEXT,
    pass    BLOB
) STRICT;
CREATE INDEX claims_unsettled ON claims (state, lease) WHERE state <> 'settled';
CREATE INDEX claims_kept      ON claims (session, client, call) WHERE pass IS NOT NULL;
CREATE TABLE recalls (principal TEXT, agent TEXT, tool TEXT, key TEXT, asked BLOB NOT NULL, call BLOB NOT NULL,
                      PRIMARY KEY (principal, agent, tool, key)) STRICT, WITHOUT ROWID;

-- Claims that the claiming process settles itself. Each call inserts and deletes one row, so there
-- is no index: `id` is derived from the call id. Any other claim moves to `claims`.
CREATE TABLE under_way (
    id        INTEGER PRIMARY KEY,
    call      BLOB    NOT NULL,
    agent     TEXT    NOT NULL,
    principal TEXT    NOT NULL,
    session   TEXT    NOT NULL,
    tool      TEXT    NOT NULL,
    digest    BLOB    NOT NULL,
    asked     BLOB    NOT NULL,
    term      TEXT    NOT NULL,
    lease     INTEGER NOT NULL,
    revokes   TEXT,
    charges   TEXT    NOT NULL,
    draft     TEXT
) STRICT;

CREATE TABLE approvals (
    n         INTEGER PRIMARY KEY,
    id        TEXT    NOT NULL UNIQUE,
    session   INTEGER NOT NULL,
    digest    BLOB    NOT NULL,
    expires   INTEGER NOT NULL,
    body      TEXT    NOT NULL,
    arguments BLOB    NOT NULL
) STRICT;
CREATE INDEX approvals_by_call ON approvals (session, digest, n);

CREATE TABLE outputs (session INTEGER, handle TEXT, at INTEGER NOT NULL, text BLOB NOT NULL, PRIMARY KEY (session, handle)) STRICT, WITHOUT ROWID;
CREATE TABLE paused  (target TEXT PRIMARY KEY, reason TEXT NOT NULL) STRICT, WITHOUT ROWID;
