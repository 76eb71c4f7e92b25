"""Seconds that an engine replica takes for responses: prefill, decode steps by how many run, and the tail. Pure.

A decode step with b sequences at context length c reads the replica's weights and b c keys and values once:

    max(products of b rows, weights / bandwidth) + b c kv bytes / bandwidth + messages + what the engine takes itself

Of responses with mean length mu and longest L the share that still runs after s tokens is taken as
(1 - s / L)^(L / mu - 1), whose integral over s is mu; all run to the end where mu = L.
"""

from dataclasses import dataclass
from math import ceil

from hybridflow.architecture.mixers.known import mixer_shares
from hybridflow.architecture.spec import ModelSpec
from hybridflow.automap.cost import Cost, Device, total
from hybridflow.automap.mean_rows import Pass
from hybridflow.automap.role_time import Model
from hybridflow.parallel.layout import Cut

# of a layer with experts beyond those of an MLP, in vLLM 0.32.0: the router, the k largest, two that sort, the sum
ROUTING_KERNELS = 5
SEGMENTS = 24  # that the decode steps are cut in, each with one number of sequences


@dataclass(frozen=True)
class Responses:
    """What an engine replica generates."""

    number: float
    prompts: float
    prompt: float  # tokens
    mean: float
    longest: float
    at_once: int  # most sequences that run, by max_num_seqs and the KV cache
    batched_tokens: int  # of a step, at most
    prefix_caching: bool = True  # samples of a prompt read it once


def generation_cost(spec: ModelSpec, *, cut: Cut, pp: int, dtype: str, responses: Responses, device: Device) -> Cost:
    """One replica of tp x pp ranks. The stages work one after another: a step waits for the token of the one before."""
    key = ("generate", spec, cut, pp, dtype, responses)
    return device.known(key, lambda: _generation_cost(spec, cut, pp, dtype, responses, device=device))


def _generation_cost(spec: ModelSpec, cut: Cut, pp: int, dtype: str, responses: Responses, device: Device) -> Cost:
    model = Model(spec, cut.tp, dtype, "lm", sequence_parallel=False, device=device, cut=cut)
    wakes = device.overhead(device.profile.overheads.engine_wake, busy=cut.tp * pp)
    found = total((wakes, prefill_cost(model, pp, responses), decode_cost(model, pp, responses)))
    # each stage waits while the others have the token: of stages that share the layers evenly
    waits = tuple(found.seconds * (pp - 1) / pp for _ in range(pp)) if pp > 1 else ()
    return Cost(found.parts, waits)


def prefill_cost(model: Model, pp: int, responses: Responses) -> Cost:
    read = responses.prompts if responses.prefix_caching else responses.number
    tokens = read * responses.prompt
    steps = max(1, ceil(tokens / responses.batched_tokens))
    mb = Pass(tokens / steps, responses.number / steps, read * responses.prompt**2 / 2 / steps)
    layers = model.forward_layer(mb).times(model.spec.num_layers)
    return total((layers, _messages(model, pp, mb.tokens), _sampled(model, mb.outputs))).times(steps)


def decode_cost(model: Model, pp: int, responses: Responses) -> Cost:
    """Full while others wait for a place, then fewer and fewer. The prefill has given one token of each response."""
    at_once = min(responses.number, responses.at_once)
    mean, longest = max(responses.mean - 1, 0.0), max(responses.longest - 1, 0.0)
    waiting = responses.number - at_once
    middle = responses.prompt + mean / 2
    parts = [decode_step(model, pp, at_once, middle).times(waiting * mean / at_once)] if waiting > 0 else []
    if mean and longest:
        power, width = longest / mean - 1, longest / SEGMENTS
        for i in range(SEGMENTS if power > 1e-9 else 1):
            begin, end = (i / SEGMENTS, (i + 1) / SEGMENTS) if power > 1e-9 else (0.0, 1.0)
            share = ((1 - begin) ** (power + 1) - (1 - end) ** (power + 1)) / (power + 1) / (end - begin)
            context = responses.prompt + longest * (begin + end) / 2
            step = decode_step(model, pp, max(1.0, at_once * share), context)
            parts.append(step.times(width if power > 1e-9 else longest))
    return total(parts)


def decode_step(model: Model, pp: int, sequences: float, context: float) -> Cost:
    """One token for each of the running sequences."""
    spec, device, overheads = model.spec, model.device, model.device.profile.overheads
    read = cache_bytes_read(spec, tp=model.tp, itemsize=device.itemsize(model.dtype), context=context) * sequences
    size = sequences * spec.hidden_size * device.itemsize(model.dtype)
    message = overheads.engine_message if model.tp > 1 else 0.0
    routing = ROUTING_KERNELS * overheads.operation if model.experts else 0.0
    layer = total(
        (
            model.products(sequences),
            device.memory(read, busy=model.tp),
            device.all_reduce(size, model.tp, hosts=model.hosts).times(2),
            device.overhead(overheads.engine_layer + 2 * message + routing, busy=model.tp),
        )
    )
    return total((layer.times(spec.num_layers), _messages(model, pp, sequences), _sampled(model, sequences)))


def cache_bytes_read(spec: ModelSpec, *, tp: int, itemsize: int, context: float) -> float:
    """Of a sequence's token in a layer in the mean: keys and values, with a window the last; a state, written again."""
    shares = mixer_shares(spec).items()
    return sum(share * mixer.cache(spec, tp=tp, itemsize=itemsize).read(context) for mixer, share in shares)


def _sampled(model: Model, sequences: float) -> Cost:
    """The logits of the last tokens, and what the engine does about each sequence, on every rank of the replica."""
    spec, device, overheads = model.spec, model.device, model.device.profile.overheads
    columns = spec.padded_vocab_size / model.tp
    message = overheads.engine_message if model.tp > 1 else 0.0
    each = overheads.engine_sequence + spec.padded_vocab_size * overheads.engine_logit
    return total(
        (
            device.product(sequences, spec.hidden_size, columns, dtype=model.dtype, busy=model.tp),
            device.all_gather(4 * sequences * spec.padded_vocab_size, model.tp, hosts=model.hosts),
            device.overhead(overheads.engine_step + sequences * each + message, busy=model.tp),
        )
    )


def _messages(model: Model, pp: int, tokens: float) -> Cost:
    """Hidden states from stage to stage, and the logits from the last to all others."""
    if pp == 1:
        return Cost()
    size = tokens * model.spec.hidden_size * model.device.itemsize(model.dtype)
    return model.device.send(size).times(pp, busy=model.tp)
