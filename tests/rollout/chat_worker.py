"""Greedy tokens of the chat's engine and of transformers, for tests/rollout/test_chat_engine.py.

python -m tests.rollout.chat_worker DIRECTORY
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from hybridflow.architecture.spec import read_spec
from hybridflow.rollout.chat_engine import ChatEngine

PROMPT, NUM_TOKENS = list(range(5, 25)), 6


def main(directory: Path) -> None:
    engine = ChatEngine(directory, max_length=64)
    given = list(engine.stream(PROMPT, ends=[2], max_tokens=NUM_TOKENS, temperature=0.0, seed=0))[-1]
    auto = AutoModelForImageTextToText if read_spec(directory).wrapped else AutoModelForCausalLM
    model = auto.from_pretrained(directory, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    with torch.no_grad():
        for _ in given:
            ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], dim=1)
    print(json.dumps({"engine": given, "transformers": ids[0, len(PROMPT) :].tolist()}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
