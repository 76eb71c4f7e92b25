"""A rank's part in a health check: the rank's name, the findings on the host, and one end of every link.

Every look has a time limit: a file system that does not answer, or a package that hangs, costs one failing line and no
more. The look at a disk or a driver goes on meanwhile in a thread that nobody waits for any longer.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch._C._distributed_c10d import Store

from hybridflow.config import RunConfig, read_tree
from hybridflow.config.auto import autos
from hybridflow.config.kinds import AnyConfig, config_class
from hybridflow.errors import EnvironmentProblem, UserError
from hybridflow.inspection.attention import attention_findings, attention_in_use, is_flash_attn_available
from hybridflow.inspection.findings import Finding
from hybridflow.inspection.links import LINK_SECONDS, follow_link, lead_link, measure_all_reduce
from hybridflow.inspection.machine import machine_findings, this_device
from hybridflow.inspection.storage import storage_findings
from hybridflow.inspection.versions import installed, version_findings
from hybridflow.parallel.agreement import code_digests
from hybridflow.parallel.device import CPU, choose_platform, uses_cuda
from hybridflow.parallel.host_memory import host_memory
from hybridflow.parallel.platform import quiet_libraries
from hybridflow.parallel.process_exit import in_time
from hybridflow.parallel.rank0_commands import Answer, Order, doing
from hybridflow.parallel.standalone_groups import StandaloneGroup
from hybridflow.parallel.torchrun import Started, host_name, started
from hybridflow.trainers.auto import facts_of, memory_here, resolved_for
from hybridflow.user_code import search_beside

LOOK_SECONDS = 75.0  # for all areas of a host together
MEASURE_SECONDS = 2 * LINK_SECONDS.total_seconds()  # for a link: one time-out to meet, and one in the middle
AREA_SECONDS = 30.0  # for one of them; the last, the inputs, has what is left
Look = Callable[[], list[Finding]]


class Participant:
    """Performs the orders of rank 0. config: the file, as every host has it, or what was read already."""

    def __init__(
        self, store: Store, started: Started, config: str | Path | AnyConfig | None, overrides: tuple[str, ...]
    ) -> None:
        self._store, self._started = store, started
        self.config, self._config_error = _read_config(config, overrides)
        self._device_error = _choose_device(self.config)
        self._facts: dict[str, Any] = {}
        self._until = 0.0
        self._kept: list[StandaloneGroup] = []

    def perform(self, order: Order) -> Answer:
        """What an order asks for; {"error": ...} where that raises."""
        acts = {"greet": self._greet, "look": self._look, "link": self._link, "all_reduce": self._all_reduce}
        acts["make_group"] = self._make_group
        doing(self._store, self._started.rank, f"in {order['act']}")
        try:
            return acts[order["act"]](order)
        except (RuntimeError, OSError, UserError) as error:  # the answer that rank 0 waits for
            return {"error": first_line(error)}

    def _greet(self, order: Order) -> Answer:
        return {"host": host_name(), "node": self._started.node}

    # -------------------------------------------------------------------------------------------- this host

    def _look(self, order: Order) -> Answer:
        """The device of this rank, and for the first rank of a host all that the host's ranks share."""
        host, num_ranks = order["host"], order["num_ranks"]
        self._facts, self._until = {}, time.monotonic() + LOOK_SECONDS
        findings = self._bounded("machine", host, lambda: self._see_device(host))
        if order["first"]:
            for area, look in self._looks(host, num_ranks).items():
                findings += self._bounded(area, host, look)
        return {"findings": [asdict(finding) for finding in findings], "facts": self._facts}

    def _looks(self, host: str, num_ranks: int) -> dict[str, Look]:
        config, cuda = self.config, uses_cuda()
        output_dir = config.output_dir if config is not None else "."
        looks: dict[str, Look] = {
            "packages": lambda: self._see_packages(host, cuda=cuda),
            "attention": lambda: self._see_attention(host, cuda=cuda),
            "memory": lambda: self._see_machine(host, num_ranks, cuda=cuda),
            "storage": lambda: storage_findings(output_dir, host),
        }
        if config is not None:
            looks["inputs"] = lambda: self._see_inputs(config, host)
        elif self._config_error is not None:
            looks["inputs"] = lambda: [_config_finding(str(self._config_error), host)]
        return looks

    def _bounded(self, area: str, host: str, look: Look) -> list[Finding]:
        """What `look` finds, or a failing line that says why there is nothing."""
        found: list[Finding] = []
        errors: list[Exception] = []

        def act() -> None:
            try:
                with contextlib.redirect_stdout(sys.stderr):  # a user's module may print when it is imported
                    found.extend(look())
            except Exception as error:  # the boundary of an area: the report goes on
                errors.append(error)

        doing(self._store, self._started.rank, f"looking at {area}")
        left = self._until - time.monotonic()
        seconds = max(0.0, left if area == "inputs" else min(left, AREA_SECONDS))
        if not in_time(act, seconds):
            value = f"no answer within {seconds:.0f} s"
            advice = "a disk, a network file system or a driver does not answer: look there by hand; restart the host"
            return [Finding(area, "all of it", host, value, "fail", advice=advice)]
        if errors:
            advice = "this check itself has failed; see the message"
            return [Finding(area, "all of it", host, first_line(errors[0]), "fail", advice=advice)]
        return found

    def _see_device(self, host: str) -> list[Finding]:
        if self._device_error is not None:
            advice = "nvidia-smi on that host shows what the driver sees; `platform=cpu` checks and trains on CPUs"
            return [Finding("machine", "devices", host, self._device_error, "fail", advice=advice)]
        self._facts["device"] = asdict(this_device(self._started.local_rank))
        return []

    def _see_packages(self, host: str, *, cuda: bool) -> list[Finding]:
        found = installed()
        self._facts["versions"] = {name: version or "none" for name, version in found.items()}
        self._facts["code"] = code_digests()["hybridflow's code"].hex()
        return version_findings(found, host, cuda=cuda)

    def _see_attention(self, host: str, *, cuda: bool) -> list[Finding]:
        dtype = "bfloat16" if self.config is None else self.config.trained.dtype
        available, in_use = is_flash_attn_available(), attention_in_use(dtype)
        self._facts["attention"] = in_use
        self._facts["is_flash_attn_available"] = available
        return attention_findings(available, in_use, host, cuda=cuda)

    def _see_machine(self, host: str, num_ranks: int, *, cuda: bool) -> list[Finding]:
        self._facts["memory"] = host_memory()[0]
        world_size = self._started.world_size
        return machine_findings(host, num_ranks=num_ranks, world_size=world_size, cuda=cuda)

    def _see_inputs(self, config: AnyConfig, host: str) -> list[Finding]:
        from hybridflow.inspection.inputs import input_findings  # transformers loads for seconds

        findings, self._facts["digests"] = input_findings(config, host)
        return findings

    # -------------------------------------------------------------------------------------------- links

    def _link(self, order: Order) -> Answer:
        def measure() -> Answer:
            group = self._group(order)
            if group.rank == 0:
                return asdict(lead_link(group))
            follow_link(group)
            return {}

        return _given_up(measure)

    def _all_reduce(self, order: Order) -> Answer:
        def measure() -> Answer:
            bus_rate, seconds = measure_all_reduce(self._group(order))
            return {"bus_rate": bus_rate, "seconds": seconds}

        return _given_up(measure)

    def _make_group(self, order: Order) -> Answer:
        """And keep it, as a run does: what it takes stays taken."""

        def measure() -> Answer:
            before, began = self._free_bytes(), time.perf_counter()
            group = self._group(order)
            group.all_reduce(torch.zeros(1, device=group.device))
            self._kept.append(group)
            return {"seconds": time.perf_counter() - began, "free_before": before, "free_after": self._free_bytes()}

        return _given_up(measure)

    def _free_bytes(self) -> int | None:
        return int(torch.cuda.mem_get_info(self._started.local_rank)[0]) if uses_cuda() else None

    def _group(self, order: Order) -> StandaloneGroup:
        ranks: list[int] = order["ranks"]
        return StandaloneGroup(
            self._store,
            order["group"],
            rank=ranks.index(self._started.rank),
            size=len(ranks),
            timeout=LINK_SECONDS,
            device=torch.device("cuda", self._started.local_rank) if uses_cuda() else CPU,
        )


def _given_up(measure: Callable[[], Answer]) -> Answer:
    """What is measured, or that it had no end: gloo's time-outs do not cover all of it."""
    answers: list[Answer] = []

    def act() -> None:
        try:
            answers.append(measure())
        except Exception as error:  # gloo's and NCCL's among them: rank 0 waits for an answer
            answers.append({"error": first_line(error)})

    in_time(act, MEASURE_SECONDS)
    return answers[0] if answers else {"error": f"no end after {MEASURE_SECONDS:g} s"}


def first_line(error: BaseException) -> str:
    """Of an error's message, without the place in torch's sources that it begins with."""
    text = next(iter(str(error).splitlines()), "")
    text = text.partition("] ")[2] if text.startswith("[/") and "] " in text else text
    return f"{type(error).__name__}: {text}"


def _read_config(
    config: str | Path | AnyConfig | None, overrides: tuple[str, ...]
) -> tuple[AnyConfig | None, str | None]:
    """The config, or why there is none: on one host the file may be missing."""
    if config is None or isinstance(config, RunConfig):
        return config, None
    try:
        tree = read_tree(config, overrides)
        if autos(tree):  # each rank by the rank's devices: a run takes the choices of rank 0
            choose_platform(tree.get("platform", "auto"))
            per_rank = started()
            facts = facts_of(tree, memory_here(per_rank.local_world_size))
            read, _ = resolved_for(tree, config, per_rank.world_size, facts)
        else:
            read = config_class(tree).from_tree(tree, config)
    except UserError as error:
        return None, str(error)
    search_beside(config)
    return read, None


def _choose_device(config: AnyConfig | None) -> str | None:
    """Settle the device; why it cannot be the one that is asked for."""
    try:
        choose_platform(config.platform if config is not None else "auto")
    except EnvironmentProblem as error:
        return str(error)
    finally:
        quiet_libraries()
    return None


def _config_finding(error: str, host: str) -> Finding:
    return Finding(
        "inputs", "config", host, error, "fail", advice="mend the config; every host reads it under this very path"
    )
