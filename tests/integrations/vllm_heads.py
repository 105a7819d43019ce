"""Draft with vLLM's own classes of draft heads, in vLLM's environment: `python tests/integrations/vllm_heads.py FILE`.

FILE holds JSON: "target", a folder, and "heads", a list of {"folder", "method", "drafts": [{"text", "taps", "count"}]}.
taps: a .pt file with the target's rows [T, A * Ht] of all tokens of the text but the last; with method "eagle", those
after the final norm. Writes a JSON list of each head's drafts to stdout. Only attention is not vLLM's code: torch
computes it over all columns, without a cache.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

answers = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
os.dup2(2, 1)

from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.layers.attention import Attention  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading  # noqa: E402

known: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # K and V of a block's text, by layer object


def attend(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> torch.Tensor:
    """In place of vLLM's Attention.forward: causal over the given columns, or a block that sees its text and itself."""
    q, k, v = (x.view(len(x), -1, self.head_size).transpose(0, 1) for x in (query, key, value))
    block = id(self) in known
    if block:
        k, v = (torch.cat((x.transpose(0, 1), y), 1) for x, y in zip(known[id(self)], (k, v), strict=True))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=not block, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def keep(layer: Any, k: torch.Tensor, v: torch.Tensor, cache: Any, slots: Any) -> None:
    """In place of `do_kv_cache_update`."""
    known[id(layer)] = k.clone(), v.clone()


def of_target(folder: Path, name: str) -> torch.Tensor:
    return load_file(folder / "model.safetensors")[name]


def load(target: Path, head: dict[str, Any], count: int) -> tuple[Any, torch.Tensor]:
    """vLLM's model of the head, and its LM head [rows, H] or the target's."""
    own = {"method": head["method"], "model": head["folder"], "num_speculative_tokens": count}
    args = EngineArgs(model=str(target), dtype="float32", enforce_eager=True, max_model_len=64, speculative_config=own)
    config = args.create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, "tcp://127.0.0.1:0", 0, "gloo")
            initialize_model_parallel(1, 1)
        torch.set_default_dtype(torch.float32)
        own_config = config.speculative_config.draft_model_config
        model = initialize_model(vllm_config=config, model_config=own_config)
        weights = load_file(Path(head["folder"]) / "model.safetensors")
        model.load_weights(iter(weights.items()))
        process_weights_after_loading(model, own_config, torch.device("cpu"))
    if "embed_tokens.weight" not in weights:
        model.model.embed_tokens.weight.data[: model.model.vocab_size] = of_target(target, "model.embed_tokens.weight")
    return model.eval(), weights.get("lm_head.weight", of_target(target, "lm_head.weight"))


def chain(model: Any, rows: torch.Tensor, text: list[int], taps: torch.Tensor, count: int) -> list[int]:
    own = getattr(model, "draft_id_to_target_id", None)
    features = model.combine_hidden_states(taps) if hasattr(model, "combine_hidden_states") else taps
    tokens = torch.tensor(text[1:])
    for _ in range(count):
        last, output = model(tokens, torch.arange(len(tokens)), features)
        best = (last[-1] @ rows.T).argmax()
        best = best if own is None else best + own[best]
        tokens, features = torch.cat((tokens, best[None])), torch.cat((features, output[-1:]))
    return tokens[-count:].tolist()


def block(model: Any, rows: torch.Tensor, text: list[int], taps: torch.Tensor, count: int) -> list[int]:
    own, mask = getattr(model, "draft_id_to_target_id", None), model.config.dflash_config["mask_token_id"]
    for layer in model.model._attn_layers:
        layer.impl.do_kv_cache_update = keep
    context = model.combine_hidden_states(taps)
    known.clear()
    model.precompute_and_store_context_kv(context, torch.arange(len(text) - 1), torch.arange(len(text) - 1))
    tokens = torch.tensor([text[-1]] + [mask] * count)
    out = model(tokens, torch.arange(len(text) - 1, len(text) + count))
    best = (out[1:] @ rows.T).argmax(-1)
    return (best if own is None else best + own[best]).tolist()


@torch.inference_mode()
def main() -> None:
    asked, found = json.loads(Path(sys.argv[1]).read_text()), []
    Attention.forward = attend
    for head in asked["heads"]:
        model, rows = load(Path(asked["target"]), head, max(each["count"] for each in head["drafts"]))
        draft = block if head["method"] == "dflash" else chain
        found.append(
            [draft(model, rows, each["text"], torch.load(each["taps"]), each["count"]) for each in head["drafts"]]
        )
    print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
