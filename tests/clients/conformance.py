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
import json
import re
import sys
from collections import Counter
from pathlib import Path
from typing import NamedTuple

sys.dont_write_bytecode = True

from common import TRIES, Skipped, expect, finish, short, skip
from conformance_client import CONFIG, NEW, OLD, as_client
from place import COMMAND_SECONDS, INSTALL_SECONDS, Place, install_node, install_npm, limit, run_all

SUITE, EARLIER_SUITE = "0.2.0-alpha.12", "0.1.16"
SUITE_SECONDS, SCENARIO_SECONDS = 150, 40


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
UNSUPPORTED = re.compile(r"tasks-")

# The suite repeats a call three times. Without `polling`, the gate denies this as a loop.
POLLED = """
[tools.test_input_required_result_elicitation]
kind = "mcp"
upstream = "fix"
effect = "read"
polling = { interval = "0s", max_unchanged = 1000 }
"""


class ServerScenario(NamedTuple):
    """A scenario in which the suite is a server."""

    scenario: str
    revision: str
    floor: int  # checks that succeed


EXPECTED = [
    ServerScenario("initialize", OLD, 1),
    ServerScenario("tools_call", OLD, 2),
    ServerScenario("tools_call", NEW, 2),
    ServerScenario("elicitation-sep1034-client-defaults", OLD, 5),
    ServerScenario("sse-retry", OLD, 3),
    ServerScenario("request-metadata", NEW, 8),
    ServerScenario("sep-2322-client-request-state", NEW, 5),
    ServerScenario("http-standard-headers", NEW, 11),
    ServerScenario("http-custom-headers", NEW, 18),
    ServerScenario("http-invalid-tool-headers", NEW, 12),
    ServerScenario("json-schema-ref-no-deref", NEW, 1),
    ServerScenario("json-schema-2020-12-preservation", OLD, 9),
    ServerScenario("json-schema-2020-12-preservation", NEW, 9),
    ServerScenario("auth/client-credentials-basic", OLD, 9),
    ServerScenario("auth/client-credentials-basic", NEW, 8),
]

# Scenarios that do not apply to the gateway, and why.
PERSON = "a user grants access in a browser; the gateway uses its own identity for upstreams"
KEYS = "tokens are requested or used with a key or another token; the gateway has a client id and a secret"
SKILLS = "an extension that the gateway does not support"
INAPPLICABLE = {
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


def run_suite_as_client(world, report):
    """Runs the suite against the fixture alone, then against the gateway with the fixture behind
    it.
    """
    fixtures, alone = {}, {}
    for title, options, runs in (("fixture alone", [], RUNS), ("older one alone", ["--older"], EARLIER_RUNS)):
        fixtures[title] = world.start([world.fixture, "--listen", "127.0.0.1:0", *options], r"listening at (http://\S+)")
        alone[title] = {run: world.suite(run, fixtures[title].address) for run in runs}
        for run, checks in alone[title].items():
            problems = [f"{key[0]} / {key[1]}{checks.messages_of(key)}" for key, statuses in checks.by_id.items() if statuses["FAILURE"] or statuses["WARNING"]]
            if checks.succeeded < run.floor:
                problems.append(f"{checks.succeeded} checks succeed, expected {run.floor}")
            report.row(line(title, run.title, checks), problems)
    connections = [
        ("gateway, HTTP", "fixture alone", f'url = "{fixtures["fixture alone"].address}"'),
        ("gateway, older HTTP", "older one alone", f'url = "{fixtures["older one alone"].address}"'),
        ("gateway, stdio", "fixture alone", f'command = {json.dumps(str(world.fixture))}\nargs = ["--stdio"]'),
    ]
    for title, fixture_title, settings in connections:
        gateway, store = world.gateway(settings)
        for run, checks_alone in alone[fixture_title].items():
            checks = world.suite(run, gateway.address)
            report.row(line(title, run.title, checks), differences(checks_alone, checks))
        code = gateway.stop()
        if code != 0:
            report.problem(f"{title}: the gateway exited with {code}")
        denied_loops = Counter(row["tool"] for row in world.rows(store, "--code", "loop_detected"))
        if denied_loops:
            report.problem(f"{title}: calls were denied as loops: {dict(denied_loops)}")
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
            found.append(f"{scenario} / {check}: {now['SUCCESS']} of {was['SUCCESS']} succeed{through.messages_of(key)}")
        for status in ("FAILURE", "WARNING"):
            if now[status] > was[status]:
                found.append(f"{scenario} / {check}: {status}{through.messages_of(key)}")
    return found


class Checks:
    """Results of the suite: the count of each status, for each check of each scenario."""

    def __init__(self, folder):
        self.by_id, self.messages, self.scenarios = {}, {}, 0
        for path in sorted(folder.rglob("checks.json")):
            scenario = re.sub(r"^server-|-\d{4}-\d\d-\d\dT[\dZ-]+$", "", path.parent.relative_to(folder).as_posix())
            if UNSUPPORTED.match(scenario):
                continue
            self.scenarios += 1
            for check in json.loads(path.read_text()):
                key = scenario, check["id"]
                self.by_id.setdefault(key, Counter())[check["status"]] += 1
                if check["status"] in ("FAILURE", "WARNING"):
                    message = check.get("errorMessage") or (check.get("details") or {}).get("message") or ""
                    self.messages.setdefault(key, []).append(f"{check['name']}: {message}")
        self.by_id = Default(self.by_id)

    def count(self, status):
        return sum(statuses[status] for statuses in self.by_id.values())

    @property
    def succeeded(self):
        return self.count("SUCCESS")

    def messages_of(self, key):
        return "".join(f"; {short(message)}" for message in self.messages.get(key, []))

    def bad(self):
        return [f"{check}{self.messages_of((scenario, check))}" for scenario, check in self.messages]


class Default(dict):
    """A dictionary in which a check that was not run has no results."""

    def __missing__(self, key):
        return Counter()


# ---- the suite as a server -----------------------------------------------------------------------


def run_suite_as_server(world, report):
    """Runs each scenario in which the suite is a server, with clients of both revisions."""
    report.row(f"{'servers':20}{len(EXPECTED)} scenarios are run, {len(INAPPLICABLE)} do not apply", world.unlisted_scenarios())
    for case in EXPECTED:
        pattern, reason = NOT_YET.get(case.scenario, (None, None))
        for revision in (OLD, NEW):
            checks, problems = world.scenario(case, revision)
            if checks.succeeded < case.floor:
                problems.append(f"{checks.succeeded} checks succeed, expected {case.floor}")
            expected_problems = [problem for problem in problems if pattern and re.search(pattern, problem)]
            if pattern and not problems:
                problems.append("succeeds now; remove it from NOT_YET")
            problems_left = [problem for problem in problems if problem not in expected_problems]
            report.row(line(f"server {case.revision}", f"{case.scenario}, client {revision}", checks), problems_left, [reason] if expected_problems else [])


# ---- installation and start ----------------------------------------------------------------------


class World(Place):
    """The programs under test and the suite."""

    def __init__(self, scratch, toolgate, fixture, node, suites):
        super().__init__(scratch, toolgate)
        self.fixture, self.node, self.suites = self.copy_program(fixture), node, suites

    def gateway(self, connection):
        """Starts a gateway, and returns it with its ledger."""
        folder = self.folder()
        (folder / "toolgate.toml").write_text(CONFIG.format(connection=connection) + POLLED)
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

    def unlisted_scenarios(self):
        """Returns the scenarios of the suite that are neither run nor listed, and the listed ones
        that it does not have.
        """
        code, out, err = finish([self.node, self.suites[SUITE], "list", "--client"], COMMAND_SECONDS, env=self.environment)
        listed = {name: revisions.split(",") for name, revisions in re.findall(r"^ +- (\S+) \[(\S+)\]$", out, re.MULTILINE)}
        expect(code == 0 and listed, f"the suite does not list its scenarios: {short(err or out)}")
        run = {(case.scenario, case.revision) for case in EXPECTED}
        known = {name for name, _ in run} | INAPPLICABLE.keys()
        problems = [f"{name} is not run" for name in listed if name not in known]
        problems += [f"the suite does not have {name}" for name in sorted(known - listed.keys())]
        problems += [f"{name} is run, and listed as not applicable" for name in sorted({name for name, _ in run} & INAPPLICABLE.keys())]
        # A scenario must be run in each of its revisions.
        for name in {name for name, _ in run} & listed.keys():
            problems += [f"{name} is not run in {revision}" for revision in (OLD, NEW) if revision in listed[name] and (name, revision) not in run]
        return problems

    def scenario(self, case, revision):
        """Runs one scenario in which the suite is a server, and returns its checks and problems."""
        folder = self.folder()
        client = [sys.executable, __file__, "--as-client", revision, "--toolgate", str(self.toolgate)]
        expect(not any(re.search(r"[\s'\"$\\]", word) for word in client), f"the suite cannot start this: {client}")
        command = [self.node, self.suites[SUITE], "client", "--command", " ".join(client), "--scenario", case.scenario]
        command += ["--spec-version", case.revision, "--force", "-o", folder]
        code, out, err = finish(command, SCENARIO_SECONDS, cwd=folder, env=self.environment)
        checks = Checks(folder)
        problems = checks.bad()
        for path in folder.rglob("stderr.txt"):
            problems += [line.removeprefix("FAILED  ") for line in path.read_text().splitlines() if line.startswith("FAILED  ")]
        if not problems and (code != 0 or not checks.scenarios):
            problems.append(f"the suite exited with {code}: {short(err or out)}")
        return checks, problems


def install_all():
    """Installs Node.js and the suites, and returns them."""
    node, program = install_node(), "@modelcontextprotocol/conformance/dist/index.js"
    versions = (SUITE, EARLIER_SUITE)
    return node, {version: install_npm(f"conformance-{version}", program, f"@modelcontextprotocol/conformance@{version}") for version in versions}


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
    run_all(head, [run_suite_as_client, run_suite_as_server], lambda scratch: World(scratch, toolgate, fixture, node, suites))


if __name__ == "__main__":
    main()
