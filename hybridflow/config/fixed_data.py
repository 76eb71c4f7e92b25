"""The config of a run on fixed data: supervised fine-tuning, reward models, DPO, KTO. Nothing is generated.

    config = FixedDataConfig.from_yaml("configs/quickstart_sft.yaml", ["num_epochs=2"])

Sections that such a run has no use for (sampling, rollout, reward, a critic) are refused, with what to remove.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from hybridflow.config import RoleConfig, RolloutConfig, RunConfig, TrainedRoleConfig
from hybridflow.config.best_metric import AREAS, check_best_metric
from hybridflow.config.data import FilesConfig
from hybridflow.config.fixed_algorithms import FixedAlgorithm
from hybridflow.config.ranks import check_placement
from hybridflow.errors import ConfigError, Reasons, remedy
from hybridflow.parallel.layout import Layout
from hybridflow.parallel.ranks import counted

ROLES = ("actor", "reference", "reward_model")  # in the order of the config
OF_GENERATION = ("sampling", "rollout", "reward", "critic")


class FixedDataSection(FilesConfig):
    """Where rows come from. A pair of completions is one row."""

    batch_size: PositiveInt
    """Rows of an optimizer step, over all ranks. A pair of completions is one row."""
    max_length: PositiveInt
    """Tokens of the longest sequence, prompt and completion together."""
    overlong: Literal["drop", "error"] = "error"
    """What happens to a row longer than max_length: the row is dropped, or the run ends with an error."""
    assistant_turns: Literal["auto", "together", "each"] = "auto"
    """Sequences of a conversation with several turns: together makes one, each makes one a turn. auto: each where the
    chat template leaves out earlier thinking, otherwise together."""


class FixedDataConfig(RunConfig):
    """A run that learns from the rows of files."""

    generates: ClassVar[bool] = False
    generates_beside: ClassVar[bool] = False
    length_keys: ClassVar[str] = "data.max_length"
    rows_key: ClassVar[str] = "data.batch_size"

    num_iterations: PositiveInt | None = None
    """Optimizer steps of the run. Give num_iterations or num_epochs, not both."""
    num_epochs: PositiveInt | None = None
    """Passes over data.train, in whole batches. With weights, as many rows by turns. Give num_iterations or num_epochs,
    not both."""
    data: FixedDataSection
    """The rows to learn from: files, columns, and limits of length."""
    actor: TrainedRoleConfig | None = None
    """The model that is trained. Required by sft, dpo and kto."""
    reference: RoleConfig | None = None
    """The model that log-ratios are measured to. Required by dpo and kto. null: with actor.lora the actor without
    adapters, or with those of actor.lora.adapter_path."""
    reward_model: TrainedRoleConfig | None = None
    """The reward model that is trained. Required by reward_model."""
    algorithm: Annotated[FixedAlgorithm, Field(discriminator="name")]
    """The name and the keys of the algorithm."""

    @model_validator(mode="before")
    @classmethod
    def _nothing_of_generation(cls, given: Any) -> Any:
        """Sections of a run that generates are named as what they are; set to null they are not there."""
        if not isinstance(given, dict):
            return given
        there = [key for key in OF_GENERATION if given.get(key) is not None]
        if there:
            raise ValueError(
                f"{there[0]}: this algorithm trains on fixed data and generates nothing: remove the section "
                f"{there[0]}, or set {there[0]}=null"
            )
        return {key: value for key, value in given.items() if key not in OF_GENERATION}

    @model_validator(mode="after")
    def _check(self) -> Self:
        profile = self.metrics.profile
        if profile and self.num_iterations and (wrong := profile.why_not_within(self.num_iterations)):
            raise ValueError(wrong)
        self.check_sections(self.algorithm.needs(), dict.fromkeys(ROLES, f"algorithm {self.algorithm.name}"))
        self.check_budgets(self.max_sequence_length, self.length_keys)
        if self.checkpoint.keep_best:
            areas = AREAS - {"reward", "rollout", "reshard", "sampling", "critic", "reward_model", "actor"}
            areas |= {self.trained_name}
            kind, every = f"a run of {self.algorithm.name}", self.metrics.eval_interval
            check_best_metric(self.checkpoint.best_metric, areas, eval_interval=every, kind=kind)
        return self

    @property
    def reference_is_base(self) -> bool:
        adapted = self.actor is not None and self.actor.lora is not None
        return self.reference is None and "reference" in self.algorithm.needs() and adapted

    @property
    def batch_size(self) -> int:
        """Sequences of an iteration: two of a pair; of kto's also the mismatched ones."""
        return self.data.batch_size * (1 if self.algorithm.kind == "sft" else 2)

    @property
    def mini_batch_size(self) -> int:
        return self.batch_size

    @property
    def fewest_rows(self) -> int:
        """Rows of a step, of which each replica of a trained model gets one or more."""
        return self.data.batch_size

    @property
    def max_sequence_length(self) -> int:
        return self.data.max_length

    def shortened(self, most: int) -> dict[str, list[Any]]:
        """Settings, as of `remedy`, with which the longest sequence has `most` tokens."""
        return {"data.max_length": [most]}

    def bucket_bytes(self, *, cuda: bool) -> int:
        """Of the buckets in which the trained model's weights live."""
        return RolloutConfig().bucket_bytes(cuda=cuda)

    def iterations(self, num_rows: int) -> int:
        """Of a run on so many rows: what is given, or `num_epochs` passes in whole batches. Errors: ConfigError."""
        if self.num_iterations is not None:
            return self.num_iterations
        assert self.num_epochs is not None, "one of the two is given"
        profile, found = self.metrics.profile, self.num_epochs * num_rows // self.data.batch_size
        if self.num_epochs * num_rows < self.data.batch_size:
            raise ConfigError(
                f"data.batch_size = {self.data.batch_size} is more than num_epochs x rows of data.train = "
                f"{self.num_epochs} x {num_rows}"
                f"{remedy({'data.batch_size': [self.num_epochs * num_rows]})}"
            )
        if profile is not None and (wrong := profile.why_not_within(found)):
            raise ConfigError(wrong)
        return found

    def roles(self) -> dict[str, RoleConfig]:
        """Every model of the run by the config key that names it."""
        return {name: role for name in ROLES if (role := getattr(self, name)) is not None}

    def layouts(self, world_size: int, reasons: Reasons) -> dict[str, Layout]:
        """Each role's layout on `world_size` ranks. What is wrong is noted; a role that has none is left out."""
        layouts = self.role_layouts(world_size, reasons)
        name, rows = self.trained_name, self.fewest_rows
        if name in layouts and rows < layouts[name].dp:
            reasons.lines.append(
                f"data.batch_size = {rows} leaves replicas of {name} without a row: {name} has data_parallel_size "
                f"{layouts[name].dp} on {counted(len(layouts[name].ranks))}"
                f"{remedy({'data.batch_size': [layouts[name].dp]})}"
            )
        if not reasons.lines:
            placed = {f"{name}.ranks": layout.ranks for name, layout in layouts.items()}
            reasons.collect(check_placement, placed, world_size)
        return layouts
