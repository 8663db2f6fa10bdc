# Two commands do everything on a fresh Linux machine: `make run` (the quickstart) and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
# Two processes, each with whole files of tests: most tests keep one core busy, and wait for much of their time.
TWO_AT_ONCE := -n 2 --dist loadfile

.PHONY: run test test-slow test-long slurm-lab lint install browser prometheus slurm clean

run: install
	$(BIN)/gradus train recipes/quickstart.yaml $$($(BIN)/python -c "from gradus import Cluster; \
	  here = Cluster.detect(); print('' if here.gpus_per_node else f'--nproc {min(2, here.cpu_cores)}')")

test: install browser prometheus slurm
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m "not slow"

test-slow: install browser prometheus slurm
	$(BIN)/python -m pytest $(TWO_AT_ONCE) --no-loadscope-reorder -m "slow and not long"

# Measurements of minutes each: before a release, and when bench, tune or the exporters change.
test-long: install browser prometheus slurm
	$(BIN)/python -m pytest $(TWO_AT_ONCE) -m long

# A shell in a Slurm cluster of its own, which is gone when the shell ends.
slurm-lab: install slurm
	@$(BIN)/python tests/slurm/lab.py

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

install: $(INSTALLED)

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo "gradus needs Python 3.10 or newer; $(PYTHON) is older. Try: make PYTHON=python3.12"; exit 2; }
	@$(PYTHON) -m venv .venv || \
	  { echo "cannot make a virtual environment; on Debian or Ubuntu: apt install python3-venv"; exit 2; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $@

# A real browser for the tests of pages, without the parts that need a screen. Without root, those tests are skipped.
browser:
	@command -v chromium-headless-shell >/dev/null || command -v chromium >/dev/null || [ "$$(id -u)" != 0 ] || \
	  { apt-get update -qq && apt-get install -y -qq chromium-headless-shell; }

# A real Prometheus for the tests of what it is told. Without root, those tests are skipped.
prometheus:
	@tests/install_prometheus.sh

# A real Slurm for the tests of the scheduler. Without root, those tests are skipped.
slurm:
	@tests/slurm/install.sh

clean:
	rm -rf .venv build .mypy_cache .ruff_cache .pytest_cache src/*.egg-info
