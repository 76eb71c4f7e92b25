"""The models of a run and the engine: their sizes on ranks, their optimizers, their budgets."""

from math import gcd, lcm
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PlainSerializer,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from hybridflow.config.hub import ModelText
from hybridflow.config.lora import LoraConfig
from hybridflow.config.ranks import check_ranks, check_sizes, parse_ranks
from hybridflow.config.recompute import RecomputeKey
from hybridflow.config.rewards import ScoringConfig
from hybridflow.config.section import Section
from hybridflow.config.vendor_arguments import EngineArguments, HfOverrides, MegatronArguments
from hybridflow.errors import ConfigError, Mendable, divisors, remedy
from hybridflow.parallel.layout import Layout, expert_tensor_parallel
from hybridflow.parallel.ranks import Ranks, shown

RanksText = Annotated[str, Field(pattern=r"^\s*[0-9]+(-[0-9]+)?\s*(,\s*[0-9]+(-[0-9]+)?\s*)*$")]
RanksKey = Annotated[
    Ranks, BeforeValidator(parse_ranks, json_schema_input_type=RanksText | NonNegativeInt), PlainSerializer(shown)
]


class OptimizerConfig(Section):
    """Adam (AdamW) or SGD in float32 main weights. The learning rate follows the schedule by iteration."""

    name: Literal["adam", "sgd"] = "adam"
    """adam is AdamW. sgd is stochastic gradient descent with momentum."""
    lr: NonNegativeFloat
    """The learning rate after the warm-up."""
    min_lr: NonNegativeFloat = 0.0
    """The learning rate at the end of a linear or cosine schedule."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes from lr to min_lr. constant: the rate stays at lr."""
    warmup_iterations: NonNegativeInt = 0
    """Iterations in which the learning rate rises linearly to lr. 0: no warm-up."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    """Adam's decay rates of the first and the second moment."""
    eps: PositiveFloat = 1e-8
    """Adam's constant in the denominator."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The momentum of sgd. 0 turns it off."""
    weight_decay: NonNegativeFloat = 0.0
    """The weight decay of an optimizer step. 0 turns it off."""
    clip_grad: NonNegativeFloat = 1.0
    """The largest global norm of gradients. 0: no clipping."""
    zero1: bool = True
    """Whether the data-parallel replicas share out the optimizer state (ZeRO-1). Only for adam."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_lr > self.lr:
            raise Mendable(f"min_lr = {self.min_lr} exceeds lr = {self.lr}", {"min_lr": [self.lr], "lr": [self.min_lr]})
        return self


class LayoutConfig(Section):
    """How one role is cut over ranks: as many as tensor x pipeline x context x data parallel sizes."""

    tensor_parallel_size: PositiveInt = 1
    """Ranks that each layer is split over. 1: no tensor parallelism."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages that the layers are split into. 1: no pipeline parallelism."""
    virtual_pipeline_parallel_size: PositiveInt = 1
    """Model chunks per pipeline stage, for the interleaved schedule. 1: plain stages."""
    num_layers_in_first_pipeline_stage: PositiveInt | None = None
    """Layers of the first stage. null: as many as in the other stages."""
    num_layers_in_last_pipeline_stage: PositiveInt | None = None
    """Layers of the last stage. null: as many as in the other stages."""
    context_parallel_size: PositiveInt = 1
    """Ranks that share the tokens of each sequence, each with all of the model. 1: no context parallelism."""
    data_parallel_size: PositiveInt | None = None
    """Replicas of the model. null: as many as the ranks allow."""
    expert_parallel_size: PositiveInt = 1
    """Ranks that the experts of a layer are dealt to, whole ones each. 1: every rank has a share of each expert."""
    expert_tensor_parallel_size: PositiveInt | None = None
    """Ranks that each expert is split over. null: so many that the experts fill the tensor-parallel ranks."""
    sequence_parallel: bool = False
    """Whether tensor-parallel ranks also split activations by sequence. Needs a tensor_parallel_size above 1."""
    ranks: RanksKey | None = None
    """The ranks of this role, as inclusive intervals and single ranks: "0-7,12". null: all ranks of the run."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        """Experts fill the tensor-parallel ranks of one replica, or of several."""
        tp, ep, etp = self.tensor_parallel_size, self.expert_parallel_size, self.expert_tp
        if etp * ep % tp:
            raise Mendable(
                f"expert_tensor_parallel_size x expert_parallel_size = {etp} x {ep} = {etp * ep} must be a multiple of "
                f"tensor_parallel_size = {tp}: {etp * ep} = {etp * ep // tp} x {tp} + {etp * ep % tp}",
                {"expert_tensor_parallel_size": [tp // gcd(tp, ep)], "expert_parallel_size": [lcm(tp, etp) // etp]},
            )
        if etp * ep > tp > 1 and not self.sequence_parallel:
            raise Mendable(
                f"expert_tensor_parallel_size x expert_parallel_size = {etp} x {ep} exceeds tensor_parallel_size = "
                f"{tp}: replicas then share experts, which needs sequence_parallel",
                {"sequence_parallel": [True]},
            )
        return self

    @property
    def expert_tp(self) -> int:
        """Ranks that share each expert."""
        sizes = self.tensor_parallel_size, self.expert_parallel_size, self.expert_tensor_parallel_size
        return expert_tensor_parallel(*sizes)

    @property
    def dense_per_expert_copy(self) -> int:
        """Copies of the dense weights that share one copy of the experts, as `Layout.dense_per_expert_copy`."""
        return self.expert_tp * self.expert_parallel_size // self.tensor_parallel_size

    def layout(self, name: str, world_size: int) -> Layout:
        """The role's layout among `world_size` ranks. Errors: ConfigError unless the layout fills the role's ranks."""
        ranks = check_ranks(f"{name}.ranks", self.ranks, world_size)
        sizes = {key: getattr(self, key) for key in ("tensor_parallel_size", "pipeline_parallel_size")}
        if self.context_parallel_size > 1:
            sizes["context_parallel_size"] = self.context_parallel_size
        check_sizes(name, sizes, self.data_parallel_size, self.ranks, ranks)
        self._check_copies(name, len(ranks) // (self.tensor_parallel_size * self.pipeline_parallel_size))
        return self.layout_on(ranks)

    def _check_copies(self, name: str, dense: int) -> None:
        """Raise ConfigError unless so many copies of the dense weights make up whole copies of the experts."""
        tp, ep, etp = self.tensor_parallel_size, self.expert_parallel_size, self.expert_tp
        replicas, pp = self.dense_per_expert_copy, self.pipeline_parallel_size
        if dense % replicas:
            counted = "data-parallel replicas" if self.context_parallel_size == 1 else "copies of the model"
            fewer = [size for size in divisors(ep) if self._copies_fit(size, dense)]
            more = remedy({f"{name}.expert_parallel_size": fewer}, f"take a multiple of {replicas * tp * pp} ranks")
            raise ConfigError(
                f"{name}: one copy of the experts takes expert_tensor_parallel_size x expert_parallel_size = {etp} x "
                f"{ep} ranks, which are {replicas} {counted} with tensor_parallel_size = {tp}. There are {dense} "
                f"{counted}, no multiple of {replicas}{more}"
            )

    def _copies_fit(self, ep: int, dense: int) -> bool:
        """Whether so many copies of the dense weights make up whole copies of experts that lie on `ep` times etp."""
        tp, etp = self.tensor_parallel_size, self.expert_tensor_parallel_size
        experts = expert_tensor_parallel(tp, ep, etp) * ep
        return experts % tp == 0 and dense % (experts // tp) == 0

    def layout_on(self, ranks: tuple[int, ...]) -> Layout:
        """With as many replicas as they make."""
        tp, pp = self.tensor_parallel_size, self.pipeline_parallel_size
        return Layout(
            tp=tp,
            pp=pp,
            dp=len(ranks) // (tp * pp * self.context_parallel_size),
            cp=self.context_parallel_size,
            ranks=ranks,
            vpp=self.virtual_pipeline_parallel_size,
            first_stage_layers=self.num_layers_in_first_pipeline_stage,
            last_stage_layers=self.num_layers_in_last_pipeline_stage,
            ep=self.expert_parallel_size,
            etp=self.expert_tensor_parallel_size,
        )


class RoleConfig(LayoutConfig):
    """A model on a grid."""

    model: ModelText
    """A HuggingFace model directory, a name on the Hub, or a torch_dist checkpoint from `hybridflow convert`."""
    hf_overrides: HfOverrides | None = None
    """Fields of the model's config.json that the run overrides. null: those of the actor where this role has the
    actor's model, else none."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """The number format of weights and activations."""
    micro_batch_tokens: Annotated[
        PositiveInt, BeforeValidator(lambda given: given, json_schema_input_type=PositiveInt | None)
    ] = 16384
    """Tokens of one forward pass on one replica, at most. null, as where it is not given: the default, or the longest
    sequence if that is longer. No less than the longest sequence."""
    megatron_arguments: MegatronArguments = MegatronArguments()
    """More arguments of megatron-core's TransformerConfig: those that change speed or memory."""
    token_dispatcher: Literal["auto", "alltoall", "deepep"] = "auto"
    """How tokens reach experts that several replicas share. auto: alltoall. deepep needs the package deep_ep, bfloat16
    and whole experts; no run on GPUs has shown it so far."""

    @model_validator(mode="before")
    @classmethod
    def _without_budget(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("micro_batch_tokens", 0) is None:
            return {key: value for key, value in given.items() if key != "micro_batch_tokens"}
        return given

    @model_validator(mode="after")
    def _check_dispatcher(self) -> Self:
        if self.token_dispatcher == "deepep":
            if self.dense_per_expert_copy == 1:
                shared = self.tensor_parallel_size
                raise Mendable(
                    "token_dispatcher = deepep needs experts that replicas share: expert_tensor_parallel_size x "
                    f"expert_parallel_size = {self.expert_tp} x {self.expert_parallel_size} is no more than "
                    f"tensor_parallel_size = {shared}. Raise expert_parallel_size, or write auto",
                    {"token_dispatcher": ["auto"]},
                )
            if self.expert_tp > 1:
                raise Mendable(
                    f"token_dispatcher = deepep needs whole experts, expert_tensor_parallel_size is {self.expert_tp}",
                    {"expert_tensor_parallel_size": [1], "token_dispatcher": ["auto"]},
                )
        return self


class TrainedRoleConfig(RoleConfig):
    optimizer: OptimizerConfig
    """The optimizer, and the schedule of the learning rate."""
    recompute: RecomputeKey = "none"
    """Activations that the backward pass computes again: none, core attention (selective), all (full), or those of
    modules. A list names the modules: core_attn, layernorm, mlp, moe, moe_act, shared_experts."""
    offload_optimizer: bool | Literal["always"] = False
    """Whether optimizer state lies in host memory. true: during generation. always: a step brings parts of the state to
    the device, two at a time."""
    offload_gradients: bool = False
    """Whether the memory of gradients is freed during generation."""
    overlap: bool | None = None
    """Whether replicas exchange gradients and weights while they compute. null: on GPUs."""
    lora: LoraConfig | None = None
    """Adapters that are trained in place of the model's weights. null: the weights are trained."""


class RewardModelConfig(RoleConfig):
    weight: float = 1.0
    """The weight of this model's score in the sum."""
    reencode: bool = False
    """Whether the model has another tokenizer. Texts are then encoded again, with the model's chat template."""


class RewardConfig(ScoringConfig):
    """The score of a response: the weighted sum of reward models, reward functions and remote ones."""

    models: tuple[RewardModelConfig, ...] = ()
    """Reward models on ranks of the run."""


FEW_SEQUENCES = 256  # of a step, where nothing says how many there may be
MOST_SEQUENCES = 512  # vLLM 0.32.0 captures no CUDA graph of a larger step


class PartialRollouts(Section):
    """Responses that have not ended when enough others have go on in the next iteration, with new weights."""

    oversample: Annotated[float, Field(ge=1.0)] = 1.5
    """Prompts under way at a time, in multiples of data.prompts_per_iteration. 1: all end in the iteration."""


class RolloutConfig(Section):
    """The vLLM engine: replicas of tensor x pipeline parallel ranks, on the actor's ranks or on other ranks."""

    tensor_parallel_size: PositiveInt | None = None
    """Ranks that each layer of an engine replica is split over. null: as in the actor."""
    pipeline_parallel_size: PositiveInt = 1
    """Pipeline stages of an engine replica. 1: no pipeline parallelism."""
    enable_expert_parallel: bool | None = None
    """Whether an engine rank has whole experts, not a share of each. null: as the actor's expert_parallel_size
    says."""
    ranks: RanksKey | None = None
    """The ranks of the engine, such as "0-7,12". null: those of the actor; others receive the weights over the
    network."""
    kv_cache_gib: PositiveFloat | None = None
    """GiB of KV cache per rank. null: what a batch of the expected length needs, within the memory that libraries leave
    (on CPUs half of it)."""
    sleep_level: Literal[0, 1] = 1
    """1 frees the KV cache during training. 0 keeps the KV cache."""
    reshard_bucket_mib: PositiveFloat | None = None
    """MiB of one bucket of the weight sync. null: 256 on GPUs, 24 on CPUs."""
    max_num_seqs: PositiveInt | None = None
    """Sequences of one step of the engine, at most. null: 256; on GPUs up to 512, as far as the rows of a replica and
    the KV cache go."""
    max_num_batched_tokens: PositiveInt = 8192
    """Tokens of one step of the engine, at most."""
    enable_prefix_caching: bool = True
    """Whether responses to one prompt share the KV cache of the prompt."""
    enforce_eager: bool = False
    """Whether the engine runs without CUDA graphs."""
    engine_arguments: EngineArguments = EngineArguments()
    """More arguments of vLLM's engine: those that change speed or memory."""
    score_while_waiting: bool | None = None
    """Whether a replica with finished responses scores them while others generate. null: only on CPUs."""
    max_staleness: NonNegativeInt = 0
    """Updates by which a token may be older than the weights that train on the token. 1: the engine, on ranks of its
    own, generates the next rollout while the models train on this one. More only with partial."""
    partial: PartialRollouts | None = None
    """Responses that go on in the next iteration. Needs max_staleness of 1 or more. null: none does."""

    @property
    def is_one_step_off(self) -> bool:
        """Whether the engine generates while models train."""
        return self.max_staleness > 0 and self.partial is None

    def scores_while_waiting(self, *, cuda: bool) -> bool:
        # on CPUs it was measured to pay, on GPUs it was not
        return not cuda if self.score_while_waiting is None else self.score_while_waiting

    def batched_tokens(self, longest: int, *, cuda: bool) -> int:
        """Of one step of the engine. Where prompts are not cut in chunks, as on CPUs, one of `longest` tokens fits."""
        return max(self.max_num_batched_tokens, self.most_sequences, 0 if cuda else longest)

    @property
    def most_sequences(self) -> int:
        """Of a step, where nobody knows how many rows there are."""
        return self.max_num_seqs or FEW_SEQUENCES

    def sequences_of_step(self, rows: int, held: int | None = None, *, cuda: bool) -> int:
        """At most, where a replica has so many rows, and the KV cache holds so many of the expected length."""
        if self.max_num_seqs is not None or not cuda:
            return self.most_sequences
        return max(FEW_SEQUENCES, min(rows, MOST_SEQUENCES, rows if held is None else held))

    def bucket_bytes(self, *, cuda: bool) -> int:
        # a CPU's allocator gives larger blocks back to the system and takes them page by page again
        return int((self.reshard_bucket_mib or (256 if cuda else 24)) * (1 << 20))


def replace_role(config: BaseModel, name: str, role: RoleConfig) -> None:
    """While `config` is checked: sections are frozen, and may be those of another config too."""
    section, _, number = name.partition(".models.")
    if number:
        pool = getattr(config, section)
        models = [role if i == int(number) else model for i, model in enumerate(pool.models)]
        config.__dict__[section] = pool.model_copy(update={"models": type(pool.models)(models)})
    else:
        config.__dict__[section] = role
