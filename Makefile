# Needs Python 3.10+, git and make; everything else is installed into .venv on first use.
#   make demo     train the first example, plain and optimized side by side
#   make test     run the tests
#   make lint     ruff check and format check
#   make types    mypy, strict
#   make clean    remove .venv and the tools' caches
# PYTHON picks the interpreter the environment is made from; WORKERS is the number of processes that run tests, and
# PYTEST_ARGS is passed on to pytest.

PYTHON ?= python3
VENV ?= .venv
WORKERS ?= auto
PYTEST_ARGS ?=
BIN := $(VENV)/bin

PIP_INSTALL := $(BIN)/python -m pip install --disable-pip-version-check

.PHONY: demo test lint types clean
.DELETE_ON_ERROR:

demo: $(VENV)/.examples-installed
	$(BIN)/python examples/digits_spikingjelly/train.py

test: $(VENV)/.test-installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --maxprocesses 4 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.test-installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.test-installed
	$(BIN)/mypy

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
		{ echo "$(PYTHON) is $$($(PYTHON) --version 2>&1); Python 3.10 or newer is needed: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@touch $@

# Installed editable, so that only a change of the requirements asks for a second installation.
$(VENV)/.%-installed: $(VENV)/.created pyproject.toml setup.cfg
	$(PIP_INSTALL) --editable '.[$*]'
	@touch $@

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis build *.egg-info
