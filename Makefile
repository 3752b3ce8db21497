# Two commands do everything: `make demo` and `make test`. Both install into .venv first, where needed.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# One thread per process: the ranks share the machine's cores.
export OMP_NUM_THREADS := 1
export TORCH_CPP_LOG_LEVEL := ERROR
# Each of the many processes of a test run would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo test format clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fxpar needs Python 3.11 or newer, but \
	$(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

demo: install
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

test: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/pytest -n 2 --dist worksteal

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build fxpar.egg-info fxpar/*.so
