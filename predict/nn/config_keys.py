"""What becomes of a key of config.json that no family read: see ConfigReader.check_unread.

A key is read by the family, or stands in UNREAD, or in the family's own UNREAD, or is not known. Of
those that are not known, one whose name has a word of RESULTS is refused; the others are noted. A
value that switches something off (null, false, 0, an empty list, a factor of 1) says nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

# Keys that change no result here, by why.
_UNREAD: Mapping[str, str] = {
    "names, and what tools write": """
        _attn_implementation _attn_implementation_autoset _attn_implementation_internal
        _commit_hash _experts_implementation_internal _name_or_path architectures
        attn_implementation auto_map cache_implementation experts_implementation
        keys_to_ignore_at_inference model_type name_or_path paddlenlp_version return_dict
        return_dict_in_generate torchscript transformers_version unsloth_fixed unsloth_version""",
    "types of numbers, which --dtype and the weights say": """
        attention_softmax_in_fp32 bf16 dtype fp16 fp32 fp32_residual_connection
        moe_router_dtype reorder_and_upcast_attn router_dtype slow_but_exact softmax_in_fp32
        torch_dtype use_bfloat16""",
    "read elsewhere: the layout of weights, the tokenizer, the chat format": """
        bos_token bos_token_id compression_config eos_token eos_token_id pad_token pad_token_id
        quantization_config sep_token_id tokenizer_class unk_token unk_token_id z_loss_weight""",
    "other tasks than text from text": """
        add_cross_attention boi_token_index chunk_size_feed_forward cross_attention_hidden_size
        decoder_start_token_id eoi_token_index finetuning_task id2label image_token_id
        image_token_index is_decoder is_encoder_decoder label2id mm_tokens_per_image
        multimodal_projector_bias num_choices num_image_tokens num_labels prefix_projection
        problem_type projector_hidden_act pruned_heads spatial_merge_size summary_activation
        summary_first_dropout summary_proj_to_labels summary_type summary_use_proj
        task_specific_params tf_legacy_loss tie_encoder_decoder type_vocab_size vision_config
        vision_feature_layer""",
    "what is given back": """
        output_attentions output_hidden_states output_predict output_router_logits output_scores
        use_cache""",
    "sampling, which flags and generation_config.json say": """
        bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping
        encoder_no_repeat_ngram_size exponential_decay_length_penalty forced_bos_token_id
        forced_eos_token_id length_penalty max_length max_new_tokens min_length
        no_repeat_ngram_size num_beam_groups num_beams num_return_sequences prefix
        remove_invalid_values repetition_penalty suppress_tokens temperature top_k top_p
        typical_p""",
    "training": """
        aux_loss_alpha dpo_config ep_size gradient_checkpointing ignore_index ignored_index init_std
        initializer_factor initializer_range kto_config layerdrop num_nextn_predict_lambda
        router_aux_loss_coef router_jitter_noise
        router_z_loss_coef seq_aux""",
    "how it is computed, and on how many devices": """
        apply_query_key_layer_scaling bias_dropout_fusion immediate_clear_past_key_value
        masked_softmax_fusion mp_degree num_partitions onnx_safe pipeline_parallel_degree
        pretraining_tp sequence_parallel skip_bias_add skip_bias_add_qkv tensor_parallel_degree
        tensor_parallel_output tensor_parallel_rank use_fast_layer_norm use_dualpipev
        use_last_token_for_generation virtual_pp_degree""",
    # As in transformers, whose class for another family does not have them.
    "sizes, windows and epsilons that some families have, or that are switched off": """
        head_dim hidden_act kv_channels layer_norm_eps layer_norm_epsilon layernorm_epsilon
        max_window_layers model_max_length multi_query n_ctx n_group norm_eps norm_epsilon
        num_key_value_heads num_kv_heads num_ln_in_parallel_attn offset_alibi parallel_attn
        qk_head_dim rms_norm_eps rope_local_base_freq rope_scaling_factor rope_theta seq_length
        sliding_window sliding_window_pattern topk_group use_sliding_window
        weight_share_add_bias""",
}
UNREAD = frozenset(" ".join(_UNREAD.values()).split())
# Of objects that say how positions turn: what other kinds than the named one read.
ROPE_UNREAD = (
    *("rope_type", "type", "finetuned", "short_factor", "long_factor"),
    "max_position_embeddings",  # that of the file's top level counts
)
# Names of training, and of other ways to the same result.
_UNREAD_NAMES = re.compile(
    r".*dropout.*|.*_pdrop|.*recompute.*|.*_parallel_degree|(use_)?(flash|fuse|mem_efficient)\w*|"
    r"use_cache_\w+|long_sequence_\w+|\w*_token_id|rope_fusion_level"
)
RESULTS = re.compile(
    "activation|alibi|bidirectional|bias|cap(ping|s)?(_|$)|causal|clamp|clip|compress|expert|factor|"
    "gate|logit|moe|multiplier|norm|per_layer|quant|residual|rope|rotary|scal(e|ing)|sink|sparse|"
    "temperature|top_?k|window"
)
_FACTOR = re.compile(r"scal(e|ing)$|multiplier$|factor$|ratio$|scale_")
# Keys that say something by false, or by what they hold, of families that do not read them.
_SILENT: Mapping[str, Callable[[Any], bool]] = {
    "is_causal": lambda value: value is True,
    "use_causal_mask": lambda value: value is True,
    "layer_types": lambda value: value is None or {*map(str, value)} == {"full_attention"},
}


def is_known(key: str) -> bool:
    """Whether a key changes no result that is not read."""
    return key in UNREAD or _UNREAD_NAMES.fullmatch(key) is not None


def changes_results(key: str) -> bool:
    """Whether a key that is not known may, by its name."""
    return key in _SILENT or RESULTS.search(key) is not None


def says_something(key: str, value: Any) -> bool:
    """Whether a value asks for anything that would not be done without the key."""
    if key in _SILENT:
        return not _SILENT[key](value)
    is_one = isinstance(value, (int, float)) and value == 1 and not isinstance(value, bool)
    return bool(value) and not (is_one and _FACTOR.search(key))
