"""The reshard of the actor's weights to the engine, beside the floor and beside the usual way, in one run.

    torchrun --nproc-per-node 4 -m tests.bench.reshard [--size small] [--dtype float32] [--pairs tp4-tp1] [--repeats 9]

ours       WeightReshard on a real actor (megatron, ZeRO-1): to the engine's layout, and back; on CPUs ranks read in
           each other's memory, where the raw collective sends messages
floor      no bytes between ranks: every element that is to be permuted (QKV; with a smaller tp in training gate and up
           too) read and written once, in place (bitwise_not_)
           else a raw collective of what the plan has each rank receive, between buffers that are there already: one
           all_gather_into_tensor where all of a group get the same from each other, else one batch_isend_irecv
usual way  each parameter gathered whole over tp and broadcast over pp, then vLLM's own load_weights into a vLLM model
           with memory of its own; before it is timed its weights are compared with ours, bit for bit

The ways take turns. Every time is that of the slowest rank, from a barrier on, the median over the turns; a ratio is
that of two medians. Extra memory is the bytes of all live tensors at the peak (counted in a turn that is not timed),
beyond the larger of the trainer's and the engine's weights; bytes and memory are the largest of any rank.
"""

import argparse
import gc
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

from hybridflow.architecture.parts import whole_parts
from hybridflow.architecture.shards import Split
from hybridflow.architecture.weights import staged_weights
from hybridflow.config import RolloutConfig, TrainedRoleConfig
from hybridflow.models.layer_specs import DTYPES
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.layout import RolloutLayout
from hybridflow.recording.measure import own_bytes
from hybridflow.reshard.groups import engine_stages, rollout_layout
from hybridflow.reshard.plan import ReshardPlan, plan_reshard
from hybridflow.roles.base import RunContext
from hybridflow.roles.policy import Actor
from hybridflow.rollout.patches import join_groups, prepare_vllm
from tests.distributed.pairs_worker import Watch, WatchedReshard
from tests.placing import place_model

SIZES = {  # hidden, ffn, layers, heads, vocabulary
    "small": (512, 1408, 4, 8, 2560),  # 14.4 M parameters
    "medium": (1024, 2816, 8, 16, 8192),  # 107 M
}
NUM_KV_HEADS = 4  # on four tensor-parallel ranks one each: [q; k; v] is then both layouts' order
INTEGERS = {2: torch.int16, 4: torch.int32}
MB, MS = 1e6, 1e3
MATCHED, GATHERED, USUAL = 1.5, 1.5, 5.0  # the targets


@dataclass(frozen=True)
class Pair:
    tp: int
    pp: int
    rollout_tp: int
    rollout_pp: int = 1

    def fits(self, num_ranks: int) -> bool:
        return num_ranks % (self.tp * self.pp) == num_ranks % (self.rollout_tp * self.rollout_pp) == 0

    @property
    def name(self) -> str:
        sizes = (("tp", self.tp), ("pp", self.pp)), (("tp", self.rollout_tp), ("pp", self.rollout_pp))
        train, rollout = ("".join(f"{axis}{n}" for axis, n in side if n > 1) or "tp1" for side in sizes)
        return f"{train}-{rollout}"


PAIRS = (
    Pair(1, 1, 2),
    Pair(2, 1, 2),
    Pair(2, 1, 1),
    Pair(4, 1, 4),
    Pair(4, 1, 2),
    Pair(4, 1, 1),
    Pair(1, 2, 1),
    Pair(2, 2, 2),
    Pair(2, 2, 4),
)


@dataclass
class Result:
    """What a pair took: medians in seconds, bytes."""

    case: str  # size and dtype
    name: str
    ways: str
    received: int
    floor_names: tuple[str, ...]  # none: there is nothing to do
    times: dict[str, float] = field(default_factory=dict)
    extra: int = 0
    usual_extra: int = 0

    @property
    def label(self) -> str:
        return f"{self.case} {self.name}"

    @property
    def floor_name(self) -> str:
        """The fastest; empty: there is nothing to do."""
        return min(self.floor_names, key=self.times.__getitem__, default="")

    @property
    def floor(self) -> float:
        return self.times[self.floor_name]

    @property
    def ratio(self) -> float:
        """Ours against the floor; in place there is something to do on both ways."""
        in_place = self.floor_name == "in place"
        return (max(self.times["there"], self.times["back"]) if in_place else self.times["there"]) / self.floor

    @property
    def gain(self) -> float:
        """The usual way against ours there and back."""
        return self.times["usual"] / (self.times["there"] + self.times["back"])

    @property
    def gain_there(self) -> float:
        return self.times["usual"] / self.times["there"]


def main() -> None:
    options = parse()
    platform = platforms.start(seed=0)
    prepare_vllm()
    world = RunContext(
        platform,
        ProcessGroups(),
        Exchange(dist.group.WORLD, platform.device),
        bucket_bytes=int(options.bucket_mib * 2**20),
    )
    pairs = [
        pair for pair in PAIRS if pair.fits(platform.world_size) and (not options.pairs or pair.name in options.pairs)
    ]
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        for size in options.size:
            model = Path(box[0]) / size
            if platform.rank == 0:
                make_model(model, size)
            dist.barrier(group=dist.group.WORLD)
            for dtype in options.dtype:
                found = bench(model, dtype, pairs, world, options.repeats)
                if platform.rank == 0:
                    report(f"{size}, {dtype}, {platform.world_size} ranks", found)
                results += found
        dist.barrier(group=dist.group.WORLD)  # the first rank's directory goes when all have read it
    if platform.rank == 0:
        conclude(results)
    platforms.stop()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [pair.name for pair in PAIRS]
    parser.add_argument("--size", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=["bfloat16", "float32"])
    parser.add_argument("--pairs", nargs="+", choices=names, default=names, help="default: all that fit")
    default = RolloutConfig().bucket_bytes(cuda=torch.cuda.is_available()) / 2**20
    parser.add_argument("--bucket-mib", type=float, default=default, help="rollout.reshard_bucket_mib")
    parser.add_argument("--repeats", type=int, default=5, help="turns that count, after one that does not")
    return parser.parse_args()


def make_model(directory: Path, size: str) -> None:
    hidden, ffn, layers, heads, vocab = SIZES[size]
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=NUM_KV_HEADS,
        max_position_embeddings=128,
    )
    logging.disable_progress_bar()
    LlamaForCausalLM(config).save_pretrained(directory)


def bench(model: Path, dtype: str, pairs: list[Pair], world: RunContext, repeats: int) -> list[Result]:
    results = []
    for (tp, pp), group in groupby(pairs, key=lambda pair: (pair.tp, pair.pp)):
        config = TrainedRoleConfig(
            model=str(model),
            dtype=dtype,
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            optimizer={"lr": 1e-6},
        )
        actor = Actor(place_model("actor", config, world.platform.world_size), temperature=1.0, world=world)
        results += [Comparison(actor, pair, dtype, world).result(f"{model.name} {dtype}", repeats) for pair in group]
        del actor
        gc.collect()
    return results


class Comparison:
    """One pair of layouts: our way, the floor, the usual way, ready to run."""

    def __init__(self, actor: Actor, pair: Pair, dtype: str, world: RunContext) -> None:
        self.actor, self.pair, self.rank = actor, pair, world.platform.rank
        self.weights = {name: tensor for name, (_, tensor) in actor.weights().items()}
        train, spec = actor.grid.layout, actor.spec
        self.layout = rollout_layout(train, pair.rollout_tp, pair.rollout_pp)
        self.itemsize = DTYPES[dtype].itemsize
        self.plan = plan_reshard(spec, train, self.layout, bucket_elements=world.bucket_bytes // self.itemsize)
        self.watch = Watch()
        self.reshard = WatchedReshard(
            self.plan,
            self.weights,
            rank=self.rank,
            dtype=DTYPES[dtype],
            device=world.platform.device,
            group=dist.group.WORLD,
            watch=self.watch,
            reads=True,
        )
        stages = engine_stages(spec.num_layers, train, self.layout)
        join_groups(self.layout, stages, world.platform.local_rank)
        self.engine = vllm_model(spec.path, dtype, self.layout)
        self.floors = self._floors()
        self.bucket_bytes = world.bucket_bytes
        self.own_bytes = 0  # of the engine's weights outside the trainer's memory

    def result(self, case: str, repeats: int) -> Result:
        self._check_usual_way()
        ways = Counter(operation.way.value for operation in self.plan.operations(self.rank))
        extra, usual_extra, received = self._bytes()
        result = Result(
            case,
            self.pair.name,
            ", ".join(f"{count} {way}" for way, count in sorted(ways.items())),
            received=received,
            floor_names=tuple(self.floors),
            extra=extra,
            usual_extra=usual_extra,
        )
        turns = [self._turn() for _ in range(repeats + 1)][1:]
        seconds = torch.tensor([list(turn.values()) for turn in turns], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=dist.group.WORLD)  # (turns, ways)
        result.times = {way: statistics.median(seconds[:, i].tolist()) for i, way in enumerate(turns[0])}
        return result

    def _turn(self) -> dict[str, float]:
        """Seconds on this rank."""
        there, back = timed(self.reshard.to_engine), timed(self.reshard.to_trainer)
        # in place the floor leaves the weights inverted, and a second time as they were
        floors = {name: (timed(floor) + timed(floor)) / 2 for name, floor in self.floors.items()}
        touch = timed(self._touch_own)
        return {"there": there, "back": back, "usual": timed(self._usual_way), "touch": touch, **floors}

    def _touch_own(self) -> None:
        """As much memory as the engine has of its own, allocated by buckets and written."""
        whole, rest = divmod(self.own_bytes, self.bucket_bytes)
        held = [torch.empty(size, dtype=torch.uint8) for size in [self.bucket_bytes] * whole + [rest]]
        for memory in held:
            memory.fill_(1)

    # ------------------------------------------------------------------------------------------ the usual way

    def _usual_way(self, on_change: Callable[[], None] = lambda: None) -> None:
        self.engine.load_weights(whole_weights(self.actor, self.weights, on_change))

    def _check_usual_way(self) -> None:
        """It brings what ours brings, and ours takes nothing away."""
        before = {name: x.clone() for name, x in self.weights.items()}
        self._usual_way()
        self.reshard.to_engine()
        names = [operation.weight.engine for operation in self.plan.operations(self.rank)]
        self.own_bytes = own_bytes(map(self.reshard.engine_tensor, names), self.weights.values())
        for name, parameter in self.engine.named_parameters():
            assert torch.equal(self.reshard.engine_tensor(name), parameter), f"{self.pair.name}: {name} differs"
        self.reshard.to_trainer()
        assert all(torch.equal(before[name], x) for name, x in self.weights.items()), "the trainer's weights changed"

    def _bytes(self) -> tuple[int, int, int]:
        """Peak extra bytes of ours and of the usual way, bytes received; the largest of any rank."""
        self.watch.start()
        cost = self.reshard.to_engine()
        self.watch.stop()
        ours = self.watch.peak_extra
        self.reshard.to_trainer()
        self.watch.start()
        self._usual_way(on_change=self.watch)
        self.watch.stop()
        # the trainer's weights stay beside the engine's
        held = sum(x.numel() for x in self.weights.values())
        engine = sum(prod(operation.shape) for operation in self.plan.operations(self.rank))
        standing = min(held, engine) * self.itemsize
        numbers = torch.tensor([ours, standing + self.watch.peak_extra, cost.bytes_received])
        dist.all_reduce(numbers, op=dist.ReduceOp.MAX, group=dist.group.WORLD)
        return tuple(numbers.tolist())

    # ---------------------------------------------------------------------------------------------- the floors

    def _floors(self) -> dict[str, Callable[[], object]]:
        """By name; the fastest is the floor. None where there is nothing to do."""
        ranks = range(dist.get_world_size())
        if any(self.plan.received_elements(rank) for rank in ranks):
            exchanges = [exchanged(self.plan, rank) for rank in ranks]
            return {"send/recv": self._send_and_receive(exchanges[self.rank])} | self._all_gather(exchanges)
        permuted = [o.weight.megatron for o in self.plan.operations(self.rank) if o.order]
        views = [self.weights[name].view(INTEGERS[self.itemsize]) for name in permuted]
        return {"in place": lambda: [view.bitwise_not_() for view in views]} if permuted else {}

    def _send_and_receive(self, own: "Exchanged") -> Callable[[], None]:
        like = next(iter(self.weights.values()))
        sends = [(dist.isend, like.new_zeros(size), peer) for peer, size in own.sends.items()]
        receives = [(dist.irecv, like.new_zeros(size), peer) for peer, size in own.receives.items()]

        def run() -> None:
            operations = [dist.P2POp(way, x, peer, dist.group.WORLD) for way, x, peer in sends + receives]
            for request in dist.batch_isend_irecv(operations):
                request.wait()

        return run

    def _all_gather(self, exchanges: list["Exchanged"]) -> dict[str, Callable[[], object]]:
        """None where the exchanges are no all-gathers."""
        groups = sorted({exchange.group for exchange in exchanges})
        if not all(exchanges[rank].joins(exchanges[ranks[0]]) for ranks in groups for rank in ranks):
            return {}
        made = {ranks: dist.new_group(list(ranks)) for ranks in groups}
        own = exchanges[self.rank]
        sent = next(iter(self.weights.values())).new_zeros(max(own.sends.values()))
        received, group = sent.repeat(len(own.group)), made[own.group]
        return {"all-gather": lambda: dist.all_gather_into_tensor(received, sent, group=group)}


@dataclass(frozen=True)
class Exchanged:
    """What a rank exchanges in all: elements by peer."""

    rank: int
    sends: dict[int, int]
    receives: dict[int, int]
    same_to_all: bool

    @property
    def group(self) -> tuple[int, ...]:
        return tuple(sorted({self.rank, *self.sends, *self.receives}))

    def joins(self, other: "Exchanged") -> bool:
        """Whether both take part in one all-gather."""
        peers = set(self.group) - {self.rank}
        sizes = {size for x in (self, other) for size in (*x.sends.values(), *x.receives.values())}
        complete = set(self.sends) == set(self.receives) == peers
        return complete and self.group == other.group and self.same_to_all and len(sizes) == 1


def exchanged(plan: ReshardPlan, rank: int) -> Exchanged:
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    contents: dict[int, list] = {}
    for bucket in plan.traffic(rank):
        for message in bucket.receives:
            receives[message.peer] += message.num_elements
        for message in bucket.sends:
            sends[message.peer] += message.num_elements
            of_source = [(weight.megatron, piece[2:]) for weight, piece in message.pieces]
            contents.setdefault(message.peer, []).extend(of_source)
    same = all(content == next(iter(contents.values())) for content in contents.values())
    return Exchanged(rank, dict(sends), dict(receives), same)


def vllm_model(path: Path, dtype: str, layout: RolloutLayout) -> nn.Module:
    """The model of a vLLM engine of this layout with weights of its own.

    Not that of a RolloutEngine: its weights are the trainer's memory, so load_weights would write over the source.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=str(path),
        dtype=dtype,
        skip_tokenizer_init=True,
        tensor_parallel_size=layout.tp,
        pipeline_parallel_size=layout.pp,
        distributed_executor_backend="external_launcher",
        kv_cache_memory_bytes=1 << 24,
        enforce_eager=True,
    ).create_engine_config()
    with set_default_torch_dtype(DTYPES[dtype]):
        return initialize_model(config)


def whole_weights(
    actor: Actor, weights: dict[str, Tensor], on_change: Callable[[], None]
) -> Iterator[tuple[str, Tensor]]:
    """HuggingFace names and whole tensors, one parameter at a time, on every rank of the grid."""
    grid, spec = actor.grid, actor.spec
    like = next(iter(weights.values()))
    for weight, stage in staged_weights(spec, "lm", grid.layout.stages(spec.num_layers)):
        parts = [like.new_empty(shape) for shape in weight.shapes(spec)] if stage != grid.pp_rank else []
        if stage == grid.pp_rank:
            shards = [weights[weight.megatron]]
            if grid.tp > 1 and weight.split is not Split.REPLICATED:
                shards = [torch.empty_like(shards[0]) for _ in range(grid.tp)]
                dist.all_gather(shards, weights[weight.megatron], group=grid.groups.tp)
            parts = [part.contiguous() for part in whole_parts(weight, shards, spec, grid.layout.places(weight.group))]
            on_change()
            del shards
        if grid.pp > 1:
            for part in parts:
                dist.broadcast(part, group=grid.groups.pp, group_src=stage)
        on_change()
        yield from zip(weight.hf, parts, strict=True)


def timed(work: Callable[[], object]) -> float:
    dist.barrier(group=dist.group.WORLD)
    started = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------------ reports


def report(title: str, results: list[Result]) -> None:
    table = Table(
        title=f"{title}: milliseconds",
        caption="x: ours against the floor (in place: the slower way); usual way against ours there and back",
    )
    columns = ("train-engine", "ways on rank 0", "MB received", "there", "back", "floor", "", "x")
    for column in (*columns, "usual way", "x", "extra MB", "usual way's"):
        table.add_column(column, justify="left" if column in ("train-engine", "ways on rank 0", "") else "right")
    for r in results:
        ms = {way: f"{seconds * MS:.2f}" for way, seconds in r.times.items()}
        table.add_row(
            r.name,
            r.ways,
            f"{r.received / MB:.1f}",
            ms["there"],
            ms["back"],
            ms.get(r.floor_name, "-"),
            r.floor_name,
            f"{r.ratio:.2f}" if r.floor_name else "-",
            ms["usual"],
            f"{r.gain:.1f}",
            f"{r.extra / MB:.1f}",
            f"{r.usual_extra / MB:.1f}",
        )
    Console(width=150).print(table)


def conclude(results: list[Result]) -> None:
    """Each target, met or missed, and one line to quote."""
    in_place = [r for r in results if r.floor_name == "in place"]
    gathered = [r for r in results if r.floor_name and r.floor_name != "in place"]
    lines = [
        judge("matched layout", "of one read and write in place", in_place, MATCHED),
        judge("gathered", "of the raw collective", gathered, GATHERED),
        judge_gain(results),
    ]
    idle = [r for r in results if not r.floor_name]
    lines += (
        [f"nothing to do: {max(r.times['there'] for r in idle) * MS:.2f} ms there at most, 0 bytes"] if idle else []
    )
    ratios = [f"{statistics.median(r.ratio for r in group):.2f}x" if group else "-" for group in (in_place, gathered)]
    lines.append(
        f"In the median over {len(results)} cases the reshard takes {ratios[0]} an in-place pass where layouts match, "
        f"{ratios[1]} the raw collective where they do not, and there and back it is "
        f"{statistics.median(r.gain for r in results):.1f}x as fast as a gather to HuggingFace tensors with "
        f"vLLM's load_weights"
    )
    for line in lines:
        Console(width=150, highlight=False).print(line)


def judge(what: str, of: str, results: list[Result], target: float) -> str:
    if not results:
        return f"{what}: no such pair was run"
    missed = [r for r in results if r.ratio > target]
    worst = max(results, key=lambda r: r.ratio)
    said = (
        f"{what}, at most {target}x the time {of}: {verdict(missed, results)}, worst {worst.ratio:.2f}x ({worst.label})"
    )
    over = [f"{r.label}: {r.ratio:.2f}x, {why(r)}" for r in missed]
    return "\n    ".join([said, *over])


def why(r: Result) -> str:
    """Where the time above the floor goes, from what was measured beside it."""
    more = f"{(r.ratio - 1) * r.floor * MS:.1f} ms above the floor"
    if r.floor_name == "in place":
        return f"{more}, in copies of blocks where the floor is one pass over each weight"
    return f"{more}, where fresh memory of the engine's size takes {r.times['touch'] * MS:.1f} ms to allocate and write"


def judge_gain(results: list[Result]) -> str:
    missed = [r for r in results if r.gain < USUAL]
    least = min(results, key=lambda r: r.gain)
    met = verdict(missed, results)
    said = f"at least {USUAL:.0f}x as fast as the usual way: {met}, least {least.gain:.1f}x ({least.label})"
    over = []
    for r in missed:
        bound = f"{r.times['usual'] / r.floor:.1f}x were it as fast as the floor" if r.floor_name else "nothing to do"
        over.append(f"{r.label}: {r.gain:.1f}x there and back, {r.gain_there:.1f}x there; {bound}")
    return "\n    ".join([said, *over])


def verdict(missed: list[Result], results: list[Result]) -> str:
    return f"missed by {len(missed)} of {len(results)}" if missed else f"met by all {len(results)}"


if __name__ == "__main__":
    main()
