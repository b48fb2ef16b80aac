# Every target sets up .venv by itself, from nothing but Python 3.11 or 3.12, bash and make.
# A GPU is used where there is one; INFERBUS_CPU=1 says to leave it alone.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

BIN := .venv/bin
# Options for pytest: make test PYTEST_ARGS="-k handoff". Coverage is measured, and has to be enough, without them:
# a part of the suite says nothing about it.
PYTEST_ARGS ?=

.PHONY: help
help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r name text; do \
		printf '  make %-8s %s\n' "$$name" "$$text"; done

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
	$(BIN)/pytest $(or $(PYTEST_ARGS),--cov)

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

.PHONY: fuzz
fuzz: dev ## a million changed messages at every decoder, on all cores; FUZZ_RUNS, FUZZ_SEED
	@$(BIN)/python -m tests.fuzz

.PHONY: lock
lock: dev ## compile requirements/*.in into pinned lists; LOCK_ARGS=--upgrade moves the pins
	@scripts/lock $(LOCK_ARGS)

.PHONY: clean
clean: ## remove the environment and every cache in this folder
	rm -rf .venv .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
