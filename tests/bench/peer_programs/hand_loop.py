"""PPO as one would write it by hand: HuggingFace models, vLLM beside them, one process with two threads.

    python -m tests.bench.peer_programs.hand_loop JOB

Weights and optimizer are float32; of a bfloat16 job vLLM has bfloat16 weights and the models run under autocast. The
engine's weights are a second copy, loaded anew each iteration. Sequences are padded on the right to the longest of a
micro-batch, in order of length; under a causal mask the padding needs no mask of its own.
"""

import contextlib
import functools
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from tests.bench.peer_programs.vllm_patches import keep_plain_weights
from tests.bench.peer_programs.workload import END, KL_COEF, LEARNING_RATE, Job, Measured, phases, prompt_ids

MICRO_BATCH = 16
CLIP, LAMBDA, VALUE_COEF = 0.2, 0.95, 0.5


@dataclass(frozen=True)
class Rows:
    """Sequences of an iteration, padded: ids (n, longest), and which of their tokens [:, 1:] are of the response."""

    ids: Tensor
    lengths: Tensor  # (n,)
    response: Tensor  # (n, longest - 1) bool

    def take(self, rows: Tensor) -> "Rows":
        longest = int(self.lengths[rows].max())
        return Rows(self.ids[rows, :longest], self.lengths[rows], self.response[rows, : longest - 1])


@dataclass(frozen=True)
class Known:
    """Of each token, (n, longest - 1); of no meaning outside responses."""

    log_probs: Tensor
    values: Tensor
    returns: Tensor
    advantages: Tensor

    def of(self, rows: Tensor, response: Tensor) -> list[Tensor]:
        """Each of the response tokens of some rows, (tokens,)."""
        every = (self.log_probs, self.values, self.returns, self.advantages)
        return [x[rows, : response.shape[1]][response] for x in every]


def main() -> None:
    path = Path(sys.argv[1])
    job = Job.read(path)
    torch.set_num_threads(2)
    loop = HandLoop(job)
    measured = Measured([], [])
    for _ in range(job.iterations + 1):
        seconds, tokens = loop.iterate()
        measured.seconds.append(seconds)
        measured.response_tokens.append(tokens)
    measured.write(path)


class HandLoop:
    def __init__(self, job: Job) -> None:
        self.job, self.prompts = job, prompt_ids(job.prompts)
        self.actor = loaded(LlamaForCausalLM, job.model("actor"))
        self.reference = loaded(LlamaForCausalLM, job.model("actor")).eval().requires_grad_(False)
        self.critic = loaded(LlamaForSequenceClassification, job.model("critic"))
        self.reward = loaded(LlamaForSequenceClassification, job.model("reward")).eval().requires_grad_(False)
        trained = (self.actor, self.critic)
        self.optimizers = [torch.optim.AdamW(m.parameters(), lr=LEARNING_RATE, weight_decay=0.0) for m in trained]
        half = functools.partial(torch.autocast, "cpu", torch.bfloat16)
        self.precision: Callable = half if job.dtype == "bfloat16" else contextlib.nullcontext
        self.engine, self.sampling = self.new_engine()

    def new_engine(self):
        keep_plain_weights()
        from vllm import LLM, SamplingParams

        work = self.job.workload
        engine = LLM(
            self.job.model("actor"),
            dtype=self.job.dtype,
            enforce_eager=True,
            max_model_len=work.max_prompt + work.max_response,
            max_num_seqs=work.sequences,
            max_num_batched_tokens=8192,
            enable_prefix_caching=False,
            seed=0,
        )
        ends = {"stop_token_ids": [END]} if work.ends else {}
        sampling = SamplingParams(max_tokens=work.max_response, ignore_eos=True, detokenize=False, logprobs=0, **ends)
        return engine, sampling

    def iterate(self) -> tuple[dict[str, float], int]:
        started = time.perf_counter()
        rows = self.rollout()
        generated = time.perf_counter()
        known = self.score(rows)
        scored = time.perf_counter()
        for mini_batch in torch.randperm(len(rows.ids)).split(self.job.workload.mini_batch):
            self.update(rows, known, mini_batch)
        ended = time.perf_counter()
        return phases(generated - started, scored - generated, ended - scored), int(rows.response.sum())

    def rollout(self) -> Rows:
        weights = list(self.actor.state_dict().items())
        self.engine.apply_model(lambda model: (model.load_weights(iter(weights)), None)[1])
        prompts = [{"prompt_token_ids": ids} for ids in self.prompts]
        outputs = self.engine.generate(prompts, self.sampling, use_tqdm=False)
        responses = [list(output.outputs[0].token_ids) for output in outputs]
        return padded(self.prompts, responses)

    @torch.no_grad()
    def score(self, rows: Rows) -> Known:
        old, reference, values = (torch.zeros(rows.response.shape) for _ in range(3))
        scores = torch.empty(len(rows.ids))
        for some in rows.lengths.argsort().split(MICRO_BATCH):
            mini, longest = rows.take(some), rows.take(some).response.shape[1]
            with self.precision():
                where = some[:, None], torch.arange(longest)[None]
                old[where] = scattered(mini, log_probs(self.actor, mini))
                reference[where] = scattered(mini, log_probs(self.reference, mini))
                values[where] = scattered(mini, per_token(self.critic, mini)[:, :-1][mini.response])
                scores[some] = per_token(self.reward, mini)[torch.arange(len(some)), mini.lengths - 1]
        rewards = -KL_COEF * (old - reference)
        rewards[torch.arange(len(scores)), rows.lengths - 2] += scores
        advantages = estimated_advantages(rewards, values, rows.response)
        chosen = advantages[rows.response]
        whitened = (advantages - chosen.mean()) / (chosen.std() + 1e-8)
        return Known(old, values, advantages + values, whitened)

    def update(self, rows: Rows, known: Known, mini_batch: Tensor) -> None:
        """One step of each model."""
        num_tokens = rows.response[mini_batch].sum()
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        for some in mini_batch[rows.lengths[mini_batch].argsort()].split(MICRO_BATCH):
            mini = rows.take(some)
            old, old_values, returns, gains = known.of(some, mini.response)
            with self.precision():
                new, estimates = log_probs(self.actor, mini), per_token(self.critic, mini)[:, :-1][mini.response]
            ratio = (new - old).exp()
            policy = torch.max(-gains * ratio, -gains * ratio.clamp(1 - CLIP, 1 + CLIP)).sum()
            near = old_values + (estimates - old_values).clamp(-CLIP, CLIP)
            value = 0.5 * torch.max((estimates - returns) ** 2, (near - returns) ** 2).sum()
            ((policy + VALUE_COEF * value) / num_tokens).backward()
        for model, optimizer in zip((self.actor, self.critic), self.optimizers, strict=True):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


def loaded(model_class: type[PreTrainedModel], directory: str) -> PreTrainedModel:
    return model_class.from_pretrained(directory, dtype=torch.float32)


def padded(prompts: list[list[int]], responses: list[list[int]]) -> Rows:
    lengths = torch.tensor([len(p) + len(r) for p, r in zip(prompts, responses, strict=True)])
    ids = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : lengths[row]] = torch.tensor(prompt + response)
    places = torch.arange(1, ids.shape[1])
    starts = torch.tensor([len(prompt) for prompt in prompts])
    return Rows(ids, lengths, (places >= starts[:, None]) & (places < lengths[:, None]))


def log_probs(model: PreTrainedModel, rows: Rows) -> Tensor:
    """(response tokens,): the output layer sees no others."""
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1][rows.response]
    logits = model.lm_head(hidden).float()
    targets = rows.ids[:, 1:][rows.response]
    return logits.gather(1, targets[:, None])[:, 0] - logits.logsumexp(dim=1)


def per_token(model: PreTrainedModel, rows: Rows) -> Tensor:
    """(n, longest): what a model with one label says at each token."""
    hidden = model.model(input_ids=rows.ids, use_cache=False).last_hidden_state
    return model.score(hidden)[..., 0].float()


def scattered(rows: Rows, values: Tensor) -> Tensor:
    return torch.zeros(rows.response.shape).masked_scatter(rows.response, values)


def estimated_advantages(rewards: Tensor, values: Tensor, response: Tensor) -> Tensor:
    """GAE with gamma 1, (n, longest - 1), zero outside responses."""
    advantages, last, following = torch.zeros_like(rewards), 0.0, 0.0
    for t in range(rewards.shape[1] - 1, -1, -1):
        last = (rewards[:, t] + following - values[:, t] + LAMBDA * last) * response[:, t]
        following = values[:, t] * response[:, t]
        advantages[:, t] = last
    return advantages


if __name__ == "__main__":
    main()
