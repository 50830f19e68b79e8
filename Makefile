# Everything a fresh machine needs is Python 3.11+ with its venv, git and a C compiler: each target sets up .venv first.

PYTHON ?= python3
BIN := .venv/bin
DEMO_HOME := $(CURDIR)/demo-lakehouse

SIDE_BY_SIDE := -n 4 --dist loadgroup --no-loadscope-reorder

LINTED := tests/unit/test_vocabulary.py tests/unit/test_reference.py

# Else each process of a demo or a test compiles the package again.
export PYTHONDONTWRITEBYTECODE =

.PHONY: setup demo demo-on-seaweedfs demo-on-postgres docs test lint unit slow mutants soak soak-campaign gpu ui bench bench-compare paper peers clean

setup: .venv/.ready

.venv/.ready: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "expected Python 3.11 or newer, found " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet "torch>=2.13,<2.14"
	PIP_CONSTRAINT=constraints.txt PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/pip install --quiet --editable ".[dagster,deepspeed,dev]"
	touch $@

demo: setup  ## plan, train, crash, recover, audit, report: the main job on real input
	$(BIN)/python -m examples.demo.main_job

test: setup  ## lint, types, import contracts, tests: side by side, because most waits of tests leave a core free
	$(MAKE) --no-print-directory --jobs 2 lint unit

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/mkdocs build --strict --quiet
	$(BIN)/pytest -q --noconftest $(LINTED)

unit: .venv/.rewritten  # `lint` runs the tests of words and of the reference
	$(BIN)/pytest -m "not slow and not soak" $(SIDE_BY_SIDE) --durations 30 $(LINTED:%=--ignore %)

slow: .venv/.rewritten  ## tests that cost much for what they add: continuous integration runs them after those of `make test`
	$(BIN)/pytest -m "slow and not soak" $(SIDE_BY_SIDE)

.venv/.rewritten: .venv/.ready  # one process rewrites the assertions of all test modules, else each of the four does
	$(BIN)/pytest --collect-only --quiet > $@ 2>&1 || { cat $@; rm $@; exit 1; }

demo-on-seaweedfs demo-on-postgres: setup  ## the demo on real servers: an Iceberg REST catalog, or PostgreSQL, and an S3 store
	$(BIN)/python -m tests.served_lakehouses $(@:demo-on-%=%)

docs: setup  ## the reference pages, the page of figures, and the site in site/; a warning is an error
	$(BIN)/python docs/generate.py
	$(BIN)/python -m benchmarks.results.page
	$(BIN)/mkdocs build --strict

mutants: setup  ## changed lines at the heart of the product, each of which its tests must notice
	$(BIN)/python -m tests.mutants

soak: setup  ## the long campaigns
	$(BIN)/pytest -m "slow or soak" --timeout 7200 --hypothesis-profile "new examples"

soak-campaign: setup  ## half an hour, 100 faults of mixed kinds; keeps its result, and writes docs/evidence/soak.md of it
	$(BIN)/python -m benchmarks.soak --out benchmarks/results/measured/soak.json
	$(BIN)/python -m benchmarks.soak --docs benchmarks/results/measured/soak.json

gpu: setup  ## figures of this machine's accelerator, at most 40 minutes; keeps gpu.json, and writes docs/evidence/gpu.md of it
	$(BIN)/python -m benchmarks.gpu --out gpu.json; status=$$?; $(BIN)/python -m benchmarks.gpu --docs gpu.json && exit $$status

ui: setup  ## the Dagster UI on the demo's lakehouse
	test -d $(DEMO_HOME)/dagster || { echo "expected the demo's lakehouse in $(DEMO_HOME), found none: run 'make demo' first"; exit 1; }
	DAGSTER_HOME=$(DEMO_HOME)/dagster DLAC_HOME=$(DEMO_HOME) $(BIN)/dagster dev -w workspace.yaml

bench: setup  ## every benchmark but compare, gpu, mesh_soak, pairs, paper, peers, soak, soak_nodes and traffic (root, iproute2, PostgreSQL), each with a JSON object as its last line
	for program in $(filter-out benchmarks/compare.py benchmarks/gpu.py benchmarks/mesh_soak.py benchmarks/pairs.py benchmarks/paper.py benchmarks/peers.py benchmarks/soak.py benchmarks/soak_nodes.py benchmarks/traffic.py benchmarks/figures.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python -m benchmarks.$$(basename $$program .py) || exit 1; done

bench-compare: setup  ## the bars of this commit beside those of REV, in turns, hours; RUN="overhead --quick" chooses programs
	$(BIN)/python -m benchmarks.compare $(REV) $(RUN)

paper: setup  ## the paper's experiments beside the peers', an hour; paper/paper.html and .pdf, and docs/evidence/paper.md of it
	$(BIN)/python -m benchmarks.paper --out paper; status=$$?; cp paper/paper.json benchmarks/results/measured/paper.json && $(BIN)/python -m benchmarks.paper --docs paper/paper.json && exit $$status

peers: setup  ## DLAC beside other loaders; makes .venv-peers and .venv-peers-NAME on the first run
	$(BIN)/python -m benchmarks.peers

clean:
	rm -rf .venv .venv-peers .venv-peers-* demo-lakehouse demo-report site .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
