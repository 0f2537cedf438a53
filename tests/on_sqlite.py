"""Runs the tests of the runtime once more, on a database.

What `cargo test --workspace` has built is taken as it is: asked for by itself, the crate would be built anew with other features."""

import json
import os
import subprocess
import sys

# They have nothing to do with a store.
WITHOUT = ["advice::", "broken::", "cel::", "codes::", "difflib::", "fuzzed::", "launder::", "rules::", "schema::", "shell::"]


def main():
    build = ["cargo", "test", "--workspace", "--locked", "--no-run", "--message-format=json"]
    said = subprocess.run(build, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in said.splitlines():
        made = json.loads(line)
        root = made.get("manifest_path", "").removesuffix("Cargo.toml")
        if root.endswith("crates/toolgate/") and made.get("executable") and made["target"]["kind"] == ["test"]:
            skip = [word for name in WITHOUT for word in ("--skip", name)]
            # As `cargo test` would set it.
            own = {"CARGO_MANIFEST_DIR": root.rstrip("/"), "CARGO_PKG_NAME": "toolgate"}
            env = {**os.environ, **own, "TOOLGATE_TEST_STORE": "sqlite"}
            sys.exit(subprocess.run([made["executable"], *skip], cwd=root, env=env).returncode)
    sys.exit("the tests of crates/toolgate were not built")


if __name__ == "__main__":
    main()
