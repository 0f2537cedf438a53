"""What the tests with programs of other people have in common: how they fail, and how a program is run to its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Where this is set, and not to 0, a test that cannot be run has failed.
REQUIRED = os.environ.get("TOOLGATE_REQUIRE_CLIENTS", "") not in ("", "0")
TRIES, PAUSE_SECONDS = 3, 20


class Failed(Exception):
    """Something was not as it should be; the text says what was seen."""


class Skipped(Exception):
    """The test cannot be run here."""


def skip(what, reason):
    """Says that a test cannot be run here; ends with 1 where it has to be."""
    if REQUIRED:
        sys.exit(f"FAILED  {what} could not be tried: {reason}")
    print(f"SKIPPED: {what}: {reason}", flush=True)


def tried(install):
    """What an installation gives. Where it has to be there, one that fails is tried again after a while."""
    for more in reversed(range(TRIES if REQUIRED else 1)):
        try:
            return install()
        except Skipped as reason:
            if not more:
                raise
            print(f"it is tried again in {PAUSE_SECONDS} s: {reason}", flush=True)
            time.sleep(PAUSE_SECONDS)


def expect(truth, seen):
    if not truth:
        raise Failed(seen)


def short(text):
    """On one line, without its middle where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= 600 else f"{line[:300]} … {line[-300:]}"


def finish(command, seconds, **options):
    """Run a program to its end; its exit code and what it printed. Its process group goes with it."""
    name = Path(command[0]).name
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    try:
        process = subprocess.Popen(command, start_new_session=True, **streams, **options)
    except OSError as error:
        raise Failed(f"{name} did not start: {error}") from error
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        raise Failed(f"{name} took more than {seconds} s") from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return process.returncode, out, err
