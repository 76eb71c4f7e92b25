"""All kinds of MLPs by name, as `mixers.known` has the mixers."""

from typing import assert_never, get_args

from hybridflow.architecture.layer_kinds import MlpName
from hybridflow.architecture.mlps.dense import DenseMlp
from hybridflow.architecture.mlps.experts import ExpertsMlp
from hybridflow.architecture.mlps.mlp import Mlp


def _made(name: MlpName) -> Mlp:
    match name:
        case "dense":
            return DenseMlp()
        case "experts":
            return ExpertsMlp()
    assert_never(name)


MLPS: dict[MlpName, Mlp] = {name: _made(name) for name in get_args(MlpName)}
