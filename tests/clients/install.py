"""Installs what the tests with programs of other people need, so that it is there when they want it.

    python3 tests/clients/install.py

Whoever wants something that is still being installed waits for it. What could not be installed is tried again then, and
it is said there what becomes of that.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

sys.dont_write_bytecode = True

import claude_code
import conformance
import gateway
from common import Failed, Skipped


def main():
    with ThreadPoolExecutor() as pool:
        for made in [pool.submit(install) for install in (conformance.install_all, gateway.install_all, claude_code.install)]:
            try:
                made.result()
            except (Failed, Skipped) as error:
                print(error, flush=True)


if __name__ == "__main__":
    main()
