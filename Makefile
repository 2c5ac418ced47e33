# make build   set-up and build: build/bin/tsmem, build/lib/libtsmem_ops.so, a Python in .venv in which `import tsmem` works
# make demo    rewrites a scripted ResNet-50, verifies it, prints memory and time before and after
# make test    every test
# make fuzz SEEDS=A:B   random programs A to B - 1, rewritten and compared (docs/testing.md)
# make sanitize   the C++ tests and those of the operators under AddressSanitizer and UndefinedBehaviorSanitizer, in build-asan
# make hostile SEEDS=0:2000   every command on that many damaged and hostile files (hours; tests/hostile)
# make tsan    forward and backward from several threads under ThreadSanitizer, in build-tsan
# make bench   every benchmark; results in build/bench
# TSMEM_TORCH=/path/to/site-packages/torch uses that torch in place of the one that set-up installs into .venv.
SHELL := /bin/bash
PYTHON := .venv/bin/python
# Relative paths in ccache's keys: the wheel's build finds what build/ has compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
SOURCES = $$(git ls-files '*.cpp' '*.h' '*.cu')

.PHONY: build demo test fuzz sanitize tsan hostile bench setup clean format tidy

setup:
	@cmake/setup.sh

build: setup
	@cmake --preset release -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset release

demo: build
	@$(PYTHON) examples/demo.py

# Both parts run, whatever the first says.
test: build
	@ctest --preset release; cpp=$$?; $(PYTHON) -m pytest tests; py=$$?; \
	if [ $$cpp -ne 0 ]; then echo "make test: ctest failed"; fi; \
	if [ $$py -ne 0 ]; then echo "make test: pytest failed"; fi; \
	[ $$cpp -eq 0 ] && [ $$py -eq 0 ]

fuzz: SEEDS ?= 0:1000
fuzz: build
	@$(PYTHON) tests/random/fuzz.py $(SEEDS)

# Python has no sanitizers of its own: they are loaded before it, and its leaks are not ours.
sanitize: setup
	@cmake --preset asan-ubsan -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset asan-ubsan
	@ctest --preset asan-ubsan
	@TSMEM_OPS=build-asan/lib/libtsmem_ops.so ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1 \
	  UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	  LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so) $$(gcc -print-file-name=libstdc++.so)" \
	  $(PYTHON) -m pytest tests/ops

hostile: SEEDS ?= 0:2000
hostile: build
	@$(PYTHON) tests/hostile/run_hostile.py $(SEEDS)

# Races are told where our code is on either side: LibTorch isn't instrumented. setarch -R: gcc's runtime needs its addresses free.
tsan: build
	@cmake --preset tsan -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset tsan
	@PYTHONPATH=python $(PYTHON) tests/threads/write_models.py build-tsan/models
	@TSAN_OPTIONS="ignore_noninstrumented_modules=1:suppressions=tests/threads/suppressions.txt:second_deadlock_stack=1" \
	  setarch -R build-tsan/bin/tsmem_threads build-tsan/models 2

bench: build
	@$(PYTHON) bench/run.py

clean:
	rm -rf build build-asan build-tsan build-aarch64

format:
	clang-format -i $(SOURCES)

# Configured and never built: with gcc's precompiled headers about, clang would try to read them.
tidy: setup
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check clang-tidy==19.1.0
	@cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Release -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@git ls-files '*.cpp' | grep -v -e '^examples/' -e '^bench/' -e '\.kernel\.cpp$$' | \
	  xargs -P $$(nproc) -n 1 .venv/bin/clang-tidy --quiet --extra-arg=-fno-openmp --extra-arg=-fdelayed-template-parsing --warnings-as-errors='*' -p build/tidy 2> >(grep -v ' warnings generated' >&2)
