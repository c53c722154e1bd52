"""Published models by name, as the configuration files that their authors publish."""

from __future__ import annotations

from typing import Any

_Config = dict[str, Any]


def _llama(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv: int = 0, **more: Any
) -> _Config:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv or heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "hidden_act": "silu",
        **more,
    }


def _gpt2(hidden: int, layers: int, heads: int) -> _Config:
    return {
        "model_type": "gpt2",
        "n_embd": hidden,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": 50257,
        "n_positions": 1024,
        "activation_function": "gelu_new",
    }


def _bert(hidden: int, layers: int, heads: int, **more: Any) -> _Config:
    return {
        "model_type": "bert",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
        "hidden_act": "gelu",
        **more,
    }


def _seq2seq(kind: str, hidden: int, layers: int, heads: int, vocab: int, **more: Any) -> _Config:
    return {
        "model_type": kind,
        "d_model": hidden,
        "encoder_layers": layers,
        "decoder_layers": layers,
        "encoder_attention_heads": heads,
        "decoder_attention_heads": heads,
        "encoder_ffn_dim": 4 * hidden,
        "decoder_ffn_dim": 4 * hidden,
        "vocab_size": vocab,
        "activation_function": "gelu",
        **more,
    }


def _whisper(hidden: int, layers: int, heads: int, vocab: int = 51865, mels: int = 80) -> _Config:
    own = {"num_mel_bins": mels, "max_source_positions": 1500, "max_target_positions": 448}
    return _seq2seq("whisper", hidden, layers, heads, vocab, **own)


def _gemma(
    kind: str, hidden: int, layers: int, heads: int, kv: int, ffn: int, head: int, vocab: int
) -> _Config:
    own = {"model_type": kind, "head_dim": head, "hidden_act": "gelu_pytorch_tanh"}
    return _llama(hidden, layers, heads, ffn, vocab, kv, **own)


def _deepseek(
    kind: str, hidden: int, layers: int, heads: int, ffn: int, vocab: int, **more: Any
) -> _Config:
    own = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    return _llama(hidden, layers, heads, ffn, vocab, model_type=kind, **own, **more)


def _opt(hidden: int, layers: int, heads: int, **more: Any) -> _Config:
    return {
        "model_type": "opt",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "ffn_dim": 4 * hidden,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        **more,
    }


def _mixture(
    kind: str,
    hidden: int,
    layers: int,
    heads: int,
    ffn: int,
    vocab: int,
    kv: int,
    *,
    experts: int,
    top_k: int,
    each: int = 0,
    **more: Any,
) -> _Config:
    """``each`` is the size of an expert where ``ffn`` is that of the dense layers."""
    own = {"num_experts": experts, "num_local_experts": experts, "num_experts_per_tok": top_k}
    if each:
        more["moe_intermediate_size"] = each
    return _llama(hidden, layers, heads, ffn, vocab, kv, model_type=kind, **own, **more)


def _qwen(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv: int, **more: Any
) -> _Config:
    return _llama(hidden, layers, heads, ffn, vocab, kv, **{"model_type": "qwen2", **more})


def _dinov2(hidden: int, layers: int, heads: int, **more: Any) -> _Config:
    return {
        "model_type": "dinov2",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "mlp_ratio": 4,
        "image_size": 518,
        "patch_size": 14,
        "hidden_act": "gelu",
        **more,
    }


def _t5(hidden: int, layers: int, heads: int, ffn: int, head: int = 64, **more: Any) -> _Config:
    return {
        "model_type": "t5",
        "d_model": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "d_ff": ffn,
        "d_kv": head,
        "vocab_size": 32128,
        **more,
    }


_FLAN: _Config = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
_QWEN3: _Config = {"model_type": "qwen3", "head_dim": 128}
_DEBERTA_V3: _Config = {
    "model_type": "deberta-v2",
    "vocab_size": 128100,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 256,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_biased_input": False,
    "type_vocab_size": 0,
}
_ROBERTA: _Config = {
    "model_type": "roberta",
    "vocab_size": 50265,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
}
_NEOX: _Config = {"model_type": "gpt_neox", "vocab_size": 50432}

MODELS: dict[str, _Config] = {
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    "bert-base": _bert(768, 12, 12),
    "bert-large": _bert(1024, 24, 16),
    "llama-7b": _llama(4096, 32, 32, 11008, 32000),
    "llama-13b": _llama(5120, 40, 40, 13824, 32000),
    "llama-3-8b": _llama(4096, 32, 32, 14336, 128256, 8),
    "llama-3-70b": _llama(8192, 80, 64, 28672, 128256, 8),
    "llama-3.2-1b": _llama(2048, 16, 32, 8192, 128256, 8, head_dim=64, tie_word_embeddings=True),
    "llama-3.2-3b": _llama(3072, 28, 24, 8192, 128256, 8, head_dim=128, tie_word_embeddings=True),
    "tinyllama-1.1b": _llama(2048, 22, 32, 5632, 32000, 4),
    "mistral-7b": _llama(4096, 32, 32, 14336, 32000, 8, model_type="mistral"),
    "mixtral-8x7b": _llama(
        4096,
        32,
        32,
        14336,
        32000,
        8,
        model_type="mixtral",
        num_local_experts=8,
        num_experts_per_tok=2,
    ),
    "qwen2.5-7b": _llama(3584, 28, 28, 18944, 152064, 4, model_type="qwen2"),
    "vit-base": {
        "model_type": "vit",
        "architectures": ["ViTForImageClassification"],
        "num_labels": 1000,
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "intermediate_size": 3072,
        "image_size": 224,
        "patch_size": 16,
        "hidden_act": "gelu",
    },
    "bart-base": _seq2seq("bart", 768, 6, 12, 50265, max_position_embeddings=1024),
    "bart-large": _seq2seq("bart", 1024, 12, 16, 50265, max_position_embeddings=1024),
    "mbart-large-50": _seq2seq("mbart", 1024, 12, 16, 250054, max_position_embeddings=1024),
    "whisper-tiny": _whisper(384, 4, 6),
    "whisper-base": _whisper(512, 6, 8),
    "whisper-small": _whisper(768, 12, 12),
    "whisper-medium": _whisper(1024, 24, 16),
    "whisper-large-v2": _whisper(1280, 32, 20),
    "whisper-large-v3": _whisper(1280, 32, 20, 51866, 128),
    "deberta-v3-base": _bert(768, 12, 12, **_DEBERTA_V3),
    "deberta-v3-large": _bert(1024, 24, 16, **_DEBERTA_V3),
    "roberta-base": _bert(768, 12, 12, **_ROBERTA),
    "roberta-large": _bert(1024, 24, 16, **_ROBERTA),
    "xlm-roberta-base": _bert(
        768, 12, 12, **{**_ROBERTA, "model_type": "xlm-roberta", "vocab_size": 250002}
    ),
    "electra-base": _bert(768, 12, 12, model_type="electra", embedding_size=768),
    "albert-base-v2": _bert(
        768,
        12,
        12,
        model_type="albert",
        embedding_size=128,
        vocab_size=30000,
        hidden_act="gelu_new",
    ),
    "gemma-2b": _gemma("gemma", 2048, 18, 8, 1, 16384, 256, 256000),
    "gemma-7b": _gemma("gemma", 3072, 28, 16, 16, 24576, 256, 256000),
    "gemma-2-2b": _gemma("gemma2", 2304, 26, 8, 4, 9216, 256, 256000),
    "gemma-2-9b": _gemma("gemma2", 3584, 42, 16, 8, 14336, 256, 256000),
    "gemma-2-27b": _gemma("gemma2", 4608, 46, 32, 16, 36864, 128, 256000),
    "gemma-3-1b": _gemma("gemma3_text", 1152, 26, 4, 1, 6912, 256, 262144),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-6.7b": _opt(4096, 32, 32),
    "pythia-6.9b": _bert(4096, 32, 32, **_NEOX, max_position_embeddings=2048),
    "gpt-neox-20b": _bert(6144, 44, 64, **_NEOX, max_position_embeddings=2048),
    "deepseek-v2-lite": _deepseek(
        "deepseek_v2",
        2048,
        27,
        16,
        10944,
        102400,
        n_routed_experts=64,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
    ),
    "deepseek-v2": _deepseek(
        "deepseek_v2",
        5120,
        60,
        128,
        12288,
        102400,
        q_lora_rank=1536,
        n_routed_experts=160,
        num_experts_per_tok=6,
        n_shared_experts=2,
        moe_intermediate_size=1536,
        first_k_dense_replace=1,
    ),
    "deepseek-v3": _deepseek(
        "deepseek_v3",
        7168,
        61,
        128,
        18432,
        129280,
        q_lora_rank=1536,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
    ),
    "llama-3.1-405b": _llama(16384, 126, 128, 53248, 128256, 8),
    "codellama-34b": _llama(8192, 48, 64, 22016, 32000, 8),
    "yi-34b": _llama(7168, 60, 56, 20480, 64000, 8),
    "smollm2-135m": _llama(576, 30, 9, 1536, 49152, 3, tie_word_embeddings=True),
    "smollm2-360m": _llama(960, 32, 15, 2560, 49152, 5, tie_word_embeddings=True),
    "smollm2-1.7b": _llama(2048, 24, 32, 8192, 49152, tie_word_embeddings=True),
    "smollm3-3b": _llama(2048, 36, 16, 11008, 128256, 4, model_type="smollm3"),
    "mistral-nemo-12b": _llama(5120, 40, 32, 14336, 131072, 8, head_dim=128, model_type="mistral"),
    "mistral-small-24b": _llama(5120, 40, 32, 32768, 131072, 8, head_dim=128, model_type="mistral"),
    "mixtral-8x22b": _mixture("mixtral", 6144, 56, 48, 16384, 32000, 8, experts=8, top_k=2),
    "qwen2.5-0.5b": _qwen(896, 24, 14, 4864, 151936, 2, tie_word_embeddings=True),
    "qwen2.5-1.5b": _qwen(1536, 28, 12, 8960, 151936, 2, tie_word_embeddings=True),
    "qwen2.5-3b": _qwen(2048, 36, 16, 11008, 151936, 2, tie_word_embeddings=True),
    "qwen2.5-14b": _qwen(5120, 48, 40, 13824, 152064, 8),
    "qwen2.5-32b": _qwen(5120, 64, 40, 27648, 152064, 8),
    "qwen2.5-72b": _qwen(8192, 80, 64, 29568, 152064, 8),
    "qwen3-0.6b": _qwen(1024, 28, 16, 3072, 151936, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-1.7b": _qwen(2048, 28, 16, 6144, 151936, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-4b": _qwen(2560, 36, 32, 9728, 151936, 8, **_QWEN3, tie_word_embeddings=True),
    "qwen3-8b": _qwen(4096, 36, 32, 12288, 151936, 8, **_QWEN3),
    "qwen3-14b": _qwen(5120, 40, 40, 17408, 151936, 8, **_QWEN3),
    "qwen3-32b": _qwen(5120, 64, 64, 25600, 151936, 8, **_QWEN3),
    "qwen3-30b-a3b": _mixture(
        "qwen3_moe", 2048, 48, 32, 6144, 151936, 4, experts=128, top_k=8, each=768, head_dim=128
    ),
    "qwen3-235b-a22b": _mixture(
        "qwen3_moe", 4096, 94, 64, 12288, 151936, 4, experts=128, top_k=8, each=1536, head_dim=128
    ),
    "qwen1.5-moe-a2.7b": _mixture(
        "qwen2_moe",
        2048,
        24,
        16,
        5632,
        151936,
        16,
        experts=60,
        top_k=4,
        each=1408,
        shared_expert_intermediate_size=5632,
    ),
    "olmoe-1b-7b": _mixture("olmoe", 2048, 16, 16, 1024, 50304, 16, experts=64, top_k=8),
    "phi-3.5-moe": _mixture(
        "phimoe",
        4096,
        32,
        32,
        6400,
        32064,
        8,
        experts=16,
        top_k=2,
        attention_bias=True,
        lm_head_bias=True,
    ),
    "gpt-oss-20b": _mixture(
        "gpt_oss", 2880, 24, 64, 2880, 201088, 8, experts=32, top_k=4, head_dim=64
    ),
    "gpt-oss-120b": _mixture(
        "gpt_oss", 2880, 36, 64, 2880, 201088, 8, experts=128, top_k=4, head_dim=64
    ),
    "phi-3-mini": _llama(3072, 32, 32, 8192, 32064, model_type="phi3"),
    "phi-4": _llama(5120, 40, 40, 17920, 100352, 10, model_type="phi3"),
    "gemma-3-12b": _gemma("gemma3_text", 3840, 48, 16, 8, 15360, 256, 262208),
    "olmo-7b": _llama(4096, 32, 32, 11008, 50304, model_type="olmo"),
    "olmo-2-7b": _llama(4096, 32, 32, 11008, 100352, model_type="olmo2"),
    "granite-3.0-2b": _llama(
        2048, 40, 32, 8192, 49155, 8, model_type="granite", tie_word_embeddings=True
    ),
    "granite-3.0-8b": _llama(
        4096, 40, 32, 12800, 49155, 8, model_type="granite", tie_word_embeddings=True
    ),
    "command-r": _llama(8192, 40, 64, 22528, 256000, model_type="cohere"),
    "command-r-plus": _llama(
        12288, 64, 96, 33792, 256000, 8, model_type="cohere", use_qk_norm=True
    ),
    "glm-4-9b-0414": _llama(4096, 40, 32, 13696, 151552, 2, head_dim=128, model_type="glm4"),
    "seed-oss-36b": _llama(5120, 64, 80, 27648, 155136, 8, head_dim=128, model_type="seed_oss"),
    "stablelm-3b-4e1t": _llama(2560, 32, 32, 6912, 50304, model_type="stablelm"),
    "starcoder2-3b": _llama(
        3072, 30, 24, 12288, 49152, 2, model_type="starcoder2", hidden_act="gelu_pytorch_tanh"
    ),
    "starcoder2-7b": _llama(
        4608, 32, 36, 18432, 49152, 4, model_type="starcoder2", hidden_act="gelu_pytorch_tanh"
    ),
    "starcoder": {
        **_gpt2(6144, 40, 48),
        "model_type": "gpt_bigcode",
        "n_inner": 24576,
        "vocab_size": 49152,
        "n_positions": 8192,
        "activation_function": "gelu",
    },
    "falcon-7b": {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
    },
    "mpt-7b": {
        "model_type": "mpt",
        "d_model": 4096,
        "n_layers": 32,
        "n_heads": 32,
        "vocab_size": 50432,
    },
    "modernbert-base": _llama(768, 22, 12, 1152, 50368, model_type="modernbert"),
    "modernbert-large": _llama(1024, 28, 16, 2624, 50368, model_type="modernbert"),
    "mpnet-base": _bert(
        768, 12, 12, model_type="mpnet", vocab_size=30527, max_position_embeddings=514
    ),
    "nomic-embed-text": _bert(768, 12, 12, model_type="nomic_bert", vocab_size=30528),
    "dinov2-base": _dinov2(768, 12, 12),
    "dinov2-large": _dinov2(1024, 24, 16),
    "dinov2-giant": _dinov2(1536, 40, 24, use_swiglu_ffn=True),
    "distilbert-base": {
        "model_type": "distilbert",
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
        "vocab_size": 30522,
        "max_position_embeddings": 512,
    },
    "t5-small": _t5(512, 6, 8, 2048),
    "t5-base": _t5(768, 12, 12, 3072),
    "t5-large": _t5(1024, 24, 16, 4096),
    "t5-3b": _t5(1024, 24, 32, 16384, 128),
    "t5-11b": _t5(1024, 24, 128, 65536, 128),
    "flan-t5-small": _t5(512, 8, 6, 1024, **_FLAN),
    "flan-t5-base": _t5(768, 12, 12, 2048, **_FLAN),
    "flan-t5-large": _t5(1024, 24, 16, 2816, **_FLAN),
    "flan-t5-xl": _t5(2048, 24, 32, 5120, **_FLAN),
    "flan-t5-xxl": _t5(4096, 24, 64, 10240, **_FLAN),
    "mistral-7b-v0.3": _llama(4096, 32, 32, 14336, 32768, 8, model_type="mistral"),
    "mamba-2.8b": {
        "model_type": "mamba",
        "hidden_size": 2560,
        "num_hidden_layers": 64,
        "state_size": 16,
        "vocab_size": 50280,
    },
    "mamba-codestral-7b": {
        "model_type": "mamba2",
        "hidden_size": 4096,
        "num_hidden_layers": 64,
        "num_heads": 128,
        "head_dim": 64,
        "n_groups": 8,
        "vocab_size": 32768,
    },
    "llava-1.5-7b": {
        "model_type": "llava",
        "text_config": {"model_type": "llama", "vocab_size": 32064},
        "vision_config": {
            "model_type": "clip_vision_model",
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_hidden_layers": 24,
            "image_size": 336,
            "patch_size": 14,
        },
    },
}
