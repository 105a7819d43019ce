"""specker inside transformers: `Generate` for `model.generate`, and `tree_attention` as an attention implementation.

    generate = Generate("Qwen/Qwen3-0.6B")
    model.generate(**inputs, custom_generate=generate)  # an unmodified AutoModelForCausalLM

A call takes one of two paths. Neither changes what `generate` emits.

* On specker's ops: the engine decodes with the model's own weights, each row of the batch at its own pace. It serves
  the architectures of checkpoints/architectures whose q, k and v are separate matrices, greedy or with `seed`, when
  only the tokens are asked for.
* By the model's own forward: any other model and any other request. A verify pass is one forward over the draft. Its
  rows are then handled one by one as plain decoding handles its steps: processors and stopping criteria see committed
  text only, each token is drawn as `generate` draws it, and the first token that differs from the draft ends the round.
  Even torch's random numbers are used as in plain decoding: the same `torch.manual_seed` gives the same tokens. All
  rows of a batch have one length, so a round keeps the draft tokens that every row accepts.
"""

import time
import weakref
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.generation import (
    EosTokenCriteria,
    GenerateDecoderOnlyOutput,
    MaxLengthCriteria,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from specker.checkpoints.checkpoint import Checkpoint, Opened
from specker.integrations.adopt import adopt, adoptable, files, outer, state
from specker.integrations.attention import register_attention
from specker.integrations.drafts import Drafts
from specker.kernels.sample_rows import sample_rows
from specker.model.sampling import pack
from specker.options import MAX_BATCH, Options, Params, Sampling
from specker.runtime import strategies
from specker.runtime.control.stats import Stats
from specker.runtime.engine import Engine
from specker.runtime.load import engine_of
from specker.runtime.recipe import recipe_of

__all__ = ["Generate", "register_attention"]

LEAST_CONTEXT = 1024  # positions of the smallest K/V cache on specker's ops; it grows in powers of two
LOADING = ("load", "tp", "dp", "draft_ranks", "draft_layout", "reduce")  # options for models that specker loads itself
WARPERS = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper)  # in the order of specker's own sampling
NAMES = {field.name for field in fields(GenerateDecoderOnlyOutput)}
CACHE = "cache" if "cache" in NAMES else "past_key_values"  # its name in `generate`: the former from 5.24 on
PREPARED = {"attention_mask", "position_ids", CACHE, "use_cache", "logits_to_keep"}  # `generate`'s own


class _Call(NamedTuple):
    """The arguments of one `generate`, prepared by transformers."""

    model: Any
    ids: Tensor  # [B, S] int64, left-padded
    processors: Any
    criteria: Any
    config: Any  # a GenerationConfig
    inputs: dict[str, Any]  # further inputs of the model

    @property
    def seen(self) -> Tensor:
        """[B, S] bool: which ids are no padding."""
        mask = self.inputs.get("attention_mask")
        return torch.ones_like(self.ids, dtype=torch.bool) if mask is None else mask[:, -self.ids.shape[1] :].bool()

    @property
    def texts(self) -> list[list[int]]:
        """Each row's ids without padding."""
        return [row[seen].tolist() for row, seen in zip(self.ids, self.seen, strict=True)]

    @property
    def only_tokens(self) -> bool:
        """Whether the call asks for nothing but tokens, after left-padded prompts, up to a length or a stop id."""
        cache, seen = self.inputs.get(CACHE), self.seen
        own = cache is not None and (getattr(cache, "_is_user_defined", False) or cache.get_seq_length() > 0)
        more = {name for name, value in self.inputs.items() if value is not None} - PREPARED
        usual, positions = (seen.cumsum(1) - 1).clamp_(min=0), self.inputs.get("position_ids")
        return (
            not (self.config.return_dict_in_generate or own or more)
            and all(type(c) in (MaxLengthCriteria, EosTokenCriteria) for c in self.criteria)
            and self.criteria.max_length is not None
            and bool(seen[:, -1].all() and (seen[:, 1:] >= seen[:, :-1]).all())
            and (positions is None or torch.equal(positions.expand_as(usual), usual))
        )

    def samplings(self, seed: int | None) -> list[Sampling] | None:
        """Each row's sampling on specker's ops; None if those cannot do what the processors do. Copies of a prompt
        (num_return_sequences) draw with the seeds `seed`, `seed` + 1, .."""
        if not self.config.do_sample:
            return None if self.processors else [Sampling()] * len(self.ids)
        if seed is None:
            return None
        values: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
        last = -1
        for p in self.processors:
            kind = WARPERS.index(type(p)) if type(p) in WARPERS else -1
            usual = getattr(p, "filter_value", -torch.inf) == -torch.inf and getattr(p, "min_tokens_to_keep", 1) == 1
            if kind <= last or not usual:
                return None
            name, last = tuple(values)[kind], kind
            values[name] = getattr(p, name)
        if values["temperature"] < 1e-6 or values["top_p"] == 0:
            return None
        return [Sampling(**values, seed=s) for s in self.seeds(seed)]

    def seeds(self, seed: int) -> list[int]:
        copies = self.config.num_return_sequences or 1
        return [(seed + row % copies) % 2**64 for row in range(len(self.ids))]


class Generate:
    """A `custom_generate` for `model.generate`: speculative decoding of an unmodified `AutoModelForCausalLM`.

    Make one and keep it: it loads the draft at the first call, and once more if calls take both paths (see the module).
    It serves one call at a time. `stats` are the counters of the last call, over all rows.

    Memory: specker's ops need q, k and v as one matrix, and gate and up. The first call fuses them layer by layer and
    makes the model's parameters views of the result, so no matrix is held twice; the others are shared as they are.
    Only norms and biases are copied. The model's values stay the same, and `Generate` notices when its weights change.
    In addition to the weights, it holds the draft and the K/V of the longest call so far (rounded up to a power of two
    of positions, at least 1,024).
    """

    stats = Stats()

    def __init__(
        self,
        draft: str | Path | None = None,
        strategy: strategies.Named = "draft",
        *,
        target: str | Path | None = None,
        streamer: Any = None,
        seed: int | None = None,
        **options: Any,
    ):
        """`draft`: folder or hub id of the draft checkpoint; default: the bundled one for the model, if there is one.
        `strategy`, `options`: as in `specker.load`; `batch_size` and `max_context` default to what the calls need.
        `target`: folder or hub id of the model, for its tokenizer; default: where the model came from. `streamer`: as
        for `generate`, which does not pass its own on. `seed`: with `do_sample`, draw with specker's noise, which gives
        the tokens of `specker.load(.., strategy="ar")` with this seed; default: draw as `generate` does.

        Raises TypeError for an unknown option and for a loaded model as draft, ValueError for options that do not fit.
        """
        if not (draft is None or isinstance(draft, str | Path)):
            raise TypeError(
                f"draft must be a folder or a hub id, got a {type(draft).__name__}: save it and pass its folder"
            )
        if given := [name for name in LOADING if name in options]:
            raise TypeError(f"option {given[0]!r} is for models that specker.load reads")
        self.options = strategies.options(strategy=strategy, **options)
        if draft is not None and not strategies.of(self.options).takes_draft:
            raise ValueError(f"strategy {self.options.strategy!r} uses no draft checkpoint: leave out draft")
        Sampling(seed=seed or 0)  # checks the seed
        self.draft, self.target, self.streamer, self.seed = draft, target, streamer, seed
        self._given = {"strategy": strategy, **options}
        self._engine: tuple[Any, Engine] | None = None  # (state of the model's weights, engine)
        self._drafts: tuple[Any, int, Drafts] | None = None  # (model, rows, drafter)

    def __call__(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        **model_kwargs: Any,
    ) -> Any:
        """`model.generate` calls this. Returns what its plain decoding returns: ids [B, S + new], or with
        return_dict_in_generate a GenerateDecoderOnlyOutput. Raises ValueError for what it does not do: beams, other
        assistants, synced GPUs, encoders, inputs_embeds, attentions, hidden states, caches that cannot be cropped."""
        call = _Call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs)
        _refuse(call, synced_gpus)
        if self.streamer is not None:
            self.streamer.put(input_ids.cpu())
        samplings = call.samplings(self.seed) if call.only_tokens else None
        engine = None if samplings is None else self._engine_for(call)
        if engine is None or samplings is None:
            out = self._verify(call)
        else:
            out = self._serve(call, engine, samplings)
        if self.streamer is not None:
            self.streamer.end()
        return out

    # --- on specker's ops

    def _engine_for(self, call: _Call) -> Engine | None:
        """An engine with the model's weights and room for the call. None if specker's decoder does not know the model,
        or not in this length."""
        model, o, length, rows = call.model, self.options, call.criteria.max_length, min(len(call.ids), MAX_BATCH)
        if not adoptable(model) or length > min(o.max_context or length, model.config.max_position_embeddings):
            return None
        if "batch_size" in self._given:
            rows = o.batch_size
        if self._engine is not None and self._engine[0] == state(model):
            engine = self._engine[1]
            if engine.max_context >= length and engine.loop.size >= rows:
                return engine
        self._engine = None  # frees its K/V
        context = max(LEAST_CONTEXT, 1 << (length - 1).bit_length())
        window = getattr(model.config, "sliding_window", None)
        if window is not None and length <= window < context:  # the compiled layers take no sliding windows
            context = window
        context = min(context, o.max_context or model.config.max_position_embeddings)
        if (made := self._composed(model, context, replace(o, batch_size=rows))) is not None:
            self._engine = state(model), made
        return made

    def _composed(self, model: Any, context: int, o: Options) -> Engine | None:
        """An engine for up to `context` positions; None if specker's decoder cannot run the model."""
        with files(model, self.target) as folder:
            main = adopt(model, context, folder)
            if main is None:
                return None
            name, asked = type(model).__name__, replace(o, max_context=context)  # not lowered, but refused
            target = Opened(name, folder, main.config, (), None)
            return engine_of(recipe_of(asked, target, self.draft, model.device, model.dtype, name), main)

    def _serve(self, call: _Call, engine: Engine, samplings: list[Sampling]) -> Tensor:
        """The prompts with their new tokens, [B, S + new]."""
        ids, pad = call.ids, call.config._pad_token_tensor
        stops = frozenset(
            i for c in call.criteria if hasattr(c, "eos_token_id") for i in c.eos_token_id.view(-1).tolist()
        )
        most, rows = max(1, call.criteria.max_length - ids.shape[1]), zip(call.texts, samplings, strict=True)
        requests = [
            engine.session.request(text, Params(most, s), index=row, reads=False) for row, (text, s) in enumerate(rows)
        ]
        for request in requests:
            request.stop_ids = stops  # the model's generation config has them all
        new: list[list[int]] = [[] for _ in requests]
        columns: list[list[int]] = []  # columns of new tokens that are known for all rows
        running = dict.fromkeys(range(len(new)))
        with engine.session.stream(requests) as events:
            for event in events:
                new[event.prompt_index] += event.tokens
                if event.finished:
                    del running[event.prompt_index]
                known = min(len(new[r]) for r in running) if running else max(map(len, new))
                for i in range(len(columns), known):
                    columns.append([tokens[i] if i < len(tokens) else int(pad) for tokens in new])
                    if self.streamer is not None:
                        self.streamer.put(torch.tensor(columns[-1], dtype=torch.int64, device="cpu"))
        self.stats = sum((s.stats for s in requests), Stats())
        return torch.cat((ids, torch.tensor(columns, dtype=torch.int64, device=ids.device).t()), 1)

    # --- by the model's own forward

    def _drafts_for(self, call: _Call) -> Drafts | None:
        """A drafter for as many rows as the call has; None if the strategy drafts nothing."""
        model, rows = call.model, min(len(call.ids), MAX_BATCH - 1)
        if not strategies.of(self.options).drafts:
            return None
        if self._drafts is None or self._drafts[0]() is not model or self._drafts[1] < rows:
            self._drafts = None
            given = {name: value for name, value in self._given.items() if name != "batch_size"}
            with files(model, self.target) as folder:
                target: Path | Checkpoint = folder
                if strategies.of(self.options).reads_target:
                    target = outer(model, self.options.max_context, folder)
                made = Drafts(target, self.draft, device=model.device, dtype=model.dtype, requests=rows, **given)
            self._drafts = weakref.ref(model), rows, made
        return self._drafts[2]

    def _verify(self, call: _Call) -> Any:
        """The prompts with their new tokens, [B, S + new], or a GenerateDecoderOnlyOutput with them."""
        drafts = self._drafts_for(call)
        with _Tapped(call.model, () if drafts is None else drafts.aux_layers) as tapped, ExitStack() as ending:
            return self._rounds(call, drafts, tapped, ending)

    def _rounds(self, call: _Call, drafts: Drafts | None, tapped: "_Tapped", ending: ExitStack) -> Any:
        model, ids, config, inputs = call.model, call.ids, call.config, dict(call.inputs)
        texts, draws = call.texts, None
        kept = call.seen.clone()  # [B, columns of the last forward], which columns are committed text
        pads = any(hasattr(c, "eos_token_id") for c in call.criteria)  # without stop ids finished rows go on
        pad = config._pad_token_tensor.to(ids.device) if pads else ids.new_zeros(())
        asked = config.return_dict_in_generate
        raw: Any = () if asked and config.output_logits else None
        scores: Any = () if asked and config.output_scores else None
        unfinished = torch.ones_like(ids[:, 0], dtype=torch.bool)
        outputs = model._prefill(ids, config, inputs)
        cache = outputs.get(CACHE) if inputs["use_cache"] else None
        if inputs["use_cache"] and (cache is None or not cache.is_croppable):
            raise ValueError(f"{type(model).__name__} cannot drop rejected tokens from its {type(cache).__name__}")
        if cache is not None:
            ending.callback(_stop_recording, cache)
            cache.activate_past_recording()  # layers with a sliding window keep what `crop` may need
        if config.do_sample and self.seed is not None:
            draws = _Draws.of(call, self.seed, ids.shape[1] if cache is None else cache.get_seq_length())
        start, self.stats, draft = time.perf_counter(), Stats(), ids[:, :0]
        while True:
            N = draft.shape[1]
            for row in range(N + 1):
                logits = outputs.logits[:, row - N - 1].to(ids.device, torch.float32, copy=True)
                processed = call.processors(ids, logits)
                raw, scores = (x if x is None else (*x, y) for x, y in ((raw, logits), (scores, processed)))
                if draws is not None:
                    tokens = draws.tokens(processed)
                elif config.do_sample:
                    tokens = torch.multinomial(processed.softmax(-1), 1).squeeze(1)
                else:
                    tokens = processed.argmax(-1)
                if pads:
                    tokens = torch.where(unfinished, tokens, pad)
                ids = torch.cat((ids, tokens[:, None]), 1)
                for text, token in zip(texts, tokens.tolist(), strict=True):
                    text.append(token)
                unfinished &= ~call.criteria(ids, scores)
                if self.streamer is not None:
                    self.streamer.put(tokens.cpu())
                if not unfinished.any() or (row < N and not torch.equal(tokens, draft[:, row])):
                    break
            if cache is not None:
                cache.crop(row - N)  # even by 0, because that shrinks layers with a sliding window
            inputs = _grown(model, outputs, inputs, row + 1)
            for _ in texts:
                self.stats.observe(N, row, row + 1)
            if not unfinished.any():
                break
            live = unfinished if pads else torch.ones_like(unfinished)
            end = call.criteria.max_length
            kept[:, kept.shape[1] - N + row :] = False
            rows, most = tapped.taken(kept), 1 << 30 if end is None else end - ids.shape[1] - 1
            draft = _draft(drafts, texts, live, pad, most, draws, rows)
            kept = kept.new_ones(len(ids), draft.shape[1] + 1)
            more = _grown(model, outputs, inputs, draft.shape[1])
            if "logits_to_keep" in more:
                more["logits_to_keep"] = draft.shape[1] + 1
            fed = None if cache is None else draft.shape[1] + 1  # without a cache the whole text
            known = torch.cat((ids, draft), 1)
            outputs = model(
                **model.prepare_inputs_for_generation(known, next_sequence_length=fed, **more), return_dict=True
            )
        self.stats.wall = time.perf_counter() - start
        if not asked:
            return ids
        return GenerateDecoderOnlyOutput(sequences=ids, scores=scores, logits=raw, **{CACHE: cache})


def _stop_recording(cache: Any) -> None:
    """End `activate_past_recording`: a later prefill would keep every column."""
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False


@dataclass
class _Draws:
    """Draws with specker's noise from scores that transformers' processors have warped."""

    samplings: list[Sampling]  # each row's sampling, for the drafter
    numbers: Tensor  # [B, 4] int64, each row's seed in the op's format
    positions: Tensor  # [B] int64, of each row's last token

    @classmethod
    def of(cls, call: _Call, seed: int, columns: int) -> "_Draws":
        """`columns`: length of the prompts, padding included."""
        mask, seeds = call.inputs.get("attention_mask"), call.seeds(seed)
        padding = 0 if mask is None else (mask == 0).sum(1)
        temperature = max(call.config.temperature or 1.0, 1e-6)
        numbers = torch.stack([pack(Sampling(temperature=1.0, seed=s)) for s in seeds])
        return cls(
            [Sampling(temperature=temperature, seed=s) for s in seeds],
            numbers.to(call.ids.device),
            torch.full_like(call.ids[:, 0], columns - 1) - padding,
        )

    def tokens(self, scores: Tensor) -> Tensor:
        """scores [B, V] float32 after the last tokens -> the next ones, [B] int64."""
        drawn = sample_rows(scores, 1.0, 0, 1.0, 0, self.positions, self.numbers)
        self.positions += 1
        return drawn


class _Tapped:
    """The hidden rows of a model at some depths (`Drafts.aux_layers`), kept by hooks within a `with` block."""

    def __init__(self, model: Any, depths: tuple[int, ...]):
        """Raises ValueError if there are depths, and the model's layers are not found."""
        self.parts: dict[int, list[Tensor]] = {depth: [] for depth in depths}
        self._hooks: list[Any] = []
        self._layers = _layers(model) if depths else []

    def __enter__(self) -> "_Tapped":
        layers = self._layers
        for depth, parts in self.parts.items():
            if depth < len(layers):
                made = layers[depth].register_forward_pre_hook(partial(_keep_input, parts), with_kwargs=True)
            else:
                made = layers[-1].register_forward_hook(partial(_keep_output, parts))
            self._hooks.append(made)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def taken(self, kept: Tensor) -> list[dict[int, Tensor]]:
        """Of each sequence, depth -> [T, E]: the rows of the columns that `kept` [B, columns] marks, which are the last
        ones forwarded since the last call. A continued cache has forwarded fewer."""
        found: list[dict[int, Tensor]] = [{} for _ in kept]
        for depth, parts in self.parts.items():
            columns = torch.cat(parts, 1)[:, -kept.shape[1] :]
            parts.clear()
            for rows, of, marks in zip(found, columns, kept[:, -columns.shape[1] :], strict=True):
                rows[depth] = of[marks.to(of.device)]
        return found


def _keep_input(parts: list[Tensor], module: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    parts.append(args[0] if args else named["hidden_states"])


def _keep_output(parts: list[Tensor], module: Any, args: tuple[Any, ...], out: Any) -> None:
    parts.append(out[0] if isinstance(out, tuple) else out)


def _layers(model: Any) -> list[Any]:
    """The layers of a causal language model. Raises ValueError."""
    count = model.config.get_text_config().num_hidden_layers
    lists = [m for m in model.get_decoder().children() if isinstance(m, torch.nn.ModuleList) and len(m) == count]
    if not lists:
        raise ValueError(
            f"specker does not find the layers of {type(model).__name__}, whose hidden states a head reads"
        )
    return list(lists[0])


def _draft(
    drafts: Drafts | None,
    texts: list[list[int]],
    live: Tensor,
    pad: Tensor,
    most: int,
    draws: _Draws | None,
    tapped: list[dict[int, Tensor]],
) -> Tensor:
    """[B, N] int64, N <= most: as many draft tokens as every `live` row has; the other rows continue with `pad`.
    `tapped`: what `_Tapped.taken` returns."""
    rows = live.nonzero().view(-1).tolist()
    found: list[list[int]] = [[]]
    if drafts is not None and most > 0:
        samplings = None if draws is None else [draws.samplings[row] for row in rows]
        found = drafts.draft([texts[row] for row in rows], most, samplings, [tapped[row] for row in rows])
    N = min(map(len, found))
    draft = pad.repeat(len(texts), N)
    if N:
        draft[live] = torch.tensor([tokens[:N] for tokens in found], dtype=torch.int64, device=draft.device)
    return draft


def _grown(model: Any, outputs: Any, inputs: dict[str, Any], count: int) -> dict[str, Any]:
    """The model's inputs after `count` more tokens."""
    inputs = dict(inputs)
    for _ in range(count):  # one by one, since each token's type repeats the one before it
        inputs = model._update_model_kwargs_for_generation(outputs, inputs)
    return inputs


def _refuse(call: _Call, synced: bool) -> None:
    """Raise ValueError with a sentence for what `Generate` does not do."""
    model, config = call.model, call.config
    if (config.num_beams or 1) > 1:
        raise ValueError(f"specker decodes one path of each sequence, no beams: leave out num_beams={config.num_beams}")
    if (mode := str(config.get_generation_mode().value)) not in ("greedy_search", "sample"):
        raise ValueError(f"specker decodes greedily or samples: leave out the options for {mode}")
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if synced or (several and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model))):
        raise ValueError("specker does not run in step with other processes (synced_gpus): gather the model first")
    if model.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} has an encoder: specker decodes causal language models")
    if call.inputs.get("inputs_embeds") is not None or not call.ids.shape[1]:
        raise ValueError("specker drafts from token ids: pass input_ids, without inputs_embeds")
    if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
        raise ValueError("a verify pass has several tokens: leave out output_attentions and output_hidden_states")
