-- The pass of a call that a client runs, sealed, under the client's name for it: whoever settles the call takes it out.
ALTER TABLE claims ADD COLUMN client TEXT;
ALTER TABLE claims ADD COLUMN pass BLOB;
CREATE INDEX claims_by_lease ON claims (lease) WHERE state = 'open';
CREATE INDEX claims_kept ON claims (session, client, call) WHERE pass IS NOT NULL;
