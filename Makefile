# Two commands matter: `make run` shows the main job, `make test` checks everything.

.PHONY: run test test-run test-clients with-claude-code with-others with-canary bench soak deny deps

# What the tests have built is taken as it is: asked for one by one, everything above tokio would be built anew with other features.
PROGRAMS = cargo build --quiet --locked --workspace --bins --examples

run: ## Build and start the gateway with a refund desk behind it, and an agent that works through it
	cargo build --package toolgate-cli --package refund-desk
	rm -rf target/refund-desk
	TOOLGATE_STATE=target/refund-desk/state target/debug/refund-agent target/debug/toolgate examples/refund-desk/toolgate.toml

test: deps ## Install what is missing, then check everything
	mkdir -p target && python3 tests/clients/install.py > target/install.log 2>&1 & # meanwhile
	cargo fmt --all --check
	cargo clippy --workspace --all-targets --locked -- --deny warnings
	RUST_TEST_THREADS=4 cargo test --workspace --locked # many wait more than they work
	python3 tests/on_sqlite.py # the same on a database
	RUSTDOCFLAGS="--deny warnings" cargo doc --workspace --no-deps --locked --quiet
	cargo check --workspace --locked --quiet # with the features that users get, and no others
	$(MAKE) test-run
	python3 tests/clients/conformance.py --toolgate target/debug/toolgate --fixture target/debug/examples/fixture

test-run: ## What `make run` shows is what it should show
	$(PROGRAMS)
	rm -rf target/refund-desk
	TOOLGATE_STATE=target/refund-desk/state target/debug/refund-agent target/debug/toolgate examples/refund-desk/toolgate.toml --once > target/run.log
	grep "7 calls ran, 7 were refused" target/run.log
	grep "claude mcp add --transport http desk http://127.0.0.1:" target/run.log
	TOOLGATE_STATE=target/refund-desk/state python3 tests/refund_desk.py target/debug/toolgate target/run.log target/refund-desk/ledger.db target/refund-desk/desk.db
	TOOLGATE_STATE=target/refund-desk/state target/debug/toolgate audit verify --store target/refund-desk/ledger.db
	rm -rf target/desk-away && mkdir target/desk-away # and nothing is begun where the desk is away
	sed -e 's|target/debug/refund-desk|target/desk-away/nobody|; s|target/refund-desk/|target/desk-away/|; s|"policy.toml"|"../../examples/refund-desk/policy.toml"|' examples/refund-desk/toolgate.toml > target/desk-away/toolgate.toml
	! TOOLGATE_STATE=target/desk-away/state target/debug/refund-agent target/debug/toolgate target/desk-away/toolgate.toml --once > target/desk-away/run.log 2>&1
	grep 'the upstream `desk` is away: nothing was begun' target/desk-away/run.log

test-clients: deps ## Third-party clients, where they can be installed
	$(PROGRAMS)
	mkdir -p target/sound && cp target/debug/toolgate target/debug/toolgate-hook target/sound/ # the canary has another built
	$(MAKE) --jobs=3 --output-sync=target with-claude-code with-others with-canary

with-claude-code:
	python3 tests/clients/claude_code.py --toolgate target/sound/toolgate

with-others:
	python3 tests/clients/gateway.py --toolgate target/sound/toolgate

with-canary:
	python3 tests/clients/canary.py

bench: ## Print a table and write target/bench.json
	cargo bench --package toolgate --bench call --bench rules --locked
	cargo bench --package toolgate-store --bench ledger --locked
	cargo build --release --package toolgate-mcp --example fixture --locked
	cargo bench --package toolgate-cli --bench hook --bench gateway --locked

soak: ## Longer random runs of the tests in `make test`
	TOOLGATE_SOAK=1 cargo test --profile soak --package toolgate --package toolgate-store --package toolgate-mcp --locked -- --nocapture

deny: ## Licences and advisories, for those who have cargo-deny
	cargo deny check

deps:
	@cargo clippy --version >/dev/null 2>&1 || rustup component add clippy
	@cargo fmt --version >/dev/null 2>&1 || rustup component add rustfmt
	@python3 -c 'import ensurepip, venv' 2>/dev/null || (apt-get update -qq && apt-get install -y -qq python3 python3-venv)
	@command -v git >/dev/null || (apt-get update -qq && apt-get install -y -qq git)
	@command -v npm >/dev/null || (apt-get update -qq && apt-get install -y -qq npm) || true
	@command -v cc >/dev/null || (apt-get update -qq && apt-get install -y -qq gcc libc6-dev)
