"""Write an exported EAGLE-3 head (`export`, layout flat) as a GGUF file for llama.cpp (`--spec-type draft-eagle3`):

    python -m train.head.gguf --head OUT/head --target TARGET.gguf --out HEAD.gguf

The tokenizer is copied from the target's GGUF file.
"""

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from transformers import HfArgumentParser

from specker.checkpoints.architectures.names import LAYER
from specker.checkpoints.gguf.heads import HEADS
from specker.checkpoints.parse import read_json
from specker.command.exits import run_cli
from train.head.export import default_taps

ARCHITECTURE = "eagle3"
KINDS = ("F32", "F16", "BF16", "Q8_0")


@dataclass
class Args:
    head: str = field(metadata={"help": "folder of the head"})
    target: str = field(metadata={"help": "GGUF file of its target"})
    out: str = field(metadata={"help": "GGUF file to write"})
    kind: str = field(default="BF16", metadata={"help": f"of the matrices: {', '.join(KINDS)}"})


def write(head: Path, target: Path, out: Path, kind: str = "BF16") -> None:
    """Raises ValueError for files of another kind."""
    if kind not in KINDS:
        raise ValueError(f"--kind must be one of {', '.join(KINDS)}, got {kind!r}")
    c = read_json(head / "config.json")
    if c.get("architectures") != ["LlamaForCausalLMEagle3"]:
        raise ValueError(f"{head} is not a head in the flat layout: export it with --layout flat")
    reader = gguf.GGUFReader(target)
    part = out.with_suffix(".part")
    writer = gguf.GGUFWriter(part, ARCHITECTURE)
    for name, item in reader.fields.items():
        if name.startswith("tokenizer."):
            last = item.types[-1] if item.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, item.contents(), item.types[0], sub_type=last)
    layers = reader.fields[f"{reader.fields['general.architecture'].contents()}.block_count"].contents()
    writer.add_block_count(c["num_hidden_layers"])
    writer.add_context_length(c["max_position_embeddings"])
    writer.add_embedding_length(c["hidden_size"])
    writer.add_feed_forward_length(c["intermediate_size"])
    writer.add_head_count(c["num_attention_heads"])
    writer.add_head_count_kv(c["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(c["rms_norm_eps"])
    writer.add_rope_freq_base(c["rope_theta"])
    writer.add_rope_dimension_count(c["head_dim"])
    writer.add_vocab_size(c["vocab_size"])
    own = (c.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    writer.add_array(f"{ARCHITECTURE}.target_layers", [n + 1 for n in own] if own else [*default_taps(layers)])
    writer.add_uint32(f"{ARCHITECTURE}.target_hidden_size", c.get("target_hidden_size") or c["hidden_size"])
    writer.add_bool(f"{ARCHITECTURE}.norm_before_residual", False)
    for name, x in _tensors(c, load_file(head / "model.safetensors")).items():
        if x.dtype == torch.int64:
            writer.add_tensor(name, x.numpy(), raw_dtype=gguf.GGMLQuantizationType.I64)
            continue
        form = gguf.GGMLQuantizationType[kind if x.ndim == 2 else "F32"]
        data = np.ascontiguousarray(x.float().numpy())
        writer.add_tensor(name, gguf.quantize(data, form), raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(out)


def _tensors(c: dict[str, Any], x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by llama.cpp's names: q and k with the rows of a rotated pair side by side, and d2t as ids."""
    names = {name.replace("layers.0", "midlayer"): own for own, name in HEADS[ARCHITECTURE].tensors.items()}
    names |= {f"midlayer.{own.tensor}": f"blk.0.{own.gguf}.weight" for own in LAYER.values()}
    heads = {"attn_q": c["num_attention_heads"], "attn_k": c["num_key_value_heads"]}
    found = {}
    for name, tensor in x.items():
        if name == "t2d":
            continue
        if name == "d2t":
            found["d2t"] = tensor + torch.arange(len(tensor))
            continue
        new = names[name]
        if (count := heads.get(new.split(".")[-2])) is not None:
            tensor = tensor.view(count, 2, -1, tensor.shape[1]).transpose(1, 2).reshape(tensor.shape)
        found[new] = tensor
    return found


def main() -> int:
    def run() -> int:
        (args,) = HfArgumentParser(Args).parse_args_into_dataclasses()
        write(Path(args.head), Path(args.target), Path(args.out), args.kind)
        return 0

    return run_cli(run)


if __name__ == "__main__":
    sys.exit(main())
