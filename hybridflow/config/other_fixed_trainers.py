"""What keys of other trainers' SFT, reward-model, DPO and KTO configs are called in a config on fixed data.

TRL (SFTConfig, RewardConfig, DPOConfig, KTOConfig), OpenRLHF (train_sft, train_rm, train_dpo, train_kto), NeMo-RL (sft,
rm, dpo), LLaMA-Factory (the YAML of the stages sft, rm, dpo, kto) and verl's SFT. As `other_trainers`, which has the
rows of all runs: optimizers, layouts, checkpoints.
"""

from collections.abc import Mapping

_COUNTS = "what the assistant says counts, and `completion` of a row; nothing before it"

# as other_trainers.ROWS
ROWS: tuple[tuple[str, str, str], ...] = (
    # ---- data
    (
        "data.train",
        "dataset dataset_name dataset_path train_dataset train_data_path train_files dataset_dir data.train_path",
        "a JSON-lines or Parquet file, a directory of them, or a list of sources",
    ),
    ("data.heldout", "eval_dataset val_files val_data_path eval_dataset_path val_dataset_name data.validation", ""),
    (
        "data.columns",
        "chosen_key rejected_key prompt_key input_key output_key label_key response_key messages_key text_column "
        "dataset_text_field prompt_dict_keys response_dict_keys columns input_template",
        "our name: the files' one, such as {prompt: question, chosen: better}",
    ),
    ("data.train", "interleave_probs mix_strategy dataset_probs prompt_data_probs", "a list of {path, weight}"),
    ("data.message_format", "formatting tags role_tag content_tag", "openai or sharegpt"),
    (
        "",
        "template chat_template chat_template_path apply_chat_template tokenizer_chat_template multiturn",
        "there is none here: rows of messages are rendered by the tokenizer's own chat template",
    ),
    (
        "data.max_length",
        "max_length max_seq_length max_seq_len max_len cutoff_len max_total_sequence_length max_prompt_length "
        "max_completion_length prompt_max_len data.max_input_seq_length max_input_seq_length",
        "tokens of a sequence, prompt and completion",
    ),
    ("data.overlong", "truncation truncation_mode data.truncation", "drop or error: no sequence is cut"),
    (
        "",
        "assistant_only_loss completion_only_loss train_on_prompt mask_history train_on_inputs only_train_on_response",
        f"there is none here: {_COUNTS}; `weight: 0` in a message leaves it out",
    ),
    (
        "actor.micro_batch_tokens",
        "packing packing_strategy packing_samples neat_packing padding_free eval_packing "
        "gradient_accumulation_steps micro_train_batch_size train_micro_batch_size micro_batch_size_per_gpu "
        "use_remove_padding use_dynamic_bsz max_token_len_per_gpu sequence_packing dynamic_batching",
        "a budget of tokens; micro-batches are packed, without padding",
    ),
    (
        "data.batch_size",
        "per_device_train_batch_size train_batch_size train_global_batch_size global_batch_size train.batch_size",
        "rows of an optimizer step, over all ranks",
    ),
    ("data.batch_size", "per_device_eval_batch_size val_batch_size val_global_batch_size", "evaluations take it too"),
    (
        "",
        "max_samples max_train_samples",
        "there is none here: name a file of the rows, or say num_iterations",
    ),
    (
        "",
        "overwrite_cache preprocessing_num_workers dataset_num_proc dataloader_num_workers tokenized_path streaming",
        "there is none here: rows are read and encoded when they are drawn",
    ),
    ("data.heldout", "val_size eval_split dataset_test_split", "a file of its own"),
    # ---- how many
    ("num_epochs", "num_train_epochs max_epochs max_num_epochs total_epochs epochs", "passes over data.train"),
    ("num_iterations", "max_steps max_num_steps total_training_steps num_steps", "optimizer steps"),
    # ---- losses
    ("algorithm.name", "stage rlhf_type task_type", "sft, reward_model, dpo or kto"),
    ("algorithm.beta", "beta pref_beta kto_beta dpo_beta reference_policy_kl_penalty", "of dpo and kto"),
    ("algorithm.loss", "loss_type pref_loss ipo ipo_enable dpo_loss_type preference_loss", "of dpo: sigmoid or ipo"),
    ("algorithm.label_smoothing", "dpo_label_smoothing label_smoothing_factor label_smoothing", "of dpo"),
    ("algorithm.desirable_weight", "kto_chosen_weight desirable_loss_weight desirable_weight", "of kto"),
    ("algorithm.undesirable_weight", "kto_rejected_weight undesirable_loss_weight undesirable_weight", "of kto"),
    (
        "",
        "rpo_alpha pref_ftx nll_loss_coef sft_loss_weight preference_loss_weight ld_alpha f_divergence_type "
        "f_alpha_divergence_coef use_weighting discopop_tau simpo_gamma loss_weights",
        "there is none here: dpo has one loss, without a part of sft",
    ),
    (
        "",
        "preference_average_log_probs sft_average_log_probs length_normalization",
        "there is none here: log-ratios are sums over the tokens, as in the papers",
    ),
    (
        "reference",
        "ref_model ref_pretrain reference_free ref_model_path precompute_ref_log_probs precompute_ref_batch_size",
        "a section: model: a HuggingFace directory",
    ),
    ("", "center_rewards_coefficient margin_loss", "there is none here: a row's `margin` is taken where it has one"),
    ("", "neftune_noise_alpha noisy_embedding_alpha", "there is none here: embeddings get no noise"),
    ("", "sync_ref_model ref_model_sync_steps", "there is none here: the reference stays what it is"),
    ("actor.lora", "finetuning_type", "a section for lora; without the section all weights are trained"),
    ("actor.lora.target_modules", "lora_target", "names as HuggingFace has them, or all-linear"),
    ("actor.lora.adapter_path", "adapter_name_or_path", "a directory of PEFT"),
    (
        "",
        "freeze_trainable_layers freeze_trainable_modules create_new_adapter quantization_bit quantization_method",
        "there is none here: adapters of actor.lora are trained, or all weights, in actor.dtype",
    ),
    ("actor.recompute", "disable_gradient_checkpointing", "none, selective or full, or a list of modules"),
    ("", "flash_attn attn_implementation use_liger_kernel enable_liger_kernel", "there is none here: the device says"),
    ("", "do_train do_eval do_predict plot_loss logging_steps overwrite_output_dir", "there is none here"),
    ("", "eos_token pad_token", "there is none here: they are those of the model's tokenizer"),
)
TABLE: Mapping[str, tuple[str, str]] = {key: (ours, note) for ours, theirs, note in ROWS for key in theirs.split()}

ROLES: tuple[tuple[str, str], ...] = (
    ("reward_model", "reward_model"),
    ("reward", "reward_model"),
    ("reference", "reference"),
    ("ref", "reference"),
)
# what runs on fixed data have nothing of: the start of a key of ours
ABSENT = (
    *("sampling", "rollout", "reward", "critic", "algorithm.", "watchdog.generate_seconds"),
    *(
        "data.prompts_per_iteration",
        "data.max_prompt_length",
        "data.overlong_prompts",
        "data.prompt_key",
        "data.environment",
    ),
    *("data.chat_template=", "metrics.num_samples", "metrics.eval_reward"),
)
NOTHING = "there is none here: this algorithm trains on the rows of files and generates nothing"
