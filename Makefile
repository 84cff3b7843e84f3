# Every chore is a target here, and CI runs the same ones. `make help` lists them.

PYTHON ?= python3
TORCH  ?= 2.13.0
BIN    := .venv/bin
SOURCES := $(wildcard core backends models executors plugins src tests tools benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help setup lock demo test check format typecheck fuzz bench-scheduler bench-native bench-speculative quantization matrix kv-waste floor peers compare load-peer abuse serve-overhead soak fuzz-http schemas grammar-overhead lora clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: ## Make .venv with everything at the pinned versions; does nothing when nothing changed
	@command -v $(PYTHON) >/dev/null || { echo "no '$(PYTHON)' here: install Python 3.11 or newer, or name one: make setup PYTHON=python3.12"; exit 1; }
	@$(PYTHON) tools/setup.py

lock: ## Rewrite constraints.txt with the newest versions that fit; torch stays at TORCH=version
	$(PYTHON) tools/lock.py --torch $(TORCH)

demo: setup ## Ask a small real model a question (fetched once)
	$(BIN)/headrace chat smollm2 -p "What is the capital of France?" --max-tokens 48 --temperature 0

test: setup ## Run all tests, those on real weights included; the slowest are listed
	$(BIN)/python -m pytest --durations=15 -m "not alone" -n auto --dist loadfile
	$(BIN)/python -m pytest --durations=5 -m alone

check: setup ## Lint, formatting, ARCHITECTURE.md's tree and types; lists what grew long
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/python tools/tree.py --check
	$(BIN)/python tools/typecheck.py
	@$(BIN)/python tools/sizes.py

format: setup ## Format the code, mend what the linter can, rewrite the tree in ARCHITECTURE.md
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/python tools/tree.py

typecheck: setup ## Types alone: mypy over all rooms as one package
	$(BIN)/python tools/typecheck.py

fuzz: setup ## Run the stateful property tests with 100 times as many examples
	HEADRACE_FUZZ=100 $(BIN)/python -m pytest tests/core -k stateful --durations=15

bench-scheduler: setup ## Time the scheduler with a fake executor
	$(BIN)/python benchmarks/scheduler.py

bench-native: setup ## Measure the native CPU backend against the floor of this machine
	$(BIN)/python benchmarks/native.py

bench-speculative: setup ## Time drafts by prompt lookup against none, on work that copies and work that does not
	$(BIN)/python benchmarks/speculative.py

quantization: setup ## Measure what weights of fewer bits cost in quality and bring in size and speed
	$(BIN)/python benchmarks/quantization.py

matrix: setup ## Run 200 requests of features in pairs with drafts and without; writes the table of docs/speculative.md
	$(BIN)/python benchmarks/matrix.py

kv-waste: setup ## Count what paging wastes of KV memory, and what reserving would
	$(BIN)/python benchmarks/kv_waste.py

floor: setup ## Measure what no engine can beat on this machine
	$(BIN)/python benchmarks/floor.py

peers: setup ## Set up the engines to compare with, below build/peers: 3 GB, 15 minutes; PEERS="vllm ..." takes some
	$(BIN)/python benchmarks/peers/setup.py $(PEERS)

compare: setup ## Time Headrace and its peers, one after another, between two looks at the floor
	$(BIN)/python benchmarks/compare.py

load-peer: setup ## Load a server with another client, too, and compare what both tell; BASE_URL=... takes a running one
	$(BIN)/python benchmarks/load_peer.py $(if $(BASE_URL),--base-url $(BASE_URL))

abuse: setup ## Serve 256 streams at once and 1,000 clients that vanish, and see what is left of them
	$(BIN)/python benchmarks/serving/abuse.py

serve-overhead: setup ## Compare an engine over HTTP with the same one called from a program
	$(BIN)/python benchmarks/serving/overhead.py

soak: setup ## Serve mixed traffic for MINUTES (default: 30), and see whether memory stays where it is
	$(BIN)/python benchmarks/serving/soak.py $(if $(MINUTES),--minutes $(MINUTES))

fuzz-http: setup ## Send a server 2,000 cases of what its OpenAPI allows and forbids
	$(BIN)/python benchmarks/serving/fuzz_http.py

schemas: setup ## Ask for JSON that fits each of 200 schemas, and validate what comes
	$(BIN)/python benchmarks/schemas.py

grammar-overhead: setup ## Time tokens under a grammar against plain ones
	$(BIN)/python benchmarks/structured.py

lora: setup ## Time four adapters mixed against the base model, and loading beside running streams
	$(BIN)/python benchmarks/lora.py

clean: ## Remove build outputs and tools' caches; .venv and fetched models stay
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
