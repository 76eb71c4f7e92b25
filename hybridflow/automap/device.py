"""What a device can do, as the model of time needs it: a small file of numbers, each with where it comes from. Pure.

    load_profile("h100-sxm")             one of those that are shipped (`shipped_profiles()`)
    load_profile("our-cluster.json")     what `hybridflow.plan --profile-device` has measured

Rates are those of one rank that works alone. Where ranks share a host's processors, as on a CPU, `shared` says how much
more all of them do together than one alone; ranks with a device of their own share nothing.
"""

from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, ValidationError, model_validator

from hybridflow.config import read_tree
from hybridflow.config.section import Section
from hybridflow.errors import ConfigError

DType = Literal["float32", "bfloat16"]
PROFILES = Path(__file__).parent / "profiles"
SUFFIX = ".json"
NEAREST = 4  # measured shapes that a rate is interpolated from


class ProductRates(Section):
    """FLOP/s of a matrix product (m, k) x (k, n): measured by shape, or by a peak and how fast products come near it.

    Of a peak, efficiency x peak x s / (s + half_size), with s the smallest of m, k and n: a data sheet has no more.
    """

    table: tuple[tuple[PositiveInt, PositiveInt, PositiveInt, PositiveFloat], ...] = ()  # m, k, n, FLOP/s
    peak: PositiveFloat | None = None
    efficiency: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    half_size: NonNegativeFloat = 0.0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.table) == (self.peak is not None):
            raise ValueError("give either a table of measured shapes or a peak")
        return self

    @property
    def best(self) -> float:
        """FLOP/s that no shape is above."""
        return max((row[3] for row in self.table), default=(self.peak or 0.0) * self.efficiency)

    def rate(self, m: float, k: float, n: float) -> float:
        """FLOP/s at a shape: of a table the mean of the logarithms at the nearest shapes, by inverse square distance.

        The distance is Euclidean in the logarithms of the sizes; beyond the table the border holds.
        """
        if self.peak is not None:
            small = min(m, k, n)
            return self.peak * self.efficiency * small / (small + self.half_size)
        at = (log(m), log(k), log(n))
        found = sorted(
            (sum((log(size) - x) ** 2 for size, x in zip(row[:3], at, strict=True)), log(row[3])) for row in self.table
        )[:NEAREST]
        if found[0][0] < 1e-9:
            return exp(found[0][1])
        weights = [1 / distance for distance, _ in found]
        return exp(sum(w * value for w, (_, value) in zip(weights, found, strict=True)) / sum(weights))


class Link(Section):
    """Between ranks: bytes/s that one rank sends, in one direction, and seconds that a message takes besides.

    sharers: ranks of a host that share the bandwidth; 1: nobody shares.
    """

    bandwidth: PositiveFloat
    latency: NonNegativeFloat
    sharers: PositiveInt = 1


class Collective(Section):
    """A measured all-reduce among `ranks` ranks of one host: seconds = latency + bytes / bandwidth.

    Loads: the share of the host's processors that one such group keeps busy while it waits for messages, and while it
    moves bytes; groups at once take their multiple, where that is above 1 so much longer.
    """

    ranks: Annotated[int, Field(ge=2)]
    latency: NonNegativeFloat
    bandwidth: PositiveFloat
    latency_load: NonNegativeFloat = 0.0
    bandwidth_load: NonNegativeFloat = 0.0


class Contention(Section):
    """How many times what one rank alone does, all ranks of a host do together, by what bounds them."""

    products: Annotated[float, Field(ge=1.0)]
    memory: Annotated[float, Field(ge=1.0)]
    overhead: Annotated[float, Field(ge=1.0)]


class Crowding(Section):
    """How many times longer than `Contention` says work takes while so many ranks of a host are busy: what they lose to
    each other's caches and to changing places. training: passes of models; engine: decode steps."""

    ranks: PositiveInt
    training: Annotated[float, Field(ge=1.0)]
    engine: Annotated[float, Field(ge=1.0)]


class Overheads(Section):
    """Seconds that go by whatever the sizes are."""

    operation: NonNegativeFloat  # a kernel that does nothing
    layer_forward: NonNegativeFloat  # a layer of a training model, one micro-batch
    layer_backward: NonNegativeFloat
    micro_batch: NonNegativeFloat  # a micro-batch beside the layers, each way
    step: NonNegativeFloat  # an optimizer step
    step_layer: NonNegativeFloat  # of each layer in it
    engine_step: NonNegativeFloat  # of the engine, beside layers and sequences
    engine_layer: NonNegativeFloat
    engine_sequence: NonNegativeFloat  # a running sequence, each step
    engine_logit: NonNegativeFloat  # a logit of a running sequence, each step: sampling
    engine_message: NonNegativeFloat  # an all-reduce of two ranks within the engine, beyond what it takes elsewhere
    engine_wake: NonNegativeFloat  # a generation, beside the steps


class DeviceProfile(Section):
    """See the module. Bandwidths in bytes/s, rates in FLOP/s, times in seconds.

    sources: where each number comes from, by field.
    """

    name: str
    measured: bool  # where it is used; else it is read somewhere, and was not measured by us
    sources: dict[str, str]
    memory_bytes: PositiveInt  # of the device of a rank; of a CPU, a rank's share
    host_memory_bytes: PositiveInt | None = None  # of a host, for what its ranks keep there; None: not known
    products: dict[DType, ProductRates]
    # of a product's rate: what products of several experts in one kernel reach
    grouped_efficiency: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    attention_forward: PositiveFloat  # FLOP/s, causal, counting the half that is not masked
    attention_backward: PositiveFloat
    memory_bandwidth: PositiveFloat  # reading what is far larger than any cache
    elementwise_bandwidth: PositiveFloat  # of elementwise kernels over activations, reads and writes together
    elementwise_backward: PositiveFloat | None = None  # None: the same
    # of adding a micro-batch's gradients to their float32 sum; None: they are added where they are computed
    gradient_bandwidth: PositiveFloat | None = None
    logits_forward: PositiveFloat | None = None  # logits/s whose log-probs are computed; None: by their bytes
    logits_backward: PositiveFloat | None = None
    inside: Link  # a host
    between: Link  # hosts
    collectives: tuple[Collective, ...] = ()  # where measured; else rings over the links
    overheads: Overheads
    host_bandwidth: PositiveFloat  # device to host memory
    disk_bandwidth: PositiveFloat  # of a host, all ranks together
    shared: Contention | None = None  # None: each rank has a device of its own
    crowding: tuple[Crowding, ...] = ()  # by ranks, ascending; only where they share
    ranks_per_host: PositiveInt = 8

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.products:
            raise ValueError("products: give the rates of a dtype at least")
        numbers = {"memory_bytes", "products", "memory_bandwidth", "inside", "between"}
        numbers |= {"grouped_efficiency"} if self.grouped_efficiency < 1 else set()
        numbers |= {name for name in ("gradient_bandwidth", "host_memory_bytes") if getattr(self, name)}
        missing = sorted(numbers - self.sources.keys())
        if missing:
            raise ValueError(f"sources: {missing[0]} has none: say where the number comes from")
        unknown = sorted(self.sources.keys() - type(self).model_fields.keys())
        if unknown:
            raise ValueError(f"sources: {unknown[0]} is no field of a profile")
        return self

    def crowded(self, busy: float, *, engine: bool) -> float:
        """How many times longer, with so many busy ranks on a host: on the straight line between measured numbers."""
        before, factor = 0.0, 1.0
        for row in self.crowding:
            at = row.engine if engine else row.training
            if busy <= row.ranks:
                return factor + (at - factor) * (busy - before) / (row.ranks - before)
            before, factor = row.ranks, at
        return factor

    def product_rates(self, dtype: str) -> ProductRates:
        """Errors: ConfigError where the profile has none for this dtype."""
        found: Mapping[str, ProductRates] = {str(name): rates for name, rates in self.products.items()}
        if dtype not in found:
            raise ConfigError(f"profile {self.name}: products has no {dtype}, it has {', '.join(found)}")
        return found[dtype]


def shipped_profiles() -> tuple[str, ...]:
    """Names of the profiles that come with the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob(f"*{SUFFIX}")))


def load_profile(path_or_name: str | Path) -> DeviceProfile:
    """A shipped profile by name or by what only this name begins with, or a file.

    Errors: ConfigError naming file, field, value and rule.
    """
    names, given = shipped_profiles(), str(path_or_name)
    begun = [name for name in names if name.startswith(given)]
    if given not in names and len(begun) == 1 and not Path(given).exists():
        (given,) = begun
    path = PROFILES / f"{given}{SUFFIX}" if given in names else Path(path_or_name)
    if not path.exists():
        raise ConfigError(f"profile {path_or_name}: no such file, and none of that name is shipped: {', '.join(names)}")
    tree = read_tree(path)  # JSON is YAML
    try:
        return DeviceProfile.model_validate(tree)
    except ValidationError as error:
        raise ConfigError("\n".join(_explained(path, tree, dict(each)) for each in error.errors())) from error


def _explained(path: Path, tree: dict[str, Any], error: Mapping[str, Any]) -> str:
    """`file: field = value: rule`"""
    field = ".".join(str(part) for part in error["loc"])
    value: Any = tree
    for part in error["loc"]:
        found: Any = value
        value = None
        if isinstance(found, Mapping) and part in found:
            value = found[part]
        elif isinstance(found, Sequence) and isinstance(part, int) and part < len(found):
            value = found[part]
    rule = str(error["msg"]).removeprefix("Value error, ")
    if not field:
        return f"{path}: {rule}"
    return f"{path}: {field}: {rule}" if value is None else f"{path}: {field} = {value!r}: {rule}"
