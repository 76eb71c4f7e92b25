"""What an optimizer step takes on a grid: gradients summed over replicas, and the optimizer itself. Pure."""

from typing import Literal

from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.config import TrainedRoleConfig
from hybridflow.parallel.layout import Layout
from hybridflow.placement.footprint import (
    MAIN_BYTES,
    expert_elements,
    stage_elements,
    stage_optimizer_bytes,
    staged_bytes,
)

ADAM_BYTES = 28  # an element's gradient, main weight and two moments read, the last three written, in float32
SGD_BYTES = 20


def hosts_of(layout: Layout, axis: Literal["tp", "cp", "copies", "pp"], device: Device) -> int:
    """That a group along the axis lies on; 2 stands for more, as the slower link is the same."""
    return 2 if layout.crosses_hosts(axis, device.profile.ranks_per_host) else 1


def layers_of_stages(spec: ModelSpec, layout: Layout) -> list[tuple[int, bool]]:
    """(layers, whether it is the last) of each stage."""
    return [(layers, i == layout.pp - 1) for i, layers in enumerate(layout.layers_per_stage(spec.num_layers))]


def reduction_cost(spec: ModelSpec, layout: Layout, config: TrainedRoleConfig, device: Device, *, head: Head) -> Cost:
    """The sum of the gradients over copies of the weights, on the largest stage: 4 n bytes, which are float32;
    all-reduced, or with ZeRO-1 reduce-scattered."""
    if layout.copies("dense") == 1:
        return Cost()
    dense, experts, hosts = *_largest(spec, layout, head), hosts_of(layout, "copies", device)
    reduce = device.reduce_scatter if _zero1(config) else device.all_reduce
    groups = _side_by_side(layout, hosts)
    return total(
        reduce(MAIN_BYTES * size, copies, hosts=hosts, groups=groups)
        for size, copies in ((dense, layout.copies("dense")), (experts, layout.copies("experts")))
        if size
    )


def _largest(spec: ModelSpec, layout: Layout, head: Head) -> tuple[int, int]:
    """Elements on the largest stage: those that all copies sum, and experts of which there are fewer copies."""
    if layout.dense_per_expert_copy == 1:
        return max(stage_elements(spec, head, layout, trained=True)), 0
    stages = zip(stage_elements(spec, head, layout, trained=True), expert_elements(spec, layout), strict=True)
    every, experts = max(stages)
    return every - experts, experts


def _side_by_side(layout: Layout, hosts: int) -> int:
    """Groups of replicas that send over the same links: of those that leave their hosts the ones of a stage."""
    return layout.tp if hosts > 1 else layout.tp * layout.pp


def step_cost(spec: ModelSpec, layout: Layout, config: TrainedRoleConfig, device: Device, *, head: Head) -> Cost:
    """An optimizer step on the largest stage, on all ranks at once: gradients are set to zero, their norm taken, and
    the optimizer passes over the state. With ZeRO-1 each of c copies has n / c elements; b n bytes are gathered."""
    dense, experts = _largest(spec, layout, head)
    elements, copies = dense + experts, layout.copies("dense")
    layers = max(layers for layers, _ in layers_of_stages(spec, layout))
    busy, overheads = len(layout.ranks), device.profile.overheads
    own = dense / copies + experts / layout.copies("experts") if _zero1(config) else elements
    costs = [
        device.memory(MAIN_BYTES * elements + MAIN_BYTES * own + _passes(config) * own, busy=busy),
        device.overhead(overheads.step + layers * overheads.step_layer, busy=busy),
    ]
    if copies > 1 and _zero1(config):
        size, hosts = device.itemsize(config.dtype) * elements, hosts_of(layout, "copies", device)
        costs.append(device.all_gather(size, copies, hosts=hosts, groups=_side_by_side(layout, hosts)))
    return total(costs)


def staging_cost(spec: ModelSpec, layout: Layout, config: TrainedRoleConfig, device: Device, *, head: Head) -> Cost:
    """What a step takes longer where the optimizer's state lies in host memory (offload_optimizer = always).

    A part comes while another one goes, over a link that is as fast both ways, and the optimizer steps a third. A step
    takes the longer of the state's way and of the optimizer's passes over it; the first part's way to the device and
    the last part's way back come on top. Of a state of s bytes in parts of p bytes that is

        max(s / host_bandwidth, passes) - passes + min(s, 2 p) / host_bandwidth

    On a CPU nothing overlaps: 2 s / host_bandwidth.
    """
    state, busy = max(stage_optimizer_bytes(spec, head, layout, config)), len(layout.ranks)
    if device.profile.shared is not None:
        return device.to_host(2 * state, busy=busy)
    dense, experts = _largest(spec, layout, head)
    own = dense / layout.copies("dense") + experts / layout.copies("experts") if _zero1(config) else dense + experts
    hidden = device.memory(_passes(config) * own).seconds * device.profile.host_bandwidth  # bytes
    return device.to_host(max(0.0, state - hidden) + staged_bytes(state), busy=busy)


def _passes(config: TrainedRoleConfig) -> int:
    """Bytes of an element that the optimizer reads and writes."""
    optimizer = config.optimizer
    return {"adam": ADAM_BYTES, "sgd": SGD_BYTES if optimizer.momentum else SGD_BYTES - 8}[optimizer.name]


def _zero1(config: TrainedRoleConfig) -> bool:
    return config.optimizer.zero1 and config.optimizer.name == "adam"
