# Every target sets up .venv by itself, from nothing but Python 3.11 or 3.12, bash and make.
# A GPU is used where there is one; INFERBUS_CPU=1 says to leave it alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
# Options for pytest: make test PYTEST_ARGS="-k handoff". Without them the suite runs in two lanes (tests/support/lanes.py),
# and coverage is measured, and has to be enough: a part of the suite says nothing about it.
PYTEST_ARGS ?=

.PHONY: help
help: ## show this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
		printf '  make %-15s %s\n' "$$name" "$$text"; done

.PHONY: env
env:
	@scripts/bootstrap

.PHONY: dev
dev:
	@scripts/bootstrap dev

.PHONY: demo
demo: env ## the main job on this machine: NATS, a prefill and a decode worker, three requests
	@$(BIN)/python -m inferbus.workers.stack.demo

.PHONY: up
up: env ## the same stack in the foreground, until Ctrl-C
	@$(BIN)/inferbus up

.PHONY: test
test: dev lint types ## all checks, the whole test suite and its coverage
	$(BIN)/pytest $(or $(PYTEST_ARGS),--cov -n 2 --no-loadscope-reorder)

.PHONY: lint
lint: dev ## formatting and lint rules, of the code and of what deploys it
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/yamllint --strict .
	$(BIN)/hadolint deploy/Dockerfile

.PHONY: types
types: dev ## static types
	$(BIN)/mypy

.PHONY: fmt
fmt: dev ## format the code
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

.PHONY: bench
bench: env ## benchmarks; results go to benchmarks/results
	$(BIN)/python -m benchmarks

.PHONY: soak
soak: env ## kill, stop and restart workers and server under load, then account for every job; SOAK_SECONDS=600
	@$(BIN)/python -m tests.soak

.PHONY: test-batches
test-batches: dev ## kill submitters, workers and servers of 100 batches of 5,000 lines; BATCH_SEEDS, BATCH_FIRST, BATCH_LINES
	BATCH_FIRST=$${BATCH_FIRST:-0} BATCH_SEEDS=$${BATCH_SEEDS:-100} $(BIN)/pytest tests/broker/test_batch_random.py $(PYTEST_ARGS)

.PHONY: fuzz
fuzz: dev ## a million changed messages at every decoder, on all cores; FUZZ_RUNS, FUZZ_SEED
	@$(BIN)/python -m tests.fuzz

.PHONY: test-containers
test-containers: dev ## the images and compose.yaml for real, on a Docker daemon that is brought up where none answers
	tests/deploy/bring_up_docker.sh
	$(BIN)/python -m tests.deploy.check_stack --build
	INFERBUS_TEST_NATS_IMAGE=nats:2.15-alpine $(BIN)/pytest -n 2 tests/deploy/test_containers.py \
		tests/broker/test_jetstream.py tests/broker/test_streams.py tests/broker/test_pull.py \
		tests/broker/test_objects.py tests/broker/test_wire.py tests/broker/test_entrance.py

.PHONY: lock
lock: dev ## compile requirements/*.in into pinned lists; LOCK_ARGS=--upgrade moves the pins
	@scripts/lock $(LOCK_ARGS)

.PHONY: clean
clean: ## remove the environment and every cache in this folder
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
