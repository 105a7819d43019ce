"""A byte tokenizer with the special tokens of Harmony, and a chat template that writes it as gpt-oss's does."""

from pathlib import Path
from typing import Any

from make_checkpoint import make

TOKENS = ("<|return|>", "<|constrain|>", "<|channel|>", "<|start|>", "<|end|>", "<|message|>", "<|call|>")
IDS = {token: 256 + n for n, token in enumerate(TOKENS)}
TEMPLATE = """\
{{- '<|start|>system<|message|>Reasoning: ' ~ (reasoning_effort or 'medium') ~ '<|end|>' }}
{%- for t in tools or [] %}
  {{- '<|start|>developer<|message|>// ' + t.function.description + t.function.name + '<|end|>' }}
{%- endfor %}
{%- for m in messages %}
  {%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('both content and thinking') }}{% endif %}
  {%- if m.tool_calls %}
    {%- if m.thinking or m.content %}
      {{- '<|start|>assistant<|channel|>analysis<|message|>' + (m.thinking or m.content) + '<|end|>' }}
    {%- endif %}
    {%- set call = m.tool_calls[0].function %}
    {{- '<|start|>assistant to=functions.' + call.name + '<|channel|>commentary json<|message|>' }}
    {{- call.arguments | tojson + '<|call|>' }}
  {%- elif m.role == 'tool' %}
    {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
  {%- elif m.role == 'assistant' %}
    {{- '<|start|>assistant<|channel|>final<|message|>' + m.content }}
    {{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
  {%- else %}
    {{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
  {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""


def harmony_tokenizer() -> Any:
    """Ids 0..255 are the byte alphabet, then come `TOKENS`, of which <|return|> is the eos; with a chat template."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True) for text in TOKENS])
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|return|>")
    fast.chat_template = TEMPLATE
    return fast


def make_harmony(folder: Path, arch: str = "qwen2", **more: Any) -> Path:
    """Write a tiny random checkpoint with this tokenizer into `folder` and return it."""
    make(folder, arch, **{"vocab": 320, "layers": 1, "max_context": 600, **more})
    harmony_tokenizer().save_pretrained(folder)
    return folder
