#!/usr/bin/env bash
# Trains a small model on CPU processes, from nothing; as many as the config's layouts need, two by default. The model is
# made here. Configs that read data/sums take a published model, which is fetched.
#
#   bash launch/quickstart.sh [CONFIG] [KEY=VALUE ...]        CONFIG: configs/quickstart.yaml
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."

config=configs/quickstart.yaml
if [[ $# -gt 0 && $1 == *.yaml ]]; then
    config=$1
    shift
fi
[[ -f $config ]] || { echo "quickstart.sh: no config $config (paths count from $PWD)" >&2 && exit 1; }

show_and_run() {
    printf '$ %s\n' "$*"
    "$@"
}

show_and_run bash launch/setup.sh
export OMP_NUM_THREADS=1  # one thread for each process
export TORCH_CPP_LOG_LEVEL=ERROR  # vLLM tells every rank how it binds memory
base=$(sed -n 's/^base: *\([^ #]*\).*/\1/p' "$config")  # counted from the config's directory
files=("$config" ${base:+"$(dirname "$config")/$base"})
if grep -q data/tiny_experts "${files[@]}"; then
    show_and_run .venv/bin/python -m tools.make_tiny data/tiny_experts --experts 8 --if-missing
elif grep -q data/sums "${files[@]}"; then
    show_and_run .venv/bin/python -m tools.make_sums data/sums --if-missing
elif grep -q data/tiny_tools "${files[@]}"; then
    show_and_run .venv/bin/python -m tools.make_tiny data/tiny_tools --tools --if-missing
else
    show_and_run .venv/bin/python -m tools.make_tiny data/tiny --if-missing
fi
show_and_run .venv/bin/hybridflow train "$config" "$@"
