"""Peak bytes of a policy model's output layer with its log-probs and entropies, all logits at once and in chunks.

    python -m tests.bench.output_layer [--rows 16384] [--json]

One rank of Qwen3-8B's last stage as it runs on a GPU without apex and Triton, in bfloat16, on meta tensors: nothing is
computed, and every storage that an operator makes is counted. Beside it what `hybridflow.plan` counts.
"""

import argparse
import json
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hybridflow.architecture.spec import ModelSpec
from hybridflow.models.output_layer import OutputLayer, Outputs
from hybridflow.parallel import vocab
from hybridflow.parallel.vocab import by_torch
from hybridflow.placement.footprint import output_bytes

SPEC = ModelSpec(
    path=Path("Qwen3-8B"),
    family="qwen3",
    head="lm",
    num_layers=36,
    hidden_size=4096,
    ffn_hidden_size=12288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    norm_eps=1e-6,
    tied=False,
    max_positions=40960,
)
SIZES = (1, 2, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=16384)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=max(SIZES))
    found = [measure(tp, options.rows, backward=backward) for tp in SIZES for backward in (False, True)]
    if options.json:
        print(json.dumps(found))
        return
    print(f"GiB of {options.rows:,} rows x {SPEC.vocab_size:,} columns: all logits at once -> in chunks (plan)")
    for its in found:
        before, after, counted = (f"{its[name] / 2**30:.2f}" for name in ("all at once", "peak", "counted"))
        print(f"tp {its['tp']}, {its['pass']}: {before} -> {after} ({counted})")


def measure(tp: int, rows: int, *, backward: bool) -> dict[str, Any]:
    """Without the last hidden states, which are there before."""
    with mock.patch.object(vocab, "LOGITS_AT_ONCE", 1 << 60):
        all_at_once = peak(tp, rows, backward=backward)
    counted = output_bytes(SPEC, "lm", tp=tp, itemsize=2, rows=rows, backward=backward) - 2 * rows * SPEC.hidden_size
    return {
        "tp": tp,
        "pass": "update" if backward else "scoring",
        "all at once": all_at_once,
        "peak": peak(tp, rows, backward=backward),
        "counted": counted,
    }


def peak(tp: int, rows: int, *, backward: bool) -> int:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=SPEC.hidden_size,
        num_attention_heads=SPEC.num_heads,
        params_dtype=torch.bfloat16,
        tensor_model_parallel_size=tp,
        perform_initialization=False,
        use_cpu_initialization=True,
    )
    group = dist.new_group(list(range(tp)))
    with torch.device("meta"):
        layer = OutputLayer(SPEC.hidden_size, SPEC.padded_vocab_size, config=config, tied=False, tp_group=group)
        weight: Any = layer.weight
        weight.main_grad = torch.empty(weight.shape)  # float32, as megatron's
        hidden = torch.empty(rows, SPEC.hidden_size, dtype=torch.bfloat16, requires_grad=backward)
        targets, advantages = torch.empty(rows, dtype=torch.int64), torch.empty(rows)
    kernels = by_torch("cuda")

    def both() -> tuple[Tensor, Tensor]:
        outputs: Outputs = layer(hidden)
        return outputs.log_probs_and_entropy(targets, vocab_size=SPEC.vocab_size, temperature=1.0, kernels=kernels)

    with Peak() as found:
        if backward:
            log_probs, entropy = both()
            (advantages * log_probs + entropy).sum().backward()
        else:
            with torch.no_grad():
                both()
    return found.most


class Peak(TorchDispatchMode):
    """The most bytes that were alive at once of storages that operators made under the mode."""

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.most = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given = {_key(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and _key(x) not in given | self._known.keys():
                self._add(x.untyped_storage())
        return out

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known[key] = size
        self.alive += size
        self.most = max(self.most, self.alive)
        weakref.finalize(storage, self._remove, key)

    def _remove(self, key: int) -> None:
        self.alive -= self._known.pop(key)


def _key(x: Tensor) -> int:
    return x.untyped_storage()._cdata


if __name__ == "__main__":
    main()
