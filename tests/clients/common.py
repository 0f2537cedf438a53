"""Shared parts of the tests with third-party programs: errors, and running a program to its end."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# If this is set and not 0, a test that cannot run counts as failed.
REQUIRED = os.environ.get("TOOLGATE_REQUIRE_CLIENTS", "") not in ("", "0")
TRIES, PAUSE_SECONDS = 3, 20


class Failed(Exception):
    """A check failed. The text says what was observed."""


class Skipped(Exception):
    """The test cannot be run here."""


def skip(what, reason):
    """Reports that a test cannot run here. Exits with 1 if the test is required."""
    if REQUIRED:
        sys.exit(f"FAILED  cannot test {what}: {reason}")
    print(f"SKIPPED: {what}: {reason}", flush=True)


def install_with_retries(install):
    """Returns the result of an installation. A required installation is retried after a pause."""
    for attempts_left in reversed(range(TRIES if REQUIRED else 1)):
        try:
            return install()
        except Skipped as reason:
            if not attempts_left:
                raise
            print(f"retrying in {PAUSE_SECONDS} s: {reason}", flush=True)
            time.sleep(PAUSE_SECONDS)


def expect(condition, message):
    if not condition:
        raise Failed(message)


def short(text):
    """Joins a text to one line, and shortens the middle of a long one."""
    line = " ".join(text.split())
    return line if len(line) <= 600 else f"{line[:300]} … {line[-300:]}"


def finish(command, seconds, **options):
    """Runs a program to its end, and returns its exit code and output.

    Kills its process group afterwards.
    """
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
