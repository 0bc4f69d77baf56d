"""Names that people type: the nearest option to a misspelled one, to a short one, to another toolkit's."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "grid.tensor": ("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size",
                    "tensor_model_parallel", "model_parallel_size"),
    "grid.pipeline": ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size",
                      "pipeline_parallel_degree"),
    "grid.data": ("dp", "dp_size", "data_parallel_size", "data_parallel_degree"),
    "grid.context": ("cp", "cp_size", "context_parallel", "context_parallel_size"),
    "grid.sequence_parallel": ("sp", "sequence_parallel", "enable_sequence_parallel"),
    "grid.overlap": ("tp_comm_overlap", "async_tp", "enable_async_tensor_parallel", "enable_async_tp"),
    "pipeline.schedule": ("pipeline_schedule", "pp_schedule", "pipeline_parallel_schedule", "pipeline_schedule_csv"),
    "pipeline.chunks": ("virtual_pipeline_model_parallel_size", "vpp", "vp", "virtual_stages", "model_chunks",
                        "num_virtual_stages_per_pipeline_rank", "num_layers_per_virtual_pipeline_stage"),
    "pipeline.layers_per_stage": ("pipeline_model_parallel_layout", "split_points", "pipeline_parallel_split_points",
                                  "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                                  "pipeline_parallel_layers_per_stage", "num_layers_per_stage"),
    "recompute.mode": ("recompute_granularity", "activation_checkpointing", "gradient_checkpointing",
                       "recompute_activations", "ac", "act_ckpt"),
    "recompute.layers": ("recompute_num_layers",),
    "recompute.operations": ("recompute_modules", "selective_ac_option", "ops_to_recompute"),
    "recompute.budget_bytes": ("memory_budget", "activation_memory_budget"),
    "data_parallel.zero": ("zero", "zero_stage", "use_distributed_optimizer", "fsdp"),
    "data_parallel.shard_size": ("hybrid_shard_size", "num_distributed_optimizer_instances", "hsdp",
                                 "data_parallel_shard_degree"),
    "data_parallel.reduce": ("reduce_each", "no_sync", "overlap_grad_reduce"),
    "data_parallel.bucket_bytes": ("bucket_size", "bucket_cap_mb", "ddp_bucket_size", "reduce_bucket_size"),
    "precision.mode": ("precision", "dtype", "bf16", "fp16", "fp32", "torch_dtype", "mixed_precision", "amp"),
    "precision.loss_scale": ("loss_scaling", "initial_loss_scale", "init_scale", "initial_scale_power"),
    "precision.loss_scale_interval": ("loss_scale_window", "growth_interval", "scale_window"),
    "model.num_layers": ("layers", "n_layer", "n_layers", "num_hidden_layers", "depth"),
    "model.hidden_size": ("hidden", "n_embd", "d_model", "hidden_dim", "embed_dim", "model_dim", "dim"),
    "model.num_attention_heads": ("heads", "n_head", "n_heads", "num_heads"),
    "model.num_key_value_heads": ("kv_heads", "n_kv_heads", "num_kv_heads", "num_query_groups", "n_query_groups"),
    "model.head_dim": ("kv_channels", "head_size"),
    "model.ffn_hidden_size": ("ffn", "ffn_size", "intermediate_size", "n_inner", "d_ff", "mlp_dim", "ffn_dim"),
    "model.vocab_size": ("vocab", "padded_vocab_size", "vocabulary_size"),
    "model.max_position_embeddings": ("n_positions", "n_ctx", "block_size", "max_sequence_length"),
    "model.normalization": ("norm", "norm_type"),
    "model.norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"),
    "model.position": ("position_embedding_type",),
    "model.rope_theta": ("rotary_base", "rope_base"),
    "model.rope_scaling": ("rope_scaling_factor", "rotary_scaling"),
    "model.rotary_fraction": ("rotary_pct", "partial_rotary_factor", "rotary_percent"),
    "model.activation": ("hidden_act", "activation_function", "act", "swiglu"),
    "model.bias": ("use_bias", "add_bias_linear", "attention_bias"),
    "model.qkv_bias": ("add_qkv_bias",),
    "model.parallel_residual": ("use_parallel_residual", "gpt_j_residual", "parallel_attn"),
    "model.tie_embeddings": ("tie_word_embeddings", "untie_embeddings_and_output_weights", "weight_tying", "tied"),
    "model.dropout": ("hidden_dropout", "resid_pdrop", "embd_pdrop", "residual_dropout"),
    "model.attention_dropout": ("attn_pdrop", "attn_dropout"),
    "model.init_std": ("init_method_std", "initializer_range"),
    "train.steps": ("steps", "train_iters", "max_steps", "max_iters", "iterations", "num_steps", "num_train_steps"),
    "train.stop_after": ("exit_interval", "stop_at"),
    "train.global_batch_size": ("gbs", "bs", "batch_size", "global_batch", "train_batch_size"),
    "train.micro_batch_size": ("mbs", "micro_batch", "microbatch_size", "microbatch", "per_device_train_batch_size",
                               "per_device_batch_size", "device_batch_size", "train_micro_batch_size_per_gpu",
                               "gradient_accumulation_steps", "grad_acc", "grad_accumulation_steps"),
    "train.sequence_length": ("seq_len", "seq_length", "sequence_len", "seqlen", "max_seq_length", "max_length"),
    "train.seed": ("seed", "random_seed"),
    "kernels.backend": ("kernel_backend", "use_triton", "use_apex", "use_liger_kernel", "fused_kernels",
                        "attn_implementation", "apply_rope_fusion", "bias_activation_fusion"),
    "kernels.chunked_loss": ("fused_linear_cross_entropy", "cross_entropy_loss_fusion", "chunked_cross_entropy"),
    "train.compile": ("compile", "torch_compile", "use_compile"),
    "optimizer.name": ("optim", "optimizer_type"),
    "optimizer.lr": ("lr", "learning_rate", "max_lr"),
    "optimizer.betas": ("adam_beta1", "adam_beta2", "beta1", "beta2"),
    "optimizer.eps": ("adam_eps", "adam_epsilon"),
    "optimizer.weight_decay": ("wd",),
    "optimizer.ns_steps": ("muon_ns_steps", "muon_num_ns_steps", "newton_schulz_steps"),
    "optimizer.momentum": ("sgd_momentum", "muon_momentum"),
    "optimizer.grad_clip": ("clip_grad", "max_grad_norm", "max_norm", "clip", "gradient_clip_val", "grad_norm_clip"),
    "lr_schedule.name": ("scheduler", "lr_scheduler", "lr_scheduler_type", "lr_decay_style", "schedule"),
    "lr_schedule.warmup_steps": ("warmup", "warmup_iters", "lr_warmup_iters", "num_warmup_steps"),
    "lr_schedule.decay_steps": ("lr_decay_iters", "decay_iters"),
    "lr_schedule.min_ratio": ("min_lr", "min_lr_ratio", "min_lr_rate"),
    "data.path": ("data_path", "dataset", "train_data_path", "train_file", "dataset_path", "dataset_name"),
    "data.tokenizer": ("tokenizer", "tokenizer_model", "tokenizer_path", "tokenizer_type", "vocab_file"),
    "data.held_out": ("split", "val_split", "validation_split", "valid_size"),
    "data.directory": ("data_cache_path", "cache_dir", "data_dir"),
    "evaluation.every": ("eval_interval", "eval_steps", "eval_every", "val_check_interval"),
    "evaluation.steps": ("eval_iters", "limit_val_batches", "eval_batches"),
    "checkpoint.every": ("save_interval", "save_steps", "save_every", "checkpoint_interval"),
    "checkpoint.asynchronous": ("async_save", "async", "async_mode", "asynchronous_save"),
    "checkpoint.keep": ("save_total_limit", "keep_last", "keep_last_n", "keep_latest_k", "max_to_keep", "save_top_k"),
    "checkpoint.keep_every": ("keep_interval", "save_retain_interval", "keep_every_n_steps"),
    "checkpoint.keep_best": ("save_best", "load_best_model_at_end"),
    "checkpoint.keep_metric": ("metric_for_best_model", "monitor"),
    "checkpoint.strict": ("strict", "dist_ckpt_strictness", "strict_load"),
    "launch.preempted_exit": ("exit_signal_handler", "exit_signal", "preempted_exit_code"),
    "checkpoint.resume": ("load", "resume", "resume_from_checkpoint", "load_checkpoint"),
    "checkpoint.init_from": ("init_from", "pretrained", "pretrained_checkpoint", "finetune", "model_name_or_path",
                             "initial_load_path", "load_weights", "warm_start"),
    "logging.every": ("log_interval", "logging_steps", "log_every", "log_every_n_steps"),
    "logging.tensorboard": ("tensorboard_dir", "tensorboard", "report_to"),
    "logging.profile": ("profile", "profiler"),
    "launch.processes": ("nproc", "nproc_per_node", "num_processes", "world_size", "nprocs", "num_gpus", "gpus"),
    "run.directory": ("output_dir", "out_dir", "save", "save_dir", "run_dir", "work_dir", "workdir"),
}  # fmt: skip

_NOT_BUILT: Mapping[str, str] = {
    "data.packing": "packing modes; samples run over the ends of documents",
    "logging.wandb": "Weights & Biases; a logger of your own comes in by plugins=",
    "cluster": "descriptions of clusters",
}


def not_built_value(key: str, value: Any) -> str | None:
    """Why a value that the design has a place for is refused for now; None for any other."""
    if isinstance(value, (dict, list)):
        return None
    if key == "grid.context" and isinstance(value, int) and value > 1:
        return "context parallelism is not built yet; set grid.context=1"
    return None


def not_built(key: str) -> str | None:
    """Why ``key``, which this design has a place for, is refused for now; None for any other key."""
    section = key.partition(".")[0]
    reason = _NOT_BUILT.get(key) or _NOT_BUILT.get(section)
    return None if reason is None else f"{key}: not built yet ({reason}); leave it out"


def nearest_key(key: str, known: Iterable[str]) -> str | None:
    """The option that was most likely meant, among ``known``; None where nothing is near."""
    known = list(known)
    name = key.strip("+~").lower().replace("-", "_")
    leaf = name.rpartition(".")[2]
    for candidate, aliases in _ALIASES.items():
        if candidate in known and (name in aliases or leaf in aliases):
            return candidate
    by_leaf = [candidate for candidate in known if candidate.rpartition(".")[2] == leaf]
    section = name.partition(".")[0]
    same = [
        candidate
        for candidate in by_leaf
        if difflib.SequenceMatcher(None, candidate.partition(".")[0], section).ratio() > 0.5
    ]
    if same or len(by_leaf) == 1:
        return (same or by_leaf)[0]
    return _most_similar(name, leaf, known)


def _most_similar(name: str, leaf: str, known: list[str]) -> str | None:
    def likeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, name, candidate).ratio()
        last = difflib.SequenceMatcher(None, leaf, candidate.rpartition(".")[2]).ratio()
        same_section = "." in name and candidate.partition(".")[0] == name.partition(".")[0]
        return max(whole, last - 0.05) + (0.1 if same_section else 0.0)

    aliases = {alias: candidate for candidate, names in _ALIASES.items() if candidate in known for alias in names}
    close = difflib.get_close_matches(leaf, aliases, 1, 0.85)
    best = max(known, key=likeness, default=None)
    if best is not None and likeness(best) >= 0.7:
        return best
    return aliases[close[0]] if close else None


def is_misspelling(key: str, nearest: str) -> bool:
    """Whether ``key`` is so near to an option, or such a usual name of it, that it surely was meant."""
    leaf = key.rpartition(".")[2]
    return leaf in _ALIASES.get(nearest, ()) or difflib.SequenceMatcher(None, key, nearest).ratio() >= 0.85


def unknown_key(key: str, known: Iterable[str], written: str | None = None) -> str:
    """The refusal of an option that does not exist.

    Args:
        key: as in the configuration, ``section.name``.
        known: every key that exists.
        written: as it was typed, with its value and prefix.
    """
    unbuilt = not_built(key)
    if unbuilt:
        return unbuilt
    nearest = nearest_key(key, known)
    hint = f"nearest: {nearest}" if nearest else "docs/configuration.md lists all"
    return f"{written or key}: there is no option {key.lstrip('+~')}; {hint}"


def nearest_choice(value: Any, choices: Iterable[str]) -> str:
    """The nearest of a few words, and all of them."""
    choices = list(choices)
    if not choices:
        return "there are none"
    close = difflib.get_close_matches(str(value).lower(), choices, 1, 0.4)
    return (f"nearest: {close[0]}; " if close else "") + f"there are {', '.join(choices)}"
