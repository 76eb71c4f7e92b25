"""A rank of two hosts, by plain torchrun: the sum over both, as the platform joins the world.

python -m tests.launcher.gloo_worker
"""

import os
from datetime import timedelta

import torch
import torch.distributed as dist

from hybridflow.parallel.gloo import use_one_thread

if __name__ == "__main__":
    use_one_thread(master=os.environ["MASTER_ADDR"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    total = torch.full((1,), dist.get_rank() + 1.0)
    dist.all_reduce(total)
    print(f"rank {dist.get_rank()}: {total.item():g}", flush=True)
    dist.destroy_process_group()
