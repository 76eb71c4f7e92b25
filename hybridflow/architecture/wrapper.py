"""Names of tensors where a language model lies in a directory with what reads images beside it."""

# in front of the language model's tensors: what stands there without a wrapper
WRAPPED = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
VISION = ("model.visual.", "vision_tower.", "multi_modal_projector.")  # in front of those of what reads images


def unwrapped(name: str) -> str | None:
    """The language model's own name of a tensor; None: the tensor is of what reads images."""
    if name.startswith(VISION):
        return None
    for beginning, other in WRAPPED.items():
        if name.startswith(beginning):
            return other + name.removeprefix(beginning)
    return name
