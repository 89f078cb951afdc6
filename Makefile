PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install serve test test-slow test-eval test-gpu check clean

install: $(VENV)/.installed

# pip, not uv: constraints.txt pins a torch build that only pip's configured sources may know.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# `exec`: a signal to make's child reaches the server itself.
serve: install
	@exec $(BIN)/ostro serve $(ARGS)

# Two processes of one thread each: the tests are many and small. A file's tests share what it sets up.
test: install check
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile -m "not slow and not gpu" $(ARGS)

test-slow: install
	$(BIN)/python -m pytest -m slow $(ARGS)

# Apart from `dev`: the harness brings pandas, pyarrow, scipy and scikit-learn.
$(VENV)/.installed-eval: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,eval]'
	touch $@

test-eval: $(VENV)/.installed-eval
	$(BIN)/python -m pytest tests/test_evaluation.py tests/e2e/test_lm_eval.py $(ARGS)

# On a machine with a GPU: kernels against their twins, the GPU's runner against the CPU's.
test-gpu: install
	$(BIN)/python -m pytest tests/gpu $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

clean:
	rm -rf $(VENV) dist .mypy_cache .pytest_cache .ruff_cache
