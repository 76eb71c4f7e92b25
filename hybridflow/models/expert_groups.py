"""The choice of experts by groups, as DeepSeek-V3 makes it (arXiv 2412.19437, section 2.1.2)."""

from typing import NamedTuple

from torch import Tensor

from hybridflow.architecture.latent_fields import BEST_OF_GROUP


class ExpertGroups(NamedTuple):
    """The experts in `number` equal runs; a token's experts are of the `chosen` groups with the best scores."""

    number: int = 1
    chosen: int = 1

    def masked(self, scores: Tensor) -> Tensor:
        """(t, experts) -> the same with minus infinity in the groups that are not chosen."""
        if self.chosen == self.number:
            return scores
        by_group = scores.unflatten(1, (self.number, -1))
        best = by_group.topk(BEST_OF_GROUP).values.sum(-1)  # (t, groups)
        chosen = best.new_zeros(best.shape).bool().scatter(1, best.topk(self.chosen).indices, True)
        masked: Tensor = by_group.masked_fill(~chosen[:, :, None], float("-inf")).flatten(1)
        return masked
