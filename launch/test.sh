#!/usr/bin/env bash
# Runs the tests; arguments go to pytest:  bash launch/test.sh [-k NAME | tests/test_x.py | ...]
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1  # torchrun tests start several processes: one thread each
exec .venv/bin/python -m pytest "$@"
