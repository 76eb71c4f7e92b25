"""What `hybridflow.plan --time` tells, as lists and dicts for JSON; seconds and bytes throughout. Pure."""

import contextlib
from collections.abc import Callable
from typing import Any

from hybridflow.automap.device import DeviceProfile
from hybridflow.automap.timing import HAND_OVER, Prediction, Work, predict, work_of
from hybridflow.config.kinds import AnyConfig
from hybridflow.errors import ConfigError
from hybridflow.parallel.ranks import shown
from hybridflow.placement.cache_room import with_room
from hybridflow.placement.forecast import fullest
from hybridflow.placement.placed import PlacedModels, place

Report = dict[str, Any]
MOST_ROWS = 1 << 20  # of a batch that is looked at


def time_report(run: PlacedModels, profile: DeviceProfile, work: Work | None = None) -> Report:
    """Errors: ConfigError where the profile lacks a dtype of the run."""
    work = work or work_of(run.config, profile)
    found = predict(run, profile, work)
    return {
        "profile": profile.name,
        "measured": profile.measured,
        "seconds": found.seconds,
        "tokens": work.tokens,
        "tokens_per_second_per_device": found.tokens_per_second_per_device,
        "prompt_tokens": work.prompt,
        "response_tokens": {"mean": work.mean, "longest": work.longest},
        "phases": phase_rows(found),
        "side_by_side": side_by_side(found) if run.config.generates_beside else None,
        "idle": idle_rows(found.idle),
        "largest_batch": largest_batch(run, profile, cuda=profile.shared is None),
    }


def side_by_side(found: Prediction) -> Report:
    """Seconds of the engine and of the models, of which an iteration takes the longer, and of what comes on top: weight
    sync, hand-over and saves."""
    generated = [span for span in found.spans if span.phase == "generate"]
    begin = generated[0].begin
    models = [span for span in found.spans if span.phase not in ("reshard", "generate", HAND_OVER, "save")]
    engine, trained = (max(span.begin + span.seconds for span in spans) - begin for spans in (generated, models))
    return {"engine": engine, "models": trained, "together": found.seconds - max(engine, trained)}


def phase_rows(found: Prediction) -> list[Report]:
    """Of each phase and role, in the order in which they begin: seconds of the rank that takes longest."""
    rows: dict[tuple[str, str], Report] = {}
    for span in found.spans:
        row = rows.setdefault(
            (span.phase, span.role),
            {"phase": span.phase, "role": span.role, "begin": span.begin, "ranks": set(), "seconds": {}, "bound": ""},
        )
        row["bound"] = row["bound"] or span.bound
        row["ranks"] |= set(span.ranks)
        for rank in span.ranks:
            row["seconds"][rank] = row["seconds"].get(rank, 0.0) + span.seconds
    for row in rows.values():
        row["seconds"] = max(row["seconds"].values())
        row["share"] = row["seconds"] / found.seconds
        row["ranks"] = shown(sorted(row["ranks"]))
    return list(rows.values())


def idle_rows(idle: tuple[float, ...]) -> list[Report]:
    """Ranks whose share is alike to a thousandth, together."""
    groups: dict[float, list[int]] = {}
    for rank, share in enumerate(idle):
        groups.setdefault(round(share, 3), []).append(rank)
    return [{"ranks": shown(ranks), "share": share} for share, ranks in groups.items()]


def largest_batch(run: PlacedModels, profile: DeviceProfile, *, cuda: bool) -> Report:
    """Rows of data an iteration, with as many mini-batches, for which no rank holds more than the device has.

    key: that of the config. rows: None where not even the least fits. is_bound: whether more rows would not fit; else
    memory does not grow with them any more. room: bytes of a device that are counted on.
    """
    room, config = profile.memory_bytes, run.config
    step = config.batch_size // config.mini_batch_size

    def fits(count: int) -> bool:
        with contextlib.suppress(ConfigError):
            placed = place(_with_rows(config, count * step), run.world_size, cuda=cuda)
            return _peak(with_room(placed, room)) <= room
        return False

    count = _largest(fits, MOST_ROWS // step)
    rows = count * step if count else None
    return {"key": config.rows_key, "rows": rows, "is_bound": count < MOST_ROWS // step, "room": room}


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest of 1 .. most that fits, where all below do; 0: none."""
    if fits(most):
        return most
    low, high = 0, 1
    while high < most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _with_rows(config: AnyConfig, rows: int) -> AnyConfig:
    """The same with so many rows of data an iteration, in as many mini-batches."""
    data = config.data.model_copy(update={config.rows_key.removeprefix("data."): rows})
    copy = config.model_copy(update={"data": data})
    update = config.algorithm.update
    if update.mini_batch_size is None:
        return copy
    size = copy.batch_size * config.mini_batch_size // config.batch_size
    algorithm = config.algorithm.model_copy(update={"update": update.model_copy(update={"mini_batch_size": size})})
    return copy.model_copy(update={"algorithm": algorithm})


def _peak(run: PlacedModels) -> int:
    """Most bytes on any rank at any moment, those of libraries too."""
    return fullest(run).needed
