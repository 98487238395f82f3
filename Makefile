# Each target sets up what it needs on a fresh machine: Linux, Python >= 3.11, git, make; a C++ compiler is optional.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard native/*) setup.py pyproject.toml constraints.txt

# Tests run in two processes. A process that has finished takes over tests of the other process.
PYTEST := -m pytest -q -n 2 --dist worksteal --durations=10
REFERENCE_TESTS := $(addprefix tests/gradients/test_,consumers.py factors.py random_programs.py models.py)

.PHONY: demo test test-all test-rest test-slow test-reference lint bench clean

demo: export MALLOC_MMAP_THRESHOLD_ = 1048576
demo: $(VENV)/.demo
	$(BIN)/backstash compare examples/train_images.py --network vgg --batch 192 --steps 10 --out demo-results/vgg
	$(BIN)/backstash compare examples/train_images.py --network resnet --batch 192 --steps 10 --out demo-results/resnet

test: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "not slow"

test-slow: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m slow

test-all: $(VENV)/.dev
	$(BIN)/python $(PYTEST)

# Everything that `make test` leaves out.
test-rest: test-slow test-reference

# Tests of gradients with the reference kernels, and of two networks, because networks take minutes with these kernels.
test-reference: export BACKSTASH_KERNELS = reference
test-reference: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "not slow" $(REFERENCE_TESTS) -k "not test_network or resnet18 or vgg_small"

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m benchmarks.run --device cpu

clean:
	rm -rf $(VENV) build demo-results backstash-compare src/*.egg-info src/backstash/ops/cpu/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: a range would fetch the newest build with its CUDA packages.
$(VENV)/.torch: $(BIN)/python constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check setuptools wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot]' scikit-learn
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot,dev]'
	touch $@

$(VENV)/.bench: $(VENV)/.torch $(SOURCES)
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot,bench]'
	touch $@
