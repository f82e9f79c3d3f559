"""Models of transformers with tiny configurations: a batch of three, and what they compute of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

Batch = tuple[torch.Tensor, ...]
Apply = Callable[..., torch.Tensor]

DECODERS = (
    *("GPT2", "GPTNeo", "GPTNeoX", "GPTJ", "OPT", "Bloom", "Falcon", "Llama", "Mistral", "Mixtral", "Qwen2", "Qwen3"),
    *("Qwen2Moe", "Qwen3Moe", "Gemma", "Gemma2", "Gemma3", "Phi", "Phi3", "StableLm", "Starcoder2", "Olmo", "Olmo2"),
    *("Olmoe", "GptOss", "Cohere", "Granite", "GraniteMoe", "Mamba", "XGLM", "CodeGen", "CTRL", "BioGpt"),
    *("DeepseekV3", "Persimmon", "Nemotron", "Helium", "Glm", "SmolLM3", "Mpt"),
)
ENCODERS = (
    *("Bert", "Roberta", "Electra", "DistilBert", "Albert", "Deberta", "DebertaV2", "MobileBert", "SqueezeBert"),
    *(
        "XLMRoberta",
        "Camembert",
        "ConvBert",
        "FNet",
        "MPNet",
        "ModernBert",
        "Longformer",
        "Funnel",
        "LayoutLM",
        "Ernie",
    ),
    *("Nystromformer", "RoFormer", "XLNet"),
)
PAIRS = ("T5", "Bart", "MBart", "Pegasus", "Marian", "M2M100", "Blenderbot", "PLBart")
VISION = (
    *("ViT", "DeiT", "Beit", "Swin", "ResNet", "ConvNext", "ConvNextV2", "RegNet", "MobileViT", "PoolFormer"),
    *("Segformer", "EfficientNet", "MobileNetV2", "Dinov2", "ViTMSN"),
)
FAMILIES = (*DECODERS, *ENCODERS, *PAIRS, *VISION)

# Each configuration takes those of these fields that it has.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "embedding_size", "dim", "word_embed_proj_dim"), 16),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), 24),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_attention_heads", "num_key_value_heads", "n_head", "num_heads"), 2),
    **dict.fromkeys(("n_heads", "encoder_attention_heads", "decoder_attention_heads", "num_experts_per_tok"), 2),
    **dict.fromkeys(("type_vocab_size", "expand"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "q_lora_rank", "kv_lora_rank", "moe_intermediate_size", "sliding_window"), 8),
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim", "state_size", "conv_kernel", "time_step_rank"), 4),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 32),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "activation_dropout", "dropout_rate"), 0.0),
    **{"vocab_size": 37, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1},
    **{"image_size": 16, "patch_size": 8, "num_channels": 3, "window_size": 4},
    "attention_types": [[["global", "local"], 1]],
}
_TWO_STAGES = {"hidden_sizes": [8, 16], "depths": [1, 1]}
_SIZES_OF: dict[str, dict[str, Any]] = {
    "Gemma2": {"query_pre_attn_scalar": 8},
    "CTRL": {"n_embd": 16, "dff": 24},
    "Longformer": {"attention_window": 4},
    "Funnel": {"block_sizes": [1, 1], "d_inner": 24, "d_head": 8, "n_head": 2},
    "XLNet": {"n_head": 2, "d_inner": 24},
    "MobileBert": {"true_hidden_size": 16, "intra_bottleneck_size": 16},
    "SqueezeBert": {f"{name}_groups": 1 for name in ("q", "k", "v", "post_attention", "intermediate", "output")},
    "ConvBert": {"conv_kernel_size": 3},
    "Swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 8,
        "depths": [1, 1],
        "num_heads": [1, 2],
        "window_size": 2,
    },
    "ResNet": {"embedding_size": 8, "layer_type": "basic", **_TWO_STAGES},
    "ConvNext": {"num_stages": 2, "patch_size": 4, **_TWO_STAGES},
    "ConvNextV2": {"num_stages": 2, "patch_size": 4, **_TWO_STAGES},
    "RegNet": {"embedding_size": 8, "groups_width": 4, **_TWO_STAGES},
    "MobileViT": {
        **{"image_size": 64, "patch_size": 2, "hidden_sizes": [16, 16, 16], "num_attention_heads": 2},
        "neck_hidden_sizes": [8, 8, 8, 8, 8, 8, 16],
    },
    "PoolFormer": {
        **{"hidden_sizes": [8, 8], "depths": [1, 1], "num_encoder_blocks": 2},
        **{"patch_sizes": [4, 2], "strides": [4, 2], "padding": [1, 1]},
    },
    "Segformer": {
        **{"image_size": 32, "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]},
        **{"num_attention_heads": [1, 1, 2, 2], "decoder_hidden_size": 16},
    },
    "EfficientNet": {"image_size": 32, "width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "MobileNetV2": {"image_size": 32, "depth_multiplier": 0.35},
}
_HEADS = {
    DECODERS: ("ForCausalLM", "LMHeadModel"),
    ENCODERS: ("ForSequenceClassification",),
    PAIRS: ("ForConditionalGeneration", "MTModel"),
    VISION: ("ForImageClassification",),
}


def make(name: str) -> tuple[nn.Module, Batch, Apply]:
    """A model in evaluation mode, a batch of three, and ``apply(model, *batch) -> [3, ...]``."""
    torch.manual_seed(0)
    heads = next(heads for names, heads in _HEADS.items() if name in names)
    head = next(head for head in heads if hasattr(transformers, name + head))
    model = getattr(transformers, name + head)(_configuration(name)).eval()
    if name in VISION:
        size = getattr(model.config, "image_size", 32)
        size = 32 if name in ("ResNet", "ConvNext", "ConvNextV2", "RegNet", "PoolFormer") else size
        return model, (torch.randn(3, 3, size, size),), lambda model, x: model(pixel_values=x).logits
    ids, targets = torch.randint(3, 37, (3, 8)), torch.randint(3, 37, (3, 5))
    if name in PAIRS:
        apply = lambda model, x, y: model(input_ids=x, decoder_input_ids=y, use_cache=False).logits
        return model, (ids, targets), apply
    if name in DECODERS:
        return model, (ids,), lambda model, x: model(input_ids=x, use_cache=False).logits
    return model, (ids,), lambda model, x: model(input_ids=x).logits


def _configuration(name: str) -> Any:
    kind = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else name + "Config")
    fields = {*inspect.signature(kind).parameters}.union(
        *(getattr(base, "__annotations__", {}) for base in kind.__mro__)
    )
    return kind(**({k: v for k, v in _SIZES.items() if k in fields} | _SIZES_OF.get(name, {})))
