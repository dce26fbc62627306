"""Unmodified architectures of transformers, tiny and with random weights: how to build each, and what to feed it.

Widths are of 16 or 32, vocabularies of 64 and nothing drops out, so that a model trains alike wherever it runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

VOCABULARY = 64
_IMAGE = 32


@dataclass(frozen=True)
class Architecture:
    """A model class of transformers.

    Attributes:
        name: the name in the tables of tests.
        family: "decoder", "mixture of experts", "encoder", "encoder-decoder", "vision" or "state space".
        model: the name of the model's class.
        config: the name of its configuration's class.
        options: maps the number of layers to the configuration's arguments.
        inputs: maps a configuration, batch size and length to the arguments of forward, such that forward returns a loss.
        changes_length: whether a batch can be longer or shorter than the last one.
        traced_more: why Dynamo captures more graphs of the sharded model than of the plain one; empty if it does not.
        untrainable: why plain ``torch.compile`` cannot train the model; empty if it can.
    """

    name: str
    family: str
    model: str
    config: str
    options: Callable[[int], dict[str, Any]]
    inputs: Callable[[Any, int, int], dict[str, Tensor]]
    changes_length: bool = True
    traced_more: str = ""
    untrainable: str = ""

    def build(self, layers: int) -> Any:
        """Build the model, in training mode. Equal arguments give equal models."""
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.options(layers))
        _prepare(config)
        config.use_cache = False
        return getattr(transformers, self.model)(config).float().train()

    def but(self, **changes: Any) -> Architecture:
        """Return a copy with some attributes changed."""
        return replace(self, **changes)

    def batch(self, model: Any, batch: int, length: int, seed: int) -> dict[str, Tensor]:
        """Return the arguments of forward. ``length`` is the number of tokens; models of images ignore it."""
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.inputs(model.config, batch, length)


def _prepare(config: Any) -> None:
    """Turn off dropout and jitter, and make weights large enough for informative gradients in every layer."""
    for key, value in list(vars(config).items()):
        if key in ("router_jitter_noise", "input_jitter_noise"):
            setattr(config, key, 0.0)
        elif key in ("initializer_range", "init_std"):
            setattr(config, key, 0.1)
        elif "drop" in key and isinstance(value, (int, float)) and not isinstance(value, bool):
            setattr(config, key, type(value)(0))
        elif hasattr(value, "to_dict"):
            _prepare(value)


def layers_of(model: nn.Module, layers: int) -> list[nn.Module]:
    """Return the layers of a model: the modules of all outermost module lists that have at least ``layers`` modules.

    If all lists are shorter, the longest ones count.
    """
    lists = {name: module for name, module in model.named_modules() if isinstance(module, nn.ModuleList)}
    longest = min(layers, max(map(len, lists.values())))
    long = {name: module for name, module in lists.items() if len(module) >= longest}
    outermost = [module for name, module in long.items() if not any(name.startswith(f"{other}.") for other in long)]
    return [layer for module in outermost for layer in module]


# -------------------------------------------------------------------------------------------------- inputs


def _ids(batch: int, length: int) -> Tensor:
    return torch.randint(4, VOCABULARY, (batch, length))


def _text(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    ids = _ids(batch, length)
    return {"input_ids": ids, "labels": ids}


def _padded_text(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    ids = _ids(batch, length)
    mask = torch.ones_like(ids)
    mask[0, -2:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids}


def _translation(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    return {"input_ids": _ids(batch, length + 3), "labels": _ids(batch, length)}


def _speech(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    return {"input_features": torch.randn(batch, 8, 16), "labels": _ids(batch, length)}


def _sound(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    return {"input_values": torch.randn(batch, 40 * length), "labels": torch.arange(batch) % 3}


def _image(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(batch, 3, _IMAGE, _IMAGE), "labels": torch.arange(batch) % 3}


def _segments(config: Any, batch: int, length: int) -> dict[str, Tensor]:
    images = _image(config, batch, length)["pixel_values"]
    return {"pixel_values": images, "labels": torch.randint(0, 3, (batch, _IMAGE, _IMAGE))}


def _captions(config: Any, batch: int, length: int) -> dict[str, Any]:
    ids = _ids(batch, length)
    ids[:, -1] = 2
    return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, _IMAGE, _IMAGE), "return_loss": True}


# ------------------------------------------------------------------------------------------- configurations

_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    **_SPECIAL,
}


def _options(options: dict[str, Any], depth: str) -> Callable[[int], dict[str, Any]]:
    def at(layers: int) -> dict[str, Any]:
        given = {depth: layers} if depth else {}
        return {**given, **{key: value(layers) if callable(value) else value for key, value in options.items()}}

    return at


def _causal(name: str, family: str = "decoder", *, depth: str = "num_hidden_layers", **options: Any) -> Architecture:
    return Architecture(name, family, f"{name}ForCausalLM", f"{name}Config", _options({**_SIZES, **options}, depth), _text)


def _moe(name: str, **options: Any) -> Architecture:
    return _causal(name, "mixture of experts", **{"num_experts_per_tok": 2, "moe_intermediate_size": 16, **options})


def _bare(name: str, family: str = "decoder", *, head: str = "ForCausalLM", depth: str, **options: Any) -> Architecture:
    """Return an architecture whose configuration has its own names for sizes."""
    sizes = {"vocab_size": VOCABULARY, **_SPECIAL, **options}
    return Architecture(name, family, f"{name}{head}", f"{name}Config", _options(sizes, depth), _text)


def _encoder(name: str, *, head: str = "ForMaskedLM", **options: Any) -> Architecture:
    sizes = {**_SIZES, "num_key_value_heads": None, "type_vocab_size": 2, **options}
    sizes = {key: value for key, value in sizes.items() if value is not None}
    return Architecture(name, "encoder", f"{name}{head}", f"{name}Config", _options(sizes, "num_hidden_layers"), _padded_text)


def _translator(name: str, *, inputs: Any = _translation, **options: Any) -> Architecture:
    sizes = {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "encoder_layers": lambda layers: layers,
        "decoder_layers": lambda layers: layers,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
        **_SPECIAL,
        **options,
    }
    return Architecture(
        name, "encoder-decoder", f"{name}ForConditionalGeneration", f"{name}Config", _options(sizes, ""), inputs
    )


def _t5(name: str, **options: Any) -> Architecture:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "decoder_start_token_id": 0, **options}
    return Architecture(
        name,
        "encoder-decoder",
        f"{name}ForConditionalGeneration",
        f"{name}Config",
        _options({"vocab_size": VOCABULARY, **_SPECIAL, "num_decoder_layers": lambda layers: layers, **sizes}, "num_layers"),
        _translation,
    )


def _vision(
    name: str, *, depth: str = "num_hidden_layers", head: str = "ForImageClassification", inputs: Any = _image, **options: Any
) -> Architecture:
    sizes = {"image_size": _IMAGE, "patch_size": 8, "num_channels": 3, "num_labels": 3, **options}
    return Architecture(name, "vision", f"{name}{head}", f"{name}Config", _options(sizes, depth), inputs, changes_length=False)


def _transformer(name: str, **options: Any) -> Architecture:
    return _vision(name, **{"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, **options})


def _two_towers(name: str, **options: Any) -> Architecture:
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "projection_dim": 16}

    def text(layers: int) -> dict[str, Any]:
        sizes = {"vocab_size": VOCABULARY, "max_position_embeddings": 64, **_SPECIAL}
        return {**tower, **sizes, "num_hidden_layers": layers}

    def vision(layers: int) -> dict[str, Any]:
        return {**tower, "image_size": _IMAGE, "patch_size": 8, "num_hidden_layers": layers}

    sizes = {"text_config": text, "vision_config": vision, "projection_dim": 16, **options}
    return Architecture(name, "vision", f"{name}Model", f"{name}Config", _options(sizes, ""), _captions)


def _state_space(name: str, **options: Any) -> Architecture:
    return _causal(name, "state space", **{"num_key_value_heads": 2, **options})


_DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 0,
}

_STAGES = {"depths": lambda layers: [1, layers]}

ARCHITECTURES: dict[str, Architecture] = {
    architecture.name: architecture
    for architecture in [
        _causal("Llama"),
        _causal("Mistral", sliding_window=8),
        _causal("Ministral", head_dim=8),
        _causal("Qwen2"),
        _causal("Qwen3", head_dim=8),
        _causal("Gemma", head_dim=8),
        _causal("Gemma2", head_dim=8, sliding_window=8),
        _causal("Gemma3", head_dim=8, sliding_window=8).but(config="Gemma3TextConfig"),
        _bare("GPT2", head="LMHeadModel", depth="n_layer", n_embd=32, n_head=4, n_positions=64),
        _bare("GPTBigCode", depth="n_layer", n_embd=32, n_head=4, n_positions=64),
        _bare(
            "GPTNeo",
            depth="num_layers",
            hidden_size=32,
            num_heads=4,
            max_position_embeddings=64,
            window_size=8,
            attention_types=lambda layers: [[["global"], layers]],
        ),
        _causal("GPTNeoX"),
        _bare("GPTJ", depth="n_layer", n_embd=32, n_head=4, n_positions=64, rotary_dim=8),
        _causal("OPT", ffn_dim=48, word_embed_proj_dim=32),
        _bare("Bloom", depth="n_layer", hidden_size=32, n_head=4),
        _causal("Falcon"),
        _bare("Mpt", depth="n_layers", d_model=32, n_heads=4, max_seq_len=64),
        _causal("Phi"),
        _causal("Phi3"),
        _causal("StableLm"),
        _causal("Olmo"),
        _causal("Olmo2"),
        _causal("Olmo3", sliding_window=8),
        _causal("Cohere"),
        _causal("Cohere2", sliding_window=8),
        _causal("Granite"),
        _causal("Glm", head_dim=8),
        _causal("Glm4", head_dim=8),
        _causal("SmolLM3"),
        _causal("Starcoder2"),
        _causal("Persimmon"),
        _causal("Nemotron"),
        _causal("Helium", head_dim=8),
        _causal("Exaone4", sliding_window=8),
        _causal("ModernBertDecoder", global_attn_every_n_layers=3, local_attention=8),
        _moe("Mixtral", num_local_experts=4),
        _moe("Qwen2Moe", num_experts=4, shared_expert_intermediate_size=16),
        _moe("Qwen3Moe", num_experts=4, head_dim=8),
        _moe("Olmoe", num_experts=4),
        _moe("GptOss", num_local_experts=4, head_dim=8, sliding_window=8),
        _moe("GraniteMoe", num_local_experts=4),
        _moe("DeepseekV2", **{**_DEEPSEEK, "n_group": 1}),
        _moe("DeepseekV3", **_DEEPSEEK),
        _moe("Phimoe", num_local_experts=4),
        _encoder("Bert"),
        _encoder("Roberta"),
        _bare("DistilBert", "encoder", head="ForMaskedLM", depth="n_layers", dim=32, hidden_dim=48, n_heads=4),
        _encoder("Albert", embedding_size=16),
        _encoder("Electra", embedding_size=16),
        _encoder("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8),
        _encoder("ModernBert", global_attn_every_n_layers=3, local_attention=8, cls_token_id=1, sep_token_id=2),
        _encoder("MPNet"),
        _encoder("RoFormer"),
        _encoder("ConvBert").but(
            traced_more="Inductor's passes over joint graphs make its length a number, also without sharding"
        ),
        _t5("T5"),
        _t5("MT5"),
        _t5("SwitchTransformers", num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1).but(
            traced_more="graphs break among its experts, and those of one unit do not share a graph: it names their parameters"
        ),
        _translator("Bart"),
        _translator("MBart"),
        _translator("Pegasus"),
        _translator("Marian").but(model="MarianMTModel"),
        _translator("Whisper", inputs=_speech, num_mel_bins=8, max_source_positions=8, max_target_positions=64),
        _bare(
            "Wav2Vec2Conformer",
            "encoder",
            head="ForSequenceClassification",
            depth="num_hidden_layers",
            hidden_size=32,
            num_attention_heads=4,
            intermediate_size=64,
            conv_dim=(16, 16),
            conv_stride=(5, 2),
            conv_kernel=(10, 3),
            conv_depthwise_kernel_size=5,
            position_embeddings_type="relative",
            max_source_positions=400,
            layerdrop=0.0,
            mask_time_prob=0.0,
            num_conv_pos_embeddings=16,
            num_conv_pos_embedding_groups=4,
            num_labels=3,
        ).but(
            inputs=_sound,
            traced_more="its forward breaks graphs; Dynamo then looks into what gathers the root, in no more graphs",
        ),
        _transformer("ViT"),
        _transformer("DeiT"),
        _transformer("Beit"),
        _transformer("Dinov2", mlp_ratio=2),
        _vision("Swin", depth="", embed_dim=16, patch_size=2, window_size=4, num_heads=[2, 4], **_STAGES),
        _vision("ConvNext", depth="", patch_size=2, hidden_sizes=[16, 32], num_stages=2, **_STAGES),
        _vision(
            "Segformer",
            depth="",
            head="ForSemanticSegmentation",
            inputs=_segments,
            num_encoder_blocks=2,
            hidden_sizes=[16, 32],
            num_attention_heads=[2, 4],
            sr_ratios=[2, 1],
            patch_sizes=[7, 3],
            strides=[4, 2],
            mlp_ratios=[2, 2],
            decoder_hidden_size=16,
            **_STAGES,
        ),
        _vision("ResNet", depth="", embedding_size=16, hidden_sizes=[16, 32], layer_type="basic", **_STAGES),
        _two_towers("CLIP"),
        _two_towers("Siglip"),
        _state_space("Mamba", state_size=4),
        _state_space("Mamba2", state_size=4, head_dim=16, num_heads=4, n_groups=2, chunk_size=4, expand=2),
        _state_space("FalconMamba", state_size=4),
        _state_space(
            "Jamba", attn_layer_period=3, attn_layer_offset=1, num_experts=2, mamba_d_state=4, use_mamba_kernels=False
        ),
    ]
}
