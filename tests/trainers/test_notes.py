"""What a run says of warm-ups that it does not get to the end of."""

from pathlib import Path

from hybridflow.config import ExperimentConfig
from hybridflow.models.optimizer import learning_rate
from hybridflow.trainers.loop import warmup_notes
from tests.recording.test_resume import config


def with_warmups(root: Path, actor: int, critic_alone: int, **optimizer: object) -> ExperimentConfig:
    c = config(root)
    role = c.actor.model_copy(
        update={"optimizer": c.actor.optimizer.model_copy(update={"warmup_iterations": actor, **optimizer})}
    )
    algorithm = c.algorithm.model_copy(update={"critic_warmup_iterations": critic_alone})
    return c.model_copy(update={"actor": role, "algorithm": algorithm})


def test_a_learning_rate_that_never_comes_to_lr_is_told(tmp_path: Path) -> None:
    c = with_warmups(tmp_path, 100, 0)
    assert warmup_notes(c, 2) == [
        "warning: actor.optimizer.warmup_iterations = 100: the run has 2 iterations. The learning rate ends at 0.02 of "
        "lr = 0.001"
    ]
    assert learning_rate(c.actor.optimizer, 2, 2) == 0.02 * 0.001
    assert warmup_notes(c, 100) == [], "the last iteration has the whole rate"
    assert warmup_notes(with_warmups(tmp_path, 100, 0, lr=0.0), 2) == []


def test_an_actor_that_is_never_trained_is_told(tmp_path: Path) -> None:
    """The flow trains the actor from the iteration after the critic's on."""
    [told] = warmup_notes(with_warmups(tmp_path, 0, 5), 5)
    assert told == (
        "warning: algorithm.critic_warmup_iterations = 5: the run has 5 iterations. The critic alone is trained, the "
        "actor never"
    )
    assert warmup_notes(with_warmups(tmp_path, 0, 5), 6) == []
    assert "the run has 1 iteration." in warmup_notes(with_warmups(tmp_path, 2, 0), 1)[0]
