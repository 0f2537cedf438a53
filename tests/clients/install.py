"""Installs the third-party programs that the tests need, before the tests start.

    python3 tests/clients/install.py

A test waits for an installation in progress, and retries a failed one. The test reports the final
result.
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
        for installation in [pool.submit(install) for install in (conformance.install_all, gateway.install_all, claude_code.install)]:
            try:
                installation.result()
            except (Failed, Skipped) as error:
                print(error, flush=True)


if __name__ == "__main__":
    main()
