"""What `hybridflow.plan` prints: the verdict, tables of roles and memory, and lines on the sync and a checkpoint."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hybridflow.parallel.ranks import shown

WIDTH = 112  # columns of a pipe

if TYPE_CHECKING:
    from hybridflow.placement.forecast import Report


FEW = 24  # characters of ranks that are shown whole


GIB = 1 << 30


def print_plan(plan: "Report", console: Console, *, whole: bool) -> None:
    """A forecast, with the verdict first and last. whole: with tables of the sync and a checkpoint, and all notes."""
    chosen = " (the smallest that its layouts go up in)" if plan["smallest_that_fits"] else ""
    console.print(Text(f"{plan['config']}: {plan['name']}, world size {plan['world_size']}{chosen}"), soft_wrap=True)
    console.print(Text(plan["verdict"]["line"]), soft_wrap=True)
    if "placement" in plan:
        console.print(Text(f"\n{plan['placement']}"))
    if whole:
        _print_tables(plan, console)
    else:
        _print_short(plan, console)
    print_missing(plan.get("missing", ()), console)
    for line in plan.get("elsewhere", ()):
        console.print(Text(line), soft_wrap=True)
    if "time" in plan:
        from hybridflow.cli.plan_time import print_time

        print_time(plan["time"], console)
    console.print(Text(plan["verdict"]["line"]), soft_wrap=True)


def print_missing(missing: Sequence[str], console: Console) -> None:
    """Why this machine cannot train a config of sizes alone."""
    if missing:
        console.print(Text("Sizes alone are planned: hybridflow train would refuse this config here:"))
        for line in missing:
            console.print(Text(f"  {line}"), soft_wrap=True)


def _print_short(plan: "Report", console: Console) -> None:
    """The roles, the fullest rank of each moment, and a line each on the cache, the sync and a checkpoint."""
    console.print(_roles_table(plan, whole=False))
    for moment, report in plan["memory"].items():
        row = report["worst_rank"]
        parts = [f"{kind.replace('_', ' ')} {_gib(row[kind])}" for kind in MEMORY_COLUMNS[:-1] if row[kind]]
        console.print(Text(f"{moment}: {_gib(row['total'])} GiB on rank {row['rank']}: {', '.join(parts)}"))
    if "reshard" in plan:
        received = plan["reshard"]["received_bytes"]
        moved = f"a rank receives {_bytes(received['max'])} at most" if received["max"] else "nothing moves"
        for line in ("line", "long_line"):
            console.print(Text(f"{plan['kv_cache'][line]}."))
        console.print(Text(f"Weight sync: {moved}, all ranks {_bytes(received['total'])}."))
    notes = *plan["adapters"], *(f"{note}." for note in plan.get("rollout_notes", ()))
    for note in (*notes, *_host_lines(plan), _checkpoint_line(plan["checkpoint"])):
        console.print(Text(note), soft_wrap=True)
    console.print(Text("--all shows each role's memory, the ways of the sync, and a checkpoint by rank."))


def _print_tables(plan: "Report", console: Console) -> None:
    checkpoint, generates = plan["checkpoint"], "reshard" in plan
    tables: list[tuple[Table, Sequence[str]]] = [
        (_roles_table(plan, whole=True), (*plan["adapters"], *(_rollout_notes(plan) if generates else ()))),
        (_memory_table(plan), (*(MEMORY_NOTES if generates else FIXED_MEMORY_NOTES), *_more_lines(plan))),
    ]
    if generates:
        tables.append((_reshard_table(plan["reshard"]), _reshard_notes(plan["reshard"])))
    for table, notes in (*tables, (_checkpoint_table(checkpoint), _checkpoint_notes(checkpoint))):
        console.print()
        console.print(table)
        for note in notes:
            console.print(Text(note))
    console.print()


def _table(title: str, columns: Iterable[str], num_left: int = 1) -> Table:
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(
            column, justify="left" if i < num_left else "right", overflow="fold", no_wrap=column != "model"
        )
    return table


def _roles_table(plan: "Report", *, whole: bool) -> Table:
    """whole: with the layers of each stage."""
    stages = ("layers a stage",) if whole else ()
    columns = ("role", "dtype", "parameters", "grid", "ranks", *stages, "model")
    table = _table("Roles", columns, num_left=len(columns))
    if not whole:
        table.box, table.title, table.pad_edge = box.SIMPLE_HEAD, None, False
    for role in plan["roles"]:
        trained = role["trained_parameters"]
        table.add_row(
            role["role"],
            role["dtype"],
            _count(role["parameters"]) + (f", {_count(trained)} trained" if trained else ""),
            _grid(role),
            role["ranks"],
            *([_layers(role["layers_per_stage"])] if whole else ()),
            Text(role["model"]),
        )
    if "rollout" not in plan:
        return table
    rollout = plan["rollout"]
    experts = " ep" if rollout["expert_parallel"] else ""
    engine = f"{rollout['replicas']} of tp {rollout['tp']}{experts} x pp {rollout['pp']}"
    layers = [_layers(rollout["layers_per_stage"])] if whole else ()
    table.add_row("engine", "", "", engine, rollout["ranks"], *layers, "the actor's")
    return table


def _grid(role: "Report") -> str:
    chunks = f" (vpp {role['vpp']})" if role["vpp"] > 1 else ""
    split = (f" ep {role['ep']}" if role["ep"] > 1 else "") + (" sp" if role["sequence_parallel"] else "")
    context = f" x cp {role['cp']}" if role["cp"] > 1 else ""
    return f"tp {role['tp']}{split} x pp {role['pp']}{chunks}{context} x dp {role['dp']}"


def _layers(counts: list[int]) -> str:
    return f"{len(counts)} x {counts[0]}" if len(set(counts)) == 1 else ", ".join(map(str, counts))


def _rollout_notes(plan: "Report") -> list[str]:
    """The groups of the actor's first rank, the first engine replica, and notes on the rollout."""
    actor = plan["roles"][0]["groups_of_first_rank"]
    groups = "; ".join(f"{axis} {_few(ranks)}" for axis, ranks in actor.items())
    first = f"The actor's first groups: {groups}. The first engine replica: {_few(plan['rollout']['first_replica'])}."
    return [first, *(f"{note}." for note in plan["rollout_notes"])]


def _few(ranks: list[int]) -> str:
    text = shown(ranks)
    return text if len(text) <= FEW else f"{','.join(map(str, ranks[:3]))},...,{ranks[-1]}"


def _more_lines(plan: "Report") -> list[str]:
    """On libraries, and on the KV cache where there is one."""
    cache = plan.get("kv_cache", {})
    return [plan["libraries"] or ON_GPUS, *(f"{cache[line]}." for line in ("line", "long_line") if cache)] + (
        _host_lines(plan)
    )


def _host_lines(plan: "Report") -> list[str]:
    """On host memory, where a run keeps something there."""
    return [plan["host_memory"]["line"]] if plan["host_memory"] else []


MEMORY_COLUMNS = ("weights", "gradients", "optimizer", "activations", "kv_cache", "total")


MEMORY_NOTES = (
    "The rows show the fullest rank of each role. Models on a rank take turns: only the largest activations count.",
    "The engine's weights are those outside the actor's memory. The actor's weights leave out memory that is released "
    "during generation.",
    "The table has no padding. Activations are an estimate.",
)


FIXED_MEMORY_NOTES = (MEMORY_NOTES[0], MEMORY_NOTES[2])


ON_GPUS = "On GPUs CUDA's context, NCCL and CUDA graphs take several GiB more."  # where the run would be on CPUs


def _memory_table(plan: "Report") -> Table:
    columns = ("moment", "role", "rank", *(name.replace("_", " ") for name in MEMORY_COLUMNS))
    table = _table("Memory per rank, GiB", columns, num_left=2)
    for moment, report in plan["memory"].items():
        for name, row in report["roles"].items():
            table.add_row(moment, name, str(row["rank"]), *(_gib(row[kind]) for kind in MEMORY_COLUMNS))
        row = report["worst_rank"]
        cells = (moment, "together", str(row["rank"]), *(_gib(row[kind]) for kind in MEMORY_COLUMNS))
        table.add_row(*cells, style="bold", end_section=True)
    return table


def _reshard_table(reshard: "Report") -> Table:
    table = _table("Reshard: bytes per rank", ("", "least", "mean", "most", "all ranks"))
    for label, key in (
        ("received", "received_bytes"),
        ("lower bound", "lower_bound_bytes"),
        ("sent", "sent_bytes"),
        ("permuted in place", "permuted_bytes"),
        ("peak extra (estimate)", "peak_extra_bytes"),
    ):
        row = reshard[key]
        total = "" if key == "peak_extra_bytes" else _bytes(row["total"])
        table.add_row(label, _bytes(row["min"]), _bytes(row["mean"]), _bytes(row["max"]), total)
    table.add_section()
    for label, key in (
        ("HybridFlow's formula", "hybridflow_bytes"),
        ("DeepSpeed-Chat's formula", "deepspeed_chat_bytes"),
    ):
        table.add_row(label, "", "does not apply" if reshard[key] is None else _bytes(reshard[key]), "", "")
    return table


def _reshard_notes(reshard: "Report") -> list[str]:
    ways = "; ".join(f"{way} {row['parameters']:,} ({_bytes(row['bytes'])})" for way, row in reshard["ways"].items())
    notes = [f"Parameters of all engine ranks by way: {ways}. {reshard['num_buckets']} buckets."]
    mean = reshard["received_bytes"]["mean"]
    shares = [
        f"{mean / reshard[key]:.3f} of {name}'s formula"
        for name, key in (("HybridFlow", "hybridflow_bytes"), ("DeepSpeed-Chat", "deepspeed_chat_bytes"))
        if reshard[key]
    ]
    if shares:
        notes.append(f"The mean received is {' and '.join(shares)}.")
    return notes + _frozen_notes(reshard["frozen"])


def _frozen_notes(frozen: "Report | None") -> list[str]:
    """Which of a sync's bytes are of frozen weights."""
    if frozen is None or not frozen["received_bytes"]:
        return []
    share = f"{_bytes(frozen['received_bytes'])} of what a rank receives at most are frozen weights"
    if frozen["once"]:
        return [f"{share}: they travel once, when the engine is built. Later {_bytes(frozen['adapter_bytes'])} travel."]
    return [f"{share}, in each iteration: the engine is cut in another way than the actor. Cut alike nothing travels."]


def _checkpoint_table(checkpoint: "Report") -> Table:
    table = _table("Checkpoint: bytes per rank", ("", "least", "mean", "most", "all ranks"))
    rows = [("written", "rank_bytes")]
    if checkpoint["async_save"]:
        rows.append(("copied to host memory, and kept there", "host_bytes"))
    for label, key in rows:
        table.add_row(label, *(_bytes(checkpoint[key][name]) for name in ("min", "mean", "max", "total")))
    return table


def _checkpoint_notes(checkpoint: "Report") -> list[str]:
    """How many there will be, and whether the disk holds them."""
    interval, kept = checkpoint["save_interval"], checkpoint["kept_bytes"]
    when = _when_saved(interval, checkpoint["save_minutes"])
    memory = " A save takes memory for one tensor at a time."
    if checkpoint["async_save"]:
        memory = " The line on host memory has what the blocks of the copies take."
    notes = [f"{when}; at most {checkpoint['num_kept']} at a time, with the one under way: {_bytes(kept)}.{memory}"]
    return [*notes, _disk_line(checkpoint)]


def _checkpoint_line(checkpoint: "Report") -> str:
    when = _when_saved(checkpoint["save_interval"], checkpoint["save_minutes"])
    size = f"{_bytes(checkpoint['rank_bytes']['total'])} each, {checkpoint['num_kept']} at most"
    return f"Checkpoint: {size}; {when[0].lower()}{when[1:]}. {_disk_line(checkpoint)}"


def _disk_line(checkpoint: "Report") -> str:
    """Whether the disk holds all that is kept."""
    kept, free, own = (checkpoint[name] for name in ("kept_bytes", "free_bytes", "own_bytes"))
    beside = f" beside the {_bytes(own)} of this run's checkpoints" if own else ""
    room = f"output_dir = {checkpoint['directory']} has {_bytes(free)} free{beside} on this machine"
    return f"{room}." if free + own >= kept else f"warning: {room}: too little for {_bytes(kept)}."


def _when_saved(interval: int, minutes: float | None) -> str:
    both = [f"every {interval} iterations"] * bool(interval) + [f"every {minutes} minutes"] * (minutes is not None)
    return " and ".join(both).capitalize() if both else "Only when the run is told to stop"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}" if size >= GIB / 100 else f"{size / GIB:.4f}" if size else "-"


def _bytes(size: int) -> str:
    for unit, scale in (("GiB", GIB), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= scale:
            return f"{size / scale:,.2f} {unit}"
    return f"{size} B"


def _count(number: int) -> str:
    for unit, scale in (("B", 10**9), ("M", 10**6), ("K", 10**3)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return str(number)
