"""Where the metrics of a run go, what is traced, and which metric ends the run."""

from typing import Annotated, Literal

from pydantic import Field, FiniteFloat, NonNegativeInt, PositiveInt

from hybridflow.config.rewards import EvalRewardKey
from hybridflow.config.section import Section
from hybridflow.errors import remedy


class WandbConfig(Section):
    """Weights & Biases, in the package's extra `wandb`."""

    project: str
    """The W&B project that receives the metrics."""
    entity: str | None = None
    """The W&B user or team. null: the account's own."""
    mode: Literal["online", "offline"] = "online"
    """online sends metrics during the run. offline writes files into the run directory, for `wandb sync`."""


class MlflowConfig(Section):
    """MLflow, in the package's extra `mlflow`."""

    experiment: str
    """The MLflow experiment that receives the metrics."""
    tracking_uri: str
    """The address of the MLflow server, such as http://tracking:5000."""


class ProfileConfig(Section):
    """A trace of torch's profiler for each stage of some iterations, in traces/ of the run's directory."""

    iterations: Annotated[tuple[PositiveInt, ...], Field(min_length=1)]
    """The iterations that are traced, from 1. A traced iteration takes longer."""
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] = (0,)
    """The ranks that are traced, from 0."""
    python: bool = False
    """Whether a trace has the calls of Python functions too, which makes the trace larger and the iteration slower."""

    def why_not_within(self, num_iterations: int) -> str | None:
        """What is wrong with the iterations of a run that has so many."""
        last, there = max(self.iterations), [each for each in self.iterations if each <= num_iterations]
        if last <= num_iterations:
            return None
        less = f"metrics.profile.iterations has {last}: the run has {num_iterations} iterations"
        return f"{less}{remedy({'metrics.profile.iterations': [there or [num_iterations]]})}"


class MetricsConfig(Section):
    csv: bool = True
    """Whether the run writes metrics.csv in the run's directory."""
    tensorboard: bool = True
    """Whether the run writes TensorBoard files in the run's directory."""
    wandb: WandbConfig | None = None
    """Where Weights & Biases gets the metrics. null: nowhere."""
    mlflow: MlflowConfig | None = None
    """Where MLflow gets the metrics. null: nowhere."""
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """The port where rank 0 serves the metrics of the last iteration as Prometheus text. null: none is served."""
    prometheus_address: str = "127.0.0.1"
    """The address of rank 0's host that prometheus_port is opened on. 0.0.0.0: all addresses."""
    dump_batches: bool = False
    """Whether the run writes every training batch to batches/, for a replay."""
    eval_interval: NonNegativeInt = 0
    """Iterations between evaluations on data.heldout. 0: no evaluation."""
    eval_reward: EvalRewardKey | None = None
    """The reward function whose score says what is right in eval/accuracy. A text names the function alone; a section
    adds arguments. null: the weighted sum of data.environment, else of the functions in the section reward."""
    eval_threshold: FiniteFloat = 1.0
    """The least score that counts as right in eval/accuracy: of eval_reward, or of what judges without one."""
    num_samples: NonNegativeInt = 4
    """Responses per iteration in samples.jsonl. 0: none."""
    num_groups: NonNegativeInt = 0
    """Training prompts per iteration whose responses are all in samples.jsonl, beside num_samples. 0: none."""
    profile: ProfileConfig | None = None
    """Which iterations and ranks write a profiler's trace. null: none."""


class StopConfig(Section):
    """A run ends after the first iteration whose metric is so low or so high, before it has done all iterations."""

    metric: str
    """The metric that ends the run, such as eval/loss. Metrics of eval/ exist every metrics.eval_interval
    iterations."""
    at_most: float | None = None
    """The run ends when the metric is this or lower. Give at_most or at_least, not both."""
    at_least: float | None = None
    """The run ends when the metric is this or higher. Give at_most or at_least, not both."""

    def holds(self, value: float) -> bool:
        """Whether a value of the metric is the end; never of one that is not a number."""
        if self.at_most is not None:
            return value <= self.at_most
        assert self.at_least is not None, "one of the two is given"
        return value >= self.at_least

    def reason(self, value: float) -> str:
        """Why the run stops, for a person."""
        rule = f"at most {self.at_most:g}" if self.at_most is not None else f"at least {self.at_least:g}"
        return f"{self.metric} = {value:.6g} is {rule} (stop_when)"
