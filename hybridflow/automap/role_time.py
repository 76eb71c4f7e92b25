"""Seconds that a model takes on a grid: scoring rows, and an update of its weights. Pure.

    forward_cost(spec, layout, config, rows, device, head="lm")     one replica scores its rows
    update_cost(spec, layout, config, rows, device, head="lm")      one optimizer step on a mini-batch

With m micro-batches on p stages of v chunks, and t_s the seconds of one on stage s, a pipeline takes

    m max t + (sum t - max t) / v

(Narayanan et al. 2021, arXiv 2104.04473, section 2.2, where all t are alike: the bubble is (p - 1) t / v). Of this a
rank of stage s computes for m t_s, and waits for the rest.
"""

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil

from hybridflow.architecture.flops import mean_mixing_flops
from hybridflow.architecture.mixers.known import mixer_shares
from hybridflow.architecture.spec import Head, ModelSpec
from hybridflow.automap.context_time import ContextWork
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.automap.expert_time import ExpertWork
from hybridflow.automap.mean_rows import MeanRows, Pass, passes
from hybridflow.automap.step_time import hosts_of, layers_of_stages, reduction_cost, step_cost
from hybridflow.config import RoleConfig, TrainedRoleConfig
from hybridflow.config.recompute import MODULES, OF_MIXTURE, Recompute, modules_of
from hybridflow.parallel.layout import Cut, Layout
from hybridflow.parallel.vocab import chunks_of_rows
from hybridflow.placement.footprint import stage_elements

BACKWARD_ATTENTION = 2.5  # times the operations of forward: five products instead of two
NORM_PASSES = 8  # over the hidden state, of two norms: it is read three times, and written, by each
LOGIT_BYTES = 4  # log-probs of logits are computed in float32


@dataclass(frozen=True)
class Model:
    """What the seconds of a role depend on, on a tensor-parallel rank. hosts: that a tensor-parallel group lies on."""

    spec: ModelSpec
    tp: int
    dtype: str
    head: Head
    sequence_parallel: bool
    device: Device
    hosts: int = 1
    cut: Cut | None = None  # of experts; None: a share of each on every rank
    cp: int = 1  # ranks that share tokens
    cp_hosts: int = 1  # that they lie on

    # ---- layers

    def forward_layer(self, mb: Pass) -> Cost:
        """A layer forward on one rank; tp ranks of a group keep their host busy together."""
        return self.device.known(("forward", *self._key, mb), lambda: self._forward_layer(mb))

    def _forward_layer(self, mb: Pass) -> Cost:
        context = self.context.forward(mb) if self.context else Cost()
        work = total((self.products(mb.tokens), *self._besides(mb, 1.0, backward=False), context))
        return self.device.launched(work, self.device.profile.overheads.layer_forward, busy=self.tp)

    def backward_layer(self, mb: Pass, recompute: Recompute) -> Cost:
        """The gradients of a layer: two products for each of forward; what is not kept runs again."""
        return self.device.known(("backward", *self._key, mb, recompute), lambda: self._backward_layer(mb, recompute))

    def _backward_layer(self, mb: Pass, recompute: Recompute) -> Cost:
        backward = [self._product(mb.tokens, n, k) for k, n in self.matrices]
        if self.spec.lora is None:  # else the gradients of weights are left out
            backward += [self._product(n, mb.tokens, k) for k, n in self.matrices]
        else:
            backward.append(self._adapters(mb.tokens).times(2))
        experts = self.experts.products(mb.tokens, backward=True) if self.experts else Cost()
        parts = [*backward, experts, *self._besides(mb, 2.0, backward=True)]
        if self.context:
            parts.append(self.context.backward(mb, kept="core_attn" in modules_of(recompute)))
        if recompute != "full":
            modules = modules_of(recompute)
            within = OF_MIXTURE if "moe" in modules else ()
            parts += [self._again(mb, module) for module in MODULES if module in modules and module not in within]
        work = self.device.launched(total(parts), self.device.profile.overheads.layer_backward, busy=self.tp)
        return work + self.forward_layer(mb) if recompute == "full" else work

    def _again(self, mb: Pass, module: str) -> Cost:
        """A module forward once more. Where there are experts, no layer is taken as dense."""
        spec, experts = self.spec, self.experts
        if module == "core_attn":
            context = self.context.forward(mb) if self.context else Cost()
            return self._attention(mb, backward=False) + context
        if module == "layernorm":
            sp = self.tp if self.sequence_parallel else 1
            return self._passes(mb, NORM_PASSES * self.device.itemsize(self.dtype) * spec.hidden_size / sp)
        if experts is None:
            return self._mlp_again(mb, spec.ffn_hidden_size) + self._mlp_messages(mb) if module == "mlp" else Cost()
        if module == "moe_act":
            return self._passes(mb, experts.activation_bytes())
        shared = self._mlp_again(mb, spec.shared_ffn_hidden_size)
        if module == "moe":
            router = self._product(mb.tokens, spec.hidden_size, spec.num_experts)
            own = (router, experts.products(mb.tokens), self._passes(mb, experts.elementwise_bytes()))
            return total((*own, shared, self._mlp_messages(mb)))
        return shared if module == "shared_experts" else Cost()

    def _mlp_again(self, mb: Pass, size: float) -> Cost:
        """Products of a dense MLP, and its activation."""
        products = [self._product(mb.tokens, k, n) for k, n in self._mlp(size / self.tp)]
        width = (5 if self.spec.traits.mlp.gated else 2) * size / self.tp
        return total((*products, self._passes(mb, self.device.itemsize(self.dtype) * width)))

    def _passes(self, mb: Pass, size: float) -> Cost:
        """Over so many bytes of each token, forward."""
        return self.device.elementwise(mb.tokens * size, busy=self.tp)

    @cached_property
    def _key(self) -> tuple[Hashable, ...]:
        """All that a cost depends on beside a micro-batch."""
        how = (self.dtype, self.head, self.sequence_parallel, self.hosts, self.cp, self.cp_hosts)
        return (self.spec, self.tp, self.cut, *how)

    @cached_property
    def experts(self) -> ExpertWork | None:
        """None: the model has none. With them, no layer is taken as dense."""
        cut = self.cut or Cut(self.tp, self.tp)
        return ExpertWork(self.spec, cut, self.dtype, self.device) if self.spec.num_experts else None

    @cached_property
    def context(self) -> ContextWork | None:
        """None: no other rank has a part of the tokens."""
        if self.cp == 1:
            return None
        return ContextWork(
            self.spec,
            tp=self.tp,
            ranks=self.cp,
            hosts=self.cp_hosts,
            dtype=self.dtype,
            sequence_parallel=self.sequence_parallel,
            device=self.device,
        )

    @cached_property
    def matrices(self) -> list[tuple[float, float]]:
        """(k, n) of a layer's products of all tokens on a rank: the router is one, experts are not.

        Where layers mix tokens by several kinds of mixers, of a layer in the mean.
        """
        spec, tp = self.spec, self.tp
        hidden, attention = float(spec.hidden_size), list[tuple[float, float]]()
        split = tp if self.sequence_parallel else 1
        for mixer, share in mixer_shares(spec).items():
            *into, (inner, out) = mixer.products(spec, tp=tp, split=split)
            attention += [*((k, n * share) for k, n in into), (inner * share, out)]
        if self.experts is None:
            return [*attention, *self._mlp(spec.ffn_hidden_size / tp)]
        shared = self._mlp(spec.shared_ffn_hidden_size / tp) if spec.shared_ffn_hidden_size else []
        return [*attention, (hidden, float(spec.num_experts)), *shared]

    def _mlp(self, width: float) -> list[tuple[float, float]]:
        hidden = float(self.spec.hidden_size)
        return [(hidden, self._gates * width), (width, hidden)]

    def products(self, tokens: float) -> Cost:
        """Of a layer forward, with the experts'."""
        own = total((*(self._product(tokens, k, n) for k, n in self.matrices), self._adapters(tokens)))
        return own + self.experts.products(tokens) if self.experts else own

    def _adapters(self, tokens: float) -> Cost:
        """Of each linear layer with an adapter two narrow products, and one more pass over what the layer gives."""
        if self.spec.lora is None:
            return Cost()
        rank, costs = self.spec.lora.rank, list[Cost]()
        for k, n in self.matrices:
            costs += [self._product(tokens, k, rank), self._product(tokens, rank, n)]
            costs.append(self.device.elementwise(3 * tokens * n * self.device.itemsize(self.dtype), busy=self.tp))
        return total(costs)

    @property
    def _gates(self) -> int:
        return 2 if self.spec.traits.mlp.gated else 1

    def _product(self, m: float, k: float, n: float) -> Cost:
        return self.device.product(m, k, n, dtype=self.dtype, busy=self.tp)

    def _attention(self, mb: Pass, *, backward: bool) -> Cost:
        """2.5 times as many operations backward as forward (Dao et al. 2022)."""
        mixing = mean_mixing_flops(self.spec, pairs=mb.pairs, tokens=mb.tokens, padded=True)
        operations = mixing / self.tp * (BACKWARD_ATTENTION if backward else 1.0)
        return self.device.attention(operations, backward=backward, busy=self.tp)

    def _besides(self, mb: Pass, times: float, *, backward: bool) -> list[Cost]:
        """Attention, elementwise operations, messages."""
        return [
            self._attention(mb, backward=backward),
            self.device.elementwise(times * mb.tokens * self.elementwise_bytes(), backward=backward, busy=self.tp),
            self._messages(mb, backward=backward),
        ]

    def elementwise_bytes(self) -> float:
        """A token's, forward: two norms (8 h), two residual sums (6 h), rotary (4 (q + k): both read and written,
        twice), SwiGLU (5 f, or 2 f without a gate); b bytes each."""
        spec, b = self.spec, self.device.itemsize(self.dtype)
        q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        sp = self.tp if self.sequence_parallel else 1
        wide = spec.shared_ffn_hidden_size if self.experts else spec.ffn_hidden_size
        width = (5 if spec.traits.mlp.gated else 2) * wide
        own = b * (14 * spec.hidden_size / sp + (4 * (q + kv) + width) / self.tp)
        for mixer, share in mixer_shares(spec).items():
            of_heads, of_token = mixer.elementwise(spec)
            own += share * b * (of_token / sp + of_heads / self.tp)
        return own + self.experts.elementwise_bytes() if self.experts else own

    def _messages(self, mb: Pass, *, backward: bool) -> Cost:
        """Two all-reduces of the activations each way; with sequence parallelism each is a reduce-scatter and an
        all-gather, and backward the inputs of both column-parallel products are gathered again. Tokens that are sent to
        their experts go there and back, in place of the second."""
        return self._within_replica(mb, backward=backward).times(0.5) + self._mlp_messages(mb, backward=backward)

    def _mlp_messages(self, mb: Pass, *, backward: bool = False) -> Cost:
        """The second: of an MLP or a mixture."""
        own = self._within_replica(mb, backward=backward).times(0.5)
        if self.experts is None or self.experts.ep_ranks == 1:
            return own
        tokens = mb.tokens / (self.tp if self.sequence_parallel else 1)
        return self.experts.messages(tokens) + (own if self.spec.shared_ffn_hidden_size else Cost())

    def _within_replica(self, mb: Pass, *, backward: bool) -> Cost:
        if self.tp == 1:
            return Cost()
        size = mb.tokens * self.spec.hidden_size * self.device.itemsize(self.dtype)
        if not self.sequence_parallel:
            return self.device.all_reduce(size, self.tp, hosts=self.hosts).times(2)
        return self.device.all_gather(size, self.tp, hosts=self.hosts).times(6 if backward else 4)

    # ---- ends

    def output(self, mb: Pass, *, backward: bool = False) -> Cost:
        """The head over the wanted rows, and log-probs of logits; backward more logits than exist at once are made
        again."""
        return self.device.known(("output", *self._key, mb.outputs, backward), lambda: self._output(mb, backward))

    def _output(self, mb: Pass, backward: bool) -> Cost:
        if self.head == "score":
            return self.device.memory(mb.outputs * self.spec.hidden_size * 4, busy=self.tp)
        k, n = self.spec.hidden_size, self.spec.padded_vocab_size / self.tp
        product = self._product(mb.outputs, k, n)
        if backward:
            again = product if len(chunks_of_rows(ceil(mb.outputs), int(n))) > 1 else Cost()
            product = again + self._product(mb.outputs, n, k)
            product += Cost() if self.spec.lora is not None else self._product(n, mb.outputs, k)
        logits = self.device.logits(mb.outputs * n, backward=backward, busy=self.tp)
        messages = self.device.all_reduce(LOGIT_BYTES * mb.outputs, self.tp, hosts=self.hosts)
        return total((product, logits, messages if backward else messages.times(2)))


def model_of(spec: ModelSpec, layout: Layout, config: RoleConfig, device: Device, *, head: Head) -> Model:
    how = (config.dtype, head, config.sequence_parallel)
    return Model(
        spec,
        layout.tp,
        *how,
        device=device,
        hosts=hosts_of(layout, "tp", device),
        cut=layout.cut,
        cp=layout.cp,
        cp_hosts=hosts_of(layout, "cp", device) if layout.cp > 1 else 1,
    )


# ------------------------------------------------------------------------------------------------ on a grid


def forward_cost(
    spec: ModelSpec, layout: Layout, config: RoleConfig, rows: MeanRows, device: Device, *, head: Head, units: int = 1
) -> Cost:
    """One replica scores `rows`, each of so many units of them in micro-batches of its own. Loads are of a replica."""
    grid = (layout.cut, layout.pp, layout.vpp, layout.first_stage_layers, layout.last_stage_layers)
    how = (config.dtype, config.sequence_parallel, config.micro_batch_tokens, layout.cp)
    sharing = hosts_of(layout, "cp", device) if layout.cp > 1 else 1
    where = (hosts_of(layout, "tp", device), hosts_of(layout, "pp", device), sharing)
    key = ("score", spec, *grid, *how, *where, rows, head, units)  # the same of an actor and of a reference like it
    return device.known(key, lambda: _forward_cost(spec, layout, config, rows, device, head=head, units=units))


def _forward_cost(
    spec: ModelSpec, layout: Layout, config: RoleConfig, rows: MeanRows, device: Device, *, head: Head, units: int
) -> Cost:
    count, mb = _passes(replace(rows, number=rows.number / units), config, layout)
    count *= units
    if not count:
        return Cost()
    model = model_of(spec, layout, config, device, head=head)
    overhead = device.overhead(device.profile.overheads.micro_batch, busy=layout.tp)
    layer, message = model.forward_layer(mb), _between_stages(model, layout, mb)
    stages = {
        (layers, is_last): total((layer.times(layers), overhead, message, model.output(mb) if is_last else Cost()))
        for layers, is_last in dict.fromkeys(layers_of_stages(spec, layout))
    }
    return pipelined([stages[stage] for stage in layers_of_stages(spec, layout)], count, chunks=layout.vpp)


def update_cost(
    spec: ModelSpec, layout: Layout, config: TrainedRoleConfig, rows: MeanRows, device: Device, *, head: Head
) -> Cost:
    """One optimizer step on a mini-batch of these rows, on all replicas at once. Loads are of the whole grid."""
    own = rows.split(layout.dp)
    gradients = gradient_cost(spec, layout, config, own, device, head=head)
    reduced = reduction_cost(spec, layout, config, device, head=head)
    if device.profile.shared is None:  # while the last micro-batch runs backward, two thirds of the seconds
        hidden = 2 / 3 * gradients.seconds / max(own.micro_batches(config.micro_batch_tokens), 1)
        reduced = reduced.times(max(0.0, 1 - hidden / reduced.seconds) if reduced.seconds else 1.0)
    gradients = gradients.times(1, busy=layout.copies("dense"))
    return total((gradients, reduced, step_cost(spec, layout, config, device, head=head)))


def gradient_cost(
    spec: ModelSpec, layout: Layout, config: TrainedRoleConfig, rows: MeanRows, device: Device, *, head: Head
) -> Cost:
    """One replica adds up the gradients of `rows`, at least of one micro-batch. Loads are of one replica.

    With context parallelism: of one of the ranks that share tokens, each of which has its part of every row.
    """
    count, mb = _passes(rows, config, layout)
    model = model_of(spec, layout, config, device, head=head)
    overhead = device.overhead(2 * device.profile.overheads.micro_batch, busy=layout.tp)
    layer = model.forward_layer(mb) + model.backward_layer(mb, config.recompute)
    ends = model.output(mb) + model.output(mb, backward=True)
    message = _between_stages(model, layout, mb).times(2)
    elements_of_stages = stage_elements(spec, head, layout, trained=True)
    parts = list(zip(layers_of_stages(spec, layout), elements_of_stages, strict=True))
    tied = spec.tied and head == "lm" and layout.pp == 1 and spec.lora is None
    twice = spec.vocab_size * spec.hidden_size / layout.tp if tied else 0
    stages = {
        ((layers, is_last), elements): total(
            (
                layer.times(layers),
                overhead,
                message,
                device.gradients(elements + twice, dtype=config.dtype, busy=layout.tp),
                ends if is_last else Cost(),
            )
        )
        for (layers, is_last), elements in dict.fromkeys(parts)
    }
    return pipelined([stages[part] for part in parts], max(count, 1), chunks=layout.vpp)


def _passes(rows: MeanRows, config: RoleConfig, layout: Layout) -> tuple[int, Pass]:
    """Micro-batches, and what a rank has of the mean one: ranks that share tokens have nearly equal parts."""
    count, mb = passes(rows, config.micro_batch_tokens)
    return count, Pass(mb.tokens / layout.cp, mb.outputs / layout.cp, mb.pairs / layout.cp)


def pipelined(stages: Sequence[Cost], count: int, *, chunks: int) -> Cost:
    """`count` micro-batches through the stages; see the module. Loads of stages that work at once add up."""
    if len(stages) == 1:
        return stages[0].times(count)
    longest = max(stages, key=lambda stage: stage.seconds)
    whole = sum(stage.seconds for stage in stages)
    if not whole:
        return Cost()
    alike = Counter(stages)
    alone = [stage.times(number / chunks) for stage, number in alike.items()]  # while the pipeline fills and empties
    rounds = count - 1 / chunks
    busy = rounds and (count * whole - whole / chunks) / (rounds * longest.seconds)
    found = total((*alone, longest.times(rounds, busy=busy)))
    return Cost(found.parts, tuple(max(0.0, found.seconds - count * stage.seconds) for stage in stages))


def _between_stages(model: Model, layout: Layout, mb: Pass) -> Cost:
    """What a stage sends on, of each chunk."""
    if layout.pp == 1:
        return Cost()
    split = layout.tp if model.sequence_parallel else 1
    size = mb.tokens * model.spec.hidden_size * model.device.itemsize(model.dtype) / split
    sent = model.device.send(size, hosts=hosts_of(layout, "pp", model.device))
    return sent.times(layout.vpp, busy=layout.tp)
