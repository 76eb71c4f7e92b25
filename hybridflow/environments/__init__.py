"""Environments of many turns: classes of users that talk with the model. `step` is given a `ModelTurn`."""

from hybridflow.environments.model_turn import ModelTurn as ModelTurn

Said = ModelTurn  # the name that users' classes import
