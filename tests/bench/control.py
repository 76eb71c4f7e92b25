"""What each rank does for a token of an iteration beside its models: microseconds of a CPU and bytes, by stage.

    git worktree add /tmp/before COMMIT
    python -m tests.bench.control /tmp/before [--tokens 10000000] [--rounds 3]      # both checkouts by turns
    python -m tests.bench.control [--tokens 1000000]                                # this checkout alone
    python -m tests.bench.control --algorithm grpo --profile                        # and where the seconds go

An iteration of GRPO (groups of 8, a KL in the loss) and one of PPO, each row a prompt of 100 and a response of 900 to
1,100 tokens, four mini-batches. One rank runs the flow, the bookkeeping, the exchange and the scorer as they are. In
place of the engine, the models and the users' function stand objects that give numbers at once; of the models' work
this rank does what every rank does for every row: who computes which rows, and the weights of the loss.
"""

import argparse
import contextlib
import cProfile
import gc
import json
import os
import pstats
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parents[2]
PROMPT, SPREAD, GROUP, MINI_BATCHES, REPLICAS = 100, 200, 8, 4, 64
STAND_IN = "a model's results"  # what nobody counts
Cells = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, nargs="?", help="another checkout, to compare with")
    parser.add_argument("--tokens", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], help="one alone, measured in this process")
    parser.add_argument("--profile", action="store_true", help="the functions that take longest; with --algorithm")
    parser.add_argument("--json", action="store_true", help="print the cells alone")
    options = parser.parse_args()
    if options.algorithm is not None:
        cells = iteration(options.algorithm, options.tokens, profile=options.profile)
        print(json.dumps(cells) if options.json else table({"now": cells}))
        return
    checkouts = {"before": options.before.resolve()} if options.before is not None else {}
    checkouts["now"] = HERE
    for algorithm in ("grpo", "ppo"):
        found: dict[str, list[Cells]] = {name: [] for name in checkouts}
        for number in range(options.rounds):
            for name in list(checkouts) if number % 2 == 0 else list(checkouts)[::-1]:
                found[name].append(measured(checkouts[name], algorithm, options.tokens))
        print(f"{algorithm}, {options.tokens:,} tokens, medians of {options.rounds}:")
        print(table({name: medians(rows) for name, rows in found.items()}), flush=True)


def measured(checkout: Path, algorithm: str, tokens: int) -> Cells:
    """By this file, in a process that imports hybridflow from `checkout`."""
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", str(Path(__file__)), "--algorithm", algorithm, "--tokens", str(tokens), "--json"]
    done = subprocess.run(command, cwd=checkout, env=environment, text=True, stdout=subprocess.PIPE, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def medians(rows: list[Cells]) -> Cells:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def table(found: dict[str, Cells]) -> str:
    names = list(next(iter(found.values())))
    lines = [f"{'':34}" + "".join(f"{name:>12}" for name in found) + ("       ratio" if len(found) > 1 else "")]
    for name in names:
        values = [cells.get(name, 0.0) for cells in found.values()]
        ratio = f"{values[1] / values[0]:12.2f}" if len(values) > 1 and values[0] else ""
        lines.append(f"{name:34}" + "".join(f"{value:12.4f}" for value in values) + ratio)
    return "\n".join(lines)


# ---- stages


class Stages:
    """A CPU's seconds of each stage without those of stages within it, and the most memory that was resident in it."""

    def __init__(self) -> None:
        self.seconds: Cells = {}
        self.peak: Cells = {}
        self._open: list[str] = []
        self._since = 0.0

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def wrap(self, owner: Any, attribute: str, name: str) -> None:
        """Have each call of this function or method counted as a stage."""
        function = getattr(owner, attribute)

        def counted(*args: Any, **named: Any) -> Any:
            with self.stage(name):
                return function(*args, **named)

        setattr(owner, attribute, counted)

    def _turn(self) -> None:
        now = time.process_time()
        if self._open:
            name = self._open[-1]
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self._since
            self.peak[name] = max(self.peak.get(name, 0.0), resident("VmHWM"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on
        self._since = time.process_time()


def resident(which: str) -> float:
    """Bytes of this process."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{which}:"))
    return 1024.0 * int(line.split()[1])


def iteration(algorithm: str, num_tokens: int, *, profile: bool) -> Cells:
    """Microseconds a token by stage, and bytes a token: at most, of the finished batch, and by stage."""
    stages = Stages()
    run, book, flow = stand_in_run(algorithm, num_tokens, stages)
    wrap_stages(stages)
    before, profiler = resident("VmRSS"), cProfile.Profile()
    with profiler if profile else contextlib.nullcontext(), stages.stage("flow and bookkeeping"):
        book.begin(run, 1, 10)
        done = book.finished(run, flow(run))
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(45)
    del stages.seconds[STAND_IN], stages.peak[STAND_IN]
    tokens = len(done.batch.input_ids)
    held = sum(x.nbytes for x in done.batch.tensors().values())
    seconds = {f"us: {name}": 1e6 * value / tokens for name, value in sorted(stages.seconds.items())}
    peaks = {f"bytes: {name}": (value - before) / tokens for name, value in sorted(stages.peak.items())}
    engine = stages.seconds.get("responses of the own engine", 0.0)
    return {
        "us a token": 1e6 * sum(stages.seconds.values()) / tokens,
        "us a token, not of own responses": 1e6 * (sum(stages.seconds.values()) - engine) / tokens,
        **seconds,
        "bytes a token at most": (max(stages.peak.values()) - before) / tokens,
        "bytes a token of the batch": held / tokens,
        **peaks,
    }


def wrap_stages(stages: Stages) -> None:
    """Names that both checkouts have."""
    from hybridflow.batch import RolloutBatch
    from hybridflow.flows import bookkeeping, run
    from hybridflow.flows.overlapped_scoring import OverlappedScoring
    from hybridflow.parallel.exchange import Exchange
    from hybridflow.rewards.calls import RolloutCalls
    from hybridflow.rewards.scorer import Scorer
    from hybridflow.roles.generator import Generator
    from hybridflow.rollout import generation

    stages.wrap(Generator, "generate", "responses of the own engine")
    for name in ("_joined", "packed"):
        if hasattr(generation, name):
            stages.wrap(generation, name, "prompts and responses packed")
    for name in ("summed", "wholes", "sum", "gather_all"):
        if hasattr(Exchange, name):
            stages.wrap(Exchange, name, "exchange")
    for module in (run, bookkeeping):
        stages.wrap(module, "check_finite", "finite checks")
    stages.wrap(Scorer, "scores", "calls of functions")
    stages.wrap(RolloutCalls, "submit", "calls of functions")
    for name in ("on_response", "begin", "settle", "assign_rest"):
        if hasattr(OverlappedScoring, name):
            stages.wrap(OverlappedScoring, name, "calls of functions")
    stages.wrap(bookkeeping.Bookkeeping, "agree_on", "agreement on the batch")
    stages.wrap(RolloutBatch, "select", "rows of mini-batches")
    stages.wrap(bookkeeping, "batch_metrics", "metrics")
    stages.wrap(bookkeeping, "cost_metrics", "metrics")


# ---- what stands in for engine, models and functions


class Model:
    """Numbers for the response tokens of one of REPLICAS replicas; a step that nobody takes."""

    training_model = records = None
    _alone, lr = False, 1e-4

    def __init__(self, name: str, stages: Stages) -> None:
        self.name, self._stages, self.steps, self.takes_steps = name, stages, [], True
        self.grid = SimpleNamespace(inside=True, contributes=True, dp=REPLICAS, cp_rank=0)

    def begin_iteration(self, iteration: int, num_iterations: int) -> None:
        self.steps = []

    def offloaded(self) -> Any:
        return contextlib.nullcontext()

    def log_probs(self, batch: Any, some: Any = None) -> Any:
        import torch

        from hybridflow.batch import token_index
        from hybridflow.parallel.exchange import PartialTensor
        from hybridflow.roles.base import Role

        with self._stages.stage("rows of replicas"):
            rows = Role._rows_of_replicas(self, batch, some)[0]
        with self._stages.stage(STAND_IN):
            own = token_index(batch.lengths, torch.tensor(rows))
            where = own[batch.response_mask[own]]
            return PartialTensor(len(batch.input_ids), where, -torch.rand(len(where)))

    values = log_probs

    def update(self, batch: Any, objective: Any) -> None:
        import torch

        from hybridflow.roles.base import Role, StepReport

        with self._stages.stage("rows of replicas"):
            Role._rows_of_replicas(self, batch)
        with self._stages.stage("weights of the loss"):
            objective.mean(batch)
        self.steps.append(StepReport(("loss", "grad_norm"), torch.ones(2, dtype=torch.float64), None))


class Engine:
    """All responses at once, as vLLM gives them."""

    cache_use = SimpleNamespace(pop=lambda: (0.0, 0))

    def __init__(self, outputs: list[Any], stages: Stages) -> None:
        self._outputs, self._stages = outputs, stages

    def stream(self, requests: list[Any], params: Any, *, stepped: Callable[[], None]) -> Iterator[tuple[int, Any]]:
        from hybridflow.rollout.engine import response_of

        for i, output in enumerate(self._outputs):
            yield i, response_of(output)
        stepped()


class Calls:
    """A pool whose function scores by the number of the row."""

    def __init__(self, specs: Any) -> None:
        self.specs, self._rows = specs, list[list[int]]()

    def submit(self, function: int, rows: Any) -> int:
        self._rows.append(rows["rows"])
        return len(self._rows) - 1

    def outcome(self, ticket: int) -> Any:
        scores = tuple((float(row * 7919 % 5),) for row in self._rows[ticket])
        return SimpleNamespace(kind="scored", scores=scores, problem="", seconds=0.0, printed="")

    def withdraw(self, tickets: Any) -> set[int]:
        return set()

    def forget(self, tickets: Any) -> None:
        return


def stand_in_run(algorithm: str, num_tokens: int, stages: Stages) -> tuple[Any, Any, Callable[[Any], Any]]:
    import torch
    import torch.distributed as dist

    from hybridflow.config import ExperimentConfig
    from hybridflow.flows.bookkeeping import OnlineBookkeeping
    from hybridflow.flows.draws import PromptDraws
    from hybridflow.flows.hooks import RunHooks
    from hybridflow.flows.models import Roles
    from hybridflow.flows.overlapped_scoring import OverlappedScoring
    from hybridflow.flows.run import Run
    from hybridflow.flows.synchronous import SharedEngine, Synchronous
    from hybridflow.parallel.exchange import Exchange
    from hybridflow.parallel.grid import ProcessGroups
    from hybridflow.parallel.layout import RolloutLayout
    from hybridflow.parallel.platform import Platform
    from hybridflow.parallel.stop import StopRequest
    from hybridflow.parallel.watchdog import Watchdog
    from hybridflow.recording.measure import Stopwatch
    from hybridflow.rewards.calls import FunctionCaller
    from hybridflow.rewards.scorer import Scorer
    from hybridflow.rewards.specs import pool_specs
    from hybridflow.trainers.online import flow_of

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    num_rows = num_tokens // (PROMPT + 1000) // (GROUP * MINI_BATCHES) * GROUP * MINI_BATCHES
    config = ExperimentConfig.from_yaml(HERE / "configs" / "quickstart_rule.yaml", overrides_of(algorithm, num_rows))
    platform, layout = Platform(torch.device("cpu"), rank=0, local_rank=0, world_size=1), RolloutLayout(1, 1, ((0,),))
    exchange, watch, groups = Exchange(dist.group.WORLD, torch.device("cpu")), Stopwatch(), ProcessGroups()
    caller = FunctionCaller(lambda ids: "", 0, 1, Calls(pool_specs(config)))
    scorer = Scorer(config.reward, [], caller=caller, watch=watch, limits=config.sampling.limits)
    actor, reference = Model("actor", stages), Model("reference", stages)
    critic = Model("critic", stages) if algorithm == "ppo" else None
    roles, hooks = Roles(actor=actor, critic=critic, reference=reference, scorer=scorer), RunHooks()
    scoring = OverlappedScoring(
        [],
        scorer,
        layout,
        actor=actor,
        sampling=config.sampling,
        rank=0,
        groups=groups,
        notices=None,
        exchange=exchange,
        watch=watch,
    )
    engine = Engine(outputs(num_rows), stages)
    generator = stand_in_generator(config, engine, layout=layout, platform=platform, exchange=exchange)
    prompts, shared = (
        Prompts(num_rows // (1 if algorithm == "ppo" else GROUP)),
        SharedEngine(generator, roles, platform),
    )
    draws = PromptDraws(config, prompts)
    source = Synchronous(shared, scoring, config.sampling, draws=draws, watch=watch, hooks=hooks)
    deadlines = config.watchdog.deadlines()
    book = OnlineBookkeeping(
        config,
        roles,
        prompts,
        source,
        exchange=exchange,
        watch=watch,
        watchdog=Watchdog(deadlines, StopRequest(1.0, signals=())),
        hooks=hooks,
    )
    gc.collect()
    gc.freeze()  # as a trainer on GPUs does when it starts: no search for garbage looks at the given responses
    return Run(config, book, source), book, flow_of(config.algorithm)


def overrides_of(algorithm: str, num_rows: int) -> list[str]:
    """GRPO has groups of several rows, PPO one response to a prompt."""
    size, samples = num_rows // MINI_BATCHES, 1 if algorithm == "ppo" else GROUP
    shared = [
        f"sampling.samples_per_prompt={samples}",
        f"data.prompts_per_iteration={num_rows // samples}",
        "sampling.max_response_length=1200",
        "data.max_prompt_length=200",
    ]
    if algorithm == "ppo":
        return [*shared, f"algorithm.update.mini_batch_size={size}"]
    kl, update = "kl: {use: loss, coef: 0.01}", f"update: {{mini_batch_size: {size}}}"
    return [*shared, "critic=null", f"algorithm={{name: grpo, {kl}, {update}}}"]


def stand_in_generator(config: Any, engine: Engine, *, layout: Any, platform: Any, exchange: Any) -> Any:
    from hybridflow.roles.generator import Generator

    class Given(Generator):
        def __init__(self) -> None:
            self._placed = SimpleNamespace(config=config, stages=())
            self._actor, self._platform, self._exchange = SimpleNamespace(records=None), platform, exchange
            self.layout, self.engine, self.costs, self.own_bytes = layout, engine, [], 0
            self._environments = self._replica = self.turns = None  # turns: of checkouts before
            self.params: Any = {"sampled": [None]}

        def resharded(self) -> Any:
            return contextlib.nullcontext()

        awake = resharded

        def give_back(self) -> None:
            return

        def count_work(self, rollout: Any, watch: Any) -> None:
            return

    return Given()


class Prompts:
    """In the place of a prompt file."""

    def __init__(self, count: int) -> None:
        from hybridflow.data.usable import Dropped

        self._count, self.dropped = count, Dropped()

    def order(self, seed: int, shuffle: bool, *, position: int = 0) -> Any:
        from hybridflow.data.order import PromptOrder

        return PromptOrder(self._count, seed, shuffle, position=position)

    def start_ahead(self, order: Any, count: int) -> None:
        return

    def draw(self, order: Any, count: int) -> Any:
        import torch

        from hybridflow.batch import PromptBatch
        from hybridflow.data.prompts import DrawnPrompts

        numbers, lengths = tuple(order.next(count)), torch.full((count,), PROMPT)
        ids = torch.arange(count * PROMPT) % 1000
        batch = PromptBatch(ids, lengths, ("",) * count, {"answer": tuple(map(str, range(count)))})
        return DrawnPrompts(batch, numbers, self.dropped)


def outputs(num_rows: int) -> list[Any]:
    """vLLM's, of 900 to 1,100 tokens."""
    import torch
    from vllm.logprobs import FlatLogprobs

    generator, found = torch.Generator().manual_seed(1), []
    for row in range(num_rows):
        size = 1000 - SPREAD // 2 + row * 37 % SPREAD
        ids: list[int] = torch.randint(0, 32_000, (size,), generator=generator).tolist()
        known = FlatLogprobs()
        known.token_ids, known.logprobs = list(ids), (-torch.rand(size, generator=generator)).tolist()
        reason = "length" if row % 10 == 0 else "stop"
        found.append(SimpleNamespace(token_ids=ids, logprobs=known, finish_reason=reason))
    return found


if __name__ == "__main__":
    main()
