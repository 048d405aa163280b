# The commands of this project. `make demo` and `make test` set up .venv by themselves; they need
# Python 3.11 or newer with its venv module (Debian: python3-venv), git and make.

LOCK := .ci/requirements.lock
INSTALLED := .venv/.installed
PYTHON := .venv/bin/python
UV ?= uv

.PHONY: help demo test lint lock bench

help:
	@echo 'make demo   show a call that survives the loss of an interface'
	@echo 'make test   run the tests (ARGS="-k name" for some of them)'
	@echo 'make lint   check formatting, style, types, import directions and generated code'
	@echo 'make bench  measure the sidecar beside nginx, haproxy and a first attempt (needs nginx, haproxy, wrk)'
	@echo 'make lock   renew the pinned requirements (needs uv)'

demo: $(INSTALLED)
	@.venv/bin/a2a-sidecar demo

test: $(INSTALLED)
	@$(PYTHON) -m pytest --numprocesses auto --dist loadfile $(ARGS)

bench: $(INSTALLED)
	@$(PYTHON) -m benchmarks.run $(ARGS)

lint: $(INSTALLED)
	@$(PYTHON) -m ruff format --check . proto/generate
	@$(PYTHON) -m ruff check . proto/generate
	@$(PYTHON) -m mypy
	@.venv/bin/lint-imports
	@$(PYTHON) proto/generate --check

# Two files: everything for development, and the same versions of what the daemon itself needs.
lock:
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command 'make lock' \
	    --group dev --output-file $(LOCK) pyproject.toml
	@$(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --custom-compile-command 'make lock' --no-annotate \
	    --constraints $(LOCK) --output-file .ci/runtime.lock pyproject.toml

$(INSTALLED): $(LOCK)
	@sh .ci/setup $(LOCK) $(INSTALLED)
