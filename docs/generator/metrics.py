"""reference/metrics.md: the metrics of metrics.csv, by area, with their titles and units."""

import re

from docs.generator.markdown import HEAD, code, table
from hybridflow.config.best_metric import lower_is_better
from hybridflow.reporting.metric_titles import TITLES

INTRODUCTION = """\
# Metrics

`runs/NAME/metrics.csv` has a row for each iteration and a column for each metric. TensorBoard, Weights & Biases and
MLflow get the same names. A metric is called `area/name`. A run has the metrics that its config makes: without a
critic there is no `critic/loss`. `NAME` in the tables stands for a name of the run.

The column "Better" says which checkpoints `checkpoint.keep_best` keeps by that metric, with `best_is: auto`. A metric
that a flow adds ([`run.metrics`](api.md#write-an-algorithm)) has a column too.

"""
# area -> what it is about, and when a run has it
AREAS = {
    "eval": "Held-out data. These metrics exist every `metrics.eval_interval` iterations.",
    "reward": "Scores of responses. Only with generation.",
    "actor": "The model that is trained. A value is the mean over the optimizer steps of an iteration.",
    "critic": "The value model. Only with `algorithm.name: ppo`, or a custom flow with a critic.",
    "reward_model": "Only with `algorithm.name: reward_model`.",
    "NAME": "Metrics of the trained model: NAME is `actor`, `critic` or `reward_model`.",
    "kl": "The reference. Only where `algorithm.kl.use` is not `none`.",
    "environment": "Conversations of many turns. Only with `data.environment`.",
    "rollout": "Responses and the engine. Only with generation.",
    "sampling": "Prompts by their length. Only with `sampling.by_prompt_length`.",
    "train": "The whole iteration.",
    "speed": "Operations of the models a second, by phase: the mean of the ranks that work in the phase.",
    "data": "Rows of files.",
    "time": "Seconds of an iteration, of the slowest rank. A stage that a run does not have has no metric.",
    "reshard": "Weights on their way from the trainer to the engine, of the rank with most. Only with generation.",
    "memory": "Of the rank with most.",
}
STALE = "With `rollout.max_staleness`."
# metric -> when a run has it, where the area does not say
WHEN = {
    "eval/accuracy": "By `metrics.eval_threshold`: [who judges](../guides/evaluation.md#what-is-right).",
    "eval/score_mean": "With a section `reward` or an environment, whose score trains. Not that of `eval_reward`.",
    "eval/failed_rows": "With `reward.on_error: score`. Failed rows count as wrong.",
    "eval/{}/accuracy": "Of the set NAME in `data.heldout`, as all metrics of `eval/NAME/`.",
    "eval/{}/pass_at_{}": "With several `samples`: K of them.",
    "eval/{}/majority_at_{}": "With several `samples`: K of them.",
    "eval/loss": "On fixed data.",
    "eval/reward_accuracy": "On pairs.",
    "eval/reward_margin_mean": "On pairs.",
    "reward/score_all_mean": "Where a flow trains on a part of the responses.",
    "reward/greedy_score_mean": "With `remax`.",
    "reward/equal_groups_fraction": "With several responses to a prompt.",
    "reward/errors": "With reward functions. Above 0 with `reward.on_error: score` alone.",
    "reward/timeouts": "With reward functions. Above 0 with `reward.on_error: score` alone.",
    "reward/row_mean_ms": "With reward functions.",
    "reward/row_max_ms": "With reward functions.",
    "reward/{}/{}": "With a function that returns several parts.",
    "actor/clip_fraction": "With a clipped loss.",
    "rollout/experts_differ": "With `algorithm.policy.replay_routing`.",
    "rollout/experts_load_max_over_mean": "Of a mixture of experts. 1: all experts of a layer have as many tokens.",
    "rollout/experts_load_worst_layer": "Of a mixture of experts. All layers: `experts_load.csv`, `hybridflow report`.",
    "actor/clip_fraction_low": "With a clipped loss.",
    "actor/clip_fraction_high": "With a clipped loss.",
    "actor/weights_out_of_bounds": "With `algorithm.policy.importance`.",
    "{}/reference_point": "With `kto`.",
    "{}/reward_accuracy": "On pairs.",
    "{}/reward_margin_mean": "On pairs.",
    "{}/chosen_reward_mean": "On pairs.",
    "{}/rejected_reward_mean": "On pairs.",
    "{}/desirable_reward_mean": "With `kto`.",
    "{}/undesirable_reward_mean": "With `kto`.",
    "rollout/groups_under_way": "With `rollout.partial`.",
    "rollout/tokens_under_way": "With `rollout.partial`.",
    "rollout/generation_rounds": "With `algorithm.dynamic_sampling`.",
    "rollout/groups_generated": "With `algorithm.dynamic_sampling`.",
    "rollout/groups_equal": "With `algorithm.dynamic_sampling`.",
    "rollout/groups_filled": "With `algorithm.dynamic_sampling`.",
    "rollout/groups_surplus": "With `algorithm.dynamic_sampling`.",
    "rollout/response_length_p{}": "10, 50, 90 and 99.",
    "rollout/kv_cache_use_max": "Of the engine replica with most.",
    "rollout/preemptions": "Of the engine replica with most.",
    "rollout/staleness_mean": STALE,
    "rollout/staleness_max": STALE,
    "rollout/staleness_{}_fraction": STALE,
    "rollout/staleness_{}_log_prob_diff": f"{STALE} Where a pass computes the actor's log-probs.",
    "time/engines_wait_seconds": "With `rollout.max_staleness: 1` and no `rollout.partial`.",
    "time/trainers_wait_seconds": "With `rollout.max_staleness: 1` and no `rollout.partial`.",
    "speed/iteration_mfu": "On GPUs whose peak is known.",
    "speed/{}_mfu": "On GPUs whose peak is known.",
    "time/wait_fraction_mean": "With several ranks.",
    "time/wait_fraction_max": "With several ranks.",
    "time/wait_fraction_rank_{}": "With 2 to 16 ranks.",
    "time/slowest_rank": "With several ranks.",
    "time/slowest_rank_seconds": "With several ranks.",
    "memory/host_state_mb": "With `offload_optimizer`: of a rank, page-locked on GPUs.",
    "memory/peak_{}_mb": "Of the device on GPUs, resident in the process on CPUs.",
    "train/lost_to_nonfinite": "With `nonfinite.action: skip`, where a step was lost. The row has nothing else.",
    "data/epoch": "On fixed data.",
    "data/trained_tokens": "On fixed data.",
    "data/length_mean": "On fixed data.",
    "data/length_max": "On fixed data.",
    "data/dropped_overlong": "With `data.overlong_prompts: drop` or `data.overlong: drop`.",
    "data/dropped_bad": "With `data.bad_rows: drop`.",
    "data/dropped_not_started": "With a class as `data.environment`, and `on_error: fail_row`.",
}
WORDS = """
## How some are measured

- `actor/loss` has the entropy bonus and the KL in it. `actor/grad_norm` is the norm before clipping.
- `actor/entropy`, `actor/approx_kl` and `actor/clip_fraction` are means over all response tokens of a step, whatever
  `loss_mean` and `mask_truncated` say. With `cispo` the clipped tokens are those whose ratio is out of bounds.
- `rollout/log_prob_diff_mean` and `_max` compare the engine's log-prob of a response token with the trainer's.
  `rollout/token_mult_prob_error` is the mean of exp of that difference: 1.01 is 1 %. `rollout/gen_kl` is the KL of the
  engine's distribution to the trainer's, by k3.
- The engine's log-probs are of the distribution that it samples from. With `top_p`, `top_k`, `min_p`, penalties or
  biases this distribution is not the trainer's softmax. The four metrics then measure that difference too.
- The age of a token is the number of updates between the actor that sampled it and the actor that trains on it.
- With `rollout.max_staleness: 1`, metrics of a rollout and of its generation belong to the rollout that trains, which
  engines made during the iteration before. `time/engines_wait_seconds` is the wait before this rollout.
  `time/trainers_wait_seconds` is the wait for this rollout, also where a save or an evaluation has waited for it.
- `time/idle_fraction` is the mean over ranks of the share of an iteration that a rank waits for others in exchanges of
  results.
- `time/wait_fraction_*` is the share of an iteration that a rank is in collectives: the wait for others, and the
  transfer. The ranks' host clock measures it on CPUs, and events of the stream on GPUs. The engine's own collectives
  are not counted. On GPUs those that the backward pass starts in layers are not counted either: autograd has a thread
  of its own there.
- A late rank is in collectives for less time than the others. `time/slowest_rank` is that rank.
  `time/slowest_rank_seconds` is how much longer the others were there, in the mean over the others.
- `speed/{}_tflops` counts the operations of a model that runs each row whole: prompts once a row, causal attention, and
  the output layer at response tokens. An update counts three forward passes. What is computed again is not counted,
  and what rows share is counted for each row. The time is that of the slowest rank.
- `speed/{}_mfu` is that number against the peak of the device in the model's dtype, by data sheets without sparsity:
  A100, H100 (SXM), H200 and L40S.
- `memory/peak_{}_mb` on GPUs is what torch's allocator held at most.
- `reward/row_mean_ms` and `reward/row_max_ms` leave out rows that ran at the same time.
- `{}/reward_accuracy` is the share of pairs whose chosen completion has the higher reward. The reward is the score, or
  with `dpo` beta times the log-ratio.
"""


def page() -> str:
    assert set(TITLES) >= set(WHEN), set(WHEN) - set(TITLES)
    areas: dict[str, list[str]] = {}
    for metric in TITLES:
        areas.setdefault(_shown(metric).partition("/")[0], []).append(metric)
    assert set(areas) == set(AREAS), set(areas) ^ set(AREAS)
    sections = [_section(area, areas[area]) for area in AREAS]
    return HEAD + INTRODUCTION + "\n".join(sections) + WORDS.replace("{}", "NAME")


def _section(area: str, metrics: list[str]) -> str:
    title = "trained model" if area == "NAME" else area
    rows = [_row(metric) for metric in metrics]
    return f"## {title}\n\n{AREAS[area]}\n\n" + table(("Metric", "Meaning", "Unit", "Better", "When"), rows)


def _row(metric: str) -> tuple[str, str, str, str, str]:
    title, unit = TITLES[metric]
    first = "N" if re.search(r"_N(_|\b)", _shown(metric)) else "NAME"
    names = title.replace("{}", first, 1).replace("{}", "K" if metric.startswith("eval/") else "PART")
    return code(_shown(metric)), names, unit, _better(metric), WHEN.get(metric, "")


def _shown(metric: str) -> str:
    """`reward/NAME/PART` of `reward/{}/{}`."""
    if metric.startswith(("sampling/up_to_{}", "rollout/staleness_{}")):
        return metric.replace("{}", "N")
    if metric.startswith("eval/{}"):
        return metric.replace("at_{}", "at_K").replace("{}", "NAME")
    return metric.replace("{}", "NAME", 1).replace("{}", "PART")


def _better(metric: str) -> str:
    """Of what a person judges a run by."""
    if not re.match(r"(eval/|reward/(score_mean|errors|timeouts)|[a-z_]+/loss|\{\}/.*accuracy|.*margin)", metric):
        return ""
    return "lower" if lower_is_better(metric) else "higher"
