"""Seconds of published runs beside what `hybridflow plan --time` says of them, for docs/explanation/planning.md.

    python -m tests.bench.published            prints both tables
    python -m tests.bench.published --write    writes them into the page

`published_runs` has the runs. Each is laid out as its source says, with a shipped profile. Predictions are of
hybridflow's own trainer and engine on that layout.
"""

import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridflow.architecture.spec import read_spec
from hybridflow.automap.cost import Device
from hybridflow.automap.device import load_profile
from hybridflow.automap.generation_time import Responses, generation_cost
from hybridflow.automap.timing import Prediction, Work, predict
from hybridflow.config import ExperimentConfig
from hybridflow.parallel.layout import Cut, Layout
from hybridflow.placement.footprint import stage_elements
from hybridflow.placement.placed import place
from tests.bench.published_runs import (
    LATENCIES,
    LLAMA_1B,
    NEMO_RUNS,
    OWN_RUNS,
    REWARD,
    VLLM,
    WRITTEN,
    Latency,
    NemoRun,
    OwnRun,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "explanation" / "planning.md"
SHAPES = ROOT / "configs" / "shapes"
GIB = 1 << 30
ENGINE_SHARE, BESIDE = (
    0.6,
    3 * GIB,
)  # of a GPU, NeMo RL's default; what the engine has beside weights and cache: assumed
# takes as long as GRPO of NeMo RL, which has the old log-probs of all rows: hybridflow's GRPO leaves some to the update
ALGORITHM = {"name": "reinforce", "kl": {"use": "reward"}, "update": {"mini_batch_size": 512}}
BEGIN, END = "<!-- tests.bench.published: begin -->", "<!-- tests.bench.published: end -->"


@dataclass(frozen=True)
class Row:
    run: str
    source: str
    published: float
    predicted: float
    phases: str  # what the prediction is made of, or the constant that the row gives
    blind: bool = True  # no constant comes from it

    @property
    def ratio(self) -> float:
        return self.predicted / self.published


def published_rows() -> list[Row]:
    return [*(nemo_row(run) for run in NEMO_RUNS), *(latency_row(latency) for latency in LATENCIES)]


def own_rows() -> list[Row]:
    with tempfile.TemporaryDirectory() as own:
        return [row for run in OWN_RUNS for row in _own_rows(run, Path(own))]


# ------------------------------------------------------------------------------------------------ others' runs


def nemo_row(run: NemoRun) -> Row:
    found = predict_nemo(run)
    words = f"{run.model}, {run.gpus} GPUs: {_layout(run)}"
    return Row(words, run.source, run.seconds, found.seconds, _phases(found))


def predict_nemo(run: NemoRun) -> Prediction:
    """Rows are packed in budgets of one longest sequence; optimizer state is in host memory while the engine works."""
    profile, shape = load_profile("h100-sxm"), str(SHAPES / run.model)
    role = {"model": shape, "micro_batch_tokens": run.limit}
    sizes = {key: value for key, value in run.actor.items() if key != "recompute"}
    longest = run.limit - round(run.prompt)
    config = ExperimentConfig.model_validate(
        {
            "name": "published",
            "num_iterations": 1,
            "tensor_parallel_across_hosts": run.engine_tp > profile.ranks_per_host,
            "data": {
                "train": "none",
                "prompts_per_iteration": run.prompts,
                "max_prompt_length": run.limit - longest,
            },
            "sampling": {"max_response_length": longest, "samples_per_prompt": 32},
            "actor": role | run.actor | {"optimizer": {"lr": 1e-6}, "offload_optimizer": True},
            "reference": role | sizes | {"micro_batch_tokens": run.limit * run.score_tokens},
            "reward": REWARD,
            "rollout": {
                "tensor_parallel_size": run.engine_tp,
                "enable_expert_parallel": False,
                "kv_cache_gib": cache_gib(run, profile.memory_bytes),
                "max_num_seqs": 1024,
            },
            "algorithm": ALGORITHM,
        }
    )
    work = Work(run.prompts, 32, run.prompt, run.response, longest, profile.ranks_per_host)
    return predict(place(config, run.gpus, cuda=True), profile, work)


def cache_gib(run: NemoRun, memory_bytes: int) -> float:
    """What the engine's share of a GPU leaves."""
    spec, tp = read_spec(SHAPES / run.model), run.engine_tp
    weights = 2 * stage_elements(spec, "lm", Layout(tp, 1, 1, tuple(range(tp))))[0]
    return round((ENGINE_SHARE * memory_bytes - weights - BESIDE) / GIB, 1)


def _layout(run: NemoRun) -> str:
    names = {"tensor_parallel_size": "tp", "pipeline_parallel_size": "pp", "expert_parallel_size": "ep"}
    sizes = [f"{short} {run.actor[key]}" for key, short in names.items() if key in run.actor]
    words = f"training {' x '.join(sizes)}"
    if "recompute" in run.actor:
        words += " with full recompute"
    if run.assumed:
        words += f" ({run.assumed})"
    return f"{words}, engines tp {run.engine_tp}"


def latency_row(run: Latency) -> Row:
    responses = Responses(8, 8, prompt=32, mean=128, longest=128, at_once=256, batched_tokens=8192)
    device, spec = Device(load_profile("h200")), read_spec(SHAPES / run.model)
    cost = generation_cost(spec, cut=Cut(run.tp, run.tp), pp=1, dtype="bfloat16", responses=responses, device=device)
    predicted = cost.seconds - device.profile.overheads.engine_wake
    words = f"{run.model}, 8 x (32 + 128) tokens, tp {run.tp} on H200"
    return Row(words, VLLM, run.seconds, predicted, "gives engine_step, engine_layer", blind=False)


# ------------------------------------------------------------------------------------------------ hybridflow's runs


def _own_rows(run: OwnRun, own: Path) -> Iterator[Row]:
    config = ExperimentConfig.model_validate({"name": "own", "num_iterations": 1} | _with_models(run.config, own))
    found = predict(place(config, 1, cuda=True), load_profile("h100-sxm"))
    for phase, seconds in run.seconds.items():
        predicted = found.phases[phase] if phase else found.seconds
        gives = run.fitted.get(phase)
        words = "" if gives is None else "by its phases" if not gives else f"gives {gives}"
        yield Row(run.what, phase or "iteration", seconds, predicted, words, blind=gives is None)


def _with_models(config: Any, own: Path) -> Any:
    """The config with a directory in place of a model's name."""
    if isinstance(config, dict):
        return {
            key: _model(value, own) if key == "model" else _with_models(value, own) for key, value in config.items()
        }
    return [_with_models(each, own) for each in config] if isinstance(config, list) else config


def _model(name: str, own: Path) -> str:
    if name not in WRITTEN:
        return str(ROOT / name)
    directory = own / name
    directory.mkdir(exist_ok=True)
    base = json.loads((ROOT / LLAMA_1B / "config.json").read_text()) if "model_type" not in WRITTEN[name] else {}
    (directory / "config.json").write_text(json.dumps(base | WRITTEN[name]))
    return str(directory)


# ------------------------------------------------------------------------------------------------ tables


def _phases(found: Prediction) -> str:
    """Those of at least a hundredth."""
    named = {name: value for name, value in found.phases.items() if value >= found.seconds / 100}
    return ", ".join(f"{name} {_digits(value)}" for name, value in named.items())


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def tables() -> str:
    """Both, in Markdown."""
    lines = [
        "| run | source | published, s | predicted, s | predicted / published | of it |",
        "|---|---|---|---|---|---|",
    ]
    for row in published_rows():
        numbers = f"{_digits(row.published)} | {_digits(row.predicted)} | {row.ratio:.2f}"
        lines.append(f"| {row.run} | {row.source} | {numbers} | {row.phases} |")
    lines += ["", "| run on one H100 | phase | measured, s | predicted, s | predicted / measured | constant |"]
    lines.append("|---|---|---|---|---|---|")
    for row in own_rows():
        numbers = f"{_digits(row.published)} | {_digits(row.predicted)} | {row.ratio:.2f}"
        lines.append(f"| {row.run} | {row.source} | {numbers} | {row.phases} |")
    return "\n".join(lines)


def main() -> None:
    text = tables()
    if "--write" in sys.argv[1:]:
        before, rest = PAGE.read_text().split(BEGIN)
        after = rest.split(END)[1]
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")
    print(text)


if __name__ == "__main__":
    main()
