PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install test test-slow check clean

install: $(VENV)/.installed

# pip, not uv: constraints.txt pins a torch build that only pip's configured sources may know.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

test: install check
	$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

test-slow: install
	$(BIN)/python -m pytest -m slow $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache
