# `make demo` and `make test` do all of their own set-up; `make help` lists the rest.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3.11
STATE ?= state

.DEFAULT_GOAL := help
.PHONY: help setup demo test check up down clean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(VENV)/.setup-stamp  ## make .venv with everything that the project needs

$(VENV)/.setup-stamp: requirements.txt constraints.txt agent/pyproject.toml plugins/pyproject.toml
	@.ci/setup "$(PYTHON)" "$(VENV)"
	@touch $@

demo: setup  ## three real trainings share a small cluster, scheduled by Airflow each minute (about 12 minutes)
	@exec $(BIN)/pollux demo --state $(STATE)/demo

test: setup  ## all tests, a short run through the real stack included
	@exec $(BIN)/pytest

check: setup  ## lint, types and import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

up: setup  ## start Airflow, MLflow and the local cluster, and keep them running
	@exec $(BIN)/pollux stack up --state $(STATE)/stack --detach

down:  ## stop what `make up` started
	@if [ -x $(BIN)/pollux ]; then $(BIN)/pollux stack down --state $(STATE)/stack; else echo "nothing to stop: .venv is not there"; fi

clean: down  ## stop the stack and remove its state
	rm -rf $(STATE)
