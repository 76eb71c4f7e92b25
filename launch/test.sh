#!/usr/bin/env bash
# Runs the tests:
#
#   bash launch/test.sh            what matters most of each room: 10 minutes on 2 cores
#   bash launch/test.sh --fast     what of these is quick, no ranks and no compiler: under 2 minutes
#   bash launch/test.sh --all      everything: 20 minutes on 2 cores, longer on slow ones
#   bash launch/test.sh --rest     what --all has and the first command has not
#
# Other arguments go to pytest: tests/test_config.py, -k NAME, -m "not distributed", -n 0, ... Named tests are taken from
# all of them.
#
# Three workers: one has tests whose ranks wait, one those whose ranks fill the cores, one the rest (tests/conftest.py).
set -euo pipefail

arguments=()
for word in "$@"; do
    case $word in
        --fast | --all | --rest) arguments+=(--set "${word#--}") ;;
        *) arguments+=("$word") ;;
    esac
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh
export OMP_NUM_THREADS=1  # tests start several processes: one thread each
exec .venv/bin/python -m pytest -n 3 "${arguments[@]}"
