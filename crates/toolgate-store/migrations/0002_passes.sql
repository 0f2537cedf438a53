-- The encrypted state of a deferred call, by the client's name for the call. Settling removes it.
ALTER TABLE claims ADD COLUMN client TEXT;
ALTER TABLE claims ADD COLUMN pass BLOB;
CREATE INDEX claims_by_lease ON claims (lease) WHERE state = 'open';
CREATE INDEX claims_kept ON claims (session, client, call) WHERE pass IS NOT NULL;
