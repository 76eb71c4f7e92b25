#!/usr/bin/env bash
# Runs the tests:
#
#   bash launch/test.sh            what matters most of each room: 8 minutes on 2 cores
#   bash launch/test.sh --fast     what of these is quick, no ranks and no compiler: 2 minutes
#   bash launch/test.sh --rest     what a change must pass besides: half an hour
#   bash launch/test.sh --gate     both in one session, as .ci/run has it
#   bash launch/test.sh --weekly   products of what the others take by pairs
#   bash launch/test.sh --all      everything
#   bash launch/test.sh --newest [--python PYTHON]
#                                  the first with a newer megatron-core on Python 3.12, of models, ranks, checkpoints,
#                                  conversion and engine: 10 minutes. launch/setup.sh --newest makes the environment
#
# Other arguments go to pytest: tests/test_config.py, -k NAME, -m "not distributed", -n 0, ... Named tests are taken from
# all of them.
#
# Three workers: one has tests whose ranks wait, one those whose ranks fill the cores, one the rest (tests/conftest.py).
# Two are enough for --fast, which starts no ranks.
set -euo pipefail

arguments=() setup=() newest= workers=3
while (($#)); do
    case $1 in
        --fast) arguments+=(--set fast) workers=2 ;;
        --all | --rest | --gate | --weekly) arguments+=(--set "${1#--}") ;;
        --newest) newest=1 ;;
        --python) setup+=(--python "${2?--python needs a value}") && shift ;;
        *) arguments+=("$1") ;;
    esac
    shift
done

cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=.venv
if [[ -n $newest ]]; then
    setup+=(--newest) venv=$(bash launch/setup.sh --newest --where)
    export HYBRIDFLOW_PLATFORM=cpu CUDA_VISIBLE_DEVICES=  # its torch may be built for CUDA
    export PYTHONPATH=$PWD  # its packages are those of all checkouts
    [[ " ${arguments[*]}" == *" tests/"* ]] || arguments+=(
        --set default tests/models tests/parallel tests/architecture tests/checkpoint tests/tools/convert tests/rollout
        tests/distributed tests/cli/test_env.py tests/test_constraints.py
    )
fi
bash launch/setup.sh "${setup[@]}"
export OMP_NUM_THREADS=1  # tests start several processes: one thread each
exec "$venv/bin/python" -m pytest -n "$workers" "${arguments[@]}"
