"""The profile of the machine that this runs on, by all ranks together; see the modules beside it.

profile = measure_profile("our machine", tell=print)        # on every rank that torchrun has started, or alone

How much longer than a share of the processors says work takes while many ranks of a host are busy: every rank has a
model and an engine of its own, too large for the caches. One works alone, then two, four, ... at once.
"""

import os
import platform as machine
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from hybridflow.automap.device import Contention, Crowding, DeviceProfile, Overheads, ProductRates
from hybridflow.automap.profiling import arithmetic, groups
from hybridflow.automap.profiling.engine import engine_overheads
from hybridflow.automap.profiling.groups import sizes
from hybridflow.automap.profiling.layers import elementwise_bandwidths, layer_overheads
from hybridflow.automap.profiling.tiny import PROMPT, batch, make_model, placed_run
from hybridflow.models.layer_specs import DTYPES
from hybridflow.parallel import platform as platforms
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.host_memory import host_memory
from hybridflow.parallel.platform import Platform
from hybridflow.parallel.ranks import counted
from hybridflow.roles.base import RunContext
from hybridflow.roles.generator import Generator
from hybridflow.roles.policy import Actor
from hybridflow.rollout.engine import Request

Tell = Callable[[str], None]
DISK_BYTES = 1 << 27
NO_OVERHEADS = dict.fromkeys(Overheads.model_fields, 0.0)


def measure_profile(name: str, *, tell: Tell) -> DeviceProfile:
    """Collective over the ranks that torchrun has started. tell: of the first rank, what comes next.

    Every rank is given the same profile.
    """
    platform = platforms.start(seed=0)
    tell = tell if platform.rank == 0 else _nothing
    with tempfile.TemporaryDirectory() as own:
        box = [own]
        dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
        directory, began = Path(box[0]), time.monotonic()
        world = _world(platform)
        profile = _raw(name, platform, world.groups, directory, tell)
        tell("layers and steps of training models")
        overheads = {
            **NO_OVERHEADS,
            "operation": profile.overheads.operation,
            **asdict(layer_overheads(directory, world)),
        }
        profile = _with(profile, platform, overheads=Overheads(**overheads))
        tell("elementwise operations")
        forward, backward = elementwise_bandwidths(directory, world, profile)
        profile = _with(profile, platform, elementwise_bandwidth=forward, elementwise_backward=backward)
        tell("the engine")
        overheads |= asdict(engine_overheads(directory, world, profile))
        profile = _with(profile, platform, overheads=Overheads(**overheads))
        if profile.shared is not None and platform.world_size > 1:
            tell("many ranks at once")
            profile = _with(profile, platform, crowding=measured_contention(directory, world, profile.shared))
        tell(f"measured in {time.monotonic() - began:.0f} s")
        dist.barrier(group=dist.group.WORLD)
    return profile


def _world(platform: Platform) -> RunContext:
    from hybridflow.rollout.patches import prepare_vllm

    prepare_vllm()
    exchange = Exchange(platforms.world_group(), platform.device)
    return RunContext(platform, ProcessGroups(), exchange, bucket_bytes=24 << 20)


@dataclass(frozen=True)
class _Alone:
    """What the first rank measures by itself, in FLOP/s, logits/s, bytes/s and seconds; of grouped products a share."""

    grouped: float
    attention: tuple[float, float]
    logits: tuple[float, float]
    stream: float
    host: float
    disk: float
    operation: float


def _alone(device: torch.device, group: dist.ProcessGroup, directory: Path) -> _Alone:
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    return _Alone(
        grouped=arithmetic.grouped_efficiency(dtype, device),
        attention=arithmetic.attention_rates(dtype, device),
        logits=arithmetic.logit_rates(device, group),
        stream=arithmetic.stream_bandwidth(device),
        host=arithmetic.host_bandwidth(device),
        disk=_disk_bandwidth(directory),
        operation=arithmetic.operation_seconds(device),
    )


def _raw(name: str, platform: Platform, own_groups: ProcessGroups, directory: Path, tell: Tell) -> DeviceProfile:
    """All but what the trainer's own models and engine take."""
    device, is_first = platform.device, platform.rank == 0
    alone = own_groups.own((rank,) for rank in range(platform.world_size))
    assert alone is not None, "every rank is in a group"
    tell("matrix products by shape")
    tables = {dtype: tuple(arithmetic.product_table(dtype, device)) if is_first else () for dtype in DTYPES}
    tell("attention, log-probs, memory, disk")
    found = _alone(device, alone, directory) if is_first else None
    tell("ranks at once")
    shared = _shared(platform) if device.type == "cpu" else None
    tell("messages between ranks")
    messages = groups.collectives(own_groups, platform.rank, platform.world_size, device)
    link = groups.link(own_groups, platform.rank, platform.world_size, device)
    box = [(tables, found)]
    dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
    tables, found = box[0]
    assert found is not None, "the first rank has measured"
    where = f"measured on {machine.machine()}, {_processor(device)}, with {counted(platform.world_size)}"
    fields = {
        "name": name,
        "measured": True,
        "memory_bytes": platform.memory_bytes(),
        "host_memory_bytes": host_memory()[1],
        "products": {dtype: ProductRates(table=table) for dtype, table in tables.items()},
        "grouped_efficiency": found.grouped,
        "attention_forward": found.attention[0],
        "attention_backward": found.attention[1],
        "memory_bandwidth": found.stream,
        "elementwise_bandwidth": found.stream,
        "logits_forward": found.logits[0],
        "logits_backward": found.logits[1],
        "inside": link,
        "between": link,
        "collectives": tuple(messages),
        "overheads": Overheads(**NO_OVERHEADS | {"operation": found.operation}),
        "host_bandwidth": found.host,
        "disk_bandwidth": found.disk,
        "shared": shared,
        "ranks_per_host": platform.world_size,
    }
    sources = {field: where for field in fields if field not in ("name", "measured")}
    sources["between"] = "not measured: as inside, these ranks were on one host"
    return DeviceProfile(sources=sources, **fields)


def _with(profile: DeviceProfile, platform: Platform, **fields: object) -> DeviceProfile:
    """As the first rank has measured it, on every rank."""
    box = [fields]
    dist.broadcast_object_list(box, src=0, group=dist.group.WORLD)
    return profile.model_copy(update=box[0])


def _shared(platform: Platform) -> Contention:
    """Of ranks on the processors of one host."""
    x, weight = torch.randn(512, 512), torch.randn(1024, 512)
    some, other = torch.ones(1 << 20), torch.empty(1 << 20)
    small = torch.ones(16)
    return Contention(
        products=groups.together(lambda: torch.nn.functional.linear(x, weight), 0.7, platform.device),
        memory=groups.together(lambda: other.copy_(some), 0.7, platform.device),
        overhead=groups.together(lambda: small.add_(1.0), 0.7, platform.device),
    )


def _disk_bandwidth(directory: Path) -> float:
    """Of one file, until it lies on the disk."""
    data = bytes(DISK_BYTES)
    begin = time.perf_counter()
    with (directory / "disk").open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - begin
    (directory / "disk").unlink()
    return DISK_BYTES / seconds


def _processor(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"{torch.get_num_threads()} threads a rank"


def _nothing(text: str) -> None:
    pass


HIDDEN, LAYERS = 384, 4
ROWS, RESPONSE, SEQUENCES, REPEATS = 4, 56, 4, 3
VOCABULARY = 2048


def measured_contention(directory: Path, world: RunContext, shared: Contention) -> tuple[Crowding, ...]:
    """Collective over the world; every rank gets the same. One row a number of ranks."""
    platform, model = world.platform, directory / "crowd"
    if platform.rank == 0:
        make_model(model, hidden=HIDDEN, layers=LAYERS, positions=PROMPT + RESPONSE, vocabulary=VOCABULARY)
    world.exchange.sum(torch.zeros(1))
    run = placed_run(
        model,
        dp=platform.world_size,
        dtype="float32",
        length=PROMPT + RESPONSE,
        budget=ROWS * (PROMPT + RESPONSE),
        output_dir=directory,
    )
    actor = Actor(run.actor, temperature=1.0, world=world)
    rows = batch(ROWS, RESPONSE)

    def scores() -> None:
        with actor.computing_all_rows():
            actor.log_probs(rows)

    generator = Generator(run, actor, eos_token_ids=(), platform=platform, exchange=world.exchange)
    assert generator.engine is not None, "every rank generates"
    with generator.resharded(), generator.awake():
        engine = _of_crowds(lambda: _run_engine(generator), world)
    training = _of_crowds(scores, world)
    generator.engine.close()
    return tuple(
        Crowding(
            ranks=count,
            training=max(1.0, training[count] / training[1] / max(1.0, count / shared.products)),
            engine=max(1.0, engine[count] / engine[1] / max(1.0, count / shared.products)),
        )
        for count in (1, *sizes(platform.world_size))
    )


def _run_engine(generator: Generator) -> None:
    assert generator.engine is not None
    requests = [Request([1 + i] * PROMPT, seed=i) for i in range(SEQUENCES)]
    for _ in generator.engine.stream(requests, generator.params["sampled"]):
        pass


def _of_crowds(work: Callable[[], None], world: RunContext) -> dict[int, float]:
    """Mean seconds of the ranks that work, by their number."""
    rank, world_size, found = world.platform.rank, world.platform.world_size, {}
    work()
    for count in (1, *sizes(world_size)):
        world.exchange.sum(torch.zeros(1))
        seconds = []
        for _ in range(REPEATS if rank < count else 0):
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
        own = torch.tensor(statistics.mean(seconds) if seconds else 0.0, dtype=torch.float64)
        found[count] = float(world.exchange.sum(own)) / count
    return found
