"""Which rows come next: a function of the seed and of how many were taken so far, and of nothing else.

order = PromptOrder(len(dataset), seed=0, shuffle=True)
order.next(64)
"""

import hashlib

import torch
from torch import Tensor


class PromptOrder:
    """One permutation an epoch, each a function of (seed, epoch) alone.

    The only state is `position`, the number of rows handed out so far. The order from there on does not depend on
    how many were asked for at a time, so a run that is resumed with the position it had goes on exactly as it would.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, *, position: int = 0) -> None:
        assert num_prompts > 0, f"num_prompts = {num_prompts}: an order needs a prompt"
        assert position >= 0, f"position = {position} is negative"
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self.position = position

    def next(self, count: int) -> list[int]:
        """The next `count` indices; a call may cross into the next epoch, or over several."""
        indices: list[int] = []
        while len(indices) < count:
            epoch, start = divmod(self.position, self._num_prompts)
            taken = self._permutation(epoch)[start : start + count - len(indices)].tolist()
            indices += taken
            self.position += len(taken)
        return indices

    def _permutation(self, epoch: int) -> Tensor:
        """(num_prompts,) drawn anew by each call: a million take some 20 milliseconds."""
        if not self._shuffle:
            return torch.arange(self._num_prompts)
        digest = hashlib.blake2b(f"prompt order {self._seed} {epoch}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)  # below 2**63
        return torch.randperm(self._num_prompts, generator=generator)
