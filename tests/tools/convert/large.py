"""A checkpoint of gigabytes, made from a config alone in some seconds, and the peak memory of a conversion.

python -m tests.tools.convert.large ARGUMENT ...    runs `tools.convert ARGUMENT ...`, then prints its peak memory
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor

from hybridflow.architecture.spec import read_spec
from hybridflow.architecture.weights import model_weights
from hybridflow.formats.huggingface_files import num_bytes, plan_files, write_index, write_safetensors
from hybridflow.formats.safetensors_files import TensorInfo
from tests.launch import ROOT

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 4096,
}
FILE_BYTES = 10**9


def make_large(directory: Path, config: dict[str, object]) -> tuple[int, int]:
    """Write it, in bfloat16 and several files. (bytes of all tensors, of the largest)."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    spec = read_spec(directory)
    infos = {
        name: TensorInfo(shape, torch.bfloat16)
        for weight in model_weights(spec, spec.head)
        for name, shape in zip(weight.hf, weight.shapes(spec), strict=True)
    }
    generator = torch.Generator().manual_seed(0)

    def random(name: str) -> Tensor:
        """Random bits: NaNs are weights like any other."""
        numbers = torch.empty(num_bytes(infos[name]) // 8, dtype=torch.int64)
        return numbers.random_(generator=generator).view(torch.bfloat16).view(infos[name].shape)

    plan = plan_files(infos, FILE_BYTES)
    for file in dict.fromkeys(plan.values()):
        write_safetensors(directory / file, {name: infos[name] for name in plan if plan[name] == file}, random)
    sizes = [num_bytes(info) for info in infos.values()]
    write_index(directory, plan, sum(sizes))
    return sum(sizes), max(sizes)


def peak_memory(*arguments: object) -> int:
    """Bytes that a process of its own, which runs `tools.convert` with these arguments, has resident at most."""
    command = [sys.executable, "-m", "tests.tools.convert.large", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main(arguments: list[str]) -> int:
    from hybridflow.cli.convert import main as convert

    status = convert(arguments)
    # ru_maxrss would count what the process was before it became python: a copy of the one that started it
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    print(int(line.split()[1]) * 1024)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
