"""Reward functions that were written for TRL, OpenRLHF or verl: known by the names of their parameters, and adapted.

    adapter(queries_prompts_labels, "graders:f")    "... those of OpenRLHF: ... def my_reward(prompts, ..."

Called by place such a function would take one thing for another, and score without a word.
"""

from inspect import Parameter, Signature

BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
OURS = ("prompts", "responses", "columns")
# names that say at any of the three places that something else is expected
OTHERS = {
    "verl": {"data_source", "data_sources", "solution_str", "solution_strs", "extra_info", "extra_infos"},
    "OpenRLHF": {"queries", "query"},
    "TRL": {"completions", "completion", "completion_ids", "completions_ids", "prompt_ids", "trainer_state"},
}
RIGHT_ANSWERS = {"ground_truth", "ground_truths", "label", "labels", "answer", "answers", "solution", "solutions"}
RIGHT_ANSWERS |= {"target", "targets", "gold", "golds", "reference", "references"}
PROMPTS, RESPONSES = {"prompts", "prompt"}, {"responses", "response", "completions", "completion"}
ONE_ROW = {"data_source", "solution_str", "ground_truth", "query", "completion", "response", "prompt"}

# what each of their parameters is here, for all rows and for row i
LISTS = {
    "queries": "[p + r for p, r in zip(prompts, responses)]",
    "labels": 'columns["answer"]',  # which no data has by that name
    "solution_strs": "responses",
    "data_sources": 'columns["data_source"]',
    "ground_truths": 'columns["ground_truth"]',
    "extra_infos": 'columns["extra_info"]',
    **{name: "prompts" for name in PROMPTS},
    **{name: "responses" for name in RESPONSES},
}
ROWS = {
    "query": "prompts[i] + responses[i]",
    "label": 'columns["answer"][i]',
    "solution_str": "responses[i]",
    **{name: "prompts[i]" for name in PROMPTS},
    **{name: "responses[i]" for name in RESPONSES},
}
NOT_HERE = {"completion_ids", "completions_ids", "prompt_ids", "trainer_state", "log_extra", "log_metric"}


def adapter(signature: Signature, path: str, *, awaited: bool) -> str | None:
    """What is wrong and the lines that mend it; None where the names are not another trainer's."""
    taken = [one for one in signature.parameters.values() if one.kind in BY_PLACE]
    names = [one.name for one in taken]
    if not _is_foreign(names[: len(OURS)]):
        return None
    trainer = next((other for other, known in OTHERS.items() if known & set(names)), None)
    trainer = trainer or ("OpenRLHF" if "labels" in names else "another trainer")
    module, _, function = path.partition(":")
    return (
        f"reward function {path}: its parameters ({', '.join(names)}) are those of {trainer}, it would be called by "
        f"place with prompts, responses, columns; write beside it and name {module}:my_reward in the config:\n"
        f"    {'async ' * awaited}def my_reward(prompts, responses, columns):\n"
        f"        return {_call(function, signature, awaited=awaited)}{_notes(names)}"
    )


def _is_foreign(names: list[str]) -> bool:
    if names == list(OURS):
        return False
    first, second, third = (names + [""] * 3)[:3]
    if first in RESPONSES or second in PROMPTS or third in PROMPTS | RESPONSES | RIGHT_ANSWERS:
        return True
    others = set().union(*OTHERS.values()) | {"ground_truth", "ground_truths", "labels"}
    if third == OURS[2]:  # written for us, whatever it calls the responses
        others -= RESPONSES
    return bool(others & set(names))


def _call(function: str, signature: Signature, *, awaited: bool) -> str:
    """The expression that calls the function with what the parameters mean."""
    parameters = list(signature.parameters.values())
    one_row = any(one.name in ONE_ROW for one in parameters)
    all_columns = not one_row and any(one.kind is Parameter.VAR_KEYWORD for one in parameters)
    given = []
    for one in parameters:
        value = _value(one.name, one_row=one_row)
        if one.kind in (Parameter.VAR_KEYWORD, Parameter.VAR_POSITIONAL):
            continue
        by_name = all_columns and value == f'columns["{one.name}"]'
        if by_name or ("columns[" in value and one.default is not Parameter.empty):
            continue  # a column that comes among all, or that the rows may lack
        given.append(value if one.kind is Parameter.POSITIONAL_ONLY else f"{one.name}={value}")
    call = f"{'await ' * awaited}{function}({', '.join([*given, *['**columns'] * all_columns])})"
    return f"[{call} for i in range(len(responses))]" if one_row else call


def _value(name: str, *, one_row: bool) -> str:
    if name in NOT_HERE:
        return "None"
    return ROWS.get(name, f'columns["{name}"][i]') if one_row else LISTS.get(name, f'columns["{name}"]')


def _notes(names: list[str]) -> str:
    if "completions" not in names:
        return ""
    return (
        '\n    (where it reads completion[0]["content"]: completions=[[{"role": "assistant", "content": r}] for r in '
        "responses])"
    )
