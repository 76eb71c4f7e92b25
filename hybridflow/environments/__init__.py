"""Environments of many turns: classes of the user's that talk with the model. `Said` is what they are given."""

from hybridflow.environments.said import Said as Said
