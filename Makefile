# make demo   set up, then park demo: dense attention against PARK with the small trained model on this CPU: videos, metrics, a page
# make test   set up, then style, types, layout and every test
# make bench  sparse against dense time on this machine's CPU
# make extras each extra alone, from the built wheel in an empty environment, at its job (downloads several GB)
# make campaign the long tests: stops, full disks, hostile folders, fuzzed calls, 200 videos; DIFFUSERS_SOURCE=PATH adds its own tests
# make matrix the lowest, the pinned and the newest versions, each in an environment of its own; writes docs/support.md (an hour or more)
# make docs   the documentation site in out/docs, warnings are errors, in an environment of its own (.venv-docs)

PYTHON ?= python3
VENV ?= .venv
INSTALLED := $(VENV)/.installed
BIN := $(VENV)/bin
DOCS_VENV ?= .venv-docs

.PHONY: demo test bench extras campaign matrix docs lint clean

demo: $(INSTALLED)
	$(BIN)/park demo

# a third worker for the waits of two cores; compiled tests are kept, since dozens of processes import them
test: lint
	env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

bench: $(INSTALLED)
	$(BIN)/park bench cpu

extras:
	$(PYTHON) tools/matrix.py extras

campaign: $(INSTALLED)
	$(BIN)/python tools/campaign.py $(if $(DIFFUSERS_SOURCE),--diffusers $(DIFFUSERS_SOURCE))

matrix:
	$(PYTHON) tools/matrix.py versions

docs: $(DOCS_VENV)/.installed
	PATH=$(abspath $(DOCS_VENV))/bin:$$PATH NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build --strict --site-dir out/docs

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Debian's Python may come without ensurepip: then the machine's own pip furnishes the environment
$(INSTALLED): pyproject.toml lab/pyproject.toml constraints.txt
	test -x $(BIN)/pip || $(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $(BIN)/python install pip; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'pip>=25'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e . -e './lab[test]'
	touch $@

$(DOCS_VENV)/.installed: pyproject.toml
	test -x $(DOCS_VENV)/bin/pip || $(PYTHON) -m venv $(DOCS_VENV) || { $(PYTHON) -m venv --clear --without-pip $(DOCS_VENV) && $(PYTHON) -m pip --python $(DOCS_VENV)/bin/python install pip; }
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check 'pip>=25.1'
	$(DOCS_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --group docs
	touch $@

clean:
	rm -rf $(VENV) $(DOCS_VENV) out .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
