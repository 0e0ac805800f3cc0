# Two commands: `make demo` and `make test`. Both set everything up in .venv on first use.
#
#   PYTHON=python3.12                                     the interpreter for .venv (3.11 to 3.13)
#   TORCH_INDEX=https://download.pytorch.org/whl/cpu      where to look for another build of torch
#   VENV=/somewhere/else                                  the virtual environment

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet --no-compile -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
# As pip would, but on all cores: more than half of an installation. Some files are for newer Pythons.
COMPILE := $(PY) -m compileall -qq -j 0 $(VENV)/lib || true

.PHONY: demo test lint clean
.DELETE_ON_ERROR:

demo: $(VENV)/.demo-installed
	PATH="$(abspath $(VENV))/bin:$$PATH" bash examples/demo.sh

# Two processes of one thread, for 2 cores: tests start processes of their own. Each begins with half of
# the tests and takes from the other when it is done. PYTEST_ARGS="-n 0": one process, as --pdb needs.
test: $(VENV)/.dev-installed
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal $(PYTEST_ARGS)

lint: $(VENV)/.dev-installed
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(VENV)/bin/basedpyright
	@find codesign -name '*.py' -exec cat {} + | wc -l | xargs printf 'codesign/: %s lines of Python\n'

clean:
	rm -rf $(VENV) dist .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'codesign needs Python 3.11 or newer: make PYTHON=python3.12 ...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet --upgrade 'pip>=25.1' -c constraints.txt
	@touch $@

$(VENV)/.demo-installed: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e '.[engine,report]'
	@$(COMPILE)
	@touch $@

# What the demo needs is in it, and is looked up once.
$(VENV)/.dev-installed: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) -e '.[engine,report]' --group dev
	@$(COMPILE)
	@touch $@ $(VENV)/.demo-installed
