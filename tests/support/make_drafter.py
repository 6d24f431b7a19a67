"""Makes random drafters, and the little of a target that a drafter borrows, for tests of every size.

`python -m tests.support.make_drafter TARGET DRAFTER` writes a random drafter for a target's folder.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

V1, V2 = 1, 2


def drafter_config(target: dict[str, Any], version: int = V2, **overrides: Any) -> dict[str, Any]:
    """A drafter's config.json for a target's: the published layout, few layers, the target's head geometry.

    overrides replace keys, in dflash_config if they stand there, else at the top; None removes a key.
    """
    hidden, heads = target["hidden_size"], target["num_attention_heads"]
    depth = target["num_hidden_layers"]
    nested: dict[str, Any] = {
        "block_size": 8,
        "mask_token_id": min(16, target["vocab_size"] - 1),
        "target_layer_ids": sorted({min(depth - 1, 1 + index * max(1, depth // 3)) for index in range(3)}),
    }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if version == V1 else "DFlash2DraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": target["intermediate_size"],
        "num_hidden_layers": 3,
        "num_attention_heads": heads,
        "num_key_value_heads": target.get("num_key_value_heads", heads),
        "head_dim": target.get("head_dim") or hidden // heads,
        "rms_norm_eps": 1e-6,
        "vocab_size": target["vocab_size"],
        "max_position_embeddings": target.get("max_position_embeddings", 8192),
        "attention_bias": False,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "rope_theta": 1e5,
        "num_target_layers": depth,
    }
    if version == V2:
        nested |= {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 32, "selector_top_k": 16}
        config |= {"layer_types": ["sliding_attention"] * 3, "sliding_window": 512, "is_causal": False}
    for key, value in overrides.items():
        (nested if key in nested else config)[key] = value
    config["dflash_config"] = {key: value for key, value in nested.items() if value is not None}
    return {key: value for key, value in config.items() if value is not None}


def drafter_sizes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a drafter in the published layout."""
    flash = config["dflash_config"]
    hidden, dim, width = config["hidden_size"], config["head_dim"], config["intermediate_size"]
    q_rows, kv_rows = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    num_taps = len(flash["target_layer_ids"])
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_taps * config.get("target_hidden_size", hidden)),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for index in range(config["num_hidden_layers"]):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_rows, hidden),
            "self_attn.k_proj.weight": (kv_rows, hidden),
            "self_attn.v_proj.weight": (kv_rows, hidden),
            "self_attn.o_proj.weight": (hidden, q_rows),
            "self_attn.q_norm.weight": (dim,),
            "self_attn.k_norm.weight": (dim,),
            "mlp.gate_proj.weight": (width, hidden),
            "mlp.up_proj.weight": (width, hidden),
            "mlp.down_proj.weight": (hidden, width),
        }
        if config.get("attention_bias"):
            rows = {"q": q_rows, "k": kv_rows, "v": kv_rows, "o": hidden}
            layer |= {f"self_attn.{part}_proj.bias": (size,) for part, size in rows.items()}
        if config.get("attention_sink_bias"):
            layer["self_attn.attention_sink_bias"] = (config["num_attention_heads"],)
        if "conv_kernel_size" in flash:
            taps, groups = flash["conv_kernel_size"], hidden // flash["conv_group_size"]
            for part in ("attention", "mlp"):
                layer[f"{part}_conv.base_kernel"] = (2, taps, hidden)
                layer[f"{part}_conv.kernel_projection.weight"] = (2 * taps * groups, hidden)
        sizes |= {f"layers.{index}.{name}": size for name, size in layer.items()}
    if "selector_rank" in flash:
        rank, vocab = flash["selector_rank"], config["vocab_size"]
        sizes["candidate_selector.hidden_projection.weight"] = (rank, hidden)
        sizes["candidate_selector.predecessor_codebook"] = (vocab, rank)
        sizes["candidate_selector.successor_codebook"] = (vocab, rank)
    return sizes


def random_tensors(
    sizes: dict[str, tuple[int, ...]], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Weights that keep rows apart: norms near 1, matrices of unit gain, convolutions near the identity."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, size in sizes.items():
        tensor = torch.randn(size, generator=generator)
        if name.endswith("norm.weight"):
            tensor = 1 + 0.1 * tensor
        elif name.endswith("base_kernel"):
            tensor *= 0.2
            tensor[:, 0] += 1
        elif name.endswith("codebook"):
            tensor *= 0.7
        elif tensor.dim() > 1:
            tensor /= math.sqrt(size[-1])
        else:
            tensor *= 0.3
        made[name] = tensor.to(dtype)
    return made


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """config.json and model.safetensors in folder, which is made if missing."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    save_file(tensors, folder / "model.safetensors")
    return folder


def make_drafter(
    folder: Path, target_folder: Path, version: int = V2, *, seed: int = 0, dtype: str = "float32", **overrides: Any
) -> Path:
    """A random drafter for the target in target_folder; overrides as in drafter_config. Returns folder."""
    target = json.loads((target_folder / "config.json").read_text(encoding="utf-8"))
    config = drafter_config(target, version, dtype=dtype, **overrides)
    return write_folder(folder, config, random_tensors(drafter_sizes(config), seed, getattr(torch, dtype)))


def make_target_stub(folder: Path, *, tied: bool = False, seed: int = 7, **overrides: Any) -> Path:
    """As much of a target as a drafter needs: config.json, embedding and head."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 211,
        "tie_word_embeddings": tied,
    } | overrides
    size = (config["vocab_size"], config["hidden_size"])
    names = ["model.embed_tokens.weight"] + ([] if tied else ["lm_head.weight"])
    tensors = {name: 3 * tensor for name, tensor in random_tensors(dict.fromkeys(names, size), seed).items()}
    return write_folder(folder, config, tensors)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.make_drafter", description=__doc__)
    parser.add_argument("target", type=Path, help="folder of the target")
    parser.add_argument("drafter", type=Path, help="folder to write")
    parser.add_argument("--version", type=int, choices=(V1, V2), default=V2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    args = parser.parse_args()
    print(make_drafter(args.drafter, args.target, args.version, seed=args.seed, dtype=args.dtype))


if __name__ == "__main__":
    main()
