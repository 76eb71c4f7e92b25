"""Why a plan that a search has found is better than another, in numbers and keys. Pure."""

from typing import Any

from hybridflow.automap.search import SearchedPlan
from hybridflow.automap.timing import SCORING_PHASES
from hybridflow.config.auto import sections
from hybridflow.config.kinds import AnyConfig
from hybridflow.placement.forecast import Fullest

GENERATION = ("reshard", "generate")
SCORING = ("reward", *SCORING_PHASES.values())
UPDATES = ("critic_update", "actor_update", "reward_model_update")
LEAST_SHARE = 0.002  # of an iteration: of a difference that is shown


def chosen_values(config: AnyConfig) -> dict[str, Any]:
    """What a search chooses, by the keys of the config."""
    tree = config.model_dump(mode="json")
    found: dict[str, Any] = {}
    for name, section, keys in sections(tree):
        shown = "rollout" if name == "engine" else name
        found |= {f"{shown}.{key}": section[key] for key in (*keys, "ranks") if key in section}
    return found


def differences(config: AnyConfig, other: AnyConfig) -> dict[str, tuple[Any, Any]]:
    """Keys that a search chooses -> both values, where they differ. The number of replicas follows from the rest."""
    mine, others = chosen_values(config), chosen_values(other)
    return {
        key: (mine[key], others[key])
        for key in mine
        if mine[key] != others[key] and not key.endswith("data_parallel_size")
    }


def summary(plan: SearchedPlan) -> dict[str, str]:
    """Where the roles lie, and how they are cut: a few words for each."""
    found = {}
    for name, model in plan.placed.models.items():
        layout, config = model.layout, model.config
        chunks = f" (vpp {layout.vpp})" if layout.vpp > 1 else ""
        split = (f" ep {layout.ep}" if layout.ep > 1 else "") + (" sp" if config.sequence_parallel else "")
        context = f" x cp {layout.cp}" if layout.cp > 1 else ""
        found[name] = f"tp {layout.tp}{split} x pp {layout.pp}{chunks}{context} x dp {layout.dp}"
    rollout = plan.placed.rollout
    if rollout is not None:
        found["engine"] = f"{len(rollout.replicas)} of tp {rollout.tp} x pp {rollout.pp}"
    return found


def groups(plan: SearchedPlan) -> str:
    """`actor + critic + engine on 8 | reward.models.0 on 8`"""
    lie: dict[tuple[int, ...], list[str]] = {}
    for name, model in plan.placed.models.items():
        lie.setdefault(model.layout.ranks, []).append(name)
    if plan.placed.rollout is not None:
        lie.setdefault(plan.placed.rollout.ranks, []).append("engine")
    if len(lie) == 1:
        return f"all on {plan.placed.world_size}"
    return " | ".join(f"{' + '.join(names)} on {len(ranks)}" for ranks, names in sorted(lie.items()))


def phase_changes(plan: SearchedPlan, other: SearchedPlan) -> dict[str, tuple[float, float]]:
    """Phase -> seconds of both, the largest difference first; those that differ by hardly anything are left out."""
    mine, others = plan.prediction.phases, other.prediction.phases
    both = {name: (mine.get(name, 0.0), others.get(name, 0.0)) for name in dict.fromkeys((*mine, *others))}
    least = LEAST_SHARE * plan.seconds
    shown = {name: pair for name, pair in both.items() if abs(pair[0] - pair[1]) >= least}
    return dict(sorted(shown.items(), key=lambda item: item[1][0] - item[1][1]))


def stages(plan: SearchedPlan) -> dict[str, float]:
    """Seconds from the first begin to the last end of what roles do side by side."""
    found = {}
    for name, of in (("generation", GENERATION), ("scoring", SCORING), ("updates", UPDATES)):
        spans = [span for span in plan.prediction.spans if span.phase in of]
        if spans:
            found[name] = max(span.begin + span.seconds for span in spans) - min(span.begin for span in spans)
    return found


def why(plan: SearchedPlan, other: SearchedPlan, name: str) -> list[str]:
    """A sentence on which phases make the difference, and one on the keys."""
    share = 1 - plan.seconds / other.seconds
    gain = f"{plan.seconds:.4g} s against {other.seconds:.4g} s ({share:.1%} less)"
    mine, others = stages(plan), stages(other)
    whole = ", ".join(f"{name} {others[name]:.4g} -> {mine[name]:.4g} s" for name in mine if name in others)
    phases = [f"{phase} {b:.3g} -> {a:.3g} s" for phase, (a, b) in phase_changes(plan, other).items()]
    keys = [f"{key} {b} -> {a}" for key, (a, b) in differences(plan.config, other.config).items()]
    lines = [f"Against {name}: {gain}: {whole}. By phase: {'; '.join(phases) or 'none differs by more than a hair'}."]
    if keys:
        lines.append(f"  What differs: {', '.join(keys)}.")
    return lines


def memory_words(fullest: Fullest, most: int = 3) -> str:
    """What takes most on a rank. Models take turns to compute: of their activations the largest are there."""
    roles = fullest.roles
    largest = max(held.activations for held in roles.values())
    kinds = sorted(
        (
            (size, f"{name} {kind.replace('_', ' ')}")
            for name, held in roles.items()
            for kind, size in vars(held).items()
            if kind != "activations" or size == largest
        ),
        reverse=True,
    )
    shown = [*kinds[:most], (fullest.margin.total, "libraries")]
    return ", ".join(f"{kind} {size / (1 << 30):.3g} GiB" for size, kind in shown if size)
