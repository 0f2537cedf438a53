"""What the tests with programs of other people have in common: how they fail, and how a program is run to its end."""

import contextlib
import os
import signal
import subprocess
from pathlib import Path


class Failed(Exception):
    """Something was not as it should be; the text says what was seen."""


class Skipped(Exception):
    """The test cannot be run here."""


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
