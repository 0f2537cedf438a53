"""Tests the real Claude Code command-line client with toolgate's hooks.

    python3 tests/clients/claude_code.py --toolgate target/debug/toolgate

The client is installed from npm into target/clients. It runs headless in a network namespace that
has only a loopback interface, with a dummy key and a new home directory. Its model is the scripted
one of model.py. The hooks are those that `toolgate init --for claude-code` writes.

If the client cannot be installed or a namespace cannot be created, the script prints SKIPPED with
the reason and exits with 0. With TOOLGATE_REQUIRE_CLIENTS=1 it tries the installation three times,
and fails. It exits with 1 if anything is wrong.
"""

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

sys.dont_write_bytecode = True

from common import Failed, Skipped, expect, finish, install_with_retries, short, skip
from model import Model, Tool

VERSION = "2.1.325"  # the first with `onFailure` is 2.1.295
INSTALL_SECONDS, CLIENT_SECONDS, COMMAND_SECONDS, ALL_SECONDS = 300, 120, 20, 900

ROOT = Path(__file__).resolve().parents[2]
ISOLATION = ["--net", "--pid", "--fork", "--kill-child", "--mount-proc"]

REASON = "Do not remove files in this project; move them to trash/ instead."
CONFIG = """
store = "ledger.db"

[tools.bash]
kind = "client"
shell = "/command"

[tools.read]
kind = "client"
effect = "read"

[tools.write]
kind = "client"
policy = "open"

[[policy]]
name = "no_removal"
rule = "deny"
tools = ["bash"]
where = [{{ argument = "/command", runs = ["rm"] }}]
category = "PERMISSION"
reason = "{reason}"

[[hooks]]
name = "house_rules"
tools = "bash"
command = "{python}"
args = ["{program}"]
when = "both"
"""

# A hook of the operator that rewrites one command and normalises one output.
HOUSE_RULES = '''
import json, sys

event = json.load(sys.stdin)
command = event["tool_input"].get("command")
answer = {}
if event["hook_event_name"] == "PreToolUse" and command == "touch original.txt":
    answer = {"updatedInput": {**event["tool_input"], "command": "touch rewritten.txt"}}
if event["hook_event_name"] == "PostToolUse" and command == "cat card.txt":
    answer = {"updatedResult": {**event["tool_result"], "stdout": "card ending in 1111"}}
json.dump(answer, sys.stdout)
'''


class Unusable(Failed):
    """A failure that prevents all later scenarios."""


class World:
    """A home directory, a project in it, and the client."""

    def __init__(self, scratch, client, toolgate):
        self.home, self.project, self.client = scratch / "home", scratch / "home" / "project", client
        self.toolgate = scratch / "bin" / "toolgate"
        for folder in (self.project, scratch / "bin", scratch / "tmp"):
            folder.mkdir(parents=True)
        # Both programs in one directory, as installed: `init` registers `toolgate-hook`.
        for name in ("toolgate", "toolgate-hook"):
            shutil.copy(Path(toolgate).with_name(name), self.toolgate.with_name(name))
        self.environment = {
            "PATH": f"{self.toolgate.parent}:{os.environ.get('PATH', os.defpath)}",
            "HOME": str(self.home),
            "TMPDIR": str(scratch / "tmp"),
            "CLAUDE_CODE_TMPDIR": str(scratch / "tmp"),
            "LANG": "C.UTF-8",
            "ANTHROPIC_API_KEY": "dummy",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        }
        program = scratch / "house_rules.py"
        program.write_text(HOUSE_RULES)
        self.config = CONFIG.format(reason=REASON, python=sys.executable, program=program)
        self.write("greeting.txt", "good morning\n")
        self.write("card.txt", "card 4111-1111-1111-1111\n")
        self.write("keep.txt", "keep me\n")

    def write(self, name, text):
        (self.project / name).write_text(text)

    def has(self, name):
        return (self.project / name).exists()

    def command(self, *arguments):
        """Runs toolgate in the project, which must succeed."""
        code, out, err = finish([self.toolgate, *arguments], COMMAND_SECONDS, cwd=self.project, env=self.environment)
        if code != 0:
            raise Unusable(f"`toolgate {' '.join(arguments)}` exited with {code}: {short(err or out)}")

    def play(self, *turns):
        """Runs the client with these turns of the model, and returns the results that the model
        read.
        """
        with Model([*turns, "done"]) as model:
            arguments = ["-p", "go", "--output-format", "json", "--allowedTools", "Bash", "Read", "Write"]
            environment = {**self.environment, "ANTHROPIC_BASE_URL": model.url}
            code, out, err = finish([self.client, *arguments], CLIENT_SECONDS, cwd=self.project, env=environment)
            results = model.results()
        expect(code == 0, f"the client exited with {code}: {short(err or out)}")
        expect(len(results) == len(turns), f"{len(results)} results for {len(turns)} calls: {results}")
        return results


def without_hooks_the_forbidden_call_runs(world):
    """Shows that the denials below are from toolgate and not from the client."""
    world.write("control.txt", "")
    [result] = world.play(Tool("Bash", {"command": "rm control.txt"}))
    expect(not result.is_error and not world.has("control.txt"), f"the model read: {result.text}")


def init_writes_working_hooks(world):
    world.write("toolgate.toml", world.config)
    world.command("init", "--for", "claude-code")
    world.command("trust")
    found = {}
    for folder, name in ((world.project, "settings.json"), (world.project, "settings.local.json"), (world.home, "settings.json")):
        path = folder / ".claude" / name
        if path.exists():
            for event, groups in json.loads(path.read_text()).get("hooks", {}).items():
                found.setdefault(event, []).extend(hook for group in groups for hook in group["hooks"])
    for event in ("SessionStart", "PreToolUse", "PostToolUse", "PostToolUseFailure", "SessionEnd"):
        expect(len(found.get(event, [])) == 1, f"{event} has {len(found.get(event, []))} hooks")
        [hook] = found[event]
        expect(hook.get("type") == "command" and os.path.isabs(hook.get("command", "")), f"{event}: {hook}")
        expect(isinstance(hook.get("args"), list), f"{event} uses a shell: {hook}")
        expect(isinstance(hook.get("timeout", 1), (int, float)), f"{event}: {hook}")
    expect(found["PreToolUse"][0].get("onFailure") == "block", f"PreToolUse fails open: {found['PreToolUse'][0]}")


def a_forbidden_call_is_refused_and_the_model_reads_why(world):
    [result] = world.play(Tool("Bash", {"command": "rm keep.txt", "description": "Remove a file"}))
    expect(world.has("keep.txt"), "the denied command ran")
    expect(result.is_error and REASON in result.text, f"the model read: {result.text}")


def an_allowed_call_runs_and_the_model_reads_its_output(world):
    touched, shown = world.play(Tool("Bash", {"command": "touch made.txt"}), Tool("Bash", {"command": "cat greeting.txt"}))
    expect(world.has("made.txt"), f"the command did not run; the model read: {touched.text}")
    expect(not shown.is_error and shown.text == "good morning", f"the model read: {shown.text}")


def a_rewritten_call_is_what_runs(world):
    [result] = world.play(Tool("Bash", {"command": "touch original.txt", "description": "Make a file"}))
    seen = [name for name in ("original.txt", "rewritten.txt") if world.has(name)]
    expect(seen == ["rewritten.txt"], f"made: {seen}; the model read: {result.text}")


def a_normalised_output_is_what_the_model_reads(world):
    [result] = world.play(Tool("Bash", {"command": "cat card.txt"}))
    expect(not result.is_error and result.text == "card ending in 1111", f"the model read: {result.text}")


def doctor_reports_settings_that_the_client_ignores(world):
    """The client silently ignores the whole file if any part of it is malformed, so the gate is
    off.
    """
    path = world.project / ".claude" / "settings.json"
    valid = path.read_text()
    for settings, is_valid in (
        (f"/* ours */\n{valid}", False),
        (valid.replace("{", "{ // ours\n", 1), False),
        (valid.rstrip().removesuffix("}").rstrip() + ",\n}\n", False),
        (valid.replace('"PreToolUse": [', '"PreToolUse": [{"matcher": 7, "hooks": "x"},', 1), False),
        (f"\ufeff{valid}", True),
        (valid, True),
    ):
        path.write_text(settings)
        world.write("aside.txt", "")
        world.play(Tool("Bash", {"command": "rm aside.txt"}))
        code, out, _ = finish([world.toolgate, "doctor"], COMMAND_SECONDS, cwd=world.project, env=world.environment)
        expect((world.has("aside.txt"), code == 0) == (is_valid, is_valid), f"{short(settings[:80])}: doctor exited with {code}: {short(out)}")
    path.write_text(valid)


def without_the_store_every_call_is_refused(world):
    store = world.project / "ledger.db"
    expect(store.exists(), "the store does not exist")
    for end in ("", "-wal", "-shm"):
        Path(f"{store}{end}").unlink(missing_ok=True)
    for result in refused(world, "storeless"):
        expect(re.search("store|ledger", result.text), f"the model read: {result.text}")


def without_toolgate_every_call_is_refused(world):
    world.toolgate.unlink()
    refused(world, "gateless")


def refused(world, name):
    """Makes calls that are normally allowed. None of them may have an effect."""
    results = world.play(
        Tool("Bash", {"command": f"touch {name}.txt"}),
        Tool("Bash", {"command": "cat greeting.txt"}),
        Tool("Read", {"file_path": str(world.project / "greeting.txt")}),
        Tool("Write", {"file_path": str(world.project / f"{name}-written.txt"), "content": ""}),
    )
    made = [path.name for path in world.project.glob(f"{name}*")]
    expect(not made, f"made: {made}")
    for result in results:
        expect(result.is_error and "good morning" not in result.text, f"the model read: {result.text}")
    return results


SCENARIOS = [
    without_hooks_the_forbidden_call_runs,
    init_writes_working_hooks,
    a_forbidden_call_is_refused_and_the_model_reads_why,
    an_allowed_call_runs_and_the_model_reads_its_output,
    a_rewritten_call_is_what_runs,
    a_normalised_output_is_what_the_model_reads,
    doctor_reports_settings_that_the_client_ignores,
    without_the_store_every_call_is_refused,
    without_toolgate_every_call_is_refused,
]


def install():
    """Returns the program of the client, and installs it if necessary."""
    cache = ROOT / "target" / "clients" / f"claude-code-{VERSION}"
    cache.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be installing the client.
    with (cache.parent / f"{cache.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return installed(cache) or install_into(cache)


def install_into(cache):
    if not shutil.which("npm"):
        raise Skipped("npm is missing")
    cache.mkdir(parents=True, exist_ok=True)
    command = ["npm", "install", "--prefix", cache, "--no-audit", "--no-fund", f"@anthropic-ai/claude-code@{VERSION}"]
    try:
        code, out, err = finish(command, INSTALL_SECONDS)
    except Failed as error:
        raise Skipped(f"cannot install the client: {error}") from None
    if code != 0:
        raise Skipped(f"cannot install the client: {short(err or out)}")
    client = installed(cache)
    if not client:
        raise Skipped("the client was installed, but does not start")
    return client


def installed(cache):
    modules = cache / "node_modules"
    for client in [modules / ".bin" / "claude", *modules.glob("@anthropic-ai/claude-code-*/claude")]:
        try:
            code, out, _ = finish([client, "--version"], COMMAND_SECONDS)
        except Failed:
            continue
        if code == 0 and out.startswith(VERSION):
            return client
    return None


def isolation():
    """Returns a command that creates a namespace without network, whose processes end with it."""
    error = "unshare is missing"
    if shutil.which("unshare"):
        for rights in ([], ["--map-root-user"]):
            command = ["unshare", *rights, *ISOLATION]
            code, _, error = finish([*command, "true"], COMMAND_SECONDS)
            if code == 0:
                return command
    raise Skipped(f"cannot create a network namespace: {short(error)}")


def loopback_up():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        set_flags, up = 0x8914, 0x1
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh14x", b"lo", up))


def inside(scratch, client, toolgate):
    """Runs all scenarios in order in the namespace, and returns the number of failures."""
    loopback_up()
    world, failures = World(scratch, client, toolgate), 0
    for number, scenario in enumerate(SCENARIOS, 1):
        title = scenario.__name__.replace("_", " ")
        try:
            scenario(world)
            print(f"ok      {title}", flush=True)
        except Failed as error:
            failures += 1
            print(f"FAILED  {title}: {short(str(error))}", flush=True)
            if isinstance(error, Unusable):
                print(f"        {len(SCENARIOS) - number} scenarios were not run", flush=True)
                break
    return failures


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--toolgate", required=True, type=Path, help="the program to test")
    parser.add_argument("--inside", nargs=2, type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    toolgate = arguments.toolgate.resolve()
    if arguments.inside:
        sys.exit(1 if inside(*arguments.inside, toolgate) else 0)
    if not toolgate.is_file():
        sys.exit(f"{toolgate} does not exist; build it first")
    try:
        client = install_with_retries(install)
    except Skipped as reason:
        return skip("the real Claude Code client", reason)
    try:
        prefix = isolation()
    except Skipped as reason:
        return skip("the real Claude Code client", reason)
    print(f"Claude Code {VERSION}, with a scripted model", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED  stopped by a signal"))
    with tempfile.TemporaryDirectory(prefix="toolgate-client-") as scratch:
        command = [*prefix, sys.executable, __file__, "--toolgate", toolgate, "--inside", scratch, client]
        try:
            sys.exit(subprocess.run(command, stdin=subprocess.DEVNULL, timeout=ALL_SECONDS).returncode)
        except subprocess.TimeoutExpired:
            sys.exit(f"FAILED  all scenarios together took more than {ALL_SECONDS} s")


if __name__ == "__main__":
    main()
