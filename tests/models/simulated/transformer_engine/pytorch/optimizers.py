import torch


class FusedAdam(torch.optim.AdamW):
    """Its steps are those of torch's; see tests/models/test_fused_adam.py for the fused kernel that there is."""


FusedSGD = torch.optim.SGD
