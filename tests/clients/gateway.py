"""Tests third-party clients and servers with the gateway between them, over HTTP and standard
streams.

    python3 tests/clients/gateway.py --toolgate target/debug/toolgate

One configuration has six servers. One of them is also reached over streamable HTTP and over the
earlier SSE transport. Each client makes the same calls: some succeed, the gate denies some, and the
server rejects some. All clients must read the same results, and each must use its known revision.
Afterwards the ledger must be valid and have one row for each call, and no process may be left.

Clients and servers are installed from npm and PyPI into target/clients. If that fails, the script
prints SKIPPED with the reason and exits with 0. With TOOLGATE_REQUIRE_CLIENTS=1 it tries three
times, and fails. It exits with 1 if anything is wrong.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True

from common import TRIES, Failed, Skipped, expect, finish, short, skip
from conformance_client import NEW, OLD
from place import INSTALL_SECONDS, Place, Server, install, install_node, install_npm, limit, run_all
from scripts import EARLIER_PYTHON, FASTMCP, PYTHON, STRICT, TYPESCRIPT

NPM = [
    "@modelcontextprotocol/inspector@0.15.0",
    "@modelcontextprotocol/sdk@1.32.2",
    "@modelcontextprotocol/server-everything@2026.8.31",
    "@modelcontextprotocol/server-filesystem@2026.8.31",
]
PIP = ["mcp==2.3.0", "fastmcp==4.1.2", "mcp-server-git==2026.10.19", "mcp-server-time==2026.10.19"]
EARLIER_PIP = ["mcp==1.30.0", "mcp-server-sqlite==2025.4.25"]
CLIENT_SECONDS, COMMAND_SECONDS, READY_SECONDS, GONE_SECONDS = 90, 20, 60, 20

REASON = "Do not read secret files; ask the owner."
# Streams end after a second. Clients that support it reconnect.
CONFIG = """
store = {store}

[gateway]
stream_timeout = "1s"

[upstreams.everything]
command = {node}
args = [{everything}, "stdio"]
undeclared = "open"

[upstreams.streamed]
url = {streamed}
undeclared = "open"

[upstreams.evented]
url = {evented}
transport = "sse"
undeclared = "open"

[upstreams.files]
command = {node}
args = [{filesystem}, {files}]
undeclared = "deny"

[upstreams.git]
command = {git_server}
args = ["--repository", {repository}]
undeclared = "open"

[upstreams.time]
command = {time_server}
args = ["--local-timezone", "UTC"]
undeclared = "open"

[upstreams.sqlite]
command = {sqlite_server}
args = ["--db-path", {database}]
undeclared = "open"

[upstreams.strict]
command = {node}
args = [{strict}]
undeclared = "open"

[tools.time_gone]
kind = "mcp"
upstream = "time"
tool = "gone"
effect = "read"

[tools.files_read_text_file]
kind = "mcp"
upstream = "files"
effect = "read"

[[policy]]
name = "no_secrets"
rule = "deny"
tools = ["files_read_text_file"]
where = [{{ argument = "/path", glob = "*secret*" }}]
category = "PERMISSION"
reason = {reason}
"""
STDIO = "stdio"  # placeholder for sessions without a name
OFFERED = {"everything": 16, "streamed": 16, "evented": 16, "files": 1, "git": 12, "time": 3, "sqlite": 6, "strict": 1}


# ---- the calls ----------------------------------------------------------------------------------


class Call(NamedTuple):
    """A call, and its expected result."""

    title: str
    tool: str
    arguments: dict
    text: str  # text that the model must read
    refused: tuple = None  # category and code of the error
    decision: str = "succeeded"  # in the ledger
    again: bool = False  # whether the call may be retried


def calls(world, table, streams):
    """Returns the calls of a client, with its own database table.

    With streams, one call outlasts a stream.
    """
    read, files, repository = "files_read_text_file", world.files, {"repo_path": str(world.repository)}
    unknown, invalid = ("VALIDATION", "unknown_tool"), ("VALIDATION", "invalid_arguments")
    denied, failed = ("PERMISSION", "no_secrets"), ("BUSINESS", "tool_failed")
    unread, away = ("VALIDATION", "upstream_invalid"), ("TRANSIENT", "upstream_unavailable")
    return [
        Call("everything: echo", "everything_echo", {"message": table}, f"Echo: {table}"),
        Call("everything: longer than a stream", "everything_trigger-long-running-operation", {"duration": 7 if streams else 1, "steps": 2}, "completed"),
        Call("over streamable HTTP: echo", "streamed_echo", {"message": table}, f"Echo: {table}"),
        Call("over HTTP with SSE: echo", "evented_echo", {"message": table}, f"Echo: {table}"),
        Call("files: read", read, {"path": str(files / "greeting.txt")}, "good morning"),
        Call("files: refused by the rule", read, {"path": str(files / "secret.txt")}, REASON, denied, "refused"),
        Call("files: refused by the server", read, {"path": str(world.outside)}, "Access denied", failed, "failed"),
        Call("files: not declared", "files_write_file", {"path": str(world.new), "content": "new"}, "no tool", unknown, "refused"),
        Call("git: status", "git_status", repository, "On branch main"),
        Call("git: log", "git_log", repository, "the first one"),
        Call("time: now", "time_get_current_time", {"timezone": "UTC"}, '"timezone": "UTC"'),
        Call("sqlite: create", "sqlite_create_table", {"query": f"CREATE TABLE {table} (word TEXT)"}, "created"),
        Call("sqlite: insert", "sqlite_write_query", {"query": f"INSERT INTO {table} VALUES ('{table} was here')"}, "affected_rows"),
        Call("sqlite: read", "sqlite_read_query", {"query": f"SELECT word FROM {table}"}, f"{table} was here"),
        # The server reports this error in a successful result.
        Call("sqlite: refused by the server", "sqlite_read_query", {"query": f"DROP TABLE {table}"}, "Error: ", failed, "failed"),
        Call("strict: an error of the protocol", "strict_look", {"word": table}, "rejected the request parameters", unread, "failed"),
        Call("time: declared, and not there", "time_gone", {}, "upstream_unavailable", away, "failed", again=True),
        Call("an unknown tool", "missing_tool", {}, "no tool `missing_tool`", unknown, "refused"),
        Call("wrong arguments", "everything_get-sum", {"a": 1}, "requires `b`", invalid, "refused"),
    ]


class NotYet(NamedTuple):
    """A known failure: the clients and calls, a pattern of the problem, and the reason."""

    clients: set
    calls: set
    pattern: str
    reason: str


NOT_YET = []


def find_problem(call, result, has_output_schema):
    """Returns the problem with a result, or None."""
    if "thrown" in result:
        return f"the client raised: {result['thrown']}"
    text, structured = result["text"], result["structured"]
    if call.text not in text:
        return f"the text lacks {call.text!r}: {text}"
    if call.refused is None:
        return f"unexpected error: {text}" if result["isError"] else None
    if result["isError"] is not True:
        return f"not an error: {text}"
    if structured is None and has_output_schema:
        # Structured content must match the output schema of the tool, which an error does not. Then
        # the text has the error.
        with contextlib.suppress(ValueError):
            structured = json.loads(text.splitlines()[-1])
    if structured is None:
        return "no structured content"
    category, code = call.refused
    expected = {"isError": True, "errorCategory": category, "code": code, "isRetryable": call.again}
    actual = {name: structured.get(name) for name in expected}
    return None if actual == expected else f"the error is {actual}, expected {expected}"


# ---- the clients ---------------------------------------------------------------------------------

class Seen(NamedTuple):
    """Observations of a client."""

    revision: str  # the revision, if the client reports it
    tools: dict  # by name, whether the tool has an output schema
    results: list


class Client(NamedTuple):
    """A client, and the function that runs it."""

    name: str
    run: object  # (world, work) -> Seen
    revision: str  # the expected revision, if the client reports it
    mode: str = None


def script(program):
    """Returns a function that runs a script around a third-party library."""

    def run(world, work):
        code, out, err = finish([*program(world), json.dumps(work)], CLIENT_SECONDS, cwd=world.scratch, env=world.environment)
        expect(code == 0 and out.strip(), f"the client exited with {code}: {short(err or out)}")
        return Seen(**json.loads(out.splitlines()[-1]))

    return run


def inspect(world, work):
    """Runs the inspector once for each call. It lists the tools before each call."""
    if "url" in work:
        target = [work["url"]]
    else:
        server = {"command": work["command"][0], "args": work["command"][1:], "env": work["env"]}
        target = ["--config", world.script("mcp.json", json.dumps({"mcpServers": {"toolgate": server}})), "--server", "toolgate"]

    def run_inspector(*arguments):
        command = [world.node, world.inspector, "--cli", *target, *arguments]
        code, out, err = finish(command, CLIENT_SECONDS, cwd=world.scratch, env=world.environment)
        return json.loads(out) if code == 0 else {"thrown": short(err or out)}

    listed = run_inspector("--method", "tools/list")
    expect("tools" in listed, f"tools/list: {listed}")
    tools = {tool["name"]: "outputSchema" in tool for tool in listed["tools"]}
    results = []
    for name, arguments in work["calls"]:
        options = [word for key, value in arguments.items() for word in ("--tool-arg", f"{key}={value}")]
        result = run_inspector("--method", "tools/call", "--tool-name", name, *options)
        if "thrown" not in result:
            text = "\n".join(block["text"] for block in result["content"])
            result = {"isError": result.get("isError", False), "structured": result.get("structuredContent"), "text": text}
        results.append(result)
    return Seen(None, tools, results)


INSPECTOR = Client("Inspector", inspect, None)
CLIENTS = [
    Client("Python SDK 2", script(lambda world: [world.python, world.script("python.py", PYTHON)]), NEW, "auto"),
    Client("Python SDK 2, handshake", script(lambda world: [world.python, world.script("python.py", PYTHON)]), OLD, "legacy"),
    Client("Python SDK 1", script(lambda world: [world.earlier_python, world.script("earlier.py", EARLIER_PYTHON)]), OLD),
    Client("FastMCP", script(lambda world: [world.python, world.script("fast.py", FASTMCP)]), NEW),
    Client("TypeScript SDK", script(lambda world: [world.node, world.script("client.mjs", TYPESCRIPT)]), OLD),
    INSPECTOR,
]


# ---- the world -----------------------------------------------------------------------------------


class World(Place):
    """Six servers, one configuration, and the clients."""

    def __init__(self, scratch, toolgate, node, modules, python, earlier_python):
        super().__init__(scratch, toolgate)
        self.node, self.python, self.earlier_python = node, python, earlier_python
        self.inspector = modules / "@modelcontextprotocol/inspector/cli/build/cli.js"
        self.everything = modules / "@modelcontextprotocol/server-everything/dist/index.js"
        self.ports = {transport: free_port() for transport in ("streamableHttp", "sse")}
        self.files, self.repository, self.outside = scratch / "files", scratch / "repository", scratch / "outside.txt"
        self.store, self.config, self.made = scratch / "ledger.db", scratch / "toolgate.toml", Counter()
        # The inspector restarts itself with the first `node` in the path.
        self.environment["PATH"] = f"{node.parent}:{self.environment['PATH']}"
        (scratch / "node_modules").symlink_to(modules)
        self.files.mkdir()
        (self.files / "greeting.txt").write_text("good morning\n")
        (self.files / "secret.txt").write_text("the sum is 42\n")
        self.new = self.files / "new.txt"
        self.outside.write_text("the sum is 42\n")
        self.git("init", "--quiet", "--initial-branch=main", self.repository)
        author = ["-c", "user.name=Test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
        self.git(*author, "-C", self.repository, "commit", "--quiet", "--allow-empty", "--message", "the first one")
        values = {
            "store": self.store,
            "node": node,
            "everything": self.everything,
            "streamed": f"http://127.0.0.1:{self.ports['streamableHttp']}/mcp",
            "evented": f"http://127.0.0.1:{self.ports['sse']}/sse",
            "filesystem": modules / "@modelcontextprotocol/server-filesystem/dist/index.js",
            "files": self.files,
            "git_server": python.parent / "mcp-server-git",
            "repository": self.repository,
            "time_server": python.parent / "mcp-server-time",
            "sqlite_server": earlier_python.parent / "mcp-server-sqlite",
            "database": scratch / "data.db",
            "strict": self.script("strict.mjs", STRICT),
            "reason": REASON,
        }
        self.config.write_text(CONFIG.format(**{name: json.dumps(str(value)) for name, value in values.items()}))

    def git(self, *arguments):
        code, out, err = finish(["git", *arguments], COMMAND_SECONDS, env=self.environment)
        expect(code == 0, f"git: {short(err or out)}")

    def script(self, name, text):
        path = self.scratch / name
        path.write_text(text)
        return path

    def serve_over_http(self):
        """Starts one of the servers over each of its HTTP transports."""
        servers = []
        for transport, port in self.ports.items():
            environment = {**self.environment, "PORT": str(port)}
            server = Server([self.node, self.everything, transport], self.folder(), environment)
            servers.append(server)
            deadline = time.monotonic() + READY_SECONDS
            while not answers(port):
                is_starting = server.process.poll() is None and time.monotonic() < deadline
                expect(is_starting, f"{transport} did not start to serve: {short(server.out.read_text() + server.err.read_text())}")
                time.sleep(0.05)
        return servers

    def serve(self):
        command = [self.toolgate, "serve", "--config", self.config, "--listen", "127.0.0.1:0", "--patience", f"{READY_SECONDS}s"]
        return self.start(command, r"toolgate serves at (http://\S+)", READY_SECONDS + COMMAND_SECONDS)

    def play(self, client, work, session, table, titles=None):
        """Runs a client, and returns its observations and the problem of each call."""
        chosen = [call for call in calls(self, table, "url" in work) if titles is None or call.title in titles]
        work = {**work, "mode": client.mode, "calls": [(call.tool, call.arguments) for call in chosen]}
        # The ledger has every call, even if the client fails.
        self.made.update((session, call.tool, call.decision) for call in chosen)
        observed = client.run(self, work)
        offered = Counter(name.split("_")[0] for name in observed.tools)
        expect(observed.revision == client.revision, f"the revision is {observed.revision}, expected {client.revision}")
        expect(offered == OFFERED, f"the offered tools are {dict(offered)}, expected {OFFERED}")
        expect(len(observed.results) == len(chosen), f"{len(observed.results)} results for {len(chosen)} calls")
        problems = [(call, find_problem(call, result, observed.tools.get(call.tool))) for call, result in zip(chosen, observed.results)]
        return observed, problems


def report_client(report, client, transport, observed, results):
    """Prints the row of one client."""
    problems, notes, expected_count = [], [], 0
    for call, problem in results:
        known_failure = next((entry for entry in NOT_YET if client in entry.clients and call.title in entry.calls), None)
        if known_failure and problem is None:
            problems.append(f"{call.title}: succeeds now; remove it from NOT_YET")
        elif known_failure and re.search(known_failure.pattern, problem):
            notes.append(f"{call.title}: {known_failure.reason}")
        elif problem is not None:
            problems.append(f"{call.title}: {problem}")
        else:
            expected_count += 1
    report.row(f"{client:26}{transport:8}{observed.revision or '?':12}{len(results):>6}{expected_count:>19}", problems, notes)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def answers(port):
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), COMMAND_SECONDS):
        return True
    return False


def test_all_clients(world, report):
    http_servers = world.serve_over_http()
    gateway = world.serve()
    gateway_groups = {group(number) for number in world.running_processes()}
    stdio = [str(world.toolgate), "serve", "--stdio", "--config", str(world.config), "--patience", f"{READY_SECONDS}s"]
    for number, client in enumerate(CLIENTS):
        # Each client has its own session. The inspector accepts only addresses that end with
        # `/mcp`.
        session = "mcp" if client is INSPECTOR else f"client-{number}"
        # The inspector starts all servers again for each call.
        titles = {"everything: echo", "files: read", "wrong arguments"} if client is INSPECTOR else None
        transports = [
            ("HTTP", session, {"url": f"{gateway.address}/default/{session}"}, None),
            ("stdio", STDIO, {"command": stdio, "env": world.environment}, titles),
        ]
        for transport, session, work, titles in transports:
            try:
                observed, results = world.play(client, work, session, f"{transport.lower()}_{number}", titles)
            except Failed as error:
                report.problem(f"{client.name} over {transport}: {error}")
            else:
                report_client(report, client.name, transport, observed, results)
    left = wait_for_processes(world, gateway_groups)
    report.row(f"{'after the stdio clients':34}{len(left)} processes left", left)
    ledger(world, report)
    code = gateway.stop()
    for server in http_servers:
        server.stop()
    left = wait_for_processes(world, set())
    report.row(f"{'after SIGTERM':34}exit code {code}, {len(left)} processes left", [*left, *([f"exit code {code}"] if code else [])])
    expect(not world.new.exists(), "an undeclared tool ran")


def wait_for_processes(world, allowed_groups):
    """Waits until only processes of these groups are left, and returns the others.

    A server's children are in its group.
    """
    deadline = time.monotonic() + GONE_SECONDS
    while True:
        processes = {number: command for number, command in world.running_processes().items() if group(number) not in allowed_groups}
        if not processes or time.monotonic() > deadline:
            return sorted(processes.values())
        time.sleep(0.1)


def group(number):
    try:
        return os.getpgid(number)
    except ProcessLookupError:
        return None


def ledger(world, report):
    """Checks that the ledger is valid and has one row for each call."""
    rows, names = world.rows(world.store, "--agent", "default"), {session for session, _, _ in world.made}
    recorded = Counter((row["session"] if row["session"] in names else STDIO, row["tool"], row["decision"]) for row in rows)
    problems = [
        f"{' '.join(key)}: {recorded[key]} rows, {world.made[key]} calls"
        for key in sorted(recorded.keys() | world.made.keys())
        if recorded[key] != world.made[key]
    ]
    report.row(f"{'the ledger':34}{len(rows)} rows for {world.made.total()} calls", problems)
    report.row(f"{'`toolgate audit verify`':34}{world.audit(world.store, 'verify').splitlines()[0]}")


def install_python(name, packages, program):
    def commands(cache):
        python = cache / "venv" / "bin" / "python"
        return [[sys.executable, "-m", "venv", cache / "venv"], [python, "-m", "pip", "install", "--quiet", *packages]]

    cache = install(named(name, packages), commands, f"venv/bin/{program}")
    return cache / "venv" / "bin" / "python"


def install_all():
    """Installs Node.js, its modules, and two Python environments."""
    node, inspector = install_node(), "@modelcontextprotocol/inspector/cli/build/cli.js"
    modules = install_npm(named("npm", NPM), inspector, *NPM).parents[len(Path(inspector).parts) - 1]
    python = install_python("python", PIP, "mcp-server-time")
    return node, modules, python, install_python("python", EARLIER_PIP, "mcp-server-sqlite")


def named(name, packages):
    return f"{name}-{hashlib.sha256(' '.join(packages).encode()).hexdigest()[:8]}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toolgate", required=True, type=Path, help="the program to test")
    toolgate = parser.parse_args().toolgate.resolve()
    if not toolgate.is_file():
        sys.exit(f"{toolgate} does not exist; build it first")
    limit(TRIES * 5 * INSTALL_SECONDS)
    try:
        if not shutil.which("git"):
            raise Skipped("git is missing")
        installed = install_all()
    except Skipped as reason:
        return skip("third-party clients and servers", reason)
    head = f"{'client':26}{'over':8}{'revision':12}{'calls':>6}{'as expected':>19}"
    run_all(head, [test_all_clients], lambda scratch: World(scratch, toolgate, *installed))


if __name__ == "__main__":
    main()
