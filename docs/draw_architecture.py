"""Draws docs/architecture.svg: `python docs/draw_architecture.py`. tests/test_docs.py compares the committed picture.

The picture has a ground of its own and two sets of colours, so that it can be read on light and on dark pages.
"""

from collections.abc import Iterable
from pathlib import Path

FILE = Path(__file__).resolve().parent / "architecture.svg"
WIDTH, HEIGHT = 980, 560
STYLE = """
  .ground { fill: #ffffff; stroke: #d0d7de; }
  .rank { fill: #f6f8fa; stroke: #8c959f; }
  .behind { fill: #eaeef2; stroke: #8c959f; }
  .flow { fill: #ddf4ff; stroke: #0969da; }
  .train { fill: #dafbe1; stroke: #1a7f37; }
  .engine { fill: #fff8c5; stroke: #9a6700; }
  .other { fill: #fbefff; stroke: #8250df; }
  .file { fill: #ffffff; stroke: #8c959f; }
  .arrow { stroke: #57606a; stroke-width: 2; fill: none; marker-end: url(#tip); }
  .both { stroke: #cf222e; stroke-width: 3; fill: none; marker-end: url(#red); marker-start: url(#red); }
  .tip { fill: #57606a; }
  .red { fill: #cf222e; }
  text { font-family: system-ui, "Segoe UI", "DejaVu Sans", sans-serif; font-size: 14px; fill: #1f2328; }
  .head { font-weight: 600; font-size: 15px; }
  .small { font-size: 12.5px; fill: #57606a; }
  .note { font-size: 12.5px; fill: #cf222e; font-weight: 600; }
  @media (prefers-color-scheme: dark) {
    .ground { fill: #0d1117; stroke: #30363d; }
    .rank { fill: #161b22; stroke: #6e7681; }
    .behind { fill: #10151c; stroke: #6e7681; }
    .flow { fill: #0c2d6b; stroke: #58a6ff; }
    .train { fill: #04260f; stroke: #3fb950; }
    .engine { fill: #341a00; stroke: #d29922; }
    .other { fill: #271052; stroke: #bc8cff; }
    .file { fill: #0d1117; stroke: #6e7681; }
    .arrow { stroke: #9198a1; }
    .both { stroke: #ff7b72; }
    .tip { fill: #9198a1; }
    .red { fill: #ff7b72; }
    text { fill: #e6edf3; }
    .small { fill: #9198a1; }
    .note { fill: #ff7b72; }
  }
"""
STEPS = "prompts · responses · scores, log-probs, values · one exchange · advantages · optimizer steps"
LABEL = (
    "Each rank is one process. A flow asks the models on their grids, Megatron-core trains, vLLM generates with the "
    "actor's own weights, and reward functions score in processes beside it."
)


def box(kind: str, x: int, y: int, width: int, height: int, lines: Iterable[str], *, middle: bool = True) -> str:
    """A rectangle with lines of text, the first one bold."""
    parts = [f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8" stroke-width="1.5"/>']
    texts = list(lines)
    first = y + (height - 20 * len(texts)) / 2 + 15 if middle else y + 24
    for i, text in enumerate(texts):
        look = "head" if i == 0 else "small"
        at = x + width / 2 if middle else x + 14
        anchor = ' text-anchor="middle"' if middle else ""
        parts.append(f'<text class="{look}" x="{at:g}" y="{first + 20 * i:g}"{anchor}>{text}</text>')
    return "\n".join(parts)


def arrow(points: str, kind: str = "arrow") -> str:
    return f'<polyline class="{kind}" points="{points}"/>'


def note(kind: str, x: int, y: int, text: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'


def parts() -> Iterable[str]:
    yield f'<rect class="ground" x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10"/>'
    yield note("head", 28, 36, "One program: every rank runs the same lines")
    yield note("small", 28, 56, "torchrun or hybridflow train starts the ranks. There is no controller process.")
    yield box("file", 28, 90, 150, 70, ["config.yaml", "data, models, layout"])
    yield box("file", 28, 190, 150, 70, ["prompts", "JSON, Parquet, Hub"])
    yield box("behind", 246, 104, 706, 330, [])
    yield box("behind", 236, 94, 706, 330, [])
    yield box("rank", 226, 84, 706, 330, ["rank 0, 1, 2, ... of one host or many"], middle=False)
    yield box("flow", 246, 122, 666, 62, ["flow: PPO, GRPO, ... or a function of your own", STEPS])
    yield box("train", 246, 236, 176, 92, ["actor", "Megatron-core", "TP x PP x DP, optimizer"])
    yield box("engine", 560, 236, 156, 92, ["vLLM", "generates; reads the", "actor's memory"])
    yield arrow("430,282 552,282", "both")
    yield note("note", 491, 268, "weight sync", "middle")
    yield note("small", 491, 304, "moves only the", "middle")
    yield note("small", 491, 322, "bytes a rank lacks", "middle")
    yield box("train", 246, 344, 212, 54, ["critic", "its own grid"])
    yield box("train", 473, 344, 212, 54, ["reference", "its own grid"])
    yield box("train", 700, 344, 212, 54, ["reward models", "their own grids"])
    yield box("other", 740, 236, 172, 92, ["reward functions", "processes of their own,", "while others generate"])
    yield arrow("334,190 334,230")
    yield arrow("638,190 638,230")
    yield arrow("826,190 826,230")
    yield arrow("178,125 218,125")
    yield arrow("178,225 218,225")
    yield arrow("580,442 580,470")
    yield box(
        "file",
        226,
        476,
        726,
        56,
        ["runs/NAME", "checkpoints, metrics.csv, report, samples, and hf/: the trained model"],
    )


def drawn() -> str:
    return f"""<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{LABEL}">
<!-- Written by `python docs/draw_architecture.py`. -->
<style>{STYLE}</style>
<defs>
<marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto-start-reverse">
<path class="tip" d="M0,0 L10,5 L0,10 z"/></marker>
<marker id="red" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="5" markerHeight="5" orient="auto-start-reverse">
<path class="red" d="M0,0 L10,5 L0,10 z"/></marker>
</defs>
{chr(10).join(parts())}
</svg>
"""


if __name__ == "__main__":
    FILE.write_text(drawn())
    print(FILE.name)
