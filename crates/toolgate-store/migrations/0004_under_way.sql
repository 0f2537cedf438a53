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
    owner     TEXT    NOT NULL,
    lease     INTEGER NOT NULL,
    revokes   TEXT,
    charges   TEXT    NOT NULL,
    draft     TEXT
) STRICT;
