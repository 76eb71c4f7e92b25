"""An agent that plays episodes with verifiers' training client, each in a process of the Python that has verifiers."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("train_client_episode.py")
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}  # the renderer's tokenizer is a directory here
MAX_TOKENS = 12  # of a turn, that the client asks for


async def play(base_url: str, row: dict[str, Any], python: str, renderer: str, out: str) -> float:
    """The reward; what verifiers has recorded is in OUT/NAME.json, with the row's name in its URL."""
    command = [python, "-P", str(SCRIPT), base_url, str(row["task"]), renderer, str(MAX_TOKENS)]
    pipes = {"stdout": asyncio.subprocess.PIPE, "stderr": asyncio.subprocess.PIPE}
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **OFFLINE}, **pipes)
    said, error = await process.communicate()
    if process.returncode:
        raise RuntimeError(error.decode()[-2000:])
    recorded = json.loads(said.splitlines()[-1])
    if recorded["problem"]:
        raise RuntimeError(recorded["problem"])
    Path(out, base_url.split("/")[-2] + ".json").write_text(json.dumps(recorded))
    return recorded["reward"]
