"""What `model.generate(.., custom_generate=FOLDER, trust_remote_code=True)` runs: specker's `Generate`."""

from typing import Any
from weakref import WeakKeyDictionary

from transformers import GenerationMixin

from specker.integrations.transformers import Generate

# transformers passes nothing from one call to the next, and each `Generate` would load the draft again.
_made: "WeakKeyDictionary[Any, tuple[Any, Generate]]" = WeakKeyDictionary()


def generate(
    model: Any,
    draft: str | None = None,
    strategy: str = "draft",
    target: str | None = None,
    seed: int | None = None,
    options: dict[str, Any] | None = None,
    streamer: Any = None,
    synced_gpus: bool | None = None,
    assistant_model: Any = None,
    **arguments: Any,
) -> Any:
    """`model.generate` with speculative decoding. `draft`, `strategy`, `target`, `seed`: as for `Generate`, and so are
    `options`, by name. All other arguments are those of `generate`. Raises ValueError as `Generate` does, and for an
    assistant model."""
    if assistant_model is not None:
        raise ValueError("specker brings its own drafter: pass draft=FOLDER instead of assistant_model")
    if synced_gpus:
        raise ValueError("specker does not run in step with other processes (synced_gpus): gather the model first")
    how = {"draft": draft, "strategy": strategy, "target": target, "seed": seed, **(options or {})}
    if model not in _made or _made[model][0] != how:
        _made[model] = how, Generate(**how)
    made = _made[model][1]
    made.streamer = streamer
    # not model.generate, which is this function where the model's own repository has this folder
    return GenerationMixin.generate(model, custom_generate=made, **arguments)
