PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install serve test test-slow test-eval test-ray test-gpu test-docs test-native-sanitized bench-cpu-peer docs docs-serve docs-generate rehearse-image check clean

install: $(VENV)/.installed

# What the native CPU core is built of, and where an editable install has it.
NATIVE := native/CMakeLists.txt native/editable/CMakeLists.txt $(wildcard native/src/*)
LIBRARY := src/ostro/kernels/cpu/libostro_native

# pip, not uv: constraints.txt pins a torch build that only pip's configured sources may know.
# pip does not show what a build says of itself, so the absence of a core is told here.
$(VENV)/.installed: pyproject.toml constraints.txt $(NATIVE)
	$(PYTHON) -m venv $(VENV)
	rm -f $(LIBRARY).*
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@ls $(LIBRARY).* >/dev/null 2>&1 || echo "The native CPU core was not built: models run on torch. It needs a C++20 \
	compiler (g++ or clang++); 'pip install -v --no-deps -e .' shows what happened."
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

# The native core's tests, in C++ and in Python, watched for errors of memory and for undefined behaviour. Needs GCC and
# CMake. What watches is loaded before Python, which was built without; Python frees little at its end, so leaks there
# are not looked for.
SANITIZED := build/sanitized
test-native-sanitized: install
	cmake -S native -B $(SANITIZED) -DCMAKE_CXX_COMPILER=$(CXX) -DOSTRO_SANITIZE=ON -DOSTRO_TESTS=ON
	cmake --build $(SANITIZED) --parallel 2
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ctest --test-dir $(SANITIZED) --output-on-failure
	OMP_NUM_THREADS=1 OSTRO_NATIVE_LIBRARY=$(CURDIR)/$(SANITIZED)/libostro_native.so \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	$(BIN)/python -m pytest -n 0 tests/native --ignore=tests/native/test_build.py $(ARGS)

# llama.cpp, for bench/cpu.py to measure against: some ten minutes on two cores. Needs a C++ compiler, CMake and Ninja.
bench-cpu-peer: install
	PYTHON=$(BIN)/python bench/build_llama_cpp.sh build/llama.cpp

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
	rm -rf $(VENV) $(LIBRARY).* build dist site .mypy_cache .pytest_cache .ruff_cache
	find native/editable -mindepth 1 -maxdepth 1 ! -name CMakeLists.txt -exec rm -rf {} +
