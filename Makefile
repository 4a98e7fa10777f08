# `make demo` and `make test` do all the set-up themselves, in $(VENV).

PYTHON ?= python3
VENV ?= .venv
# Half of the tests' time is waiting: for a rendezvous, a server that is down, a process that is told to end.
WORKERS ?= 4
ENGINES ?= .venv-engines
RELEASE ?= .venv-release
BIN := $(VENV)/bin
# Where it is set, each process of the tests would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
# torch asks for the host names of both ends of each connection. Where no name server answers, it waits 5 s each time.
export RES_OPTIONS ?= timeout:1 attempts:1
# torch comes first for both; then what the demo needs, or all. After all, the demo needs nothing more.
TORCH := $(VENV)/.torch
FOR_DEMO := $(VENV)/.demo
FOR_DOCS := $(VENV)/.docs
INSTALLED := $(VENV)/.installed
# pip compiles on one core, compileall on all of them, without two fifths of the code, which nothing here imports. torch, the
# largest, is compiled while pip installs the others.
# pip's warnings are left out, its errors are not.
INSTALL := $(BIN)/pip install -qq --no-compile
# The first pip with --group. Python's own venv may have an older one.
PIP := pip>=25.1
UNUSED := /tests/|/testing/|/_inductor/|/transformers/models/|/kubernetes/aio/
UNUSED := $(UNUSED)|/site-packages/(databricks|debugpy|fontTools|hypothesis|mypy|mypyc|networkx|setuptools)/
COMPILE := $(BIN)/python -m compileall -qq -j 0 -x '$(UNUSED)' $(VENV)/lib || true

.PHONY: demo test test-all test-wide test-engines test-slurm vendors reliability soak bench drawings pictures includes docs lint wheel release-check clean

demo: $(FOR_DEMO)
	@echo "Running examples/digits.py: about a minute, most of it for 8 processes that import torch and flytekit."
	@OMP_NUM_THREADS=1 $(BIN)/python -W ignore examples/digits.py demo-output

# Every promise once, on warm jobs: see CONTRIBUTING.md.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slurm and not full and not wide"

# Every promise. TESTS_COLD=1 starts real interpreters instead of warm jobs; TESTS_COLD=first does so once for each launcher and SDK.
test-all: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slurm and not wide"

# What is left out there: the other pairs of a script and a fault, of a tracker and a restart, and repetitions. Before a release.
test-wide: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "wide and not slurm"

# Ray, Dask, mpi4py, joblib and others, in an environment of their own. Spark if there is Java, Ray in a real Slurm if there is one:
# apt-get install default-jre-headless slurmctld slurmd slurm-client munge
test-engines: $(ENGINES)/.installed
	OMP_NUM_THREADS=1 $(ENGINES)/bin/python -m pytest -m "engines or slurm" tests/engines tests/slurm/test_slurm_ray.py

# A real Slurm on this machine's loopback: apt-get install slurmctld slurmd slurm-client munge
test-slurm: $(INSTALLED)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slurm tests/slurm

# Many versions of each vendor's client, and their table in docs/about/matrix.md: all, or VENDOR=mlflow, or VENDOR="mlflow 2.14.3".
vendors: $(INSTALLED)
	OMP_NUM_THREADS=1 TESTS_COLD=1 PYTHONPATH=tests:examples $(BIN)/python -m support.vendors $(VENDOR); \
	failed=$$?; $(BIN)/python docs/include.py && exit $$failed

# The table of all faults, docs/about/matrix.md, measured again.
reliability: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:examples $(BIN)/python -m faults docs/about/matrix.md

# 200 restarts in a row of a 4-rank job.
soak: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:examples $(BIN)/python -m faults.soak

# The figures of docs/about/how-it-works.md, measured again: all of them, or ROWS="log shutdown".
bench: $(INSTALLED)
	OMP_NUM_THREADS=1 PYTHONPATH=tests:examples $(BIN)/python benchmarks $(ROWS)
	$(BIN)/python docs/include.py

# The drawings of docs/modes, from the plans themselves.
drawings: $(INSTALLED)
	$(BIN)/python docs/modes/draw.py

# The pictures of docs/pictures, from real jobs: all of them, or PICTURES="doctor". That of a browser: apt-get install chromium
pictures: $(INSTALLED)
	@$(INSTALL) pyte -c constraints.txt
	PYTHONPATH=tests:examples $(BIN)/python docs/pictures/make.py $(PICTURES)

# The copies of examples in the docs, the references, the figures, and the arguments of tracking_init.
includes: $(INSTALLED)
	$(BIN)/python docs/include.py

# The site, in site/index.html, with three packages. A dead link or anchor is an error; with --quiet it would not be.
docs: $(FOR_DOCS)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

lint: $(INSTALLED)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

wheel: $(INSTALLED)
	$(BIN)/python -m build --wheel --outdir dist .

# Before a release: the tag, the changelog, the sdist, the wheel out of it, and the README as the package index shows it.
release-check: $(RELEASE)/.installed
	@$(RELEASE)/bin/python .ci/release_check.py

# torch first and by itself, at exactly the pinned version: what depends on it would take the newest one.
# PyPI's torch for Linux brings CUDA along. pip takes the CPU build if PIP_EXTRA_INDEX_URL names an index that has it.
$(TORCH): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed: make PYTHON=python3.11")'
	@echo "Installing into $(VENV), 1 of 2: torch and numpy. About 20 s, and the download: torch is the largest one."
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) '$(PIP)'
	@$(INSTALL) "$$(grep '^torch==' constraints.txt)" numpy -c constraints.txt
	@touch $@

$(FOR_DEMO): $(TORCH)
	@echo "Installing into $(VENV), 2 of 2: wandb, flytekit, scikit-learn and matplotlib. About a minute: flytekit needs 100 packages."
	@$(INSTALL) -e . --group demo -c constraints.txt
	@$(COMPILE)
	@touch $@

$(FOR_DOCS): pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) '$(PIP)'
	@$(INSTALL) --group docs -c constraints.txt
	@touch $@

# pluto-ml last and beside the others, where its .pth is not run: that imports it at each start of an interpreter.
# pytest compiles the tests once, beside the rest of the packages. Else each of its workers would, at the same time.
$(INSTALLED): $(TORCH)
	@echo "Installing into $(VENV), 2 of 2: all that the tests, docs and checks need, about 300 packages. A few minutes."
	@$(COMPILE) & $(INSTALL) -e . --group dev -c constraints.txt; installed=$$?; wait; exit $$installed
	@$(INSTALL) --no-deps --upgrade --target $(VENV)/pluto "$$(grep '^pluto-ml==' constraints.txt)"
	@$(BIN)/python -m pytest --collect-only -qq >/dev/null 2>&1 & $(COMPILE); wait
	@touch $(FOR_DEMO) $(FOR_DOCS) $@

$(ENGINES)/.installed: pyproject.toml constraints.txt
	@echo "Installing into $(ENGINES): torch, Ray, Dask, mpi4py and others. A few minutes."
	@$(PYTHON) -m venv $(ENGINES)
	@$(ENGINES)/bin/pip install -qq --no-compile '$(PIP)'
	@$(ENGINES)/bin/pip install -qq --no-compile "$$(grep '^torch==' constraints.txt)" numpy -c constraints.txt
	@$(ENGINES)/bin/pip install -qq --no-compile -e . --group engines -c constraints.txt
	@! command -v java >/dev/null || $(ENGINES)/bin/pip install -qq --no-compile pyspark -c constraints.txt
	@$(ENGINES)/bin/python -m compileall -qq -j 0 $(ENGINES)/lib || true
	@touch $@

$(RELEASE)/.installed: pyproject.toml
	@$(PYTHON) -m venv $(RELEASE)
	@$(RELEASE)/bin/pip install -qq build hatchling 'hatch-fancy-pypi-readme>=24.1' twine -c constraints.txt
	@touch $@

clean:
	rm -rf $(VENV) $(ENGINES) $(RELEASE) .vendors .bench dist site demo-output .mypy_cache .ruff_cache .pytest_cache
