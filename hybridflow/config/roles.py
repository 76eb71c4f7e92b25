"""The models of a run and the engine: their sizes on ranks, their optimizers, their budgets."""

from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hybridflow.config.hub import cached
from hybridflow.config.ranks import check_ranks, check_sizes, parse_ranks
from hybridflow.config.rewards import ScoringConfig
from hybridflow.config.section import PathText, Section
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.ranks import Ranks, shown

ModelText = Annotated[PathText, AfterValidator(cached)]
RanksKey = Annotated[Ranks, BeforeValidator(parse_ranks), PlainSerializer(shown)]


class OptimizerConfig(Section):
    """Adam (AdamW) or SGD in float32 main weights. The learning rate follows its schedule by iteration."""

    name: Literal["adam", "sgd"] = "adam"
    lr: NonNegativeFloat
    min_lr: NonNegativeFloat = 0.0
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_iterations: NonNegativeInt = 0
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0  # sgd only
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0  # global gradient norm; 0: no clipping
    zero1: bool = True  # split optimizer state over the data-parallel replicas (adam only)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr = {self.min_lr} exceeds lr = {self.lr}")
        return self


class LayoutConfig(Section):
    """How one role is cut over ranks: tensor x pipeline x data parallel sizes are as many as its ranks."""

    tensor_parallel_size: PositiveInt = 1
    pipeline_parallel_size: PositiveInt = 1
    virtual_pipeline_parallel_size: PositiveInt = 1  # model chunks per stage: the interleaved schedule
    num_layers_in_first_pipeline_stage: PositiveInt | None = None  # None: as many as in the others
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    data_parallel_size: PositiveInt | None = None  # None: what is left of the ranks
    sequence_parallel: bool = False
    ranks: RanksKey | None = None  # "0-7,12"; None: all ranks of the run

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.sequence_parallel and self.tensor_parallel_size == 1:
            raise ValueError("sequence_parallel needs tensor_parallel_size > 1, it is 1")
        for key, neutral in (
            ("virtual_pipeline_parallel_size", 1),
            ("num_layers_in_first_pipeline_stage", None),
            ("num_layers_in_last_pipeline_stage", None),
        ):
            if self.pipeline_parallel_size == 1 and getattr(self, key) != neutral:
                raise ValueError(f"{key} = {getattr(self, key)} needs pipeline_parallel_size > 1, it is 1")
        return self

    def layout(self, name: str, world_size: int) -> Layout:
        """The layout of the role `name` among `world_size` ranks. Errors: ConfigError unless it fills its own."""
        ranks = check_ranks(f"{name}.ranks", self.ranks, world_size)
        sizes = self.tensor_parallel_size, self.pipeline_parallel_size, self.data_parallel_size
        check_sizes(name, sizes, self.ranks, ranks)
        return self.layout_on(ranks)

    def layout_on(self, ranks: tuple[int, ...]) -> Layout:
        """With as many replicas as they make."""
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        return Layout(
            tp=tp,
            pp=pp,
            dp=len(ranks) // (tp * pp),
            ranks=ranks,
            vpp=self.virtual_pipeline_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
        )


class RoleConfig(LayoutConfig):
    """A model on a grid."""

    # a HuggingFace directory, a name on the Hub, or the torch_dist checkpoint that `tools.convert` makes of one
    model: ModelText
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    micro_batch_tokens: PositiveInt = 16384  # tokens per forward pass and replica, at most


class TrainedRoleConfig(RoleConfig):
    optimizer: OptimizerConfig
    recompute: Literal["none", "selective", "full"] = "none"
    offload_optimizer: bool = False  # optimizer state waits in host memory while the engine generates
    offload_gradients: bool = False  # the gradient buffers are given back while the engine generates


class RewardModelConfig(RoleConfig):
    weight: float = 1.0
    # true: it may have another tokenizer than the actor: texts are encoded anew, by its own tokenizer and chat template
    reencode: bool = False


class RewardConfig(ScoringConfig):
    """The score of a response: the weighted sum of reward models, reward functions and remote ones."""

    models: tuple[RewardModelConfig, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.models and not self.functions and not self.remote:
            raise ValueError("names neither a model nor a function: give reward.models or reward.functions")
        return self


class RolloutConfig(Section):
    """The vLLM engine: replicas of tensor x pipeline parallel ranks, on the actor's ranks or on ranks of its own."""

    tensor_parallel_size: PositiveInt | None = None  # None: the actor's
    pipeline_parallel_size: PositiveInt = 1
    ranks: RanksKey | None = None  # None: the actor's; as in the roles. Own ranks receive the weights
    # per rank. None: what a replica's share of the batch takes where each response is as long as it may be, and no more
    # than half of the memory that is free when the engine is built
    kv_cache_gib: PositiveFloat | None = None
    sleep_level: Literal[0, 1] = 1  # 1: the KV cache is given back while the models train
    # the actor's weights travel in buckets: what is held twice or under way. None: 256 on GPUs; 24 on a CPU, whose
    # allocator gives larger blocks back to the system and takes them page by page again
    reshard_bucket_mib: PositiveFloat | None = None
    max_num_seqs: PositiveInt = 256
    max_num_batched_tokens: PositiveInt = 8192
    enable_prefix_caching: bool = True
    enforce_eager: bool = False
    # whether a replica whose responses are done scores them while others generate; false: the models begin together.
    # It takes no more memory than training: the cache and the engine's weights are given back before.
    # None: on CPUs, where it was measured, and not on GPUs
    score_while_waiting: bool | None = None

    def scores_while_waiting(self, *, cuda: bool) -> bool:
        return not cuda if self.score_while_waiting is None else self.score_while_waiting

    def batched_tokens(self, longest: int, *, cuda: bool) -> int:
        """Of one step of the engine. Where prompts are not cut in chunks, as on CPUs, one of `longest` tokens fits."""
        return max(self.max_num_batched_tokens, self.max_num_seqs, 0 if cuda else longest)

    def bucket_bytes(self, *, cuda: bool) -> int:
        return int((self.reshard_bucket_mib or (256 if cuda else 24)) * (1 << 20))
