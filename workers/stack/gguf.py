"""Turns a Llama in GGUF form into an ordinary Hugging Face folder, and makes a tiny random sibling of it.

transformers can read GGUF files too, but loses on the way what makes SmolLM2 answer well: the
pre-tokenizer's split of digits, and `<|im_end|>` as a special token. Weights are rounded to bfloat16, the
file's own precision being lower. Needs numpy and gguf; no torch.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Report = Callable[[str, float | None], None]
"""Takes what is being done, and how much of it is done (0 to 1) where that is known."""

Array = npt.NDArray[Any]

SAMPLING: Final = {"temperature": 0.2, "top_p": 0.9}
"""What SmolLM2's makers recommend, for requests that say nothing else; at temperature 1 it rambles."""

CONTROL_TOKEN = 3
TINY_SEED = 20_260
TINY_SPREAD = 0.5

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def convert(source: Path, folder: Path, report: Report) -> None:
    """Writes the model of the GGUF file `source` into `folder`, which exists."""
    from gguf import GGUFReader

    report("Reading the model file", None)
    reader = GGUFReader(source)
    meta = _metadata(reader)
    _write_tokenizer(meta, folder)
    heads = {"attn_q": meta["llama.attention.head_count"], "attn_k": meta["llama.attention.head_count_kv"]}
    weights = {}
    for done, tensor in enumerate(reader.tensors):
        report("Converting the weights", done / len(reader.tensors))
        name, part = _tensor_name(tensor.name)
        weights[name] = _dequantized(tensor, heads.get(part))
    _write_config(
        meta,
        folder,
        dtype="bfloat16",
        sampling=SAMPLING,
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        max_position_embeddings=meta["llama.context_length"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_hidden_layers=meta["llama.block_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_theta=meta["llama.rope.freq_base"],
        tie_word_embeddings="lm_head.weight" not in weights,
    )
    report("Writing the weights", None)
    _write_weights(weights, folder, "bfloat16")


def make_tiny(source: Path, folder: Path, report: Report) -> None:
    """Writes a two-layer random Llama with the tokenizer of `source` into `folder`, which exists.

    The spread of its weights is far above the usual 0.02: with that a random model repeats one token for
    ever, with this its greedy output depends on the prompt and wanders.
    """
    from gguf import GGUFReader

    report("Making the test model", None)
    meta = _metadata(GGUFReader(source))
    _write_tokenizer(meta, folder)
    hidden, inner, layers, heads, kv_heads = 64, 128, 2, 4, 2
    head = hidden // heads
    _write_config(
        meta,
        folder,
        dtype="float32",
        hidden_size=hidden,
        intermediate_size=inner,
        max_position_embeddings=4096,
        num_attention_heads=heads,
        num_hidden_layers=layers,
        num_key_value_heads=kv_heads,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
        tie_word_embeddings=False,
    )
    shapes = {"model.embed_tokens": (meta["llama.vocab_size"], hidden), "model.norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"model.layers.{layer}.{name}": shape
            for name, shape in {
                "input_layernorm": (hidden,),
                "self_attn.q_proj": (heads * head, hidden),
                "self_attn.k_proj": (kv_heads * head, hidden),
                "self_attn.v_proj": (kv_heads * head, hidden),
                "self_attn.o_proj": (hidden, heads * head),
                "post_attention_layernorm": (hidden,),
                "mlp.gate_proj": (inner, hidden),
                "mlp.up_proj": (inner, hidden),
                "mlp.down_proj": (hidden, inner),
            }.items()
        }
    shapes["lm_head"] = (meta["llama.vocab_size"], hidden)
    random = np.random.default_rng(TINY_SEED)
    weights = {
        f"{name}.weight": np.ones(shape, np.float32)
        if len(shape) == 1
        else random.standard_normal(shape, dtype=np.float32) * np.float32(TINY_SPREAD)
        for name, shape in shapes.items()
    }
    _write_weights(weights, folder, "float32")


def _metadata(reader: Any) -> dict[str, Any]:
    return {name: field.contents() for name, field in reader.fields.items()}


def _tensor_name(name: str) -> tuple[str, str]:
    """The Hugging Face name of a GGUF tensor, and which part of a layer it is."""
    stem = name.removesuffix(".weight")
    if stem in TOP_NAMES:
        return f"{TOP_NAMES[stem]}.weight", stem
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.weight", part


def _dequantized(tensor: Any, heads: int | None) -> Array:
    from gguf.quants import dequantize

    full: Array = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    if heads:  # GGUF interleaves the two rotary halves of each head.
        rows, columns = full.shape
        full = full.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)
    return full


def _write_weights(weights: Mapping[str, Array], folder: Path, dtype: str) -> None:
    """Writes a safetensors file: length of the header, header, and the tensors one after another."""
    width = 2 if dtype == "bfloat16" else 4
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, array in weights.items():
        start, end = end, end + array.size * width
        label = "BF16" if dtype == "bfloat16" else "F32"
        header[name] = {"dtype": label, "shape": array.shape, "data_offsets": [start, end]}
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)  # The format asks for data aligned to 8 bytes.
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for array in weights.values():
            (_bfloat16(array) if dtype == "bfloat16" else array).tofile(file)


def _bfloat16(array: Array) -> Array:
    """The upper halves of float32 values, rounded to nearest, ties to even; numpy has no bfloat16."""
    bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
    return ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype(
        np.uint16
    )


def _write_config(
    meta: Mapping[str, Any],
    folder: Path,
    *,
    dtype: str,
    sampling: Mapping[str, float] = MappingProxyType({}),
    **shape: object,
) -> None:
    ids = {
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
    }
    _write_json(
        folder / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "mlp_bias": False,
            "torch_dtype": dtype,
            "use_cache": True,
            "vocab_size": meta["llama.vocab_size"],
            **ids,
            **shape,
        },
    )
    _write_json(folder / "generation_config.json", {**ids, **sampling})


def _write_tokenizer(meta: Mapping[str, Any], folder: Path) -> None:
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    kinds: list[int] = meta["tokenizer.ggml.token_type"]
    unknown = tokens[meta["tokenizer.ggml.unknown_token_id"]]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    _write_json(
        folder / "tokenizer.json",
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": tokens[i], **flags}
                for i, kind in enumerate(kinds)
                if kind == CONTROL_TOKEN
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": unknown,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {token: i for i, token in enumerate(tokens)},
                "merges": meta["tokenizer.ggml.merges"],
            },
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[meta["tokenizer.ggml.bos_token_id"]],
            "eos_token": tokens[meta["tokenizer.ggml.eos_token_id"]],
            "unk_token": unknown,
            "pad_token": tokens[meta["tokenizer.ggml.padding_token_id"]],
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "chat_template": meta["tokenizer.chat_template"],
        },
    )


def _write_json(path: Path, data: object) -> None:
    path.write_text(json.dumps(data, ensure_ascii=False, indent=1), encoding="utf-8")
