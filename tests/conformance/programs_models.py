"""Models of transformers of many kinds, built from configurations and trained for a few steps.

Same rules as :mod:`programs`, which registers them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from programs import Step, amp_step, plain_step, program
from torch import nn

Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any, str], torch.Tensor]

_HALF, _BRAIN = torch.float16, torch.bfloat16
_DECODER = dict(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
    vocab_size=8000,
)  # fmt: skip
_GROUPED = dict(_DECODER, num_key_value_heads=2)
_ENCODER_DECODER = dict(
    d_model=128, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
    decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
)  # fmt: skip
_VISION = dict(hidden_size=96, num_hidden_layers=2, num_attention_heads=3, image_size=64)
_SPEECH = dict(
    hidden_size=96, intermediate_size=192, num_hidden_layers=2, num_attention_heads=4,
    conv_dim=(32, 32, 32), conv_stride=(5, 2, 2), conv_kernel=(10, 3, 3),
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, mask_time_prob=0.0,
)  # fmt: skip


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def _adafactor(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(  # type: ignore[no-any-return]
        parameters, scale_parameter=True, relative_step=True, warmup_init=True, lr=None
    )


def _tokens(model: Any, config: Any, device: str) -> torch.Tensor:
    tokens = torch.randint(5, config.vocab_size, (2, 64)).to(device)
    return model(input_ids=tokens, labels=tokens).loss  # type: ignore[no-any-return]


def _classes(model: Any, config: Any, device: str) -> torch.Tensor:
    images = torch.randn(2, 3, 64, 64, device=device)
    labels = torch.randint(0, config.num_labels, (2,), device=device)
    return model(pixel_values=images, labels=labels).loss  # type: ignore[no-any-return]


def _map(model: Any, config: Any, device: str) -> torch.Tensor:
    images = torch.randn(2, 3, 64, 64, device=device)
    labels = torch.randint(0, config.num_labels, (2, 64, 64), device=device)
    return model(pixel_values=images, labels=labels).loss  # type: ignore[no-any-return]


def _pixels(model: Any, config: Any, device: str) -> torch.Tensor:
    return model(pixel_values=torch.randn(2, 3, 64, 64, device=device)).loss  # type: ignore[no-any-return]


def _speech(model: Any, config: Any, device: str) -> torch.Tensor:
    sound = torch.randn(2, config.num_mel_bins, 200, device=device)
    labels = torch.randint(5, config.vocab_size, (2, 24), device=device)
    return model(input_features=sound, labels=labels).loss  # type: ignore[no-any-return]


def _sound(model: Any, config: Any, device: str) -> torch.Tensor:
    sound = torch.randn(2, 4000, device=device)
    labels = torch.randint(0, 2, (2,), device=device)
    return model(input_values=sound, labels=labels).loss  # type: ignore[no-any-return]


def _pairs(model: Any, config: Any, device: str) -> torch.Tensor:
    images = torch.randn(8, 3, 64, 64, device=device)
    tokens = torch.randint(5, 4000, (8, 20), device=device)
    return model(input_ids=tokens, pixel_values=images, return_loss=True).loss  # type: ignore[no-any-return]


def _series(model: Any, config: Any, device: str) -> torch.Tensor:
    past = torch.randn(8, config.context_length, config.num_input_channels, device=device)
    future = torch.randn(8, config.prediction_length, config.num_input_channels, device=device)
    return model(past_values=past, future_values=future).loss  # type: ignore[no-any-return]


def _model(
    name: str, kind: str, dtype: torch.dtype | None, optimizer: Optimizer, loss: Loss = _tokens,
    config: str = "", **sizes: Any,
) -> None:  # fmt: skip
    """Register ``name``: the model class ``kind`` of ``sizes``, trained with ``dtype`` (None: fp32
    without autocast)."""

    def make(device: str) -> Step:
        import transformers

        chosen = getattr(transformers, config or kind.split("For")[0] + "Config")(**sizes)
        model = getattr(transformers, kind)(chosen).to(device).train()
        steps = optimizer(model.parameters())

        def forward() -> torch.Tensor:
            return loss(model, chosen, device)

        return (
            plain_step(steps, forward) if dtype is None else amp_step(model, steps, forward, dtype)
        )

    make.__name__ = name
    program(make, needs="transformers")


_model("hf_bart", "BartForConditionalGeneration", _HALF, _adamw, vocab_size=8000,
       **_ENCODER_DECODER)  # fmt: skip
_model("hf_pegasus", "PegasusForConditionalGeneration", None, _momentum, vocab_size=8000,
       **_ENCODER_DECODER)  # fmt: skip
_model("hf_t5_adafactor", "T5ForConditionalGeneration", _BRAIN, _adafactor, d_model=128,
       num_layers=2, num_heads=4, d_ff=256, d_kv=32, decoder_start_token_id=0, vocab_size=8000,
       feed_forward_proj="gated-gelu")  # fmt: skip
_model("hf_mixtral", "MixtralForCausalLM", _BRAIN, _adamw, num_local_experts=4,
       output_router_logits=True, **_GROUPED)  # fmt: skip
_model("hf_switch", "SwitchTransformersForConditionalGeneration", None, _adamw, d_model=128,
       d_kv=32, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4, num_experts=4,
       vocab_size=8000, decoder_start_token_id=0)  # fmt: skip
_model("hf_qwen3_moe", "Qwen3MoeForCausalLM", _HALF, _adamw, moe_intermediate_size=64,
       num_experts=8, num_experts_per_tok=2, head_dim=32, **_GROUPED)  # fmt: skip
_model("hf_deepseek_v3", "DeepseekV3ForCausalLM", _BRAIN, _adamw, moe_intermediate_size=64,
       n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
       kv_lora_rank=32, q_lora_rank=48, qk_rope_head_dim=16, v_head_dim=32, qk_nope_head_dim=32,
       num_key_value_heads=4, **_DECODER)  # fmt: skip
_model("hf_gemma2", "Gemma2ForCausalLM", _BRAIN, _adamw, head_dim=32, sliding_window=32,
       **_GROUPED)  # fmt: skip
_model("hf_phi3", "Phi3ForCausalLM", _HALF, _fused, pad_token_id=0, **_GROUPED)
_model("hf_falcon", "FalconForCausalLM", _BRAIN, _momentum, hidden_size=128, num_hidden_layers=2,
       num_attention_heads=4, vocab_size=8000)  # fmt: skip
_model("hf_mamba2", "Mamba2ForCausalLM", None, _adamw, hidden_size=64, num_heads=8, head_dim=16,
       n_groups=2, num_hidden_layers=2, state_size=16, vocab_size=2000, chunk_size=16)  # fmt: skip
_model("hf_xlnet", "XLNetLMHeadModel", None, _adamw, config="XLNetConfig", d_model=128, n_layer=2,
       n_head=4, d_inner=256, vocab_size=8000)  # fmt: skip
_model("hf_deberta", "DebertaV2ForMaskedLM", _HALF, _adamw, relative_attention=True,
       pos_att_type=["p2c", "c2p"], position_biased_input=False, **_DECODER)  # fmt: skip
_model("hf_longformer", "LongformerForMaskedLM", _BRAIN, _adamw, attention_window=16, **_DECODER)
_model("hf_swin", "SwinForImageClassification", _BRAIN, _adamw, _classes, image_size=64,
       embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4)  # fmt: skip
_model("hf_convnext_v2", "ConvNextV2ForImageClassification", _HALF, _adamw, _classes,
       depths=[1, 1, 2, 1], hidden_sizes=[16, 32, 64, 128])  # fmt: skip
_model("hf_vit_mae", "ViTMAEForPreTraining", _HALF, _adamw, _pixels, patch_size=8,
       intermediate_size=192, decoder_hidden_size=64, decoder_num_hidden_layers=2,
       decoder_num_attention_heads=4, decoder_intermediate_size=128, **_VISION)  # fmt: skip
_model("hf_segformer", "SegformerForSemanticSegmentation", _HALF, _adamw, _map, num_labels=7,
       depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 40, 64], decoder_hidden_size=64)  # fmt: skip
_model("hf_beit", "BeitForImageClassification", _BRAIN, _adamw, _classes, intermediate_size=192,
       use_relative_position_bias=True, layer_scale_init_value=0.1, **_VISION)  # fmt: skip
_model("hf_mobilenet_v2", "MobileNetV2ForImageClassification", None, _momentum, _classes)
_model("hf_whisper", "WhisperForConditionalGeneration", _HALF, _adamw, _speech, vocab_size=4000,
       num_mel_bins=80, max_source_positions=100, pad_token_id=1, bos_token_id=1, eos_token_id=2,
       decoder_start_token_id=3, **_ENCODER_DECODER)  # fmt: skip
_model("hf_hubert", "HubertForSequenceClassification", _HALF, _adamw, _sound,
       classifier_proj_size=32, **_SPEECH)  # fmt: skip
_model("hf_clip", "CLIPModel", _HALF, _adamw, _pairs, config="CLIPConfig", projection_dim=64,
       text_config=dict(_DECODER, vocab_size=4000),
       vision_config=dict(_VISION, num_attention_heads=4, patch_size=16))  # fmt: skip

_model("hf_bloom", "BloomForCausalLM", _BRAIN, _adamw, hidden_size=128, n_layer=2, n_head=4,
       vocab_size=8000)  # fmt: skip
_model("hf_gpt_oss", "GptOssForCausalLM", _BRAIN, _adamw, head_dim=32, num_local_experts=4,
       num_experts_per_tok=2, sliding_window=32, **_GROUPED)  # fmt: skip
_model("hf_jamba", "JambaForCausalLM", None, _adamw, use_mamba_kernels=False, num_experts=4,
       attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
       mamba_d_state=8, mamba_dt_rank=8, **_GROUPED)  # fmt: skip
_model("hf_longt5", "LongT5ForConditionalGeneration", None, _adamw, d_model=128, num_layers=2,
       num_heads=4, d_kv=32, d_ff=256, local_radius=15, global_block_size=8, vocab_size=8000,
       encoder_attention_type="transient-global", decoder_start_token_id=0)  # fmt: skip
_model("hf_funnel", "FunnelForMaskedLM", None, _adamw, block_sizes=[1, 1], num_decoder_layers=1,
       d_model=128, n_head=4, d_head=32, d_inner=256, vocab_size=4000)  # fmt: skip
_model("hf_patchtst", "PatchTSTForPrediction", None, _adamw, _series, config="PatchTSTConfig",
       context_length=64, prediction_length=16, num_input_channels=4, patch_length=8,
       patch_stride=8, d_model=64, num_attention_heads=4, num_hidden_layers=2)  # fmt: skip


@program(needs="transformers")
def hf_dpo(device: str) -> Step:
    """Direct preference optimisation of a Llama against its frozen copy, on padded answers."""
    import transformers

    config = transformers.LlamaConfig(**dict(_GROUPED, vocab_size=4000))
    model = transformers.LlamaForCausalLM(config).to(device)
    reference = copy.deepcopy(model).eval().requires_grad_(False)

    def log_probability(network: Any, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = network(input_ids=tokens, attention_mask=mask, use_cache=False)
        logits = found.logits[:, :-1].float()
        taken = torch.gather(logits.log_softmax(-1), 2, tokens[:, 1:].unsqueeze(-1)).squeeze(-1)
        return (taken * mask[:, 1:]).sum(-1)

    def loss() -> torch.Tensor:
        tokens = torch.randint(5, 4000, (4, 40)).to(device)
        lengths = torch.tensor([40, 32, 40, 36]).unsqueeze(1)
        mask = (torch.arange(40) < lengths).long().to(device)
        ours = log_probability(model, tokens, mask)
        with torch.no_grad():
            base = log_probability(reference, tokens, mask)
        chosen, rejected = (ours - base).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return amp_step(model, _adamw(model.parameters()), loss, _BRAIN)
