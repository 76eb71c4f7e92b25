"""Bugs that public trainers have shipped, without an error and with curves that looked well; tests hold each one here.

The list names them, so that none goes lost when tests are moved. A line is of no worth beyond the tests that it names:
each of those fails where the bug is put in.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
LEDGER: dict[str, tuple[str, ...]] = {
    "the loss is divided by the number of micro-batches after it was normalised over the mini-batch": (
        "distributed/test_parity.py::test_gradients_and_update_do_not_depend_on_the_split",
        "distributed/test_algorithms.py::test_an_iteration_is_that_of_one_process",
    ),
    "the critic's loss is normalised by each micro-batch": (
        "distributed/test_parity.py::test_gradients_and_update_do_not_depend_on_the_split",
    ),
    "whitening over a replica, one token, or no token at all": (
        "distributed/test_parity.py::test_estimates",
        "algorithms/test_advantages.py::test_whiten_of_equal_values_or_of_one_value_is_zero",
        "algorithms/test_advantages.py::test_whiten_of_nothing_is_zero",
    ),
    "the score lies on the last position instead of the last token of the response": (
        "algorithms/test_rewards.py::test_the_score_lies_on_the_last_response_token_and_gaps_earn_nothing",
    ),
    "NaN at masked positions leaks as 0 x NaN": (
        "roles/test_objectives.py::test_nothing_outside_the_responses_is_read",
        "algorithms/test_advantages.py::test_gae_does_not_read_outside_the_response",
        "algorithms/test_advantages.py::test_whiten_ignores_shift_positive_scale_and_the_outside",
        "algorithms/test_rewards.py::test_token_rewards_do_not_read_outside_the_response",
        "algorithms/test_value_loss.py::test_explained_variance_does_not_read_outside_the_mask",
    ),
    "the sampling temperature is missing in the trainer's log-probs": (
        "distributed/test_parity.py::test_estimates",
        "parallel/test_vocab.py::test_values_and_gradients_equal_dense_float64",
    ),
    "the model is left in training mode while it scores or generates": (  # the OPT of these tests has dropout
        "distributed/test_families.py::test_logits_of_a_converted_checkpoint_equal_huggingface",
        "distributed/test_families.py::test_the_engine_computes_with_the_trainers_weights",
        "distributed/test_parity.py::test_estimates",
    ),
    "the gradient norm is told after clipping, or of one rank": (
        "distributed/test_parity.py::test_first_step_has_ratio_one",
    ),
    "the gradient of the KL is clamped away": (
        "algorithms/test_kl.py::test_far_from_the_reference_the_gradient_is_still_that_of_the_estimate",
    ),
    "dynamic sampling never ends": (
        "flows/test_dynamic_sampling.py::test_rounds_are_bounded_and_what_is_missing_is_filled_up",
        "flows/test_dynamic_sampling.py::test_with_nothing_to_learn_from_the_first_round_is_the_batch",
    ),
    "a group of one": (
        "algorithms/test_groups.py::test_a_group_of_one_is_refused",
        "test_config.py::test_parts_that_make_no_sense_together_are_refused_with_the_reason",
    ),
    "the old policy is another than the new one in the first step": (
        "distributed/test_parity.py::test_first_step_has_ratio_one",
        "distributed/test_algorithms.py::test_in_the_first_step_every_ratio_is_one",
    ),
    "the schedule of the learning rate steps twice after a resume": (
        "checkpoint/test_kills.py::test_a_run_that_ends_early_ends_as_any_other",
    ),
    "the critic's optimizer is not restored": (
        "checkpoint/test_kills.py::test_a_run_that_ends_early_ends_as_any_other",
    ),
    "the prefix cache keeps keys and values of earlier weights": (
        "distributed/test_handoff.py::test_keys_and_values_of_earlier_weights_are_forgotten",
    ),
}


@cache
def names_in(file: str) -> frozenset[str]:
    return frozenset(x.name for x in ast.parse((TESTS / file).read_text()).body if isinstance(x, ast.FunctionDef))


@pytest.mark.parametrize("bug", LEDGER)
def test_a_test_holds_each(bug: str) -> None:
    for node in LEDGER[bug]:
        file, _, name = node.partition("::")
        assert name in names_in(file), f"{node} is not there (any more): {bug}"
