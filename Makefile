PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

# Installs what is due, and is quick where nothing is. TORCH_INDEX_URL and ALLOW_CUDA choose the build of torch:
# docs/installation.md.
INSTALL = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) scripts/install.py --venv $(VENV)

.PHONY: install dev serve test run-tests test-all test-slow test-clients test-eval test-jax test-ray test-agents test-gpu test-docs test-native-sanitized test-native-tsan test-hostile fuzz-checkpoints fuzz-tokenizers fuzz-http soak bench-cpu-peer dist check-release rehearse-release docs docs-serve docs-generate rehearse-image check clean

# What serving needs; `dev` adds what tests need.
install:
	@$(INSTALL)

dev:
	@$(INSTALL) --extras dev

# `exec`: a signal to make's child reaches the server itself.
serve:
	@$(INSTALL) --serve $(ARGS)
	@exec $(BIN)/ostro serve --ui $(ARGS)

# What a newcomer waits for. The checks keep one core busy for a minute: the tests do not wait for them, and leave out
# the one of the checks.
test: dev
	@$(MAKE) --no-print-directory -j 2 check run-tests LEFT_OUT=--ignore=tests/test_import_layers.py

# Three processes of one thread each, for two cores: the tests are many and small, and wait for a third of their time. A
# file's tests share what it sets up. They run in the order of their names: sorted by their number of tests, the last
# files would be those with one long test. Bytecode is kept though the environment may say otherwise, as it does in many
# containers: each process would otherwise compile all tests again.
PYTEST = OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

run-tests: dev
	$(PYTEST) -m "not slow and not gpu and not full" $(LEFT_OUT) $(ARGS)

# The short tests that `make test` leaves out: full matrices, and every property with all its examples.
test-all: dev
	HYPOTHESIS_PROFILE=full $(PYTEST) -m "full and not slow and not gpu" $(ARGS)

test-slow: dev
	$(BIN)/python -m pytest -m slow $(ARGS)

# Client libraries against the server; those of `make test` too. guidance pins another llguidance than the server has.
test-clients:
	@$(INSTALL) --extras dev,clients
	-$(BIN)/python -m venv build/guidance && build/guidance/bin/python -m pip install -q guidance==0.3.1 openai==2.54.0
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/e2e -m "not slow and not gpu" $(ARGS)

# Apart from `dev`: the harness brings pandas, pyarrow, scipy and scikit-learn.
test-eval:
	@$(INSTALL) --extras dev,eval
	$(BIN)/python -m pytest tests/test_evaluation.py tests/e2e/test_lm_eval.py $(ARGS)

# The JAX runner on eight virtual devices, every family on each number of them: some ten minutes. `make test` has a short
# form.
test-jax:
	@$(INSTALL) --extras dev,jax
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile tests/jax $(ARGS)

# Apart from `dev` too: Ray is larger than all else together, but for torch. One cluster on this machine, on loopback;
# some five minutes.
test-ray:
	@$(INSTALL) --extras dev,ray,ray-data
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/ray $(ARGS)

# Coding agents, some 900 MB of them, against scripted answers of the fake runner; a few minutes.
AGENTS = @openai/codex@0.166.0 @anthropic-ai/claude-code@2.1.197 opencode-ai@1.18.18 @continuedev/cli@1.5.47
test-agents: dev
	npm install --prefix build/agents --no-audit --no-fund $(AGENTS)
	$(BIN)/python -m pytest -n 0 tests/agents $(ARGS)

# On a machine with a GPU: kernels against their twins, the GPU's runner against the CPU's.
test-gpu: dev
	$(BIN)/python -m pytest tests/gpu $(ARGS)

# The native core's tests, in C++ and in Python, under the address and undefined-behaviour sanitizers. Needs GCC and
# CMake. The sanitizer is preloaded, as Python was built without it; Python frees little at exit, so leaks there
# are not looked for.
SANITIZED := build/sanitized
SANITIZED_TESTS ?= tests/native tests/hostile/test_checkpoint_fuzzer.py \
	tests/hostile/test_peers_cves_files.py::test_integers_of_packed_matrices_wrap_not_in_the_native_reader \
	tests/hostile/test_peers_cves_files.py::test_matrices_of_more_than_two_to_the_31_values_are_read_where_they_are \
	tests/hostile/test_peers_cves_files.py::test_ids_beyond_the_vocabulary_reach_no_table \
	tests/hostile/test_peers_cves_files.py::test_the_native_core_itself_refuses_ids_beyond_its_tables
test-native-sanitized: dev
	cmake -S native -B $(SANITIZED) -DCMAKE_CXX_COMPILER=$(CXX) -DOSTRO_SANITIZE=address,undefined -DOSTRO_TESTS=ON
	cmake --build $(SANITIZED) --parallel 2
	UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 ctest --test-dir $(SANITIZED) --output-on-failure
	OMP_NUM_THREADS=1 OSTRO_NATIVE_LIBRARY=$(CURDIR)/$(SANITIZED)/libostro_native.so \
	ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so.6)" \
	$(BIN)/python -m pytest -n 0 -m "not slow" $(SANITIZED_TESTS) --ignore=tests/native/test_build.py $(ARGS)

# Plans on several threads, and pools, under the thread sanitizer. C++ only: Python and torch were built without it.
RACES := build/tsan
test-native-tsan:
	cmake -S native -B $(RACES) -DCMAKE_CXX_COMPILER=$(CXX) -DOSTRO_SANITIZE=thread -DOSTRO_TESTS=ON
	cmake --build $(RACES) --target ostro_plan_test ostro_pool_test --parallel 2
	TSAN_OPTIONS=halt_on_error=1 ctest --test-dir $(RACES) -R 'plans|pools' --output-on-failure

# Mutated checkpoints on the native core: fifteen minutes or so for all 50,000.
fuzz-checkpoints: dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/hostile/checkpoint_fuzzer.py $(ARGS)

# Mutated tokenizers: twenty minutes or so for all 50,000.
fuzz-tokenizers: dev
	OMP_NUM_THREADS=1 PYTHONPATH=tests/support $(BIN)/python tests/hostile/tokenizer_fuzzer.py $(ARGS)

# Mutated HTTP conversations, a million messages: some ten minutes on one core.
fuzz-http: dev
	PYTHONPATH=tests/support $(BIN)/python tests/hostile/http_fuzzer.py $(ARGS)

# Everything hostile, whole: fuzzers, crash points, floods. Some of it runs for many minutes; `make test` has a short form
# of each.
test-hostile: dev
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/hostile $(ARGS)

# An hour of traffic on a server whose engines are killed, frozen and swapped, with every answer checked. It keeps
# two cores half busy; ARGS="--hours 8 --rate 1" is longer and gentler.
soak: dev
	PYTHONPATH=tests/support $(BIN)/python tests/hostile/soak.py $(ARGS)

# llama.cpp, for bench/cpu.py to measure against: some ten minutes on two cores. Needs a C++ compiler, CMake and Ninja.
bench-cpu-peer: dev
	PYTHON=$(BIN)/python bench/build_llama_cpp.sh build/llama.cpp

# What the docs show that takes minutes: models loaded by `ostro serve`, `make serve`, examples with large packages.
test-docs: dev
	$(BIN)/python -m pytest tests/docs $(ARGS)

# A source distribution and this machine's wheel, in dist/. On Linux auditwheel names the oldest glibc that it runs with.
dist:
	@$(INSTALL) --extras dist
	rm -rf dist
	OSTRO_NATIVE_REQUIRED=1 $(BIN)/python -m build
	if [ "$$(uname)" = Linux ]; then \
	  PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python -m auditwheel repair --wheel-dir dist dist/*-linux_*.whl && rm dist/*-linux_*.whl; \
	fi

# Tools of releases, in an environment of their own.
RELEASE := build/release

$(RELEASE)/bin/twine: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(RELEASE)
	$(RELEASE)/bin/python -m pip install -q -c constraints.txt $$(sed -n 's/^release = \[\(.*\)\]/\1/p' pyproject.toml | tr -d '",')
	@touch $@

# What is in dist/, as it would be published: names, metadata, contents, sizes. Then the bill of materials of an
# environment that has this machine's wheel and nothing else.
check-release: $(RELEASE)/bin/twine
	$(PYTHON) tools/check_distributions.py dist $(ARGS)
	$(RELEASE)/bin/twine check --strict dist/*
	for wheel in dist/*linux*.whl; do [ ! -f "$$wheel" ] || $(RELEASE)/bin/python -m auditwheel show "$$wheel" || exit 1; done
	$(PYTHON) -m venv --clear --without-pip $(RELEASE)/serving
	$(RELEASE)/bin/python -m pip --python $(RELEASE)/serving/bin/python install -q --no-index --no-deps --find-links dist ostro
	$(RELEASE)/bin/python -m pip --python $(RELEASE)/serving/bin/python install -q --no-compile -c constraints.txt ostro
	$(RELEASE)/bin/python tools/write_sbom.py $(RELEASE)/serving/bin/python $(RELEASE)/ostro.cdx.json

# A release as far as one machine goes: its files and checks, the workflow's steps, and from a local index what users
# type, `pip install ostro` and `uvx ostro serve`, to the first answer.
rehearse-release: dist check-release
	$(PYTHON) bench/first_answer.py index --dist dist
	PATH="$(abspath $(RELEASE))/bin:$$PATH" $(PYTHON) bench/first_answer.py uvx --dist dist

# The site, in site/.
# mkdocs alone, in an environment of its own: serving needs nothing of it.
MKDOCS := build/docs/bin/mkdocs

$(MKDOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv build/docs
	build/docs/bin/python -m pip install -q -c constraints.txt $$(sed -n 's/^docs = \["\(.*\)"\]/\1/p' pyproject.toml)
	build/docs/bin/python -m pip uninstall -qy pip setuptools
	@touch $@

docs: $(MKDOCS)
	NO_MKDOCS_2_WARNING=1 $(MKDOCS) build --strict $(ARGS)

docs-serve: $(MKDOCS)
	@NO_MKDOCS_2_WARNING=1 exec $(MKDOCS) serve --dev-addr 127.0.0.1:8001 $(ARGS)

# The generated parts of pages: settings, fields of the API, refusals.
docs-generate: dev
	PYTHONPATH=tools $(BIN)/python -m docs_reference

# The Dockerfile's steps without a container engine: a clean environment, a server in it, its health check.
rehearse-image: dev
	$(BIN)/python -m pytest -n 0 -rs -s tests/deploy/test_image_rehearsal.py $(ARGS)

check: dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_import_layers.py

clean:
	rm -rf $(VENV) src/ostro/kernels/cpu/libostro_native.* build dist site .mypy_cache .pytest_cache .ruff_cache
	find native/editable -mindepth 1 -maxdepth 1 ! -name CMakeLists.txt -exec rm -rf {} +
