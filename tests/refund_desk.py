"""Checks one run of the refund desk: the answers to the agent, the ledger, and the payments of the
desk.

    python3 tests/refund_desk.py TOOLGATE LOG LEDGER DESK

Exits with 1 if anything is wrong.
"""

import json
import re
import sqlite3
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

# Each call of `examples/refund-desk/agent.rs`, and its expected result.
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
    """Returns the tool and the result of each call in the printed output."""
    text = re.sub(r"\x1b\[[\d;]*m", "", Path(log).read_text(encoding="utf-8")) # colours may be forced
    found = re.findall(r"^  (\w+) \{.*\}\n  (?:(✓)|✗ (\w+))", text, re.MULTILINE)
    return [(tool, "ok" if ran else code) for tool, ran, code in found]


def recorded(toolgate, ledger):
    query = [toolgate, "audit", "query", "--store", ledger, "--json"]
    output = subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout
    rows = [json.loads(line)["row"] for line in output.splitlines()]
    return [(row["tool"], row["outcome"].get("error", {}).get("code", "ok")) for row in rows]


def main(toolgate, log, ledger, desk):
    books = sqlite3.connect(f"file:{desk}?mode=ro", uri=True)
    paid = books.execute('SELECT "order", customer, amount FROM refunds ORDER BY id').fetchall()
    results = [
        ("the printed results are", printed(log), CALLS),
        ("the ledger rows are", recorded(toolgate, ledger), CALLS),
        ("the payments are", [(order, customer, Decimal(amount)) for order, customer, amount in paid], REFUNDS),
        ("the tickets are", books.execute('SELECT "order", why FROM tickets ORDER BY id').fetchall(), TICKETS),
    ]
    problems = [f"{what} {found}\n  expected {expected}" for what, found, expected in results if found != expected]
    for problem in problems:
        print(f"WRONG   {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
