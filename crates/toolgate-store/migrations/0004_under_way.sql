-- Effects of a process that ends them itself. One comes and goes with each call, so nothing else is kept in order for them: they stand by a
-- number that their names say. What does not end plainly becomes a claim like any other.
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
