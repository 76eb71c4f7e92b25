#!/usr/bin/env bash
# Runs the tests:
#
#   bash launch/test.sh            what matters most of each room: 10 minutes on 2 cores
#   bash launch/test.sh --fast     what of these is quick, no ranks and no compiler: 2 minutes
#   bash launch/test.sh --all      everything: an hour on 2 cores, longer on slow ones
#   bash launch/test.sh --rest     what --all has and the first command has not
#   bash launch/test.sh --newest [--python PYTHON]
#                                  models, ranks, checkpoints, conversion and engine with a newer megatron-core, in an
#                                  environment of Python 3.12 (launch/setup.sh --newest): half an hour on 2 cores
#
# Other arguments go to pytest: tests/test_config.py, -k NAME, -m "not distributed", -n 0, ... Named tests are taken from
# all of them.
#
# Three workers: one has tests whose ranks wait, one those whose ranks fill the cores, one the rest (tests/conftest.py).
set -euo pipefail

arguments=() setup=() newest=
while (($#)); do
    case $1 in
        --fast | --all | --rest | --weekly) arguments+=(--set "${1#--}") ;;
        --newest) newest=1 ;;
        --python) setup+=(--python "${2?--python needs a value}") && shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
if [[ -n $newest ]]; then
    venv=.venv-newest setup+=(--newest)
    export HYBRIDFLOW_PLATFORM=cpu CUDA_VISIBLE_DEVICES=  # its torch may be built for CUDA
    [[ " ${arguments[*]}" == *" tests/"* ]] || arguments+=(
        tests/models tests/parallel tests/architecture tests/checkpoint tests/tools/convert tests/rollout
        tests/distributed/test_{parity,pairs,families}.py tests/inspection tests/cli/test_env.py tests/test_constraints.py
    )
fi
bash launch/setup.sh "${setup[@]}"
export OMP_NUM_THREADS=1  # tests start several processes: one thread each
exec "$venv/bin/python" -m pytest -n 3 "${arguments[@]}"
