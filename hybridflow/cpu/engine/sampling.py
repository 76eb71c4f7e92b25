"""Next tokens, drawn by a kernel in C: the tokens that vLLM 0.32.0 draws, and their log-probs alone.

vLLM takes the log-probs of the whole vocabulary, and an exponential in float64 of nearly each token to rule it out.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hybridflow.cpu.engine.kernels import Methods
from hybridflow.cpu.kernels.sampling import draw

if TYPE_CHECKING:  # vLLM is imported when vLLM's settings stand
    from vllm.v1.sample.metadata import SamplingMetadata

LOG_PROBS = "processed_logprobs"  # of the distribution that is drawn from
SEEDS = 2**31  # vLLM draws one below this for each token, from the generator of the token's request


def sampler_in_c(theirs: type) -> Methods:
    """For vLLM's sampler: where every request draws by the request's seed from all that the logits leave."""
    their_forward = vars(theirs)["forward"]

    def forward(
        self: Any,
        logits: Tensor,
        sampling_metadata: "SamplingMetadata",
        predict_bonus_token: bool = False,
        logprobs_mode_override: str | None = None,
    ) -> Any:
        from vllm.v1.outputs import LogprobsTensors, SamplerOutput

        about, mode = sampling_metadata, logprobs_mode_override or self.logprobs_mode
        logits = logits.to(torch.float32)
        if predict_bonus_token or mode != LOG_PROBS or not _draws_from_all(self, logits, about):
            return their_forward(self, logits, about, predict_bonus_token, logprobs_mode_override)
        logits = self.apply_logits_processors(logits, about, predict_bonus_token)
        logits = self.apply_temperature(logits, about.temperature, about.all_random)
        for processor in about.logitsprocs.argmax_invariant:
            logits = processor.apply(logits)
        tokens, log_probs, ranks = draw(logits, _seeds(about.generators))
        ids = tokens.to(torch.int32).unsqueeze(-1)
        return SamplerOutput(ids, LogprobsTensors(ids, log_probs.unsqueeze(-1), ranks))

    return {"forward": forward}


def _draws_from_all(sampler: Any, logits: Tensor, about: "SamplingMetadata") -> bool:
    return (
        about.all_random
        and about.top_k is None
        and about.top_p is None
        and about.max_num_logprobs == 0
        and not about.logprob_token_ids
        and len(about.generators) == len(logits)
        and not sampler.use_fp64_gumbel
        and logits.stride(-1) == 1
    )


def _seeds(generators: dict[int, torch.Generator]) -> Tensor:
    """Of each row, as vLLM draws it: one number of the request's generator."""
    seeds = torch.empty(len(generators), dtype=torch.int64)
    each = seeds.split(1)
    for row, generator in generators.items():
        each[row].random_(0, SEEDS, generator=generator)
    return seeds
