"""Runs the tests of the runtime again, on an SQLite store.

Uses the build of `cargo test --workspace`. Building the crate alone would rebuild it with other
features.
"""

import json
import os
import subprocess
import sys

# Tests that do not use a store.
WITHOUT = [
    "cel::", "error_codes_in_spec::", "fuzz_corpus::", "next_step::", "provenance_laundering::",
    "rule_diagnostics::", "rules::", "schema::", "shell::", "suggest_vs_difflib::",
]


def main():
    build = ["cargo", "test", "--workspace", "--locked", "--no-run", "--message-format=json"]
    output = subprocess.run(build, stdout=subprocess.PIPE, text=True, check=True).stdout
    for line in output.splitlines():
        message = json.loads(line)
        root = message.get("manifest_path", "").removesuffix("Cargo.toml")
        if root.endswith("crates/toolgate/") and message.get("executable") and message["target"]["kind"] == ["test"]:
            skip = [word for name in WITHOUT for word in ("--skip", name)]
            # `cargo test` sets these variables.
            cargo_variables = {"CARGO_MANIFEST_DIR": root.rstrip("/"), "CARGO_PKG_NAME": "toolgate"}
            env = {**os.environ, **cargo_variables, "TOOLGATE_TEST_STORE": "sqlite"}
            sys.exit(subprocess.run([message["executable"], *skip], cwd=root, env=env).returncode)
    sys.exit("the tests of crates/toolgate were not built")


if __name__ == "__main__":
    main()
