# make demo   set up what it needs, train the demo static and balanced, compare
# make test   set up everything, run the tests
# make quick  the tests of the packages that need no torch
# make matrix the long tests: combinations of what `make test` covers one by one
# make docs   the commands, the code and the figures of the documents
# make browser  the pages that dynmo makes, in headless Chromium
# make site   the documentation as pages, in site/. `python -m http.server -d site` shows them.
# make release  the wheel and the sdist of the tagged version, in dist/. Uploads nothing.
# make clusters  a real Slurm, a real Ray and the API of Kubernetes
# make results  the figures of the documents anew. QUICK=1: the simulated ones alone.
#             ONLY="cases joined": some benchmarks.
# make gpu    everything that needs a GPU, with this machine's python3. Installs nothing.
#             DRY=1 runs it on the CPU with tiny sizes. SEVERAL=1: with two GPUs or more.
# make check  formatting, lint, imports, types: exactly what CI runs before the tests

PYTHON ?= python3
BIN := .venv/bin
DEMO := .venv/.demo
READY := .venv/.ready
# `make UV= ...` installs by pip.
UV := $(shell command -v uv 2> /dev/null)
# Without --no-compile pip takes twice as long. Python compiles what is imported.
INSTALL = $(if $(UV),$(UV) pip install --python $(BIN)/python,$(BIN)/python -m pip install \
    --disable-pip-version-check --no-compile) --quiet -c constraints.txt
# $(call timed,NUMBER: PART,COMMANDS): one line, with the seconds that the part took.
timed = @printf 'set-up $(1) ... '; begin=$$(date +%s); $(2) && echo "$$(($$(date +%s) - begin)) s"
# Hundreds of processes of the tests start from compiled modules.
unexport PYTHONDONTWRITEBYTECODE

# All tests with ranks go to one of two processes, so that there is one pool of ranks.
TWO := --numprocesses 2 --dist loadgroup

.PHONY: demo test quick matrix matrix-runs matrix-models matrix-rest docs browser site release clusters results gpu check format clean

# What the demo needs: no packages of tests, and the compiled loops of its planner alone.
$(DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	    "dynmo needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	$(call timed,1/3: environment in .venv,test -x $(BIN)/python || $(PYTHON) -m venv .venv)
	$(call timed,2/3: packages with torch,$(INSTALL) -e .)
	$(call timed,3/3: compiled loops of the demo,$(BIN)/python -m dynmo.train.compile_ahead zb-h1)
	@touch $@

# The rest. The inner loops of the planner and of sparse layers are compiled once and kept, so that
# no test waits for them. They take no longer than the packages.
$(READY): $(DEMO)
	$(call timed,for tests: more packages and all compiled loops,\
	    $(BIN)/python -m dynmo.train.compile_ahead & $(INSTALL) -e '.[dev]' && wait $$!)
	@touch $@

# The same config twice: static (layers stay where they started) and balanced. Then the two are
# compared.
demo: $(DEMO)
	$(BIN)/dynmo train examples/demo.toml --overwrite --set name=demo-static \
	    --set balance.balancer=none
	$(BIN)/dynmo train examples/demo.toml --overwrite --set name=demo-balanced
	$(BIN)/dynmo report runs/demo-static runs/demo-balanced

test: $(READY)
	$(BIN)/python -m pytest $(TWO) --durations 5

quick: $(READY)
	$(BIN)/python -m pytest $(TWO) tests/schedule tests/cost tests/config tests/plan \
	    tests/report tests/elastic/managers/test_command.py

# Three parts, so that each can pass by itself. The last one has all that no other part names.
MATRIX := $(BIN)/python -m pytest $(TWO) -m "matrix and not docs and not browser and not clusters"
MODELS := tests/cases tests/fuzz tests/huggingface tests/models
RUNS := tests/benchmarks tests/cli tests/elastic tests/pipeline tests/report \
    tests/runtime tests/train

matrix: matrix-runs matrix-models matrix-rest

matrix-runs: $(READY)
	$(MATRIX) $(RUNS)
	@.ci/suite passed $@

matrix-models: $(READY)
	$(MATRIX) $(MODELS)
	@.ci/suite passed $@

matrix-rest: $(READY)
	$(MATRIX) tests $(addprefix --ignore=,$(RUNS) $(MODELS))
	$(BIN)/python -m pytest $(TWO) --hypothesis-profile matrix tests/schedule \
	    tests/plan tests/cost
	@.ci/suite passed $@

docs: $(READY)
	$(BIN)/python -m pytest $(TWO) -m docs
	@.ci/suite passed docs

browser: $(READY)
	$(BIN)/python -m pytest -m browser
	@.ci/suite passed browser

site: $(READY)
	$(BIN)/python -m docs.tools.site
	$(BIN)/zensical build --strict

release: $(READY)
	@.ci/release $(BIN)/python

clusters: $(READY)
	$(BIN)/python -m pytest -m clusters
	@.ci/suite passed clusters

results: $(READY)
	$(BIN)/python -m docs.tools.remake $(if $(QUICK),--quick) $(ONLY)

# Needs no .venv: a GPU machine may have no network.
gpu:
	@$(PYTHON) -m benchmarks.gpu $(if $(DRY),--dry) $(if $(SEVERAL),--several) $(if $(COMMIT),--commit $(COMMIT))

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo --no-cache
	$(BIN)/pyright

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv build dist runs site .cache .pytest_cache .ruff_cache .hypothesis
