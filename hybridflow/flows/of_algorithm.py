"""Which flow runs an iteration of which algorithm."""

from collections.abc import Callable

from hybridflow.batch import RolloutBatch
from hybridflow.config.algorithms import (
    GRPO,
    OPO,
    PPO,
    RLOO,
    Algorithm,
    Custom,
    Distill,
    DrGRPO,
    MaxRL,
    Reinforce,
    ReMax,
)
from hybridflow.flows.custom import custom_flow
from hybridflow.flows.distill import distill
from hybridflow.flows.groups import dr_grpo, grpo, maxrl, opo, rloo
from hybridflow.flows.ppo import ppo
from hybridflow.flows.reinforce import reinforce
from hybridflow.flows.remax import remax
from hybridflow.flows.run import Run

Flow = Callable[[Run], RolloutBatch]


def flow_of(algorithm: Algorithm) -> Flow:
    """The function that runs an iteration of the algorithm."""
    match algorithm:
        case PPO():
            return lambda run: ppo(run, algorithm)
        case GRPO():
            return lambda run: grpo(run, algorithm)
        case DrGRPO():
            return lambda run: dr_grpo(run, algorithm)
        case RLOO():
            return lambda run: rloo(run, algorithm)
        case OPO():
            return lambda run: opo(run, algorithm)
        case MaxRL():
            return lambda run: maxrl(run, algorithm)
        case ReMax():
            return lambda run: remax(run, algorithm)
        case Reinforce():
            return lambda run: reinforce(run, algorithm)
        case Distill():
            return lambda run: distill(run, algorithm)
        case Custom():
            return custom_flow(algorithm)
