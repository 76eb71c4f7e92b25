"""Names of tensors where a language model lies in a directory with what reads images beside it."""

# in front of the language model's tensors: what stands there without a wrapper
WRAPPED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
MISNAMED_HEAD = "model.language_model.lm_head.weight"  # which no library reads
# in front of those of what reads images, as published and as transformers 5 has them in memory
VISION = tuple(at + part for at in ("", "model.") for part in ("visual.", "vision_tower.", "multi_modal_projector."))


def wrapped_names(name: str) -> list[str]:
    """The names that a tensor of the language model may have in such a directory."""
    return [name, *(there + name.removeprefix(own) for there, own in WRAPPED.items() if name.startswith(own))]


def unwrapped(name: str) -> str | None:
    """The language model's own name of a tensor; None: the tensor is of what reads images."""
    if name.startswith(VISION):
        return None
    for beginning, other in WRAPPED.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    return name
