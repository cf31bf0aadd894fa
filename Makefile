# make demo   set up everything, train the demo static and balanced, compare
# make test   set up everything, run the tests
# make quick  the tests of the packages that need no torch
# make matrix the long tests: combinations of what `make test` covers one by one
# make docs   the commands, the code and the figures of the documents
# make clusters  a real Slurm, a real Ray and the API of Kubernetes
# make results  the figures of the documents anew. QUICK=1: the simulated ones alone.
#             ONLY="cases joined": some benchmarks.
# make gpu    everything that needs a GPU, with this machine's python3. Installs nothing.
#             DRY=1 runs it on the CPU with tiny sizes.
# make check  formatting, lint, imports, types: exactly what CI runs before the tests

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
# Hundreds of processes of the tests start from compiled modules.
unexport PYTHONDONTWRITEBYTECODE

# All tests with ranks go to one of two processes, so that there is one pool of ranks.
TWO := --numprocesses 2 --dist loadgroup

.PHONY: demo test quick matrix docs clusters results gpu check format clean

# The inner loops of the planner and of sparse layers are compiled once and kept. That happens at
# set-up, so that no first run waits for it.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "dynmo needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@echo "set-up 1/3: environment in .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "set-up 2/3: packages, torch among them (minutes, the first time)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@echo "set-up 3/3: compiled loops (a minute)"
	@$(BIN)/python -m dynmo.train.compile_ahead
	@touch $@

# The same config twice: static (layers stay where they started) and balanced. Then the two are
# compared.
demo: $(READY)
	$(BIN)/dynmo train examples/demo.toml --overwrite --set name=demo-static \
	    --set balance.balancer=none
	$(BIN)/dynmo train examples/demo.toml --overwrite --set name=demo-balanced
	$(BIN)/dynmo report runs/demo-static runs/demo-balanced

test: $(READY)
	$(BIN)/python -m pytest $(TWO) --durations 5

quick: $(READY)
	$(BIN)/python -m pytest $(TWO) tests/schedule tests/cost tests/config tests/balance \
	    tests/planner tests/report tests/elastic/managers/test_command.py

matrix: $(READY)
	$(BIN)/python -m pytest $(TWO) -m "matrix and not docs and not clusters"
	$(BIN)/python -m pytest $(TWO) --hypothesis-profile matrix tests/schedule \
	    tests/balance tests/planner tests/cost
	@.ci/suite passed matrix

docs: $(READY)
	$(BIN)/python -m pytest $(TWO) -m docs
	@.ci/suite passed docs

clusters: $(READY)
	$(BIN)/python -m pytest -m clusters
	@.ci/suite passed clusters

results: $(READY)
	$(BIN)/python -m docs.tools.remake $(if $(QUICK),--quick) $(ONLY)

# Needs no .venv: a GPU machine may have no network.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(if $(DRY),--dry) $(if $(COMMIT),--commit $(COMMIT))

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache .hypothesis
