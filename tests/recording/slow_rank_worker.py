"""hybridflow.train where the second rank stops for some seconds in the actor's update of iteration 2.

torchrun --nproc-per-node 2 -m tests.recording.slow_rank_worker CONFIG [section.key=value ...]
"""

import sys
import time

from hybridflow.cli.train import main
from hybridflow.parallel.torchrun import torchrun_rank
from hybridflow.roles.policy import Actor
from tests.recording.test_waiting import SECONDS

if __name__ == "__main__":
    begin, before = Actor.begin_iteration, Actor._before_step
    iteration = [0]

    def noted(actor: Actor, number: int, num_iterations: int) -> None:
        iteration[0] = number
        begin(actor, number, num_iterations)

    def stopped(actor: Actor) -> None:
        if iteration[0] == 2 and not actor.steps:
            time.sleep(SECONDS)
        before(actor)

    if torchrun_rank()[0] == 1:
        Actor.begin_iteration, Actor._before_step = noted, stopped
    sys.exit(main(sys.argv[1:]))
