"""The gated delta rule by the kernels of flash-linear-attention, which take packed sequences in 16 bits on GPUs."""

import torch
from torch import Tensor

from hybridflow.errors import EnvironmentProblem
from hybridflow.models.delta_rule import NO_PARENT, Sequences
from hybridflow.models.shared_prompt import bounds

INSTALL = "`pip install fla-core`; `bash launch/setup.sh --cuda` installs it"


def delta_rule_by_fla(
    query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor, *, sequences: Sequences
) -> Tensor:
    """As `delta_rule`. One call for sequences that begin, and one for those that continue others.

    Errors: EnvironmentProblem where flash-linear-attention is not installed.
    """
    try:
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
    except ImportError as error:
        raise EnvironmentProblem(
            "a gated delta net trains in bfloat16 on GPUs by flash-linear-attention, which is missing "
            f"({error}): {INSTALL}"
        ) from error
    tensors, levels = (query, key, value, g, beta), sequences.levels
    parts, places, left, row_of = [], [], value.new_zeros(0), dict[int, int]()
    of_sequences = torch.arange(len(value), device=value.device).split(sequences.lengths)
    for level in levels:
        whole = len(level) == len(sequences.lengths)
        at = torch.cat([of_sequences[i] for i in level])
        parents = [sequences.parents[i] for i in level]
        begins = parents[0] == NO_PARENT  # then all do
        out, states = chunk_gated_delta_rule(
            *((x if whole else x[at])[None] for x in tensors),
            initial_state=None if begins else left[[row_of[parent] for parent in parents]],
            output_final_state=len(levels) > 1,
            use_qk_l2norm_in_kernel=True,
            cu_seqlens=bounds([sequences.lengths[i] for i in level], value.device).long(),
        )
        if whole:
            found: Tensor = out[0]
            return found
        parts.append(out[0])
        places.append(at)
        left, row_of = states, {number: row for row, number in enumerate(level)}
    return torch.cat(parts)[torch.cat(places).argsort()]
