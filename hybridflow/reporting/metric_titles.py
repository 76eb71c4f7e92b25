"""What each metric is called on a page for people, and the metric's unit. Pure.

    metric_title("rollout/truncated_fraction")       MetricTitle("Responses cut at the length limit", "share")
    metric_title("sampling/up_to_64/score_mean")     MetricTitle("Mean score, prompts of up to 64 tokens", "")
    metric_title("actor/my_report")                  MetricTitle("Actor: my report", "")

A metric that a user's flow or function names has the words of the name as title, and the name's last word as unit.
"""

import re
from dataclasses import dataclass

# {} stands for a name of the run: letters, digits, _, . or -. The first row that fits counts.
TITLES: dict[str, tuple[str, str]] = {
    "eval/accuracy": ("Held-out prompts answered right", "share"),
    "eval/score_mean": ("Mean score of reward on held-out prompts", ""),
    "eval/failed_rows": ("Held-out rows that the function failed on", "rows"),
    "eval/{}/accuracy": ("Responses to {} that are right (avg@k)", "share"),
    "eval/{}/score_mean": ("Mean score of reward on {}", ""),
    "eval/{}/failed_rows": ("Rows of {} that the function failed on", "rows"),
    "eval/{}/response_length_mean": ("Mean response length on {}", "tokens"),
    "eval/{}/truncated_fraction": ("Responses to {} cut at the length limit", "share"),
    "eval/{}/pass_at_{}": ("Prompts of {} with a right one of {} responses (pass@k)", "share"),
    "eval/{}/majority_at_{}": ("Prompts of {} whose most frequent answer of {} is right", "share"),
    "eval/loss": ("Loss on held-out rows", ""),
    "eval/reward_accuracy": ("Held-out pairs with the chosen one ahead", "share"),
    "eval/reward_margin_mean": ("Mean reward margin of held-out pairs", ""),
    "reward/score_mean": ("Mean score of responses", ""),
    "reward/score_std": ("Spread of scores (standard deviation)", ""),
    "reward/score_shaped_mean": ("Mean score after shaping", ""),
    "reward/score_all_mean": ("Mean score of all responses generated", ""),
    "reward/greedy_score_mean": ("Mean score of greedy responses", ""),
    "reward/equal_groups_fraction": ("Prompts whose responses all score alike", "share"),
    "reward/errors": ("Rows that reward functions failed on", "rows"),
    "reward/timeouts": ("Rows that took reward functions too long", "rows"),
    "reward/row_mean_ms": ("Mean time of a row in reward functions", "ms"),
    "reward/row_max_ms": ("Longest time of a row in reward functions", "ms"),
    "reward/latency_ms": ("Time to score all responses", "ms"),
    "reward/part_{}_mean": ("Mean score of {}, before its weight", ""),
    "reward/{}/{}": ("Mean of {}: {}", ""),
    "actor/loss": ("Policy loss", ""),
    "actor/grad_norm": ("Gradient norm of the policy, before clipping", ""),
    "actor/entropy": ("Entropy of the policy per token", "nats"),
    "actor/approx_kl": ("KL from old to new policy, approximate", "nats"),
    "actor/clip_fraction": ("Tokens whose gradient is clipped", "share"),
    "actor/clip_fraction_low": ("Tokens clipped at the lower bound", "share"),
    "actor/clip_fraction_high": ("Tokens clipped at the upper bound", "share"),
    "actor/weights_out_of_bounds": ("Importance weights out of bounds", "share"),
    "{}/reference_point": ("KTO reference point", "nats"),
    "critic/loss": ("Value loss", ""),
    "critic/grad_norm": ("Gradient norm of the critic, before clipping", ""),
    "critic/explained_variance": ("Variance of returns that values explain", "share"),
    "critic/update_latency_ms": ("Time of a critic step", "ms"),
    "reward_model/loss": ("Loss of the reward model", ""),
    "reward_model/grad_norm": ("Gradient norm of the reward model, before clipping", ""),
    "{}/reward_accuracy": ("Pairs with the chosen one ahead", "share"),
    "{}/reward_margin_mean": ("Mean reward margin of pairs", ""),
    "{}/chosen_reward_mean": ("Mean reward of chosen completions", ""),
    "{}/rejected_reward_mean": ("Mean reward of rejected completions", ""),
    "{}/desirable_reward_mean": ("Mean reward of desirable completions", ""),
    "{}/undesirable_reward_mean": ("Mean reward of undesirable completions", ""),
    "{}/lr": ("Learning rate of the {}", ""),
    "kl/reference_mean": ("KL to the reference per token", "nats"),
    "kl/sequence_mean": ("KL to the reference per response", "nats"),
    "kl/coef": ("KL coefficient", ""),
    "environment/turns_mean": ("Turns of the model in a row", "turns"),
    "environment/written_tokens_mean": ("Tokens that environments write in a row", "tokens"),
    "environment/sequences_mean": ("Sequences of a row that the model reads apart", "sequences"),
    "environment/sequences_max": ("Sequences of the row that has most", "sequences"),
    "environment/dropped_turns": ("Turns whose answer nobody got", "turns"),
    "environment/tool_calls": ("Tool calls of the model", "calls"),
    "environment/failed_tool_calls": ("Tool calls that fail", "calls"),
    "environment/failed_rows": ("Rows whose environment has failed", "rows"),
    "environment/wait_seconds_mean": ("Mean wait of a turn for its environment", "s"),
    "environment/cached_prefix_fraction": ("Tokens of earlier turns that the prefix cache has", "share"),
    "rollout/response_length_mean": ("Mean response length", "tokens"),
    "rollout/response_length_max": ("Longest response", "tokens"),
    "rollout/response_length_p{}": ("Response length, percentile {}", "tokens"),
    "rollout/kv_cache_use_max": ("Largest share of the KV cache in use", "share"),
    "rollout/preemptions": ("Requests that the engine preempted", "requests"),
    "rollout/truncated_fraction": ("Responses cut at the length limit", "share"),
    "rollout/experts_differ": ("Tokens and layers where the trainer would choose other experts", "share"),
    "rollout/experts_load_max_over_mean": ("Most tokens of an expert over the mean of experts, mean of layers", ""),
    "rollout/experts_load_worst_layer": ("Most tokens of an expert over the mean of experts, worst layer", ""),
    "rollout/log_prob_diff_mean": ("Engine against trainer: mean log-prob difference", "nats"),
    "rollout/log_prob_diff_max": ("Engine against trainer: largest log-prob difference", "nats"),
    "rollout/token_mult_prob_error": ("Engine against trainer: mean factor between probabilities", ""),
    "rollout/gen_kl": ("Engine against trainer: KL per token", "nats"),
    "rollout/groups_under_way": ("Prompts whose responses go on in the next iteration", "prompts"),
    "rollout/tokens_under_way": ("Response tokens that those prompts have so far", "tokens"),
    "rollout/staleness_mean": ("Mean age of response tokens", "updates"),
    "rollout/staleness_max": ("Age of the oldest response token", "updates"),
    "rollout/staleness_{}_fraction": ("Response tokens of age {}", "share"),
    "rollout/staleness_{}_log_prob_diff": ("Engine against trainer: log-prob difference at age {}", "nats"),
    "rollout/throughput_tokens_per_sec": ("Generation speed", "tokens/s"),
    "rollout/generation_rounds": ("Generation rounds for one batch", "rounds"),
    "rollout/groups_generated": ("Prompts generated for one batch", "prompts"),
    "rollout/groups_equal": ("Prompts generated whose responses all score alike", "prompts"),
    "rollout/groups_filled": ("Prompts of a batch whose responses all score alike", "prompts"),
    "rollout/groups_surplus": ("Prompts generated beyond the batch", "prompts"),
    "sampling/up_to_{}/prompts": ("Prompts of up to {} tokens", "prompts"),
    "sampling/up_to_{}/response_length_mean": ("Mean response length, prompts of up to {} tokens", "tokens"),
    "sampling/up_to_{}/truncated_fraction": ("Responses cut, prompts of up to {} tokens", "share"),
    "sampling/up_to_{}/score_mean": ("Mean score, prompts of up to {} tokens", ""),
    "sampling/longer/prompts": ("Longer prompts", "prompts"),
    "sampling/longer/response_length_mean": ("Mean response length, longer prompts", "tokens"),
    "sampling/longer/truncated_fraction": ("Responses cut, longer prompts", "share"),
    "sampling/longer/score_mean": ("Mean score, longer prompts", ""),
    "train/tokens_per_sec": ("Training speed, whole iteration", "tokens/s"),
    "speed/tokens_per_sec_per_gpu": ("Training speed by GPU, or by rank on CPUs", "tokens/s"),
    "train/step_time_ms": ("Time of an optimizer step", "ms"),
    "train/lost_to_nonfinite": ("Step lost to a number that is not finite", ""),
    "speed/iteration_tflops": ("Model operations by rank, whole iteration", "TFLOP/s"),
    "speed/iteration_mfu": ("Model operations against the peak, whole iteration", "share"),
    "speed/{}_tflops": ("Model operations by rank, {}", "TFLOP/s"),
    "speed/{}_mfu": ("Model operations against the peak, {}", "share"),
    "data/epoch": ("Passes over the training data", "epochs"),
    "data/trained_tokens": ("Tokens with a loss in a batch", "tokens"),
    "data/length_mean": ("Mean sequence length", "tokens"),
    "data/length_max": ("Longest sequence", "tokens"),
    "data/dropped_overlong": ("Rows left out: too long", "rows"),
    "data/dropped_bad": ("Rows left out: cannot be used", "rows"),
    "data/dropped_not_started": ("Rows left out: start raised", "rows"),
    "time/iteration_seconds": ("Time of an iteration", "s"),
    "time/rollout_seconds": ("Time of the rollout stage", "s"),
    "time/estimate_seconds": ("Time of the estimate stage", "s"),
    "time/update_seconds": ("Time of the update stage", "s"),
    "time/save_seconds": ("Time training waited for checkpoints", "s"),
    "time/generate_seconds": ("Time of generation", "s"),
    "time/reward_seconds": ("Time of scoring", "s"),
    "time/scores_seconds": ("Time of reward models' scores", "s"),
    "time/log_probs_seconds": ("Time of the actor's log-probs", "s"),
    "time/reference_seconds": ("Time of the reference's log-probs", "s"),
    "time/values_seconds": ("Time of the critic's values", "s"),
    "time/actor_update_seconds": ("Time of actor steps", "s"),
    "time/critic_update_seconds": ("Time of critic steps", "s"),
    "time/reward_model_update_seconds": ("Time of reward model steps", "s"),
    "time/scored_while_waiting_seconds": ("Time of scoring during generation", "s"),
    "time/engines_wait_seconds": ("Time the engine waited for its next rollout", "s"),
    "time/trainers_wait_seconds": ("Time the models waited for the rollout", "s"),
    "time/idle_fraction": ("Time ranks waited for others", "share"),
    "time/wait_fraction_mean": ("Time in collectives, mean of ranks", "share"),
    "time/wait_fraction_max": ("Time in collectives, of the rank with most", "share"),
    "time/wait_fraction_rank_{}": ("Time in collectives, rank {}", "share"),
    "time/slowest_rank": ("Rank that others waited for most", ""),
    "time/slowest_rank_seconds": ("Time others waited for the slowest rank", "s"),
    "reshard/seconds": ("Time of weight sync, trainer to engine", "s"),
    "reshard/bytes_received": ("Weight sync: bytes a rank receives", "bytes"),
    "reshard/bytes_sent": ("Weight sync: bytes a rank sends", "bytes"),
    "reshard/bytes_permuted": ("Weight sync: bytes reordered on a rank", "bytes"),
    "reshard/peak_extra_bytes": ("Weight sync: extra memory at its peak", "bytes"),
    "memory/{}_gpu_mem_mb": ("Training memory of the {}", "MiB"),
    "memory/actor_weight_bytes": ("Memory of the actor's weights", "bytes"),
    "memory/engine_own_weight_bytes": ("Memory of weights that the engine alone holds", "bytes"),
    "memory/host_state_mb": ("Host memory for optimizer states", "MiB"),
    "memory/peak_rss_mb": ("Most host memory of a rank so far", "MiB"),
    "memory/peak_{}_mb": ("Most memory in the {} stage", "MiB"),
}
UNITS = {  # by how the names of other metrics end
    "_tokens_per_sec": "tokens/s",
    "_seconds": "s",
    "_ms": "ms",
    "_bytes": "bytes",
    "_mb": "MiB",
    "_fraction": "share",
    "_tokens": "tokens",
}


@dataclass(frozen=True)
class MetricTitle:
    text: str
    unit: str  # empty: none, or not known


def metric_title(metric: str) -> MetricTitle:
    return known_title(metric) or _own_title(metric)


def known_title(metric: str) -> MetricTitle | None:
    """By TITLES; None where no row fits."""
    for pattern, (text, unit) in TITLES.items():
        found = re.fullmatch(re.escape(pattern).replace(r"\{\}", r"([\w.\-]+)"), metric)
        if found:
            return MetricTitle(text.format(*(_words(name) for name in found.groups())), unit)
    return None


def _own_title(metric: str) -> MetricTitle:
    area, _, name = metric.partition("/")
    words = f"{_words(area)}: {_words(name)}" if name else _words(area)
    unit = next((unit for ending, unit in UNITS.items() if metric.endswith(ending)), "")
    return MetricTitle(words[:1].upper() + words[1:], unit)


def _words(name: str) -> str:
    return name.replace("_", " ")
