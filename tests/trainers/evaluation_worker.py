"""A run that evaluates at each iteration, and then its checkpoints and its model evaluated by themselves; as JSON.

torchrun --nproc-per-node N -m tests.trainers.evaluation_worker CONFIG OUT OVERRIDE ...
"""

import json
import sys
from pathlib import Path

from hybridflow.cli.evaluate import evaluated_model
from hybridflow.config import ExperimentConfig, read_tree
from hybridflow.config.evaluation import evaluation_tree
from hybridflow.parallel import platform as platforms
from hybridflow.trainers.evaluation import Evaluator, write_results
from hybridflow.trainers.online import OnlineTrainer


def main(config: Path, out: Path, overrides: list[str]) -> None:
    trainer = OnlineTrainer.from_yaml(str(config), overrides)
    trainer.fit()
    run, found = trainer.config.run_dir, {}
    before = files(run)
    for name, given, step in (("first", run, 1), ("last", run, None), ("hf", run / "hf", None)):
        model = evaluated_model(str(given), step)
        tree = evaluation_tree(
            read_tree(run / "config.yaml"), model=model.model, name=model.name, output_dir=str(run / "eval"), sets={}
        )
        evaluator = Evaluator(ExperimentConfig.from_tree(tree, "the tree"))
        evaluated = evaluator.evaluate(lambda line: None)
        found[name] = {metric: value for each in evaluated for metric, value in each.metrics().items()}
        assert all(role.training_model is None for role in evaluator._roles.trained())
        if trainer.platform.rank == 0:
            write_results(evaluator.config, evaluated, evaluator.inputs)
    if trainer.platform.rank == 0:
        kept = {name: time for name, time in files(run).items() if not name.startswith("eval/")}
        out.write_text(json.dumps(found | {"untouched": kept == before}))
    platforms.stop()


def files(root: Path) -> dict[str, int]:
    return {str(path.relative_to(root)): path.stat().st_mtime_ns for path in root.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
