"""Chunks, bytes and seconds of what describes a checkpoint of Qwen3-235B-A22B: weights, main weights and both moments.

    python -m tests.bench.checkpoint_chunks [--tp 8] [--pp 1] [--dp 1]

Every rank's boxes are cut on meta tensors, as a save does it; their records are told to `.metadata` as rank 0 does it,
and read back as a start does it. Files of the right length stand for the 1.4 TB themselves. With dp > 1 the optimizer's
share of a replica is an equal run of all parameters of the stage, as ZeRO-1 splits a bucket.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path

import torch

from hybridflow.architecture.parts import shard_shape
from hybridflow.architecture.shards import Split, common
from hybridflow.architecture.spec import ModelSpec, read_spec
from hybridflow.architecture.weight import Weight
from hybridflow.architecture.weights import embedding, model_weights, stored_at
from hybridflow.checkpoint.sharded import box_of, finish_save
from hybridflow.checkpoint.share_chunks import pieces, stored_shape
from hybridflow.formats.distributed_directory import DistributedDirectory
from hybridflow.formats.distributed_metadata import METADATA
from hybridflow.formats.distributed_storage import Chunk, ChunkRecord
from hybridflow.parallel.layout import Layout

QWEN3_235B = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 151936} | dict(
    hidden_size=4096,
    intermediate_size=12288,
    moe_intermediate_size=1536,
    num_hidden_layers=94,
    num_attention_heads=64,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
    max_position_embeddings=40960,
    rms_norm_eps=1e-6,
)
STATES = ("exp_avg", "exp_avg_sq", "main")
HEAD_BYTES = 1024  # of a record beside its tensor


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis, size in (("tp", 8), ("pp", 1), ("dp", 1)):
        parser.add_argument(f"--{axis}", type=int, default=size)
    options = parser.parse_args()
    ranks = tuple(range(options.tp * options.pp * options.dp))
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "config.json").write_text(json.dumps(QWEN3_235B))
        spec, layout = read_spec(root), Layout(options.tp, options.pp, options.dp, ranks)
        began = time.perf_counter()
        chunks = [list(_chunks(spec, layout, rank)) for rank in ranks]
        cut = time.perf_counter() - began
        records = [record for rank in ranks for record in _records(root, f"__{rank}_0.distcp", chunks[rank])]
        began = time.perf_counter()
        finish_save(root, records)
        written = time.perf_counter() - began
        began = time.perf_counter()
        files = DistributedDirectory(root)
        for key in files.tensors:
            files.check_complete(key)
        read = time.perf_counter() - began
        sizes, described = [c.num_bytes for its in chunks for c in its], (root / METADATA).stat().st_size
    print(f"Qwen3-235B-A22B, tp {options.tp}, pp {options.pp}, dp {options.dp}: {sum(sizes) / 1e12:.2f} TB")
    print(f"{len(sizes):,} chunks, at most {max(map(len, chunks)):,} of a rank and {max(sizes) / 1e6:.0f} MB")
    print(
        f"cut for all ranks in {cut:.1f} s; told in {described / 1e6:.1f} MB, in {written:.1f} s; read in {read:.1f} s"
    )


def _chunks(spec: ModelSpec, layout: Layout, rank: int) -> Iterator[Chunk]:
    """What a rank writes."""
    stage, rest = divmod(rank, layout.tp * layout.dp)
    replica, tp_rank = divmod(rest, layout.tp)
    own = [weight for weight in model_weights(spec, "lm") if _stage(weight, spec, layout) == stage]
    sizes = [prod(shard_shape(weight, spec, layout.cut)) for weight in own]
    share, position = (sum(sizes) * replica // layout.dp, sum(sizes) * (replica + 1) // layout.dp), 0
    for weight, size in zip(own, sizes, strict=True):
        start, stop = common((position, position + size), share)
        runs = [((0, size if replica == 0 else 0), "", torch.bfloat16)]
        runs += [((start - position, stop - position), f"optimizer.state.{name}.", torch.float32) for name in STATES]
        position += size
        if weight.split is Split.REPLICATED and tp_rank:
            continue
        for run, prefix, dtype in runs:
            flat, key = torch.empty(run[1] - run[0], dtype=dtype, device="meta"), prefix + stored_at(weight)[0]
            for piece in pieces(weight, spec, layout.places(weight.group)[tp_rank], run=run):
                yield box_of(key, stored_shape(weight, spec), piece, flat, written=True).chunk()


def _stage(weight: Weight, spec: ModelSpec, layout: Layout) -> int:
    if weight.layer is None:
        return 0 if weight == embedding(spec) else layout.pp - 1
    return next(i for i, layers in enumerate(layout.stages(spec.num_layers)) if weight.layer in layers)


def _records(root: Path, file: str, chunks: list[Chunk]) -> Iterator[ChunkRecord]:
    """Of a file that is as long as if they were in it."""
    end = 0
    for chunk in chunks:
        length = chunk.num_bytes + HEAD_BYTES
        yield ChunkRecord(chunk.key, chunk.offset, chunk.shape, chunk.whole, str(chunk.dtype)[6:], file, end, length)
        end += length
    with (root / file).open("wb") as stream:
        stream.truncate(end)


if __name__ == "__main__":
    main()
