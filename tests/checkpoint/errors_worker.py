"""Runs one after the other, of which some end with an error; what each rank has met, as JSON.

torchrun --nproc-per-node N -m tests.checkpoint.errors_worker CONFIG FLAGS OUT
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist

from hybridflow.config import ExperimentConfig
from hybridflow.errors import OfAnotherRank, UserError
from hybridflow.parallel import platform as platforms
from hybridflow.trainers.online import OnlineTrainer


def score(prompts: list[str], responses: list[str], columns: dict, flag: str, iteration: int) -> list[float]:
    """Fails in the third iteration on one prompt, which one rank has, while there is a file `flag`."""
    if iteration == 3 and Path(flag).exists():
        assert columns["number"][0] % 4, "on purpose"
    return [float(len(response) % 3) for response in responses]


def main(config: Path, flags: Path, out: Path) -> None:
    """Each run ends in its third iteration, and is started again when its function is mended."""
    told = {}
    for name in ("whole", "score", "judge"):
        for start in ("broken", "mended") if name != "whole" else ("mended",):
            if told and dist.get_rank() == 0:
                flag = flags / f"{name}.broken"
                flag.touch() if start == "broken" else flag.unlink(missing_ok=True)
            told[f"{name} {start}"] = run(config, name)
    out.with_suffix(f".{dist.get_rank()}.json").write_text(json.dumps(told))
    platforms.stop()


def run(config: Path, name: str) -> str:
    trainer = OnlineTrainer(ExperimentConfig.from_yaml(config, [f"name={name}"]))
    try:
        trainer.fit()
    except (UserError, OfAnotherRank) as error:
        return "; ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    finally:
        if trainer.generator.engine is not None:
            trainer.generator.engine.close()
    return ""


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
