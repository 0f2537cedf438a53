# `make run` shows the main use case, `make test` checks everything, `make help` lists all targets.

.PHONY: run help test test-only test-run test-clients with-claude-code with-others bench soak deny deps

# Builds the same set of packages as the tests. Another set has other features, and would rebuild
# every crate above tokio.
PROGRAMS = cargo build --quiet --locked --workspace --bins --examples

run: ## Build and run the gateway, a refund desk behind it, and a scripted agent
	cargo build --package toolgate-cli --package refund-desk
	rm -rf target/refund-desk
	TOOLGATE_STATE=target/refund-desk/state target/debug/refund-agent target/debug/toolgate examples/refund-desk/toolgate.toml

help: ## Print all targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "%-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: deps ## Install missing tools, then run all checks
	mkdir -p target && python3 tests/clients/install.py > target/install.log 2>&1 & # meanwhile
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- --deny warnings
	$(MAKE) test-only
	python3 tests/on_sqlite.py # the runtime tests again, on SQLite
	RUSTDOCFLAGS="--deny warnings" cargo doc --workspace --no-deps --locked --quiet
	cargo check --workspace --locked --quiet # only with the features that users get
	$(MAKE) test-run
	python3 tests/clients/conformance.py --toolgate target/debug/toolgate --fixture target/debug/examples/fixture

test-only: ## Run the Rust tests and nothing else
	RUST_TEST_THREADS=4 cargo test --workspace --locked

test-run: ## Check the output of `make run`
	$(PROGRAMS)
	rm -rf target/refund-desk
	TOOLGATE_STATE=target/refund-desk/state target/debug/refund-agent target/debug/toolgate examples/refund-desk/toolgate.toml --once > target/run.log
	grep "7 calls ran, 7 were refused" target/run.log
	grep "claude mcp add --transport http desk http://127.0.0.1:" target/run.log
	TOOLGATE_STATE=target/refund-desk/state python3 tests/refund_desk.py target/debug/toolgate target/run.log target/refund-desk/ledger.db target/refund-desk/desk.db
	TOOLGATE_STATE=target/refund-desk/state target/debug/toolgate audit verify --store target/refund-desk/ledger.db
	rm -rf target/desk-away && mkdir target/desk-away # the agent starts nothing if the desk is unavailable
	sed -e 's|target/debug/refund-desk|target/desk-away/missing|; s|target/refund-desk/|target/desk-away/|; s|"policy.toml"|"../../examples/refund-desk/policy.toml"|' examples/refund-desk/toolgate.toml > target/desk-away/toolgate.toml
	! TOOLGATE_STATE=target/desk-away/state target/debug/refund-agent target/debug/toolgate target/desk-away/toolgate.toml --once > target/desk-away/run.log 2>&1
	grep 'the upstream `desk` is down; no work was started' target/desk-away/run.log

test-clients: deps ## Test third-party clients, if they can be installed
	$(PROGRAMS)
	$(MAKE) --jobs=2 --output-sync=target with-claude-code with-others

with-claude-code: ## Test Claude Code behind the hooks
	python3 tests/clients/claude_code.py --toolgate target/debug/toolgate

with-others: ## Test MCP clients and servers with the gateway between them
	python3 tests/clients/gateway.py --toolgate target/debug/toolgate

bench: ## Run all benchmarks, print a table, and write target/bench.json
	cargo bench --package toolgate --bench call --bench rules --locked
	cargo bench --package toolgate-store --bench ledger --locked
	cargo build --release --package toolgate-mcp --example fixture --locked
	cargo bench --package toolgate-cli --bench hook --bench gateway --locked

soak: ## Run the random tests of `make test` for longer
	TOOLGATE_SOAK=1 cargo test --profile soak --package toolgate --package toolgate-store --package toolgate-mcp --locked -- --nocapture

deny: ## Check licences and advisories (needs cargo-deny)
	cargo deny check

deps: ## Install missing tools
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@python3 -c 'import ensurepip, venv' 2>/dev/null || (apt-get update -qq && apt-get install -y -qq python3 python3-venv)
	@command -v git >/dev/null || (apt-get update -qq && apt-get install -y -qq git)
	@command -v npm >/dev/null || (apt-get update -qq && apt-get install -y -qq npm) || true
	@command -v cc >/dev/null || (apt-get update -qq && apt-get install -y -qq gcc libc6-dev)
