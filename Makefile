PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install serve test test-slow test-eval test-ray test-gpu test-docs docs docs-serve docs-generate rehearse-image check clean

install: $(VENV)/.installed

# pip, not uv: constraints.txt pins a torch build that only pip's configured sources may know.
$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# `exec`: a signal to make's child reaches the server itself.
serve: install
	@exec $(BIN)/ostro serve --ui $(ARGS)

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

# Apart from `dev` too: Ray is larger than all else together, but for torch.
$(VENV)/.installed-ray: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,ray,ray-data]'
	touch $@

# One cluster on this machine, on loopback; some five minutes.
test-ray: $(VENV)/.installed-ray
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray $(ARGS)

# On a machine with a GPU: kernels against their twins, the GPU's runner against the CPU's.
test-gpu: install
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# What the docs show that takes minutes: models loaded by `ostro serve`, `make serve`, examples with large packages.
test-docs: install
	$(BIN)/python -m pytest tests/docs $(ARGS)

# The site, in site/.
docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict $(ARGS)

docs-serve: install
	@NO_MKDOCS_2_WARNING=1 exec $(BIN)/mkdocs serve --dev-addr 127.0.0.1:8001 $(ARGS)

# The parts of pages that are made from the code: settings, fields of the API, what is refused.
docs-generate: install
	PYTHONPATH=tools $(BIN)/python -m docs_reference

# The Dockerfile's steps without a container engine: a clean environment, a server in it, its health check.
rehearse-image: install
	$(BIN)/python -m pytest -n 0 -rs -s tests/deploy/test_image_rehearsal.py $(ARGS)

check: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

clean:
	rm -rf $(VENV) dist site .mypy_cache .pytest_cache .ruff_cache
