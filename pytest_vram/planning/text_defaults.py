"""What the language models inside multimodal configurations have where the file does not say.

transformers writes a nested ``text_config`` without the fields that equal its class's defaults:
LLaVA-1.5's has a vocabulary and nothing else, Gemma 3's no heads. These are the defaults of the
classes of transformers 5 (each ``configuration_*.py``); a test holds them together.
"""

from __future__ import annotations

from typing import Any

_Sizes = dict[str, Any]


def _sizes(
    hidden: int, layers: int, heads: int, ffn: int, vocab: int, kv: int = 0, **more: Any
) -> _Sizes:
    kv_heads = {"num_key_value_heads": kv} if kv else {}
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        **kv_heads,
        **more,
    }


_GEMMA2 = _sizes(2304, 26, 8, 9216, 256000, 4, head_dim=256)
_QWEN2_VL = _sizes(8192, 80, 64, 29568, 152064, 8)
_QWEN3 = _sizes(4096, 32, 32, 22016, 151936, 32, head_dim=128)

TEXT_DEFAULTS: dict[str, _Sizes] = {
    "llama": _sizes(4096, 32, 32, 11008, 32000),
    "mistral": _sizes(4096, 32, 32, 14336, 32000, 8),
    "ministral3": _sizes(4096, 34, 32, 14336, 131072, 8, head_dim=128),
    "mixtral": _sizes(4096, 32, 32, 14336, 32000, 8, num_local_experts=8, num_experts_per_tok=2),
    "qwen2": _sizes(4096, 32, 32, 22016, 151936, 32),
    "qwen2_vl_text": _QWEN2_VL,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": _QWEN3,
    "gemma": _sizes(3072, 28, 16, 24576, 256000, 16, head_dim=256),
    "gemma2": _GEMMA2,
    "gemma3_text": {**_GEMMA2, "vocab_size": 262208},
    "phi3": _sizes(3072, 32, 32, 8192, 32064),
    "cohere2": _sizes(8192, 40, 64, 22528, 256000),
    "llama4_text": _sizes(
        5120,
        48,
        40,
        8192,
        202048,
        8,
        head_dim=128,
        intermediate_size_mlp=16384,
        num_local_experts=16,
        num_experts_per_tok=1,
    ),
}
