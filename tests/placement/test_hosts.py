"""Ranks by host: what a tensor-parallel group may cross, and on how many hosts a config runs."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hybridflow.config import ExperimentConfig
from hybridflow.errors import ConfigError
from hybridflow.placement.hosts import check_hosts, for_launch, parse_hosts, place_on_hosts, placement_lines
from hybridflow.placement.placed import place
from tests.distributed.tiny_experiment import write_config
from tests.tiny_models import make_checkpoints


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    directory = tmp_path_factory.mktemp("models")
    make_checkpoints(directory, family="llama", tied=False, head_dim=32)
    config: dict[str, Any] = json.loads(write_config(directory / "config.yaml", directory).read_text())
    config["algorithm"]["update"]["mini_batch_size"] = 4
    return config


def configured(base: dict[str, Any], **changes: Any) -> ExperimentConfig:
    """Changes by key, `actor__tensor_parallel_size`."""
    tree = json.loads(json.dumps(base))
    for key, value in changes.items():
        *sections, last = key.split("__")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = value
    return ExperimentConfig.model_validate(tree)


def test_hosts_are_read() -> None:
    hosts = parse_hosts("a.b=2,fd00::1=3")
    assert [(host.name, host.ranks) for host in hosts] == [("a.b", range(2)), ("fd00::1", range(2, 5))]
    for text in ("a", "a=0", "a=1,", "=2", "a=-1"):
        with pytest.raises(ConfigError, match=re.escape(f"hosts {text!r}: ")):
            parse_hosts(text)


def test_a_tensor_parallel_group_stays_on_a_host(base: dict[str, Any]) -> None:
    placed = place(configured(base), 4)
    check_hosts(placed, parse_hosts("a=2,b=2"))
    check_hosts(placed, parse_hosts("a=4"))
    with pytest.raises(ConfigError) as error:
        check_hosts(placed, parse_hosts("a=1,b=3"))
    assert str(error.value).splitlines() == [
        f"{key} = 2: ranks 0-1 lie on a and b (a has 0, b has 1-3): a tensor-parallel group stays on one host. Set "
        f"{key.split()[0]}=1, or tensor_parallel_across_hosts=true"
        for key in ("actor.tensor_parallel_size", "rollout.tensor_parallel_size (the actor's)")
    ]
    allowed = configured(base, tensor_parallel_across_hosts=True)
    check_hosts(place(allowed, 4), parse_hosts("a=1,b=3"))


def test_an_engine_that_crosses_hosts_where_training_does_not(base: dict[str, Any]) -> None:
    """A stage a host, and an engine that turns the stages into tensor-parallel ranks."""
    config = configured(
        base, actor__tensor_parallel_size=1, actor__pipeline_parallel_size=2, rollout__tensor_parallel_size=2
    )
    with pytest.raises(ConfigError, match=r"^rollout.tensor_parallel_size = 2: ranks 0-1 lie on a and b"):
        check_hosts(place(config, 2), parse_hosts("a=1,b=1"))


def test_the_table_tells_where_each_grid_lies(base: dict[str, Any]) -> None:
    config = configured(base, actor__ranks="0-3", critic__ranks="4-5", reference__ranks="0-3")
    placed = place(config, 6)
    assert placement_lines(placed, parse_hosts("a=2,b=2,c=2")).splitlines() == [
        "host  ranks  actor             critic            reference         reward.models.0   engine",
        "a     0-1    tp 0-1 dp 0 pp 0  -                 tp 0 dp 0-1 pp 0  tp 0 dp 0-1 pp 0  replica 0 pp 0 tp 0-1",
        "b     2-3    tp 0-1 dp 1 pp 0  -                 tp 0 dp 2-3 pp 0  tp 0 dp 2-3 pp 0  replica 1 pp 0 tp 0-1",
        "c     4-5    -                 tp 0 dp 0-1 pp 0  -                 tp 0 dp 4-5 pp 0  -",
    ]


def test_the_table_tells_who_shares_tokens(base: dict[str, Any]) -> None:
    config = configured(base, actor__tensor_parallel_size=1, actor__context_parallel_size=2)
    first, second = placement_lines(place(config, 4), parse_hosts("a=2,b=2")).splitlines()[1:]
    assert "tp 0 cp 0-1 dp 0 pp 0" in first and "tp 0 cp 0-1 dp 1 pp 0" in second


def test_as_many_hosts_as_it_fits_on(base: dict[str, Any]) -> None:
    """With two ranks a replica, and one rank a host."""
    hosts = parse_hosts("a=1,b=1,c=1")
    config = configured(base, tensor_parallel_across_hosts=True)
    placed, used, unfit = place_on_hosts(config, hosts, 1)
    assert placed.world_size == 2 and [host.name for host in used] == ["a", "b"]
    assert set(unfit) == {3, 1} and "2 x 1 = 2 does not divide the 3 ranks of the run" in unfit[3]
    told = for_launch(placed, used, unfit)
    assert told["num_hosts"] == 2 and told["run_dir"] == f"{config.output_dir}/run" and told["loads_own"] is True
    with pytest.raises(ConfigError, match=r"^3 hosts with 1 \+ 1 \+ 1 = 3 ranks: actor: tensor_parallel_size"):
        place_on_hosts(config, hosts, 3)


@pytest.mark.parametrize(
    ("environment", "told"),
    [
        ({"PATH": "/x"}, "env_vars: 'PATH': names begin with NCCL_, GLOO_, HF_; launch/run.py has --env for others"),
        ({"NCCL_X": True}, "env_vars: NCCL_X = True: a value is a text or a number"),
        ({"NCCL_X": ["a"]}, r"env_vars: NCCL_X = \['a'\]: a value is a text or a number"),
        ({"HF_": "x"}, "env_vars: 'HF_': names begin with"),
    ],
)
def test_an_environment_that_is_none(
    environment: dict[str, Any], told: str, base: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "x.yaml").write_text(json.dumps(base | {"env_vars": environment}))
    with pytest.raises(ConfigError, match=f"x.yaml: {told}"):
        ExperimentConfig.from_yaml(tmp_path / "x.yaml")


def test_the_old_name_is_read_with_a_note(base: dict[str, Any], tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(json.dumps(base | {"environment": {"NCCL_X": 1}}))
    config = ExperimentConfig.from_yaml(file)
    assert config.env_vars == {"NCCL_X": "1"}
    assert config.notes == (f"{file}: environment is now env_vars; it is read this time",)
    with pytest.raises(ConfigError, match="environment is now env_vars, which is given too: leave one out"):
        ExperimentConfig.from_yaml(file, ["env_vars.NCCL_Y=2"])


def test_numbers_of_an_environment_become_texts(base: dict[str, Any]) -> None:
    config = configured(base, env_vars={"NCCL_IB_TIMEOUT": 22, "HF_HUB_OFFLINE": "1", "GLOO_X": 0.5})
    assert config.env_vars == {"NCCL_IB_TIMEOUT": "22", "HF_HUB_OFFLINE": "1", "GLOO_X": "0.5"}
