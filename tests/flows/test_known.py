"""What `run.whole` gives."""

import pytest
import torch

from hybridflow.flows.known import Known


def test_tensors_go_by_the_names_they_were_asked_for() -> None:
    values = torch.tensor([0.5, -1.0])
    known = Known(values=values, log_probs=-values)
    assert known.values is values and known.log_probs.tolist() == [-0.5, 1.0]
    assert list(vars(known)) == ["values", "log_probs"]


def test_a_name_that_was_not_asked_for_is_told_with_those_that_were() -> None:
    with pytest.raises(AttributeError, match=r"pass ref_log_probs=.* which gave only values, log_probs"):
        _ = Known(values=torch.zeros(1), log_probs=torch.zeros(1)).ref_log_probs
    with pytest.raises(AttributeError, match="which gave only nothing"):
        _ = Known().values
