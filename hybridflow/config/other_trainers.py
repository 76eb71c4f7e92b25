"""What keys of verl, TRL, OpenRLHF and NeMo-RL are called here, for the error that an unknown key of a config gives.

    hint(("actor", "kl_loss_coef"))    "here it is algorithm.kl.coef"
    hint(("actor", "fsdp_config"))     "there is none here: ..."
    hint(("actor", "lerning_rate"))    None

Names alone: nothing of another trainer's config is read, since values differ in unit and meaning, which the notes tell.
docs/migrate/keys.md has the same by trainer, and says where the names are from.
"""

import re
from collections.abc import Iterator, Mapping, Sequence

from hybridflow.config import other_fixed_trainers

_QUANTISATION = r"(?<![a-z])(mx|nv)?(fp|float|int)[48](?!\d)|quanti[sz]|quant_|kv_cache_dtype|kv_scales|in_[48]bit"
NOT_QUANTISED = "FP8 and other quantised formats are not supported, neither in weights and KV cache nor in training: "
NOT_QUANTISED += "trainer and engine share one copy of the weights, in ROLE.dtype, and their log-probs are compared"

ROLE = "ROLE"  # in a key of ours: the model or engine that the path of the foreign key speaks of
_ROLES = (  # a word in the path -> the role, the first that is found
    ("critic", "critic"),
    ("reward_model", "reward.models.0"),
    ("reward", "reward.models.0"),
    ("reference", "reference"),
    ("ref", "reference"),
    ("rollout", "rollout"),
    ("generation", "rollout"),
)

_OF_THE_ENGINE = ("tensor_parallel_size", "pipeline_parallel_size", "ranks")
_OF_ANY_MODEL = (
    *_OF_THE_ENGINE,
    *("virtual_pipeline_parallel_size", "data_parallel_size", "sequence_parallel"),
    *("expert_parallel_size", "expert_tensor_parallel_size"),
    *("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"),
    *("model", "dtype", "micro_batch_tokens"),
)

_SPLIT = "weights are split by ROLE.tensor_parallel_size and ROLE.pipeline_parallel_size, optimizer state by "
_SPLIT += "ROLE.optimizer.zero1"
_MICRO = "a budget of tokens; micro-batches are packed, without padding"
_STEPS = "iterations, each with a batch of its own, not passes over the data"

# (ours, theirs, note): ours as `key` or `key=value`, several apart by spaces, none where a note says what there is
# instead. theirs: the end of a path, as long as needs be to mean one thing; the longest that fits is taken.
ROWS: tuple[tuple[str, str, str], ...] = (
    # ---- data
    (
        "data.train",
        "train_files prompt_data prompt_dataset train_data_path dataset_name train_dataset",
        "a JSON-lines or Parquet file",
    ),
    (
        "data.heldout",
        "val_files eval_dataset eval.dataset val_data_path val_dataset_name data.validation",
        "a JSON-lines or Parquet file",
    ),
    ("data.prompt_key", "input_key prompt_key dataset_text_field", ""),
    (
        "reward.functions",
        "label_key reward_fn_key answer_key output_key",
        "every column of data.train beside the prompt reaches the functions by its name",
    ),
    ("data.chat_template_kwargs", "apply_chat_template_kwargs chat_template_kwargs enable_thinking", ""),
    (
        "data.chat_template",
        "apply_chat_template input_template",
        "true renders texts too; messages need no key",
    ),
    ("data.max_prompt_length", "max_prompt_length prompt_max_len prompt_length max_input_seq_length", "tokens"),
    ("data.overlong_prompts=drop", "filter_overlong_prompts", ""),
    ("data.overlong_prompts", "data.truncation truncation", "drop or error: no prompt is cut"),
    ("data.shuffle", "shuffle_dataset", ""),
    ("seed", "data_seed data_loader_seed data.seed grpo.seed train.seed trainer.seed", ""),
    # ---- how many
    (
        "data.prompts_per_iteration",
        "data.train_batch_size data.gen_batch_size gen_batch_size rollout_batch_size num_prompts_per_step batch_size",
        "prompts, each with sampling.samples_per_prompt responses",
    ),
    (
        "data.prompts_per_iteration algorithm.update.mini_batch_size",
        "train_batch_size",
        "the first is verl's, in prompts; the second OpenRLHF's, in sequences",
    ),
    ("data.prompts_per_iteration", "generation_batch_size", "prompts, not sequences"),
    (
        "sampling.samples_per_prompt",
        "rollout.n sampling.n n_samples_per_prompt num_generations num_generations_per_prompt num_return_sequences",
        "",
    ),
    (
        "algorithm.update.mini_batch_size",
        "ppo_mini_batch_size",
        "in sequences; verl's is in prompts, to be multiplied by sampling.samples_per_prompt",
    ),
    (
        "algorithm.update.mini_batch_size",
        "train_global_batch_size train.batch_size mini_batch_size",
        "sequences an optimizer step",
    ),
    (
        "algorithm.update.mini_batch_size",
        "per_device_train_batch_size num_mini_batches",
        "sequences an optimizer step, over all ranks",
    ),
    ("ROLE.micro_batch_tokens", "gradient_accumulation_steps", _MICRO),
    (
        "ROLE.micro_batch_tokens",
        "ppo_micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu forward_max_token_len_per_gpu "
        "micro_train_batch_size train_micro_batch_size train_max_tokens_per_gpu train_mb_tokens sequence_packing "
        "train.micro_batch_size train.max_tokens_per_gpu dynamic_batch_enable "
        "dynamic_batching use_dynamic_bsz use_dynamic_batch use_remove_padding packing_samples padding_free",
        _MICRO,
    ),
    (
        "actor.micro_batch_tokens reference.micro_batch_tokens",
        "log_prob_micro_batch_size log_prob_micro_batch_size_per_gpu log_prob_max_token_len_per_gpu "
        "log_prob_use_dynamic_bsz micro_rollout_batch_size rollout_max_tokens_per_gpu logprob_batch_size "
        "logprob_mb_tokens local_rollout_forward_batch_size rollout.micro_batch_size rollout.max_tokens_per_gpu",
        _MICRO,
    ),
    ("algorithm.update.epochs", "ppo_epochs num_ppo_epochs max_epochs", "passes over the batch of an iteration"),
    (
        "num_iterations",
        "total_epochs num_train_epochs num_episodes max_num_epochs total_training_steps max_steps max_num_steps "
        "total_episodes num_steps",
        _STEPS,
    ),
    # ---- sampling
    (
        "sampling.max_response_length",
        "max_response_length generate_max_len max_completion_length max_new_tokens response_length rollout_len",
        "tokens, the end token included",
    ),
    (
        "data.max_prompt_length sampling.max_response_length",
        "max_model_len vllm_max_model_length max_total_sequence_length max_len",
        "their sum",
    ),
    ("sampling.temperature", "temperature", ""),
    ("sampling.top_p", "top_p", ""),
    ("sampling.top_k", "top_k", "0: all"),
    ("sampling.min_p", "min_p", ""),
    ("sampling.repetition_penalty", "repetition_penalty", ""),
    ("sampling.stop", "stop_strings", ""),
    ("sampling.stop_token_ids", "stop_token_ids stop_token_id stop_token", ""),
    ("sampling.temperature", "do_sample", "training always samples; a held-out set is greedy at temperature: 0"),
    ("data.heldout", "val_kwargs", "of a set by name: {math: {files: math.jsonl, samples: 16, temperature: 1.0}}"),
    # ---- the algorithm
    (
        "algorithm.name",
        "adv_estimator advantage_estimator advantage.estimator",
        "ppo where they say gae, and the name of the others",
    ),
    ("algorithm.gamma", "gamma", ""),
    ("algorithm.gae_lambda", "lam lambd", ""),
    ("algorithm.whiten_advantages", "normalize_advantages advantages_norm whiten_advantages", "of ppo"),
    (
        "algorithm.policy.clip_range",
        "clip_ratio clip_ratio_low cliprange eps_clip epsilon ratio_clip_min",
        "",
    ),
    ("algorithm.policy.clip_range_high", "clip_ratio_high epsilon_high ratio_clip_max", ""),
    ("algorithm.policy.clip_range algorithm.policy.clip_range_high", "eps_clip_low_high", ""),
    ("algorithm.policy.kind=dual_clip algorithm.policy.dual_clip", "clip_ratio_c ratio_clip_c delta dual_clip", ""),
    (
        "algorithm.policy.kind",
        "policy_loss loss_mode policy_loss_type importance_sampling_level sequence_level_importance_ratios",
        "clip, dual_clip, gspo (ratios of sequences), cispo, sapo or reinforce",
    ),
    (
        "algorithm.policy.loss_mean",
        "loss_agg_mode loss_type token_level_loss loss_scale_factor",
        "token_mean, sequence_token_mean, sequence_sum_mean, constant or prompt_mean",
    ),
    ("algorithm.policy.entropy_coef", "entropy_coeff entropy_coef entropy_loss_coef", ""),
    (
        "algorithm.policy.importance.cap",
        "rollout_is_threshold tis_imp_ratio_cap vllm_importance_sampling_cap vllm_importance_sampling_clip_max "
        "vllm_is_truncated_threshold is_correction_threshold truncated_importance_sampling_ratio",
        "engine against trainer",
    ),
    (
        "algorithm.policy.importance.kind",
        "rollout_is rollout_rs vllm_importance_sampling_correction vllm_importance_sampling_mode "
        "enable_vllm_is_correction is_correction_level is_correction_mode is_correction_gating "
        "use_importance_sampling_correction",
        "engine against trainer",
    ),
    ("algorithm.policy.old_log_probs=engine", "bypass_mode", ""),
    (
        "algorithm.policy.replay_routing",
        "router_replay router_replay_mode enable_rollout_routing_replay",
        "true replays the engine's experts, which verl calls R3",
    ),
    ("algorithm.policy.tau_positive", "tau_pos sapo_temperature_pos", "of kind sapo"),
    ("algorithm.policy.tau_negative", "tau_neg sapo_temperature_neg", "of kind sapo"),
    (
        "algorithm.dynamic_sampling",
        "filter_groups dynamic_filtering dynamic_filtering_enable use_dynamic_sampling",
        "of those that compare the responses of a prompt; {} has its defaults",
    ),
    (
        "algorithm.dynamic_sampling.max_generation_rounds",
        "dynamic_sampling_max_gen_batches max_num_gen_batches",
        "of an iteration",
    ),
    ("algorithm.value_clip_range", "cliprange_value value_clip", "of ppo"),
    ("critic.optimizer.lr", "vf_coef", "the critic has an optimizer of its own, its loss no coefficient"),
    ("critic", "use_critic", "there is one where the algorithm has it"),
    ("algorithm.critic_warmup_iterations", "critic_warmup freezing_actor_steps critic.freezing_steps", "of ppo"),
    (
        "algorithm.name=dr_grpo",
        "norm_adv_by_std_in_grpo no_advantage_std_norm no_std_norm scale_rewards normalize_rewards",
        "for advantages that are not divided by the standard deviation; grpo is the name where they are",
    ),
    ("algorithm.name=rloo", "use_leave_one_out_baseline", ""),
    ("algorithm.kl.use=loss", "use_kl_loss kl.use_loss", "where true; none without any KL"),
    ("algorithm.kl.use=reward", "use_kl_in_reward", "where true; none without any KL"),
    ("algorithm.kl.coef", "kl_loss_coef kl_coef init_kl_coef kl.init_coef beta reference_policy_kl_penalty", ""),
    (
        "algorithm.kl.estimator",
        "kl_loss_type kl_penalty kl_estimator kl.estimator reference_policy_kl_type",
        "k1, k2, k3",
    ),
    ("algorithm.kl.controller", "kl_ctrl.type adap_kl_ctrl", "fixed or adaptive"),
    ("algorithm.kl.target", "target_kl kl_target kl.target", "nats a sequence"),
    ("algorithm.kl.horizon", "kl_horizon kl_ctrl.horizon kl.horizon", "sequences"),
    ("algorithm.kl.reset_reference_interval", "sync_ref_model ref_model_sync_steps", "iterations; no mixing"),
    ("", "ptx_coef", "there is none here: no loss on texts is mixed in"),
    (
        "rollout.max_staleness",
        "async_train async_training async_enable async_grpo async_queue_size staleness_threshold max_staleness "
        "max_trajectory_age_steps",
        "0 or 1, in updates; 1 needs an engine on ranks of its own",
    ),
    (
        "",
        "in_flight_weight_updates",
        "there is none here: all tokens of a rollout are of one version of the weights",
    ),
    (
        "data.environment",
        "multi_turn tools agent_func_path",
        "a class of yours that answers the model, with tools if it has any",
    ),
    (
        "data.environment.max_turns",
        "max_rollout_turns max_tool_calling_iterations",
        "turns of the model in a row",
    ),
    # ---- rewards
    ("reward.models", "reward_model reward_pretrain reward_model_path", ""),
    (
        "reward.functions",
        "custom_reward_function reward_funcs",
        "Python functions, as package.module:function",
    ),
    (
        "reward.functions.0.per reward.overlong",
        "reward_manager reward_model.reward_manager",
        "no manager stands between: per: batch gives a function all rows, reward.overlong is the penalty of dapo",
    ),
    ("reward.remote", "remote_rm_url remote_url", "a list of {url: ...}, each asked once a response"),
    ("reward.functions", "reward_weights", "each function and model has its weight"),
    ("reward.normalization", "normalize_reward normalize_enable use_score_norm use_score_scaling whiten_rewards", ""),
    ("reward.clip_score", "reward_clip_range reward.clip_range score_clip", "symmetric around 0"),
    (
        "reward.truncation_penalty",
        "missing_eos_penalty stop_properly_penalty_coef",
        "taken off the score of a response that is cut",
    ),
    ("algorithm.policy.mask_truncated", "mask_truncated_completions overlong_filtering", ""),
    ("reward.overlong", "overlong_buffer overlong_buffer_cfg reward_shaping", "buffer and factor"),
    ("reward.overlong.buffer", "overlong_buffer_len", "tokens"),
    ("reward.overlong.factor", "overlong_penalty_factor", ""),
    # ---- models
    ("ROLE.model", "model_name_or_path model_name model_path model.path pretrain", "a HuggingFace directory"),
    ("critic.model", "critic_pretrain value_model", "a HuggingFace directory"),
    ("actor.model reference.model", "sft_model_path ref_model", "a HuggingFace directory"),
    (
        "ROLE.dtype",
        "model_dtype param_dtype megatron.dtype rollout.dtype precision mixed_precision bf16 fp16 torch_dtype",
        "bfloat16 or float32",
    ),
    (
        "ROLE.recompute",
        "enable_gradient_checkpointing gradient_checkpointing gradient_checkpointing_enable activation_checkpointing "
        "recompute_granularity enable_recompute",
        "none, selective or full, or a list of modules",
    ),
    (
        "ROLE.recompute",
        "recompute_modules moe_layer_recompute",
        "a list of core_attn, layernorm, mlp, moe, moe_act, shared_experts",
    ),
    # ---- adapters
    ("ROLE.lora", "lora lora_cfg dtensor_cfg.lora_cfg peft peft_config use_peft", "a section; null trains all weights"),
    (
        "actor.lora",
        "reference.lora reference.lora.rank reference.lora_rank ref.lora ref.lora_rank",
        "the reference is the actor without adapters: leave the section out",
    ),
    (
        "actor.lora critic.lora",
        "reward.lora reward.models.lora reward.models.lora.rank",
        "a model that scores in a run is not trained",
    ),
    (
        "ROLE.lora.rank",
        "lora_rank lora_r lora.rank lora.r lora.dim lora_cfg.dim peft.dim peft_config.r",
        "32 unless given",
    ),
    (
        "ROLE.lora.alpha",
        "lora_alpha lora.alpha lora_cfg.alpha peft.alpha peft_config.lora_alpha",
        "32 unless given: an adapter's output is multiplied by alpha / rank",
    ),
    (
        "ROLE.lora.target_modules",
        "target_modules lora_target_modules lora_target lora.target_modules lora_cfg.target_modules "
        "peft.target_modules peft_config.target_modules match_all_linear lora_cfg.match_all_linear train_mlp "
        "train_attn lora.train_mlp lora.train_attn",
        "names as HuggingFace has them, or all-linear; no routed experts, no output layer",
    ),
    (
        "ROLE.lora.exclude_modules",
        "exclude_modules lora_exclude_modules lora.exclude_modules lora_cfg.exclude_modules peft.exclude_modules "
        "peft_config.exclude_modules",
        "",
    ),
    ("ROLE.lora.use_rslora", "use_rslora peft_config.use_rslora", ""),
    (
        "ROLE.lora.adapter_path",
        "lora_adapter_path adapter_path lora.adapter_path adapter_name_or_path",
        "a directory of PEFT; ROLE.model names the base model",
    ),
    ("seed", "lora.seed", "it draws new adapters, too"),
    (
        "",
        "lora_dropout dropout_position lora.dropout lora.dropout_position lora_cfg.dropout lora_cfg.dropout_position "
        "peft.dropout peft.dropout_position peft_config.lora_dropout",
        "there is none here: log-probs of training are compared with those of the engine, which drops nothing",
    ),
    (
        "",
        "use_dora peft_config.use_dora lora.type lora_cfg.use_dora",
        "there is none here: an adapter is W x + scale B A x, as the engine computes it",
    ),
    (
        "",
        "load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant",
        "there is none here: the base model has ROLE.dtype, in the one copy of trainer and engine, without QLoRA",
    ),
    (
        "",
        "init_lora_weights peft_config.init_lora_weights lora_init pissa_init lora_cfg.lora_A_init "
        "lora.lora_A_init_method lora.lora_B_init_method peft.lora_A_init_method peft.lora_B_init_method",
        "there is none here: A is drawn as PEFT draws it, from the seed, and B is zero",
    ),
    (
        "",
        "modules_to_save lora_modules_to_save peft_config.modules_to_save train_unembed lora.train_unembed "
        "additional_target",
        "there is none here: adapters are trained, and a value head whole; embeddings and the output layer are not",
    ),
    ("", "lora.merge", "there is none here: adapters are never merged for generation; runs/NAME/hf is merged once"),
    ("", "lora_dtype lora.dtype peft.lora_dtype", "there is none here: adapters have ROLE.dtype"),
    (
        "",
        "trust_remote_code",
        "there is none here: no run executes code of a model directory; hybridflow convert has --trust-remote-code",
    ),
    ("", "enable_ema", "there is none here: no average of the weights is kept"),
    # ---- optimizers
    ("ROLE.optimizer.lr", "learning_rate lr", ""),
    ("actor.optimizer.lr", "actor_learning_rate", ""),
    ("critic.optimizer.lr", "critic_learning_rate", ""),
    ("ROLE.optimizer.min_lr", "min_lr min_lr_ratio", "a rate, not a share"),
    (
        "ROLE.optimizer.warmup_iterations",
        "lr_warmup_steps lr_warmup_steps_ratio lr_warmup_ratio lr_warmup_iters num_warmup_steps warmup_steps "
        "warmup_ratio",
        "iterations",
    ),
    (
        "ROLE.optimizer.schedule",
        "lr_scheduler lr_scheduler_type lr_decay_style warmup_style",
        "constant, linear or cosine",
    ),
    ("ROLE.optimizer.betas", "adam_betas adam_beta1 adam_beta2 optim.betas adam.betas", ""),
    ("ROLE.optimizer.eps", "adam_eps adam_epsilon adam.eps", ""),
    ("ROLE.optimizer.weight_decay", "l2 weight_decay", ""),
    ("ROLE.optimizer.clip_grad", "max_grad_norm max_norm grad_clip clip_grad", ""),
    ("ROLE.optimizer.zero1", "use_distributed_optimizer zero_stage", "stage 1; weights are split by the layout"),
    ("ROLE.offload_optimizer", "optimizer_offload adam_offload optimizer_cpu_offload", "while the engine generates"),
    ("ROLE.offload_gradients", "grad_offload", "while the engine generates"),
    ("", "param_offload cpu_offload", "there is none here: the engine generates with the actor's own weights"),
    # ---- layouts
    ("ROLE.tensor_parallel_size", "tensor_model_parallel_size tp_size", ""),
    (
        "rollout.tensor_parallel_size",
        "vllm_tensor_parallel_size vllm.tensor_parallel_size vllm_cfg.tensor_parallel_size",
        "",
    ),
    ("actor.tensor_parallel_size", "ds_tensor_parallel_size ds.tensor_parallel_size", ""),
    ("ROLE.pipeline_parallel_size", "pipeline_model_parallel_size pp_size", ""),
    ("rollout.pipeline_parallel_size", "vllm_cfg.pipeline_parallel_size", ""),
    ("ROLE.sequence_parallel", "sequence_parallel", ""),
    ("ROLE.virtual_pipeline_parallel_size", "virtual_pipeline_model_parallel_size", "chunks a stage"),
    ("ROLE.data_parallel_size", "dp_size", "by default what is left of the ranks"),
    (
        "ROLE.context_parallel_size",
        "context_parallel_size ulysses_sequence_parallel_size ring_attn_size sp_size",
        "keys are gathered",
    ),
    ("ROLE.expert_parallel_size", "expert_model_parallel_size", ""),
    ("ROLE.expert_tensor_parallel_size", "expert_tensor_parallel_size", ""),
    (
        "ROLE.token_dispatcher",
        "moe_token_dispatcher_type moe_enable_deepep moe_flex_dispatcher_backend",
        "auto, alltoall or deepep, between replicas; tensor-parallel ranks of one replica send nothing",
    ),
    (
        "rollout.enable_expert_parallel",
        "rollout.expert_parallel_size vllm_cfg.expert_parallel_size",
        "true or false: over all ranks of an engine replica",
    ),
    ("ROLE.num_layers_in_first_pipeline_stage", "num_layers_in_first_pipeline_stage", ""),
    ("ROLE.num_layers_in_last_pipeline_stage", "num_layers_in_last_pipeline_stage", ""),
    ("ROLE.megatron_arguments.attention_backend", "attention_backend", "flash or fused"),
    ("ROLE.megatron_arguments.gradient_accumulation_fusion", "gradient_accumulation_fusion", ""),
    ("ROLE.megatron_arguments.persist_layer_norm", "persist_layer_norm", ""),
    ("ROLE.megatron_arguments.deallocate_pipeline_outputs", "deallocate_pipeline_outputs", ""),
    (
        "",
        "override_ddp_config override_mcore_model_config override_model_config "
        "override_optimizer_config recompute_method recompute_num_layers "
        "apply_rope_fusion bias_activation_fusion bias_dropout_fusion masked_softmax_fusion "
        "overlap_grad_reduce overlap_param_gather overlap_param_gather_with_optimizer_step tp_comm_overlap "
        "account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split "
        "num_layers_per_virtual_pipeline_stage "
        "moe_grouped_gemm moe_permute_fusion moe_shared_expert_overlap "
        "moe_router_dtype moe_per_layer_logging transformer_impl use_mbridge vanilla_mbridge "
        "use_dist_checkpointing dist_checkpointing_path converter_type average_in_collective",
        "there is none here: what megatron-core is built with follows from the model, the layout and the device",
    ),
    (
        "",
        "moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff router_aux_loss_coef aux_loss_coef "
        "freeze_moe_router moe_router_bias_update_rate",
        "there is none here: the router has no loss of its own",
    ),
    (
        "",
        "fsdp use_fsdp fsdp_config fsdp_size fsdp2 use_megatron_fsdp deepspeed deepspeed_config dtensor_cfg strategy "
        "zpg sharding_strategy",
        f"there is none here, megatron-core trains: {_SPLIT}",
    ),
    (
        "",
        "nnodes n_gpus_per_node num_nodes num_gpus_per_node gpus_per_node num_gpus "
        "actor_num_nodes actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node ref_num_nodes "
        "ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node num_processes",
        "there is none here: --nproc or a hostfile says how many ranks there are, ROLE.ranks which of them a model has",
    ),
    (
        "rollout.ranks",
        "hybrid_engine colocate_all_models colocate_all colocated vllm_num_engines vllm.num_engines vllm_mode",
        "the engine lies on the actor's ranks unless it is given ranks of its own",
    ),
    ("critic.ranks reference.ranks", "colocate_critic_reward colocate_actor_ref", ""),
    # ---- the engine
    (
        "",
        "use_vllm rollout.name generation.backend rollout.mode rollout.load_format load_format "
        "vllm_sync_backend vllm.sync_backend",
        "there is none here: vLLM generates in the trainer's processes, with the actor's own weights",
    ),
    ("rollout.kv_cache_gib", "gpu_memory_utilization vllm_gpu_memory_utilization", "GiB a rank, not a share"),
    ("rollout.sleep_level", "free_cache_engine vllm_enable_sleep vllm_enable_sleep_mode vllm.enable_sleep", ""),
    ("rollout.enforce_eager", "enforce_eager", ""),
    ("rollout.enable_prefix_caching", "enable_prefix_caching", ""),
    ("rollout.max_num_seqs", "max_num_seqs", ""),
    ("rollout.max_num_batched_tokens", "max_num_batched_tokens", ""),
    ("rollout.reshard_bucket_mib", "update_weights_bucket_megabytes", "MiB"),
    ("rollout.engine_arguments", "engine_kwargs vllm_kwargs", "vLLM's own arguments that change speed or memory"),
    ("ROLE.megatron_arguments", "override_transformer_config", "megatron's own that change speed or memory"),
    # ---- checkpoints, evaluation, records
    ("checkpoint.save_interval", "save_freq save_steps save_period", "iterations"),
    (
        "checkpoint.keep_last",
        "max_actor_ckpt_to_keep max_critic_ckpt_to_keep save_total_limit max_ckpt_num ckpt.max_num",
        "",
    ),
    ("checkpoint.keep_best checkpoint.best_metric", "keep_top_k metric_name best_metric_key", ""),
    (
        "checkpoint.load",
        "resume_mode resume_from_path resume_from_checkpoint load_checkpoint ckpt.load_enable",
        "auto, none or a path",
    ),
    ("checkpoint.max_hours", "checkpoint_must_save_by", "hours since the start"),
    ("output_dir name", "default_local_dir ckpt_path ckpt.path ckpt.output_dir checkpoint_dir save_path", "joined"),
    ("name", "experiment_name exp_name run_name wandb_run_name", ""),
    (
        "metrics.tensorboard metrics.csv metrics.wandb metrics.mlflow",
        "trainer.logger tensorboard_dir use_tensorboard report_to log_with tensorboard_enabled",
        "there is no other logger",
    ),
    ("metrics.wandb", "wandb use_wandb wandb_project project_name wandb_enabled", "a section: project: NAME"),
    ("", "profiler global_profiler", "there is none here"),
    ("metrics.eval_interval", "test_freq eval_steps eval.steps val_period", "iterations"),
    ("metrics.eval_interval", "val_before_train val_at_start", "where it is not 0, there is one before training"),
    ("metrics.num_samples", "num_completions_to_print log_completions", ""),
    (
        "metrics.num_samples",
        "log_val_generations num_val_samples_to_print",
        "of what is trained on, not of evaluations",
    ),
    ("watchdog.update_seconds", "nccl_timeout ddp_timeout", "and the other phases of watchdog"),
)

TABLE: Mapping[str, tuple[str, str]] = {key: (ours, note) for ours, theirs, note in ROWS for key in theirs.split()}

# what other trainers call an algorithm -> algorithm.name
ALGORITHM_NAMES: Mapping[str, str] = {
    "gae": "ppo",
    "vapo": "ppo",
    "group_norm": "grpo",
    "dapo": "grpo",
    "gspo": "grpo",
    "drgrpo": "dr_grpo",
    "gkd": "distill",
    "minillm": "distill",
    "on_policy_distillation": "distill",
    "reinforce_plus_plus": "reinforce",
    "reinforce++": "reinforce",
    "reinforce_baseline": "reinforce",
    "reinforce_plus_plus_baseline": "reinforce",
    "ipo": "dpo",
    "rm": "reward_model",
}
NOT_HERE = ("orpo", "simpo", "online_dpo")  # that learn from pairs


def hint(path: Sequence[str], *, fixed: bool = False) -> str | None:
    """What to use instead of the key at `path`; None where no trainer that we know has it, or it is ours already.

    fixed: in a config on fixed data.
    """
    words = [word for word in path if not word.isdecimal()]  # without the places in lists
    for start in range(len(words)):
        key = ".".join(words[start:])
        own = other_fixed_trainers.TABLE.get(key) if fixed else None
        found = own or TABLE.get(key)
        if found is not None:
            ours, note = (_of_role(text, path, fixed=fixed) for text in found)
            if ".".join(path) in (key.partition("=")[0] for key in ours.split()):
                return None  # ours, in an algorithm that does without
            if fixed and own is None and any(_is_absent(key) for key in ours.split()):
                return other_fixed_trainers.NOTHING
            return note if not ours else f"here it is {' and '.join(ours.split())}" + (f" ({note})" if note else "")
    return NOT_QUANTISED if any(map(is_quantisation, path)) else None


def is_quantisation(name: str) -> bool:
    """Whether the name of a key, or of a number format, is of FP8 or another quantised format."""
    return re.search(_QUANTISATION, name, re.IGNORECASE) is not None


def _is_absent(key: str) -> bool:
    """Of a key of ours: whether no config on fixed data has it."""
    is_role = key.split(".")[0] == "reward_model"
    return not is_role and f"{key.rstrip('=')}=".startswith(other_fixed_trainers.ABSENT)


def algorithm_hint(name: str) -> str | None:
    """What to use instead of another trainer's name of an algorithm; None where there is no such name."""
    key = name.lower().replace("-", "_")
    if key in NOT_HERE:
        return "there is none here: of pairs dpo learns, with loss: ipo as well"
    found = ALGORITHM_NAMES.get(key)
    return None if found is None else f"here it is {found}"


def leaves(tree: object, path: tuple[str, ...], *, fixed: bool = False) -> Iterator[tuple[str, ...]]:
    """The path of each key in nested mappings at `path` that `hint` knows, or that holds no further ones.

    A known section stands for all keys in it but those that TABLE names together with the section.
    """
    within = tree if isinstance(tree, Mapping) else {}
    is_known = hint(path, fixed=fixed) is not None
    own = [key for key in within if not is_known or f"{path[-1]}.{key}" in TABLE or is_quantisation(str(key))]
    for key in own:
        yield from leaves(within[key], (*path, str(key)), fixed=fixed)
    if len(own) < len(within) or not within:
        yield path


def _of_role(text: str, path: Sequence[str], *, fixed: bool) -> str:
    """`text` with the role that the path speaks of, where that has the key; else the actor's."""
    sections = [part for part in path[:-1] if part != "actor_rollout_ref"]  # which holds all three
    words = other_fixed_trainers.ROLES if fixed else _ROLES
    role = next((role for word, role in words if word in sections), "actor")

    def named(found: re.Match[str]) -> str:
        known = _OF_THE_ENGINE if role == "rollout" else _OF_ANY_MODEL
        has = role in ("actor", "critic", "reward_model") or found[1] in known
        return f"{role if has else 'actor'}.{found[1]}"

    return re.sub(rf"{ROLE}\.(\w+)", named, text)
