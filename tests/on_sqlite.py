"""Runs the tests of the runtime again, on an SQLite store.

Uses the build of `cargo test --workspace`. Building the crate alone would rebuild it with other
features.
"""

import json
import os
import subprocess
import sys

# Tests that do not use a store.
WITHOUT = ["advice::", "broken::", "cel::", "codes::", "difflib::", "fuzzed::", "launder::", "rules::", "schema::", "shell::"]


def main():
    build = ["cargo", "test", "--workspace", "--locked", "--no-run", "--message-format=json"]
    said = subprocess.run(build, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in said.splitlines():
        made = json.loads(line)
        root = made.get("manifest_path", "").removesuffix("Cargo.toml")
        if root.endswith("crates/toolgate/") and made.get("executable") and made["target"]["kind"] == ["test"]:
            skip = [word for name in WITHOUT for word in ("--skip", name)]
            # `cargo test` sets these variables.
            own = {"CARGO_MANIFEST_DIR": root.rstrip("/"), "CARGO_PKG_NAME": "toolgate"}
            env = {**os.environ, **own, "TOOLGATE_TEST_STORE": "sqlite"}
            sys.exit(subprocess.run([made["executable"], *skip], cwd=root, env=env).returncode)
    sys.exit("the tests of crates/toolgate were not built")


if __name__ == "__main__":
    main()
