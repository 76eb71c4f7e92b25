"""What a layer of experts does by each way of its tokens: operations, messages, bytes, and numbers read by the host.

    python -m tests.bench.expert_dispatch [--tokens 32]

Four ranks on CPUs, 64 experts of 64 columns, 8 a token, hidden size 128, in bfloat16, forward and backward:

    shares        tensor-parallel ranks, each with a quarter of every expert
    whole         tensor-parallel ranks, each with a quarter of the experts
    whole, again  the same where the backward pass computes experts again
    alltoall      replicas of one rank; deepep: the same by the stand-in of DeepEP's calls

An operation is one of torch's that is no view, or a launch of a Triton kernel: on a GPU each is a kernel or more. By
Triton kernels run in Triton's interpreter, as a GPU's would; by torch is what CPUs do. Counts are rank 0's. Bytes are
what leaves rank 0, and `copies` what leaves it where a token goes to each of its experts.
"""

import argparse
import importlib
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

RANKS, EXPERTS, K, HIDDEN, SIZE = 4, 64, 8, 128, 64
SIMULATED = Path(__file__).resolve().parents[1] / "models" / "simulated"
WAYS = ("shares", "whole", "whole, again", "alltoall", "deepep")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32, help="of each rank")
    options = parser.parse_args()
    if "LOCAL_RANK" in os.environ:
        measure(options.tokens)
        return
    print("| way | kernels | operations forward | backward | messages | bytes | copies | reads of the host |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command = [*launch, "-m", "tests.bench.expert_dispatch", "--tokens", str(options.tokens)]
    for interprets in ("0", "1"):
        environment = os.environ | {"TRITON_INTERPRET": interprets, "OMP_NUM_THREADS": "1"}
        subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)


def measure(num_tokens: int) -> None:
    import torch
    import torch.distributed as dist
    from megatron.core.transformer.moe import fused_a2a

    from hybridflow.models.expert_dispatch import AllToAll, WithinReplica
    from hybridflow.models.expert_rows import ExpertKernels, KernelsByTorch
    from hybridflow.models.expert_triton import KernelsByTriton
    from hybridflow.models.experts import Experts
    from hybridflow.models.layers import SwiGLUFunction
    from hybridflow.models.token_dispatchers import DeepEP
    from hybridflow.parallel import platform as platforms
    from hybridflow.parallel.layout import Cut
    from tests.models.test_experts import config

    platforms.start(seed=0, platform="cpu")
    sys.path.insert(0, str(SIMULATED))
    importlib.reload(fused_a2a)
    group, rank = dist.group.WORLD, dist.get_rank()
    by_triton = os.environ["TRITON_INTERPRET"] == "1"

    def kernels(*, kept: bool = True) -> ExpertKernels:
        return KernelsByTriton(counts_on_device=not kept) if by_triton else KernelsByTorch(SwiGLUFunction)

    for way in WAYS:
        cut = Cut(4, 4, 1) if way == "shares" else Cut(4, 1, 4) if way.startswith("whole") else Cut(1, 1, 4)
        place, within = cut.places("experts")[rank], cut.tp > 1
        generator = torch.Generator().manual_seed(0 if within else rank)  # tensor-parallel ranks see the same tokens
        number = num_tokens * RANKS if within else num_tokens
        tokens = torch.randn(number, HIDDEN, generator=generator).bfloat16().requires_grad_()
        chosen = torch.rand(number, EXPERTS, generator=generator).topk(K).indices
        shares = torch.rand(number, K, generator=generator).requires_grad_()
        sizes = dict(hidden_size=HIDDEN, moe_ffn_hidden_size=SIZE, params_dtype=torch.bfloat16)
        own = Experts(config(num_moe_experts=EXPERTS, **sizes), kernels(kept=way != "whole, again"), place)
        for parameter in own.parameters():
            torch.nn.init.normal_(parameter)
        held = EXPERTS // place.ep
        dispatcher: Any = WithinReplica(place, held, group, sequence_parallel=False)
        if not within:
            dispatcher = DeepEP(group, EXPERTS) if way == "deepep" else AllToAll(place, held, group, kernels())
        counts = Counter[str]()
        with counted(counts, "forward"):
            sent = dispatcher.dispatch(tokens, shares, chosen)
            output = sent.back(own(sent.arrived()))
        with counted(counts, "backward"):
            output.float().square().sum().backward()
        if rank == 0:
            copies = 0 if within else 4 * chosen.numel() * HIDDEN * 2  # there and back, and of the gradients
            cells = [way, "Triton" if by_triton else "torch", counts["forward"], counts["backward"]]
            cells += [counts["messages"], f"{counts['bytes']:,}", f"{copies:,}", counts["reads"]]
            print("|", " | ".join(map(str, cells)), "|", flush=True)
    platforms.stop()


@contextmanager
def counted(counts: Counter[str], name: str) -> Iterator[None]:
    """Of a pass: operations by `name`, messages and their bytes, reads; those within the stand-in are left out."""
    import torch.distributed as dist
    from megatron.core.transformer.moe import fused_a2a
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

    from hybridflow.models import expert_dispatch, expert_triton

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if operation._overloadpacket.__name__ == "_local_scalar_dense":
                counts["reads"] += 1
            elif not operation.is_view and operation.namespace == "aten":
                counts[name] += 1
            return operation(*args, **(kwargs or {}))

    class Launches:
        """A kernel of Triton's, of which each launch is one operation."""

        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **options: Any) -> None:
                counts[name] += 1
                with _disable_current_modes():
                    self.kernel[grid](*args, **options)

            return launch

    def one(call: Any, what: str) -> Any:
        def outside(*args: Any, **options: Any) -> Any:
            counts[what] += 1
            with _disable_current_modes():
                return call(*args, **options)

        return outside

    def send(call: Any) -> Any:
        def sent(output: Any, rows: Any, *sizes: Any, **options: Any) -> Any:
            counts["messages"] += 1
            counts["bytes"] += rows.nbytes
            with _disable_current_modes():
                return call(output, rows, *sizes, **options)

        return sent

    names = [each for each in vars(expert_triton) if each.endswith("_kernel")]
    kernels = {each: Launches(getattr(expert_triton, each)) for each in names}
    buffer = fused_a2a.Buffer
    stand_in = {each: one(getattr(buffer, each), name) for each in ("dispatch", "combine", "get_dispatch_layout")}
    with (
        mock.patch.multiple(expert_triton, **kernels),
        mock.patch.multiple(buffer, **stand_in),
        mock.patch.object(dist, "all_to_all_single", send(dist.all_to_all_single)),
        mock.patch.object(expert_dispatch, "to_host_async", one(expert_dispatch.to_host_async, "reads")),
        Operations(),
    ):
        yield


if __name__ == "__main__":
    main()
