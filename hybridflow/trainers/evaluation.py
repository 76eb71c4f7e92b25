"""A model on held-out sets, without training: what `hybridflow eval` starts on every rank.

    evaluator = Evaluator(config, watchdog)         # actor.model: a checkpoint's actor, a directory, a name on the Hub
    for evaluated in evaluator.evaluate(print): ...

Models, engine, rewards and seeds are those of training. The actor has no optimizer, and only rank 0 writes.
"""

from collections.abc import Callable

from hybridflow.config import ExperimentConfig
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import load_inputs
from hybridflow.flows.evaluate import EvaluatedSet, HeldoutSet, evaluate
from hybridflow.flows.synchronous import SharedEngine
from hybridflow.parallel import platform as platforms
from hybridflow.parallel import torchrun
from hybridflow.parallel.agreement import check_agreement
from hybridflow.parallel.device import choose_platform
from hybridflow.parallel.exchange import Exchange
from hybridflow.parallel.grid import ProcessGroups
from hybridflow.parallel.watchdog import Watchdog
from hybridflow.placement.hosts import check_hosts, parse_hosts
from hybridflow.placement.placed import place
from hybridflow.recording.measure import Stopwatch
from hybridflow.roles.base import RunContext
from hybridflow.rollout.patches import prepare_vllm
from hybridflow.trainers.building import (
    build_generator,
    build_roles,
    function_caller,
    heldout_sets,
    most_ranks_of_a_host,
    reencoders,
)
from hybridflow.trainers.environments import judge_of, what_is_right
from hybridflow.trainers.loop import start


class Evaluator:
    """One config of `config.evaluation`. Building it is collective over the world, and so is `evaluate`."""

    def __init__(self, config: ExperimentConfig, watchdog: Watchdog | None = None) -> None:
        choose_platform(config.platform)  # before anything asks
        self.config, self.placed = config, place(config, torchrun.torchrun_rank()[1])
        check_hosts(self.placed, parse_hosts(torchrun.hosts_of_ranks()))
        self.platform, self.watchdog = start(config, watchdog)
        with self.watchdog.phase("start"):
            self._build()

    def _build(self) -> None:
        config, group = self.config, platforms.world_group()
        self.inputs = load_inputs(
            config, self.placed.actor.spec.vocab_size, num_ranks=most_ranks_of_a_host(), group=group
        )
        check_agreement(run_digests(config, self.inputs), group)
        prepare_vllm()  # reports a missing vLLM before the models load
        watch = Stopwatch(self.platform.synchronize)
        self._exchange = Exchange(group, self.platform.device)
        world = RunContext(self.platform, ProcessGroups(), self._exchange, self.placed.bucket_bytes, watch)
        self._caller = function_caller(config, self.inputs, group)
        again = reencoders(self.placed, self.inputs.decode)
        self._roles = build_roles(self.placed, world, self._caller, again, trains=False)
        generator = build_generator(self.placed, self._roles, self.inputs, world)
        self._engine = SharedEngine(generator, self._roles, self.platform)

    def evaluate(self, say: Callable[[str], None]) -> list[EvaluatedSet]:
        """Generate and judge, set after set. say: takes lines on what is going on."""
        sets = heldout_sets(self.config, self.inputs)
        judge = judge_of(self.config, self._caller)
        notes = [*self.inputs.notes(), what_is_right(self.config), *self._engine.generator.notes()]
        for line in [*self.inputs.rendering(), *notes]:
            say(line)
        with self.watchdog.phase("evaluate"), self._caller.evaluating():
            found = self._engine.heldout_responses(sets, lambda heldout: say(_announced(heldout)))
            say("judging")
            return [
                evaluate(
                    heldout,
                    responses,
                    judge,
                    caller=self._caller,
                    scorer=self._roles.scorer,
                    exchange=self._exchange,
                )
                for heldout, responses in found
            ]


def _announced(heldout: HeldoutSet) -> str:
    many = f"{len(heldout.prompts)} prompts x {heldout.samples} response{'s' * (heldout.samples > 1)}"
    how = f"at temperature {heldout.temperature:g}" if heldout.temperature else "greedy"
    return f"{heldout.title}: generating {many}, {how}"
