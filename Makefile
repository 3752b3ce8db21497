# Two commands do everything: `make demo` and `make test`. Both install into .venv first, where needed.

PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/installed

# One thread per process: the ranks share the machine's cores.
export OMP_NUM_THREADS := 1
export TORCH_CPP_LOG_LEVEL := ERROR
# Each of the many processes of a test run would compile all modules anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: install demo docs test quick survey gpu sanitize format clean

install: $(STAMP)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard csrc/*) | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "fxpar needs Python 3.11 or newer, but \
	$(PYTHON) is " + sys.version.split()[0] + "; name another one: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv .venv || { rm -rf .venv; exit 1; }

demo: install
	@$(BIN)/fxpar demo

docs: install
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The type check takes as long as many tests, and one core: it runs beside them, and what it found stands below theirs.
define types_and_tests
	@mkdir -p build
	$(BIN)/mypy > build/mypy.txt 2>&1 & types=$$!; $(BIN)/pytest -n 2 --dist worksteal $(1); tests=$$?; \
	wait $$types || { cat build/mypy.txt; exit 1; }; exit $$tests
endef

test: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports --no-cache --no-logo
	$(call types_and_tests)

# What changes most: everything between a captured forward and the programs of ranks, without training steps on them.
QUICK := $(addprefix tests/,cache docs graph hardware ir/test_trace_forward.py layouts passes resharding schedule \
	simulate test_backend.py test_backend_refusals.py test_config.py test_import.py) \
	--ignore=tests/docs/test_programs.py

quick: install
	$(BIN)/ruff check
	$(call types_and_tests,$(QUICK))

# All families of models on all meshes, which takes hours; stopped, it goes on where it was.
survey: install
	mkdir -p results
	$(BIN)/fxpar survey --save results/survey.jsonl --markdown docs/families.md

# On a machine with NVIDIA GPUs: kernels and training over NCCL on however many there are, a step and the kernels timed on
# one of them, and the demo on all of them.
gpu: install
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else \
	"make gpu needs an NVIDIA GPU and a PyTorch built for CUDA; found torch " + torch.__version__)'
	$(BIN)/pytest -m gpu
	mkdir -p results
	$(BIN)/fxpar bench fused --json > results/fused.json
	$(BIN)/fxpar bench gpu --json > results/gpu.json
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node gpu examples/train_gpt.py
	$(BIN)/fxpar bench report results/fused.json results/gpu.json

# The native core under AddressSanitizer and UndefinedBehaviorSanitizer, in a copy of the tree. Their runtimes must be loaded
# first, and so also check how torch and gloo call the C library; libstdc++ comes with them, as they look up its throw.
SANITIZED := build/sanitized
SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -g
RUNTIMES := $(foreach name,asan ubsan stdc++,$(shell $(CXX) -print-file-name=lib$(name).so))
REACH_CORE := tests/core tests/lowering/test_cpu_collectives.py \
	$(foreach name,shared_segment channel relay_route,tests/transport/test_$(name).py)

sanitize: install
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -a csrc examples fxpar lowering tests pyproject.toml setup.py README.md LICENSE $(SANITIZED)
	cd $(SANITIZED) && CFLAGS="$(SANITIZE)" LDFLAGS="-fsanitize=address,undefined" \
		$(CURDIR)/$(BIN)/python setup.py -q build_ext --inplace --force
	cd $(SANITIZED) && LD_PRELOAD="$(RUNTIMES)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
		$(CURDIR)/$(BIN)/python -m pytest -p no:cacheprovider $(or $(TESTS),$(REACH_CORE))

format: install
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:
	rm -rf .venv build fxpar.egg-info fxpar/*.so
