"""Checkpoints as DeepSeek-V3 is published: matrices in fp8, with a scale for each block of 128 x 128."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
WIDE = ("embed_tokens", "lm_head", "norm", "gate.weight", "e_score_correction_bias")  # what is not quantised


def quantised(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(fp8, scales, what the two mean as bfloat16), block by block."""
    rows, columns = (-(-n // BLOCK) for n in x.shape)
    narrow, scales, meant = torch.empty(x.shape, dtype=torch.float8_e4m3fn), torch.empty(rows, columns), x.bfloat16()
    for i in range(rows):
        for j in range(columns):
            block = (slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK))
            scales[i, j] = x[block].abs().max() / 448
            narrow[block] = (x[block] / scales[i, j]).to(torch.float8_e4m3fn)
            meant[block] = (narrow[block].float() * scales[i, j]).bfloat16()
    return narrow, scales, meant


def quantise(directory: Path) -> dict[str, Tensor]:
    """Rewrite a checkpoint of one file. What a reader must find, by name."""
    file, found, stored = directory / "model.safetensors", dict[str, Tensor](), dict[str, Tensor]()
    for name, x in load_file(file).items():
        if any(part in name for part in WIDE):
            stored[name] = found[name] = x if name.endswith("bias") else x.bfloat16()
        else:
            stored[name], stored[name + "_scale_inv"], found[name] = quantised(x)
    save_file(stored, file, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text()) | {"dtype": "bfloat16"}
    config["quantization_config"] = {
        **{"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
        "weight_block_size": [BLOCK, BLOCK],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return found
