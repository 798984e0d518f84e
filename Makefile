# `make demo` and `make test` do all of their own set-up; `make help` lists the rest.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3.11
STATE ?= state
UP_ARGS ?=
DEMO_ARGS ?=
PYTEST_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help setup api peers demo demo-kube test test-kube check chart images format up down clean distclean

help:  ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'

setup: $(VENV)/.setup-stamp  ## make .venv with everything that the project needs
	@echo "setup: $(VENV) is ready"

$(VENV)/.setup-stamp: requirements.txt constraints.txt agent/pyproject.toml plugins/pyproject.toml .ci/setup .ci/helm.py
	@.ci/setup "$(PYTHON)" "$(VENV)"
	@touch $@

peers: .peers/.stamp  ## make .peers with AdaptDL, which benchmarks compare with
	@echo "peers: .peers is ready"

.peers/.stamp: .ci/peers.txt .ci/peers-alone.txt .ci/peers
	@.ci/peers "$(PYTHON)" .peers
	@touch $@

demo: setup  ## three real trainings share a small cluster, scheduled by Airflow each minute (about 10 minutes)
	@exec $(BIN)/pollux demo --state "$(STATE)/demo"

demo-kube: setup  ## the demo on Kubernetes: KUBECONFIG names a cluster, or POLLUX_KUBE a folder with up.sh and node-up.sh
	@if [ -z "$${KUBECONFIG:-}" ] && [ -z "$${POLLUX_KUBE:-}" ]; then echo "demo-kube: set KUBECONFIG to a cluster's kubeconfig, or POLLUX_KUBE to a folder with up.sh and node-up.sh" >&2; exit 1; fi
	@if [ -z "$${KUBECONFIG:-}" ]; then .ci/kube-packages; fi
	@exec $(BIN)/pollux demo --kubernetes --state "$(STATE)/demo-kube" $(DEMO_ARGS)

test: setup  ## all tests, those on Kubernetes if KUBECONFIG or POLLUX_KUBE is set; choose with PYTEST_ARGS="-m 'not e2e'"
	@if [ -n "$${POLLUX_KUBE:-}" ] && [ -z "$${KUBECONFIG:-}" ]; then .ci/kube-packages; fi
	@exec $(BIN)/python -m pytest $(PYTEST_ARGS)

test-kube: setup  ## tests on Kubernetes: KUBECONFIG names a cluster, or POLLUX_KUBE a folder with up.sh and node-up.sh
	@if [ -z "$${KUBECONFIG:-}" ] && [ -z "$${POLLUX_KUBE:-}" ]; then echo "test-kube: set KUBECONFIG to a cluster's kubeconfig, or POLLUX_KUBE to a folder with up.sh and node-up.sh" >&2; exit 1; fi
	@if [ -z "$${KUBECONFIG:-}" ]; then .ci/kube-packages; fi
	@exec $(BIN)/python -m pytest tests/kube $(PYTEST_ARGS)

check: setup  ## lint, types, import contracts, and that pytest can collect every test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null || { $(BIN)/python -m pytest --collect-only -qq | tail -n 40; exit 1; }

chart: setup  ## lint the Helm chart and render it, with real helm
	@$(BIN)/helm lint --strict charts/pollux
	@$(BIN)/helm template pollux charts/pollux --namespace pollux >/dev/null && echo "chart: renders"

images:  ## build the images in docker/, or try their recipes where no container engine is there
	@docker/build

format: setup  ## let ruff format the code and sort the imports
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

api: setup  ## the API reference, from the docstrings, into build/api
	@exec $(BIN)/python .ci/api build/api

up: setup  ## start Airflow, MLflow and the local cluster, and keep them running; ports: UP_ARGS="--airflow-port 8080"
	@exec $(BIN)/pollux stack up --state "$(STATE)/stack" --detach $(UP_ARGS)

down:  ## stop what `make up` started
	@if [ -x $(BIN)/pollux ]; then $(BIN)/pollux stack down --state "$(STATE)/stack"; else echo "nothing to stop: $(VENV) is not there"; fi

clean: down  ## stop the stack and remove its state; the environment stays
	@if [ -x $(BIN)/pollux ]; then $(BIN)/pollux stack down --state "$(STATE)/demo"; fi
	@if [ -x $(BIN)/pollux ]; then $(BIN)/pollux stack down --state "$(STATE)/demo-kube"; fi
	@if [ -d "$(STATE)/demo-kube.cluster" ] && [ -n "$${POLLUX_KUBE:-}" ]; then "$$POLLUX_KUBE/down.sh" --purge "$(STATE)/demo-kube.cluster"; fi
	rm -rf "$(STATE)/stack" "$(STATE)/demo" "$(STATE)/demo-kube"
	@if [ -d "$(STATE)" ]; then rmdir --ignore-fail-on-non-empty "$(STATE)"; fi
	rm -rf .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis

distclean: clean  ## clean, and remove .venv and .peers too
	rm -rf $(VENV) .peers
