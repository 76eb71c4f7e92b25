"""A model on held-out sets, without training: what `hybridflow eval` starts on every rank.

    evaluator = Evaluator(config, watchdog)         # actor.model: a checkpoint's actor, a directory, a name on the Hub
    for evaluated in evaluator.evaluate(print): ...

Models, engine, rewards and seeds are those of training. The actor has no optimizer, and only rank 0 writes.

`write_results` leaves results.json and a file of samples for each set. `results_table` is for the screen.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from hybridflow.checkpoint.store import STEP
from hybridflow.config import ExperimentConfig
from hybridflow.data.digests import run_digests
from hybridflow.data.inputs import Inputs, load_inputs
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
from hybridflow.recording.run_dir import replace_file
from hybridflow.recording.samples import samples_of
from hybridflow.recording.writers import SampleWriter
from hybridflow.rewards.answers import answer_reader
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
from hybridflow.trainers.environments import judge_name, judge_of, judging_function, what_is_right
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
        for line in [*self.inputs.rendering.lines(self.config), *notes]:
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


# -------------------------------------------------------------------------------------------- what an evaluation leaves

RESULTS = "results.json"


def write_results(config: ExperimentConfig, evaluated: Sequence[EvaluatedSet], inputs: Inputs) -> Path:
    """Write RESULTS and SET.jsonl into the directory of the evaluation, over those of before. Errors: RecordError."""
    step = STEP.fullmatch(Path(config.actor.model).parent.name)
    iteration = int(step[1]) if step else 0
    for each in evaluated:
        _write_samples(config.run_dir / f"{each.heldout.title}.jsonl", each, inputs, iteration)
    _, read = answer_reader(judging_function(config))
    sets = {each.heldout.title: facts(each) for each in evaluated}
    tree = {
        "model": config.actor.model,
        "iteration": iteration if step else None,
        "seed": config.seed,
        "right": f"a score of {judge_name(config)} of at least {config.metrics.eval_threshold:g}",
        "majority": f"by {read}",
        "sets": sets,
    }
    file = config.run_dir / RESULTS
    for title in _titles(file) - sets.keys():
        (config.run_dir / f"{title}.jsonl").unlink(missing_ok=True)
    replace_file(file, [f"{json.dumps(tree, indent=1, ensure_ascii=False)}\n".encode()])
    return file


def _titles(file: Path) -> set[str]:
    """Of the sets of an earlier evaluation."""
    return set(json.loads(file.read_text(encoding="utf-8"))["sets"]) if file.is_file() else set()


def facts(each: EvaluatedSet) -> dict[str, Any]:
    """Of one set, for JSON. accuracy is avg@k."""
    heldout = each.heldout
    found = {
        "prompts": len(heldout.prompts),
        "samples": heldout.samples,
        "temperature": heldout.temperature,
        "accuracy": each.accuracy,
        "pass_at": {str(k): each.pass_at(k) for k in ks(heldout.samples)},
        "score_mean": each.score_mean,
        "response_length_mean": each.response_length_mean,
        "truncated_fraction": each.truncated_fraction,
        "failed_rows": each.num_failed or 0,
    }
    return found | ({"majority_at": {str(heldout.samples): each.majority}} if heldout.samples > 1 else {})


def ks(samples: int) -> list[int]:
    """The powers of two below the number of samples, and that number: of pass@k."""
    return [*(1 << i for i in range((samples - 1).bit_length())), samples]


def results_table(evaluated: Sequence[EvaluatedSet]) -> Table:
    """A row a set. A set of one response to each prompt has neither pass@k nor majority@k."""
    table = Table(box=box.SIMPLE)
    table.add_column("set", no_wrap=True)
    for name in ("prompts", "k", "temp", "avg@k", "pass@k", "maj@k", "score", "length", "cut"):
        table.add_column(name, justify="right", no_wrap=True)
    for each in evaluated:
        heldout, several = each.heldout, each.heldout.samples > 1
        cells = [
            heldout.title,
            str(len(heldout.prompts)),
            str(heldout.samples),
            f"{heldout.temperature:g}" if heldout.temperature else "greedy",
            f"{each.accuracy:.1%}",
            f"{each.pass_at(heldout.samples):.1%}" if several else "",
            f"{each.majority:.1%}" if several else "",
            "" if each.score_mean is None else f"{each.score_mean:.3f}",
            f"{each.response_length_mean:.1f}",
            f"{each.truncated_fraction:.1%}",
        ]
        table.add_row(*map(Text, cells))
    return table


def pass_lines(evaluated: Sequence[EvaluatedSet]) -> list[str]:
    """pass@k by k, a line for each set of several samples."""
    return [
        f"{each.heldout.title}: " + "  ".join(f"pass@{k} {each.pass_at(k):.1%}" for k in ks(each.heldout.samples))
        for each in evaluated
        if each.heldout.samples > 1
    ]


def _write_samples(file: Path, each: EvaluatedSet, inputs: Inputs, iteration: int) -> None:
    """All responses with the judge's score, and whether that is right."""
    samples = samples_of(
        each.responses,
        each.heldout.prompts,
        range(len(each.responses)),
        inputs.decode,
        kind="heldout",
        scores=each.marks,
        parts={"right": each.right.float()},
        name=each.heldout.title,
    )
    writer = SampleWriter(file)
    writer.write(iteration, samples)
    writer.close()
