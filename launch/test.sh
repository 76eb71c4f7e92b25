#!/usr/bin/env bash
# Runs the tests; arguments go to pytest:  bash launch/test.sh [-k NAME | tests/test_x.py | -m "not distributed" | -n 0 | ...]
#
# One worker has the tests that start ranks, another those of them that mostly wait, all have the rest (tests/conftest.py).
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1  # tests start several processes: one thread each
exec .venv/bin/python -m pytest -n logical --maxprocesses 4 "$@"
