# make build   set-up and build: build/bin/tsmem, build/lib/libtsmem_ops.so, a Python in .venv in which `import tsmem` works
# make demo    rewrites a scripted ResNet-50, verifies it, prints memory and time before and after
# make test    every test with the default torch, the newest; then test-other-part
# make test-default      the first half of that
# make test-other-part   what knows versions, with the other end of torch's range (.venv-2.11, build-2.11): the C++ tests, loading, training, examples
# make test-oldest, make test-newest   every test with the oldest torch, or with the newest
# make fuzz SEEDS=A:B   random programs A to B - 1, rewritten and compared (docs/testing.md)
# make sanitize   the C++ tests and those of the operators under AddressSanitizer and UndefinedBehaviorSanitizer, in build-asan
# make hostile SEEDS=0:2000   every command on that many damaged and hostile files (hours; tests/hostile)
# make tsan    forward and backward from several threads under ThreadSanitizer, in build-tsan
# make bench   every benchmark; results in build/bench
# make wheel   one wheel for every torch of the range, in build/wheel
# TSMEM_TORCH=/path/to/site-packages/torch uses that torch in place of the one that set-up installs into .venv, and no other.
SHELL := /bin/bash
PYTHON := .venv/bin/python
# The minor versions of torch: of .venv and build/, of the other end of the range, and which of them is the oldest.
DEFAULT := $(shell sed -n 's/^\([0-9]*\.[0-9]*\)\..* default$$/\1/p' python/torch-versions.txt)
OTHER := $(shell sed -n '/ default$$/d; s/^\([0-9]*\.[0-9]*\)\..*/\1/p' python/torch-versions.txt)
OLDEST := $(shell grep -m1 -o '^[0-9]*\.[0-9]*' python/torch-versions.txt)
# Relative paths in ccache's keys: the wheel's build finds what build/ has compiled.
export CCACHE_BASEDIR := $(CURDIR)
export CCACHE_NOHASHDIR := 1
# ... and by one compiler's name, which is in the keys too: pip's build would take Python's.
export CXX
SOURCES = $$(git ls-files '*.cpp' '*.h' '*.cu')

.PHONY: build build-other build-other-part configure-other demo test test-packages test-default test-other test-other-part test-newest test-oldest wheel fuzz sanitize tsan hostile bench setup clean format tidy

setup:
	@cmake/setup.sh

build: setup
	@cmake --preset release -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@cmake --build --preset release

demo: build
	@$(PYTHON) examples/demo.py

# Without CUDA, which halves its time: its kernels know nothing of torch. -O1, a third less: the CPU's kernels ask for more themselves.
configure-other:
	@cmake/setup.sh other
	@torch=$$(echo "$(CURDIR)"/.venv-$(OTHER)/lib/python3*/site-packages/torch); \
	cmake -S . -B build-$(OTHER) -G Ninja -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_FLAGS_RELEASE="-O1 -DNDEBUG" -DTSMEM_CUDA=OFF -DTSMEM_TORCH="$$torch" > build/configure-$(OTHER).log || \
	  { cat build/configure-$(OTHER).log; exit 1; }

build-other: configure-other
	@cmake --build build-$(OTHER)

# What test-other-part runs.
build-other-part: configure-other
	@cmake --build build-$(OTHER) --target tsmem tsmem_library tsmem_no_python tsmem_ops tsmem_tests

# Every part runs, whatever those before it say; a file's tests run in one process, a core each. $(call tests,Python,build folder,what pytest gets,what ctest gets); TSMEM_CUDA=OFF: no test of CUDA's kernels.
# Threads that wait for others sleep: spinning, those of two processes take the cores from one another, and tests of small tensors half as long again.
tests = failed=0; export OMP_WAIT_POLICY=passive; \
	ctest --test-dir $(2) --output-on-failure --parallel $$(nproc) $(4) || { echo "make $@: ctest failed in $(2)"; failed=1; }; \
	TSMEM_OPS="$(CURDIR)/$(2)/lib/libtsmem_ops.so" TSMEM_BIN="$(CURDIR)/$(2)/bin/tsmem" $(1) -m pytest --numprocesses=auto --maxprocesses=8 --dist=loadfile $(3) || { echo "make $@: pytest failed with $(1)"; failed=1; }; \
	[ $$failed -eq 0 ]

# Both halves run, whatever the first says.
test:
	@failed=0; for part in test-default test-other-part; do $(MAKE) --no-print-directory $$part || failed=1; done; [ $$failed -eq 0 ]

test-packages: setup
	@cmake/setup.sh tests

test-default: test-packages build
	@$(call tests,$(PYTHON),build,tests)

test-other: build-other
	@export TSMEM_CUDA=OFF; $(call tests,.venv-$(OTHER)/bin/python,build-$(OTHER),tests)

# What knows versions (the emulated kernels of CUDA know nothing of torch): loading, files of another version, training in every way, the examples.
test-other-part: build-other-part
	@export TSMEM_CUDA=OFF; $(call tests,.venv-$(OTHER)/bin/python,build-$(OTHER),$(addprefix tests/,test_loading.py test_written_before.py test_examples.py test_models.py test_session.py ops/test_recompute.py),-E ^cuda_)

test-oldest: $(if $(filter $(OLDEST),$(DEFAULT)),test-default,test-other)

test-newest: $(if $(filter $(OLDEST),$(DEFAULT)),test-other,test-default)

wheel: setup
	@$(PYTHON) cmake/wheel/make_wheel.py

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
	@cmake -S . -B build/tidy -G Ninja -DCMAKE_BUILD_TYPE=Release -DTSMEM_UNITY=OFF -DTSMEM_TORCH="$$TSMEM_TORCH" > build/configure.log || { cat build/configure.log; exit 1; }
	@git ls-files '*.cpp' | grep -v -e '^examples/' -e '^bench/' -e '\.kernel\.cpp$$' | \
	  xargs -P $$(nproc) -n 1 .venv/bin/clang-tidy --quiet --extra-arg=-fno-openmp --extra-arg=-fdelayed-template-parsing --warnings-as-errors='*' -p build/tidy 2> >(grep -v ' warnings generated' >&2)
