"""A gate that is off is seen to be off.

    python3 tests/clients/canary.py

Builds toolgate so that its policy engine allows everything once a file is there (`--cfg toolgate_broken_on_purpose`; no
other build can), starts the gateway, and switches the gate off. The canary must notice: `/readyz` goes red within two
minutes, and a gateway that is started so does not start at all. It ends with 1 if anything was not as it should be.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILT = ROOT / "target" / "debug" / "toolgate"
# How often the canary is called, and how long what comes of it may take on a busy machine; in seconds.
EVERY, SLACK = 60, 20
CONFIG = """
store = "ledger.db"

[tools.calc]
kind = "builtin"
"""


def status(url):
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def broken(home):
    """Builds the program whose gate can be switched off, and puts it into `home`.

    Only this workspace's own crates are compiled with the flag; all others are the ones that are there already. The program
    that lies in the target directory afterwards is the sound one again."""
    wrapper = ROOT / "target" / "rustc-broken" # always the same place, or each run would compile anew
    wrapper.write_text('#!/bin/sh\nexec "$@" --cfg toolgate_broken_on_purpose\n')
    wrapper.chmod(0o755)
    # With an example, so that the others are those which the tests have: asked for without, they would have other features.
    build = ["cargo", "build", "--quiet", "--locked", "--workspace", "--bin", "toolgate", "--example", "fixture"]
    try:
        subprocess.run(build, cwd=ROOT, env={**os.environ, "RUSTC_WORKSPACE_WRAPPER": str(wrapper)}, check=True)
        return Path(shutil.copy2(BUILT, home / "toolgate"))
    finally:
        subprocess.run(build, cwd=ROOT, check=True)


def main():
    with tempfile.TemporaryDirectory() as home:
        home = Path(home)
        program = broken(home)
        (home / "toolgate.toml").write_text(CONFIG)
        off = home / "off"
        environment = {**os.environ, "TOOLGATE_STATE": str(home / "state"), "TOOLGATE_OFF": str(off)}
        serve = [str(program), "serve", "--config", str(home / "toolgate.toml"), "--listen", "127.0.0.1:0"]
        gateway = subprocess.Popen(serve, env=environment, stdout=subprocess.PIPE, text=True)
        try:
            url = re.search(r"http://[^/ ]+", gateway.stdout.readline()).group()
            problems = []
            if status(f"{url}/readyz")[0] != 200:
                problems.append("the gate is on, and /readyz is not green")
            off.touch()
            begun = time.monotonic()
            while (seen := status(f"{url}/readyz"))[0] == 200 and time.monotonic() - begun < 121:
                time.sleep(1)
            took = time.monotonic() - begun
            if seen[0] != 503 or "went through" not in seen[1]:
                problems.append(f"the gate is off, and after {took:.0f} s /readyz says {seen}")
            elif took > EVERY + SLACK:
                problems.append(f"the canary is called every {EVERY} s, and it took {took:.0f} s until it was seen")
            else:
                print(f"ok      the gate was switched off, and /readyz was red after {took:.0f} s: {seen[1].strip()}")
        finally:
            gateway.send_signal(signal.SIGTERM)
            gateway.wait(20)
        started = subprocess.run(serve, env=environment, capture_output=True, text=True, timeout=30)
        if started.returncode != 2 or "the gate does not hold" not in started.stderr:
            problems.append(f"a gateway that does not hold was started: {started.returncode} {started.stderr}")
        else:
            print("ok      a gateway whose gate is off does not start")
    for problem in problems:
        print(f"WRONG   {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
