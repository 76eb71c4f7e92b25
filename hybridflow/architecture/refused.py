"""Architectures that are close to known ones, and what of them is not supported."""

from hybridflow.architecture.family import LANGUAGE_MODEL, WRAPPER

SPARSE = "sparse attention, which looks at a choice of the keys, is not supported"
NO_CAPS = "scores and logits that tanh caps are not supported"
OF_EACH_LAYER = "embeddings of each layer (PLE) and layers that share keys and values are not supported"
IN_CHUNKS = "attention in chunks, and experts that weigh what goes in, are not supported"

REFUSED = {
    "DeepseekV2" + LANGUAGE_MODEL: "its router is a softmax over groups of experts, which is not supported",
    "DeepseekV32" + LANGUAGE_MODEL: SPARSE,
    "GlmMoeDsa" + LANGUAGE_MODEL: SPARSE,
    "Gemma2" + LANGUAGE_MODEL: NO_CAPS,
    "Gemma3n" + LANGUAGE_MODEL: OF_EACH_LAYER,
    "Gemma3n" + WRAPPER: OF_EACH_LAYER,
    "Gemma4" + LANGUAGE_MODEL: OF_EACH_LAYER,
    "Gemma4" + WRAPPER: OF_EACH_LAYER,
    "GptOss" + LANGUAGE_MODEL: "sinks of attention are not supported",
    "Llama4" + LANGUAGE_MODEL: IN_CHUNKS,
    "Llama4" + WRAPPER: IN_CHUNKS,
    "NemotronH" + LANGUAGE_MODEL: "layers of Mamba are not supported",
}
