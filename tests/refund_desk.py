"""What the agent at the refund desk was told, what the ledger says of it, and what the desk has paid, after one run.

    python3 tests/refund_desk.py TOOLGATE LOG LEDGER DESK

It ends with 1 if anything was not as it should be.
"""

import json
import re
import sqlite3
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

# Each call of `examples/refund-desk/agent.rs`, and what becomes of it.
CALLS = [
    ("issue_refund", "not_verified"),
    ("verify_customer", "ok"),
    ("lookup_order", "ok"),
    ("issue_refund", "ok"),
    ("issue_refund", "already_refunded"),
    ("lookup_order", "ok"),
    ("issue_refund", "more_than_paid"),
    ("lookup_order", "ok"),
    ("issue_refund", "not_their_order"),
    ("lookup_order", "ok"),
    ("issue_refund", "refund_cap"),
    ("issue_refund", "approval_required"),
    ("refund_now", "unknown_tool"),
    ("escalate_to_human", "ok"),
]
REFUNDS = [("A-1", "C-1", Decimal(120))]
TICKETS = [("A-3", "the sofa is broken, too")]


def printed(log):
    """Of each call, the line that names it and the line that says what came of it."""
    text = re.sub(r"\x1b\[[\d;]*m", "", Path(log).read_text(encoding="utf-8")) # where colours are forced
    found = re.findall(r"^  (\w+) \{.*\}\n  (?:(✓)|✗ (\w+))", text, re.MULTILINE)
    return [(tool, "ok" if ran else code) for tool, ran, code in found]


def recorded(toolgate, ledger):
    query = [toolgate, "audit", "query", "--store", ledger, "--json"]
    said = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [json.loads(line)["row"] for line in said.splitlines()]
    return [(row["tool"], row["outcome"].get("error", {}).get("code", "ok")) for row in rows]


def main(toolgate, log, ledger, desk):
    books = sqlite3.connect(f"file:{desk}?mode=ro", uri=True)
    paid = books.execute('SELECT "order", customer, amount FROM refunds ORDER BY id').fetchall()
    seen = [
        ("the agent was told", printed(log), CALLS),
        ("the ledger has", recorded(toolgate, ledger), CALLS),
        ("the desk has paid", [(order, customer, Decimal(amount)) for order, customer, amount in paid], REFUNDS),
        ("the desk has tickets", books.execute('SELECT "order", why FROM tickets ORDER BY id').fetchall(), TICKETS),
    ]
    wrong = [f"{what} {found}\n  and not {expected}" for what, found, expected in seen if found != expected]
    for problem in wrong:
        print(f"WRONG   {problem}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
