"""What libraries take of a GPU, by hand: every group that a rank communicates in, once."""

from pathlib import Path

import pytest

from hybridflow.config.kinds import load_config
from hybridflow.placement.margin import Margin, Margins, most_words, role_bytes
from hybridflow.placement.placed import PlacedRun, place

ROOT = Path(__file__).resolve().parents[2]
GIB = 1 << 30
LINK, LAYER = 0.3, 0.39 / 16  # GiB
PPO, APART = "llama3_8b_8gpus", "qwen3_8b_one_step_off_8gpus"
MIXTURE = "qwen3_30b_a3b_8gpus"  # one model, on all ranks; the engine as it is cut
DENSE = tuple(f"actor.{key}" for key in ("model=configs/shapes/llama-3-8b", "expert_parallel_size=1", "recompute=full"))
TIED = ("actor.model=configs/shapes/llama-3.2-1b", *DENSE[1:])
NO_TP = ("actor.tensor_parallel_size=1", "actor.sequence_parallel=false")
STAGES = ("actor.tensor_parallel_size=2", "actor.pipeline_parallel_size=2")
FOUR_STAGES = (*NO_TP, "actor.pipeline_parallel_size=4", "rollout.tensor_parallel_size=1")
ENGINE_STAGES = ("rollout.tensor_parallel_size=1", "rollout.pipeline_parallel_size=4")
NO_ZERO1 = "actor.optimizer.zero1=false"


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def run_of(name: str, *overrides: str, ranks: int = 8, cuda: bool = True) -> PlacedRun:
    return place(load_config(f"configs/{name}.yaml", list(overrides)), ranks, cuda=cuda)  # type: ignore[return-value]  # each generates


CASES = [  # number of communicators of a rank, in words
    ("the world, tp, dp, all of the actor; vLLM's tp. Other models are cut alike", PPO, (), 0, 5),
    ("one more tp group", PPO, ("reference.tensor_parallel_size=2",), 0, 6),
    ("of two stages a pair each way", MIXTURE, (*DENSE, *STAGES), 0, 7),
    ("tied: two stages are also the group of the embedding", MIXTURE, (*TIED, *STAGES), 0, 8),
    ("at the end of four stages: the world, dp, all, a pair; the embedding", MIXTURE, (*TIED, *FOUR_STAGES), 0, 5),
    ("in their middle two pairs, no embedding", MIXTURE, (*TIED, *FOUR_STAGES), 2, 5),
    ("chunks go around: two pairs at the end", MIXTURE, (*DENSE, *FOUR_STAGES), 0, 4),
    ("", MIXTURE, (*DENSE, *FOUR_STAGES, "actor.virtual_pipeline_parallel_size=2"), 0, 5),
    ("without ZeRO-1 a norm within tp x pp", MIXTURE, (*DENSE, *STAGES, NO_ZERO1), 0, 7),
    ("the same within tp, which is there", MIXTURE, (*DENSE, NO_ZERO1), 0, 4),
    ("cp 2; dp is all", MIXTURE, (*DENSE, *NO_TP, "actor.context_parallel_size=2"), 0, 3),
    ("ep 8 and dp are all", MIXTURE, NO_TP, 0, 2),
    ("ep 4: experts, and copies of them", MIXTURE, (*NO_TP, "actor.expert_parallel_size=4"), 0, 4),
    ("ep 8 over two replicas of tp 4 is all", MIXTURE, (), 0, 5),
    ("an engine of stages has vLLM's group and a pair, in the middle two", MIXTURE, ENGINE_STAGES, 0, 6),
    ("", MIXTURE, ENGINE_STAGES, 2, 7),
    ("trainers: the world, tp, dp, all of them", APART, (), 0, 4),
    ("engines of one rank: the world", APART, (), 7, 1),
]


@pytest.mark.parametrize(("words", "name", "overrides", "rank", "number"), CASES)
def test_communicators_by_hand(words: str, name: str, overrides: tuple[str, ...], rank: int, number: int) -> None:
    assert Margins(run_of(name, *overrides))(rank).num_communicators == number, words


@pytest.mark.parametrize(
    ("run", "rank", "gib"),
    [
        (lambda: run_of("qwen3_8b_lora_1gpu", ranks=1), 0, 0.5 + 36 * LAYER + 1.5),  # 2.88
        (lambda: run_of(MIXTURE), 0, 0.5 + 5 * LINK + 48 * LAYER + 1.5 + 0.6),  # 5.27
        (lambda: run_of(MIXTURE, "rollout.enforce_eager=true"), 0, 0.5 + 5 * LINK + 1.5 + 0.6),
        (lambda: run_of(MIXTURE, *ENGINE_STAGES), 2, 0.5 + 7 * LINK + 12 * LAYER + 1.5),
        (lambda: run_of(APART), 0, 0.5 + 4 * LINK + 1.5),  # no engine
        (lambda: run_of(APART), 7, 0.5 + LINK + 36 * LAYER + 1.5),
    ],
)
def test_bytes_by_hand(run, rank: int, gib: float) -> None:
    assert Margins(run())(rank).total == pytest.approx(gib * GIB, abs=100)


def test_a_lower_bound_of_the_search_is_what_one_role_makes() -> None:
    """All but the world's and vLLM's: of stages by their place."""
    run = run_of(MIXTURE, *TIED, *FOUR_STAGES)
    assert role_bytes(run.actor, cuda=True) == tuple(4 * (3 * GIB // 10) for _ in range(4))
    assert role_bytes(run.actor, cuda=False) == (0, 0, 0, 0)


def test_on_cpus_there_is_none_and_no_word_of_it() -> None:
    run = run_of(MIXTURE, cuda=False)
    assert (Margins(run)(0), most_words(run)) == (Margin(), "")
    assert most_words(run_of(MIXTURE)) == (
        "Libraries take up to 5.27 GiB of a rank more: CUDA's context 0.50, 5 communicators 1.50, CUDA graphs 1.17, "
        "workspaces 2.10."
    )
