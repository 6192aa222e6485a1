# Everything here works on a machine that has only Python >= 3.11 and make: .venv is made on the first call and reused afterwards.
# PYTHON chooses the interpreter, for example: make test PYTHON=python3.12

PYTHON ?= python3
TEST_WORKERS ?= 3
MINUTES ?= 30
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PEERS := $(VENV)/.peers
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: help demo test soak device check format bench coverage-core install clean
.DEFAULT_GOAL := help

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

install: $(STAMP)  ## Make .venv with everything in it

# torch comes first and from the constraints, so that a build that pip finds on this machine is taken before anything asks for another.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: $(PYTHON) is older than Python 3.11; name another with PYTHON=..."; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev,demo]'
	@touch $@

demo: $(STAMP)  ## Show one model update end to end, measured; figures go to build/demo.json
	@mkdir -p build
	$(BIN)/raftmeta demo --report build/demo.json

test: $(STAMP)  ## Run every test; two processors keep three workers busy, since many tests wait for processes
	$(BIN)/python -m pytest -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

soak: $(STAMP)  ## Harm three real members for MINUTES=30 and judge what their clients saw; SEED=n repeats a schedule
	$(BIN)/python -m tests.cluster.nemesis --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

device: $(STAMP)  ## Check and measure CUDA on this machine, in under eight minutes; says what it had to skip
	$(BIN)/python -m tests.device.run

check: $(STAMP)  ## Lint, types, import contracts
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(STAMP)  ## Rewrite the code in the project's format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(PEERS)  ## Measure against named peers, one JSON line a case
	$(BIN)/python -m benchmarks

$(PEERS): $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[bench]'
	@touch $@

coverage-core: $(STAMP)  ## Branch coverage of the pure core; fails below 100 %
	$(BIN)/python -m coverage run --branch --source=raftmeta.core,raftmeta.codec --data-file=.coverage.core -m pytest tests/unit/core tests/unit/test_codec.py tests/unit/test_state_damaged.py tests/scenarios
	$(BIN)/python -m coverage report --data-file=.coverage.core --show-missing --fail-under=100

clean:  ## Remove .venv and everything that was made
	rm -rf $(VENV) build dist .coverage .coverage.* .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
