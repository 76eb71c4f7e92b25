"""Every name of megatron-core and every private name of torch that we use is in the releases that are installed.

megatron-core calls few names stable, so all that is imported of it counts. `docs/explanation/releases.md` says what
breaks first with another release. The names of vLLM are in tests/rollout/test_private_names.py.
"""

import ast
import re
from collections import defaultdict

import pytest

from tests.launch import ROOT
from tests.names import lacks

NAMES = {
    "megatron.core": ("parallel_state", "tensor_parallel"),
    "megatron.core.dist_checkpointing.core": ("CheckpointingConfig", "save_config"),
    "megatron.core.distributed.distributed_data_parallel": ("DistributedDataParallel",),
    "megatron.core.distributed.distributed_data_parallel_config": ("DistributedDataParallelConfig",),
    "megatron.core.distributed.finalize_model_grads": ("finalize_model_grads",),
    "megatron.core.distributed.param_and_grad_buffer": ("_ParamAndGradBucketGroup", "_ParamAndGradBuffer"),
    "megatron.core.extensions.transformer_engine": ("TEColumnParallelLinear", "TENorm", "TERowParallelLinear"),
    "megatron.core.fusions.fused_bias_swiglu": ("swiglu", "swiglu_back"),
    "megatron.core.models.common.embeddings.language_model_embedding": ("LanguageModelEmbedding",),
    "megatron.core.models.common.language_module.language_module": (
        "LanguageModule._set_attention_backend",
        "LanguageModule",
    ),
    "megatron.core.models.gpt.gpt_layer_specs": (
        *("HAVE_TE", "get_gpt_layer_local_spec", "get_gpt_layer_with_transformer_engine_spec"),
    ),
    "megatron.core.optimizer": ("get_megatron_optimizer",),
    "megatron.core.optimizer.clip_grads": ("clip_grad_by_total_norm_fp32",),
    "megatron.core.optimizer.distrib_optimizer": ("DistributedOptimizer",),
    "megatron.core.optimizer.optimizer": (
        *("ChainedOptimizer", "Float16OptimizerWithFloat16Params", "MegatronOptimizer"),
    ),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.packed_seq_params": ("PackedSeqParams",),
    "megatron.core.pipeline_parallel.p2p_communication": (
        *("P2PCommunicator", "P2PCommunicator._communicate_shapes", "_p2p_ops"),
    ),
    "megatron.core.pipeline_parallel.schedules": ("get_forward_backward_func", "get_schedule_table"),
    "megatron.core.process_groups_config": ("ProcessGroupCollection",),
    "megatron.core.tensor_parallel": (
        *("ColumnParallelLinear", "ColumnParallelLinear.forward", "VocabParallelEmbedding.forward", "layers"),
        *("VocabParallelEmbedding", "copy_to_tensor_model_parallel_region", "gather_from_sequence_parallel_region"),
        *("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"),
    ),
    "megatron.core.tensor_parallel.layers": (
        *("ColumnParallelLinear", "RowParallelLinear", "_grad_accum_fusion_available"),
    ),
    "megatron.core.tensor_parallel.mappings": ("all_gather_last_dim_from_tensor_parallel_region",),
    "megatron.core.tensor_parallel.random": ("checkpoint",),
    "megatron.core.transformer.attention": (
        *("SelfAttention", "SelfAttention.get_query_key_value_tensors", "SelfAttentionSubmodules"),
    ),
    "megatron.core.transformer.enums": ("AttnBackend", "ModelType"),
    "megatron.core.transformer.identity_op": ("IdentityOp",),
    "megatron.core.transformer.mlp": ("MLPSubmodules",),
    "megatron.core.transformer.module": ("MegatronModule",),
    "megatron.core.transformer.moe": ("fused_a2a",),
    "megatron.core.transformer.spec_utils": ("ModuleSpec",),
    "megatron.core.transformer.transformer_block": ("TransformerBlock", "TransformerBlockSubmodules"),
    "megatron.core.transformer.transformer_config": ("TransformerConfig",),
    "megatron.core.transformer.transformer_layer": (
        *("TransformerLayer", "TransformerLayer._forward_attention", "TransformerLayer._forward_mlp"),
        *("TransformerLayer._forward_pre_mlp_layernorm", "TransformerLayerSubmodules"),
    ),
    "megatron.core.typed_torch": ("apply_module", "not_none"),
    "torch": (
        *("_C._autograd._profiler_enabled", "_C.PyTorchFileWriter", "_C.DispatchKeySet", "_dynamo.config.disable"),
        "cuda.memory._set_allocator_settings",
        *("cpu._is_amx_tile_supported", "cpu._is_avx512_bf16_supported", "serialization._get_storage_alignment"),
        *("serialization._open_zipfile_writer_buffer", "serialization._save", "ops.mkldnn._linear_pointwise.default"),
        *(f"ops.aten._scaled_dot_product_flash_attention_for_cpu{end}" for end in ("", "_backward")),
    ),
    "torch._C": ("DispatchKeySet",),
    "torch._C._distributed_c10d": ("HashStore", "PrefixStore", "ProcessGroupGloo", "Store"),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo", "FileSystemWriter.write_data"),
    "torch.distributed.distributed_c10d": ("_get_default_store", "_world.pg_map"),
}
OF_CUDA = {"torch.ops.torch_attn._varlen_attn_backward"}  # is there once torch.nn.attention.varlen has been imported
ROOTS = ("torch", "dist")
PRIVATE = re.compile(r"\._(?!_)\w+")  # within a dotted name


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, names in NAMES.items() for name in names])
def test_the_name_exists(module: str, name: str) -> None:
    assert not lacks(module, name), f"{module} has no {name}"


def test_the_list_has_all_that_is_used() -> None:
    known = {f"{module}.{name}" for module, names in NAMES.items() for name in names} | OF_CUDA
    used = defaultdict(set)
    for file in sorted((ROOT / "hybridflow").rglob("*.py")):
        for name in names_in(ast.parse(file.read_bytes())):
            used[name].add(file.name)
    missing = {
        name: files for name, files in used.items() if not any(x == name or x.startswith(name + ".") for x in known)
    }
    assert missing == {}
    gone = {name for name in known if not any(name.startswith(x) for x in used) and "megatron" in name}
    assert gone == set(), "nobody uses these any more"


def names_in(tree: ast.AST) -> set[str]:
    """What a module imports of megatron, and private names of torch, dotted."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            of_megatron = node.module.startswith("megatron")
            found |= {x for x in names if of_megatron or (x.startswith("torch.") and PRIVATE.search(x))}
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            if re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in ROOTS and PRIVATE.search(name):
                found.add(re.sub("^dist", "torch.distributed", name))
    return found
