"""A hook in Python with the same work: it reads the event and the configuration, checks the command,
and claims the call in a database.
"""

import json
import re
import sqlite3
import sys
import tomllib

event = json.load(sys.stdin)
with open(sys.argv[1], "rb") as file:
    config = tomllib.load(file)
command = event["tool_input"].get("command", "")
for policy in config.get("policy", []):
    for condition in policy.get("where", []):
        for program in condition.get("runs", []):
            if re.search(r"\b" + re.escape(program) + r"\b", command):
                print(json.dumps({"hookSpecificOutput": {"hookEventName": "PreToolUse", "permissionDecision": "deny"}}))
                sys.exit(0)
database = sqlite3.connect(sys.argv[2], isolation_level=None)
database.execute("PRAGMA journal_mode = WAL")
database.execute("PRAGMA synchronous = FULL")
database.execute("CREATE TABLE IF NOT EXISTS claims (session TEXT, id TEXT, event TEXT)")
database.execute("BEGIN IMMEDIATE")
database.execute("INSERT INTO claims VALUES (?, ?, ?)", (event["session_id"], event["tool_use_id"], json.dumps(event)))
database.execute("COMMIT")
print("{}")
