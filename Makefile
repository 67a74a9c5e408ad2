# Everything a newcomer needs: Python 3.11 or newer, make, and a package index that pip can reach.
#
#   make setup   makes .venv; the other targets do that by themselves
#   make demo    prepare data, train with 1 and 3 workers, stop, resume, generate, measure (under 10 minutes on 2 cores)
#   make test    the test suite
#   make check   style, types, layers and contracts; FULL=1 adds the whole suite with the slow tests
#   make bench   the scaling table of the demo's model, on this machine
#   make clean   remove what the targets above made (the environment included)
#
# PYTHON=python3.12 picks the interpreter that .venv is made with. TORCH='torch==2.12.*' picks the PyTorch to install.
# Paths are relative on purpose: make cannot handle a checkout whose path has a space in any other way.

export PYTHON TORCH

.PHONY: help setup demo test check bench clean

help:
	@sed -n 's/^#   //p' Makefile

setup:
	@scripts/setup

demo: setup
	@scripts/demo

test: setup
	@scripts/test

check: setup
	@scripts/check $(if $(FULL),--full)

bench: setup
	@scripts/bench

clean:
	rm -rf .venv demo runs/demo build dist .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
