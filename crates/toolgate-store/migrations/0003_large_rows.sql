-- Tables with large rows get an integer key, and an index holds their old key. Before, a lookup in
-- these `WITHOUT ROWID` tables read the large rows along its way.
CREATE TABLE configs_by_number (id INTEGER PRIMARY KEY, digest BLOB NOT NULL UNIQUE, body TEXT NOT NULL) STRICT;
INSERT INTO configs_by_number (digest, body) SELECT digest, body FROM configs;
DROP TABLE configs;
ALTER TABLE configs_by_number RENAME TO configs;

CREATE TABLE claims_by_number (
    id      INTEGER PRIMARY KEY,
    call    BLOB    NOT NULL UNIQUE,
    session INTEGER NOT NULL,
    state   TEXT    NOT NULL CHECK (state IN ('open', 'pending', 'settled')),
    owner   TEXT    NOT NULL,
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
INSERT INTO claims_by_number (call, session, state, owner, lease, effect, intent, charges, used, draft, outcome, ended, client, pass)
    SELECT call, session, state, owner, lease, effect, intent, charges, used, draft, outcome, ended, client, pass FROM claims ORDER BY call;
DROP TABLE claims;
ALTER TABLE claims_by_number RENAME TO claims;
CREATE INDEX claims_unsettled ON claims (state, lease) WHERE state <> 'settled';
CREATE INDEX claims_kept ON claims (session, client, call) WHERE pass IS NOT NULL;
