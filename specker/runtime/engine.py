"""The engine that `specker.load` (load.py) makes by a recipe: a target, a drafter if any, the strategy that joins them,
and the session that decodes requests."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache as memoised
from functools import partial
from typing import TYPE_CHECKING, Any, Unpack, overload

import torch

from specker.answers.parts import Part, joined
from specker.answers.reader import Reader, reading
from specker.checkpoints.checkpoint import Checkpoint
from specker.checkpoints.gguf.cache import origin
from specker.cpu import Packed
from specker.cpu.pages import HugePages
from specker.fields import option
from specker.kernels.delta_rows import BLOCK
from specker.model.cache import KVCache
from specker.model.config import ModelConfig, layer_elements
from specker.model.decoder import Model
from specker.model.memory import allowed, free
from specker.model.states import AHEAD
from specker.options import GRAPHS, TEMPERATURE, Options, Params
from specker.runtime import check, strategies, text
from specker.runtime.check import CheckResult
from specker.runtime.control.auto import AcceptanceHistory
from specker.runtime.control.costs import Costs
from specker.runtime.control.policy import Budget, Policy
from specker.runtime.control.stats import Stats
from specker.runtime.events import Event, Logprob
from specker.runtime.loop import Loop
from specker.runtime.ranks.broadcast import Silent, share
from specker.runtime.ranks.dist import Ranks
from specker.runtime.recipe import Recipe
from specker.runtime.round.drafter import Drafter
from specker.runtime.round.graphs import Graphs
from specker.runtime.round.state import Request
from specker.runtime.session import CLOSED, Session, Stream
from specker.runtime.strategies.base import LOOKAHEAD, DraftContext, Plan, PolicyContext, allocate
from specker.runtime.strategies.vocabtrim import trim
from specker.runtime.strategies.vocabtrim.head import TrimmedHead
from specker.runtime.text import Counts, Generation, Prompt, Prompts, Stop
from specker.runtime.warmup import warm_up
from specker.torchrun import processes_here

if TYPE_CHECKING:
    from specker.arguments import EachOption, RequestOptions

log = logging.getLogger(__name__)

COPYING = 1e-3  # the cost of a draft that copies text, in steps of plain decoding, before it is measured


@dataclass(repr=False)
class Engine:
    """A target, what drafts for it and the session that decodes requests. `specker.load` makes it. Several threads may
    use it at once."""

    recipe: Recipe
    target: Checkpoint
    draft: Checkpoint | None
    options: Options = field(init=False)
    device: torch.device = field(init=False)
    dtype: torch.dtype = field(init=False)
    target_name: str = field(init=False)
    draft_name: str | None = field(init=False)
    ranks: Ranks | None = field(init=False)  # the ranks that share the target
    model: Model = field(init=False)  # the target's
    cache: KVCache = field(init=False)
    drafters: list[Drafter] = field(init=False)  # of each source
    policies: PolicyContext = field(init=False)
    plan: Plan = field(init=False)  # the warm-up plan
    loop: Loop = field(init=False)
    session: Session = field(init=False)

    def __post_init__(self) -> None:
        """Make the models, caches and the loop. Raises ValueError for `graphs` on if rounds cannot be captured."""
        recipe = self.recipe
        self.options, self.ranks = o, ranks = recipe.options, recipe.ranks
        self.device, self.dtype, family = recipe.device, recipe.dtype, recipe.family
        self.target_name, self.draft_name = recipe.target_name, recipe.draft_name
        strategy = strategies.of(o)
        self.model = model = Model(self.target, ranks=ranks)
        gpu = model.device.type == "cuda"
        drafts_locally = ranks is None or not strategy.drafts or strategy.every_rank  # else rank 0's drafts are shared
        fixed = fixed_shapes(o, model, None if drafts_locally else ranks)
        self.cache = allocate(model, o, rings=True)
        context = DraftContext(o, self.target, model, self.cache, self.draft, family, ranks, recipe.notes)
        self.drafters = strategies.drafters(context) if recipe.drafts else [Silent()] * len(o.sources)
        head_bytes = self.drafters[0].head_bytes if self.drafters else 0
        head_cost = strategy.head_cost(o, head_bytes, model)
        if strategy.self_drafting and ranks is not None:  # a measured time differs by rank: take rank 0's
            head_cost = float(ranks.first(torch.tensor([head_cost], dtype=torch.float64, device=model.device)))
        # No function that the loop or the session keeps may know the engine: a cycle keeps a dropped engine, with its
        # graphs, until the cyclic collector runs (graphs.py).
        target, draft = self.target, self.draft
        prior = memoised(lambda budget: draft_cost(budget, target, draft, head_bytes, head_cost))
        history = AcceptanceHistory(Costs(prior, memoised(lambda rows: pass_elements(target.config, rows))))
        # On a GPU a token's probability is a host read. Ranks that draft together must end a draft at the same token.
        same_confidence_everywhere = (
            strategy.stepwise(draft) if ranks is None else ranks.draft_ranks == 1 and not strategy.every_rank
        )
        reads_confidence = not gpu and same_confidence_everywhere
        layers = self.target.config.num_layers
        self.policies = PolicyContext(o, layers, family, history, head_cost, reads_confidence, recipe.branches)
        self.plan = strategies.plan(self.policies)
        check_draft(self.plan.largest, [self.target, *([] if self.draft is None else [self.draft])])
        self.loop = Loop(
            model,
            self.cache,
            self.drafters,
            self.plan.largest,
            fixed,
            Graphs(model.device if fixed and gpu else None),
            history,
            o.batch_size,
            LOOKAHEAD,
            o.prefix_cache,
            ranks,
            None if drafts_locally or ranks is None else partial(share, ranks),
            huge_pages(o, model, self.cache, self.drafters),
        )
        policy, eos_ids = partial(strategies.policy, self.policies), self.target.config.eos_ids
        copies = any(source.strategy.name == strategies.COPY for source in o.sources)
        running = recipe.memory.running
        self.session = Session(self.loop, self.target, self.target_name, policy, eos_ids, running, copies)
        for sentence in self.warnings.values():
            log.warning(sentence)

    def close(self) -> None:
        """Cancel all requests and free the models, caches and graphs. Every later use raises ValueError. A `with` block
        closes its engine at the end."""
        if self.__dict__:
            self.session.close()
            self.__dict__.clear()

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise ValueError(CLOSED)

    def __repr__(self) -> str:
        if not self.__dict__:
            return "<specker.Engine: closed>"
        return f"<specker.Engine: {self.title}, {self.strategy}, context {self.max_context}>"

    @property
    def models(self) -> str:
        """The models' names for people: a folder's or a GGUF file's own name, or a hub id."""
        return " + ".join(name for name, _ in self._sides)

    @property
    def title(self) -> str:
        """What this engine computes with: its models, in which form their weights are where their names or `dtype` do
        not say so, the device and `dtype`."""
        dtype = str(self.dtype).removeprefix("torch.")
        named = []
        for name, side in self._sides:
            held = side and (side.quantised or (dtype if origin(side.folder) else None))
            named.append(f"{name} ({held} weights)" if held else name)
        return ", ".join((" + ".join(named), str(self.device), dtype))

    @property
    def _sides(self) -> list[tuple[str, Checkpoint | None]]:
        """The target and, if there is one, the draft, with their names for people."""
        sides = (self.target_name, self.target), (self.draft_name, self.draft)
        return [((side and origin(side.folder)) or name, side) for name, side in sides if name is not None]

    @property
    def drafter(self) -> Drafter | None:
        """The first source's, which may have a model; None for plain decoding."""
        return self.loop.drafter

    @property
    def trimmed_head(self) -> TrimmedHead | None:
        """The drafter's LM head, if it is trimmed."""
        head = None if self.drafter is None else self.drafter.head
        return head if isinstance(head, TrimmedHead) else None

    @property
    def captures(self) -> bool:
        """Whether rounds are CUDA graphs, which `warmup` captures."""
        return self.loop.graphs.capture

    @property
    def strategy(self) -> str:
        return self.options.strategy

    @property
    def speculates(self) -> bool:
        """Whether anything is drafted."""
        return strategies.of(self.options).drafts

    @property
    def tokenizer(self) -> Any:
        return self.target.tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be text."""
        return self.target.tokenizer_or_none is not None

    @property
    def usual_sampling(self) -> dict[str, float]:
        """How conversations and the server sample unless they are told otherwise, as fields of
        `specker.options.Sampling`: as the checkpoint recommends, else at temperature 0.7. `generate` decodes greedily
        unless it is told otherwise."""
        recommended = self.target.recommended
        return {"temperature": 1.0, **recommended} if recommended else {"temperature": TEMPERATURE}

    @property
    def max_context(self) -> int:
        return self.target.config.max_context

    @property
    def trace(self) -> Callable[[dict[str, Any]], None] | None:
        """Called with every request's part of every round (specker/view/trace.py); not of `generate_ar`'s."""
        return self.loop.trace

    @trace.setter
    def trace(self, trace: Callable[[dict[str, Any]], None] | None) -> None:
        self.loop.trace = trace

    @property
    def remarks(self) -> dict[str, str]:
        """What to know about this engine and its results, keyed as in `--json`: its `warnings`, and facts that ask
        nothing of their reader, such as the format of its weights."""
        return self.recipe.notes | self.warnings

    @property
    def warnings(self) -> dict[str, str]:
        """The remarks that a user may want to act on. Logged when the engine is made."""
        said = self.recipe.notes.warnings()
        if self.options.load == "dummy":
            said["sizing"] = (
                "with random weights a run measures time and memory only: its text and acceptance mean nothing"
            )
        return said

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a prompt, with the tokenizer's own special tokens. Raises ValueError."""
        return text.encode(self.target, prompt)

    def encode_chat(self, messages: list[dict[str, Any]], **more: Any) -> list[int]:
        """Token ids of a conversation, through the tokenizer's chat template, ready for the assistant's turn. `more`:
        further variables of the template, such as `tools`. Raises ValueError."""
        return text.encode_chat(self.target, self.target_name, messages, **more)

    def decode(self, tokens: list[int]) -> str:
        """The text of token ids, without special tokens; "" without a tokenizer. Many tokenizers leave out the first
        space of a text, so the texts of a prompt and of its continuation, joined, may lack one; `Generation.text` has
        it."""
        tokenizer = self.target.tokenizer_or_none
        return "" if tokenizer is None else tokenizer.decode(tokens, skip_special_tokens=True)

    def validate(self, prompt: Prompt, max_new_tokens: int = 1) -> list[int]:
        """A prompt's token ids. Raises ValueError if it is empty, has ids that the target lacks or can never fit."""
        return self.session.validate(prompt, max_new_tokens)

    def policy(self) -> Policy:
        """A fresh policy for one request."""
        return strategies.policy(self.policies)

    def warmup(self, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Run the warm-up plan, so no request waits for a compiler or a capture, and measure what rounds cost here, so
        that policy `auto` does not learn it from the first text. Calls `on_progress` with (done, of)."""
        counts = None if self.trimmed_head is None else self.trimmed_head.counts
        with nullcontext() if counts is None else counts.paused():
            warm_up(self.session, self.plan, self.policy, on_progress)

    def stream(
        self,
        prompt: Prompt | Prompts,
        max_new_tokens: int | Counts = 128,
        stop: Stop = (),
        **options: "Unpack[EachOption]",
    ) -> Stream:
        """Decode one prompt, or several as a batch, and iterate over an `Event` per round and prompt. Takes what
        `generate` takes. Text that could be the beginning of a stop string is held back. Closing the stream ends its
        requests. A conversation: `engine.stream(engine.encode_chat(messages))`.

        Raises:
            TypeError: an unknown option.
            ValueError: as of `generate`.
        """
        return self.session.stream(self._requests(prompt, {"max_new_tokens": max_new_tokens, **options}, stop, True))

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of strings, too
        self, prompt: Prompt, max_new_tokens: int = 128, stop: Stop = (), **options: "Unpack[RequestOptions]"
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Prompts, max_new_tokens: int | Counts = 128, stop: Stop = (), **options: "Unpack[EachOption]"
    ) -> list[Generation]: ...

    def generate(self, prompt: Any, max_new_tokens: Any = 128, stop: Any = (), **options: Any) -> Any:
        """Decode to the end.

        Args:
            prompt: a text or its token ids; or a list of prompts, which are decoded as a batch.
            max_new_tokens: tokens to emit at most.
            stop: a string or several; the text ends before the first that occurs.
            temperature: 0 (default) decodes greedily.
            top_p: keep the smallest set of tokens with this much probability; default 1.
            top_k: keep the k most probable tokens; 0 (default) keeps all.
            min_p: keep the tokens that are at least this share as probable as the most probable one; default 0.
            repetition_penalty: divide the logits of tokens that occur in the prompt or the text by this (multiply
                negative ones); default 1.
            presence_penalty: subtract this from the logits of tokens that the text has; default 0.
            frequency_penalty: subtract this for each time that the text has the token; default 0.
            logit_bias: what to add to the logits of some token ids, such as {50256: -100}.
            seed: the same seed gives the same tokens with every strategy; default 0.
            stop_ids: token ids that end a text, besides the checkpoint's own.
            ignore_eos: the checkpoint's own do not end it; default False.
            min_tokens: tokens before which no stop id and no stop string ends the text; default 0.
            policy: how long to draft for this request, as `--policy`, or "off" to draft nothing; default: as the engine
                was loaded. Requests with different policies are not decoded together.
            logprobs: each token comes with its log-probability and those of so many most probable tokens; default 0.
            prefix_cache: "exact", "all" or "off" for this request; default: as the engine was loaded.
            cache_salt: a string; requests share K/V of common beginnings, and the texts that strategy lookup copies,
                only with requests of the same salt (default ""). None: as "", but no texts.
            grammar: what the text must match, as a function of `specker.grammar` returns it, or as a Lark grammar.
            prediction: what the text will probably be, from which strategy `lookup` drafts first: a text, its token
                ids, or OpenAI's form, {"type": "content", "content": TEXT}.

        For several prompts each of these, but `stop`, `stop_ids` and `logit_bias`, may be a list with a value for each
        prompt.

        Returns:
            A `Generation`, or a list of them for a list of prompts.

        Raises:
            TypeError: an unknown option.
            ValueError: a prompt that is empty or does not fit, or a value out of its range, in one sentence.

        Examples:
            >>> import specker
            >>> engine = specker.load(device="cpu")
            >>> out = engine.generate("def fibonacci(n):", max_new_tokens=8, temperature=0.8, seed=7)
            >>> len(out.tokens), out.finished
            (8, 'length')
        """
        return self._generate(prompt, {"max_new_tokens": max_new_tokens, **options}, stop, True)

    def chat(
        self,
        messages: list[dict[str, Any]],
        max_new_tokens: int = 128,
        stop: Stop = (),
        template: Mapping[str, Any] | None = None,
        **options: "Unpack[RequestOptions]",
    ) -> Generation:
        """Answer a conversation: `generate` for the prompt that the checkpoint's chat template makes of it.

        Args:
            messages: each with its `role` and `content`, the user's last one included.
            max_new_tokens: tokens to emit at most.
            stop: a string or several; the text ends before the first that occurs.
            template: further variables of the chat template, such as `tools` or `enable_thinking`.
            options: as of `generate`. Without any the answer is decoded greedily; `**engine.usual_sampling` samples as
                conversations in the terminal and the server do.

        Returns:
            A `Generation`. Reasoning is in its field `reasoning`, and `text` is the answer without it: what gpt-oss
            writes in the channel analysis, and what stands between `<think>` and `</think>` if the chat template names
            these tags.

        Raises:
            TypeError: an unknown option.
            ValueError: as of `generate`; also if the checkpoint has no chat template or it refuses the messages.
        """
        ids = self.encode_chat(messages, **(template or {}))
        continued = str(messages[-1].get("content")) if (template or {}).get("continue_final_message") else ""
        if (reader := self.reader(ids, continued, options.get("grammar"))) is None:
            return self.generate(ids, max_new_tokens, stop, **options)
        parts: list[Part] = []
        asked = {"max_new_tokens": max_new_tokens, **options}
        out: Generation = self._generate(ids, asked, stop, True, lambda event: parts.extend(reader.read(event)))
        return replace(out, text=joined(parts, "text"), reasoning=joined(parts, "reasoning"))

    def reader(self, prompt: list[int], continued: str = "", grammar: str | None = None) -> Reader | None:
        """What reads the answer to a conversation's prompt; None if the model writes no reasoning. `continued`: the
        message that the answer continues. A `grammar` holds for the whole answer, so reasoning that the prompt has
        opened does not go on in it."""
        template = str(getattr(self.tokenizer, "chat_template", None))
        said = self.tokenizer.decode(prompt, skip_special_tokens=False)
        found = reading(self.target.tokens.special, template, said, continued)
        if grammar is not None and found.inside:
            found = replace(found, inside=False)
        return found.reader() if found.reasons else None

    @overload
    def generate_ar(  # type: ignore[overload-overlap]
        self, prompt: Prompt, max_new_tokens: int = 128, stop: Stop = (), **options: "Unpack[RequestOptions]"
    ) -> Generation: ...

    @overload
    def generate_ar(
        self, prompt: Prompts, max_new_tokens: int | Counts = 128, stop: Stop = (), **options: "Unpack[EachOption]"
    ) -> list[Generation]: ...

    def generate_ar(self, prompt: Any, max_new_tokens: Any = 128, stop: Any = (), **options: Any) -> Any:
        """`generate` by plain decoding with the same ops and weights: the baseline and the reference. It takes the same
        options, and computes the whole prompt itself."""
        off = {"prefix_cache": "off"}
        return self._generate(prompt, {"max_new_tokens": max_new_tokens, **off, **options}, stop, False)

    def check(
        self,
        prompt: Prompt,
        generation: Generation,
        max_new_tokens: int = 128,
        stop: Stop = (),
        **options: "Unpack[RequestOptions]",
    ) -> CheckResult:
        """Decode the prompt with `ar` and compare; see check.py."""
        return self.compare(prompt, generation, self.generate_ar(prompt, max_new_tokens, stop, **options), **options)

    def compare(self, prompt: Prompt, generation: Generation, ar: Generation, **options: Any) -> CheckResult:
        """`check` against a finished plain decoding `ar`."""
        first = check.first_difference(generation.tokens, ar.tokens)
        if first is None or first >= min(len(generation.tokens), len(ar.tokens)):
            return check.compared(generation, ar, first)
        ids = self.encode(prompt) if isinstance(prompt, str) else text.token_ids(prompt)
        sampling = Params.of(**options).sampling
        with self.session.alone():
            plain, other = ar.tokens[first], generation.tokens[first]
            gap = check.gap(self.loop, ids + ar.tokens[:first], len(ids), plain, other, sampling)
        return check.compared(generation, ar, first, gap, self.bit_equal, self.dtype)

    @property
    def bit_equal(self) -> bool:
        """Whether tokens must equal plain decoding's bit for bit; see check.py."""
        o = self.options
        return check.bit_equal(self.model, strategies.of(o).chains(o), self.ranks is None or self.ranks.ordered)

    def trim_report(self, stats: Stats) -> dict[str, Any]:
        """What trimming saved and cost, by `stats` of a run; {} if the head is not trimmed."""
        if self.trimmed_head is None:
            return {}
        return trim.report(self.target, self.draft or self.target, self.trimmed_head, self.options, stats)

    def save_lookup(self) -> None:
        """Write the ended texts that strategy lookup copies to `lookup_file`, after the requests that run. The command
        line and the server do that themselves; in Python call it when you like, at the latest before the end.

        Raises:
            ValueError: the engine was loaded without `lookup_file`.
            OSError: the file cannot be written.
        """
        copying = strategies.copier(self.drafters)
        if copying is None or copying.file is None:
            raise ValueError(f"there is no file for the texts: load the engine with {option('lookup_file')}")
        with self.session.alone():
            write = copying.writer()
        if write is not None:
            write()

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Context manager for what uses the caches itself: finishes all requests first. Out of memory becomes a
        ValueError that names a context that would fit."""
        with self.session.alone():
            yield

    def _requests(
        self, prompt: Any, options: dict[str, Any], stop: Stop, speculates: bool, **more: Any
    ) -> list[Request]:
        same = {"stop": stop} | {
            name: options.pop(name, ()) for name in ("stop_ids", "logit_bias")
        }  # lists, but for all
        if not text.several(prompt):
            same["prediction"] = options.pop("prediction", None)  # perhaps a list of ids
        return [
            self.session.request(p, Params.of(**same, **named), index=i, speculates=speculates, **more)
            for i, (p, named) in enumerate(text.each(prompt, options))
        ]

    def _generate(
        self,
        prompt: Any,
        options: dict[str, Any],
        stop: Stop,
        speculates: bool,
        on_event: Callable[[Event], None] | None = None,
    ) -> Any:
        requests = self._requests(prompt, options, stop, speculates, reads=on_event is not None)
        texts = dict.fromkeys(requests, "")
        logprobs: dict[Request, list[Logprob]] = {request: [] for request in requests}
        with self.session.stream(requests) as events:
            for event in events:
                texts[event.request] += event.text
                logprobs[event.request] += event.logprobs
                if on_event is not None:
                    on_event(event)
        out = []
        for s in requests:
            said = texts[s] if s.reader else self.session.reader(s.token_ids[: s.prompt_length]).all(s.tokens)
            out.append(Generation(s.tokens, said, s.stats, s.finished or "length", logprobs[s]))
        return out if text.several(prompt) else out[0]


def check_draft(largest: Budget, models: Sequence[Checkpoint]) -> None:
    """Raise ValueError for drafts behind which a recurrent state could not be kept, and on a GPU for those of which a
    sliding window might hide a column."""
    if windows := [w for m in models if m.weights.norm.is_cuda for w in m.config.layer.sliding_windows if w]:
        most = min(windows) // 64 * 64 - 1  # and the root; the kernel counts in words of 64 columns
        if largest.nodes > most:
            raise ValueError(
                f"a draft of {largest.nodes} tokens is too large on a GPU for a model with a sliding window of "
                f"{min(windows)}: the most are {most} ({option('draft_tokens')}, {option('tree')})"
            )
    if not any(model.config.layer.recurrent for model in models):
        return
    if largest.depth > BLOCK:
        raise ValueError(
            f"a draft of {largest.depth} tokens in a row is too long for a model with recurrent layers: the most are "
            f"{BLOCK} ({option('draft_tokens')}, {option('tree')})"
        )
    if largest.nodes >= AHEAD:
        raise ValueError(
            f"a draft of {largest.nodes} tokens is too large for a model with recurrent layers: the most are "
            f"{AHEAD - 1} ({option('tree')})"
        )


def fixed_shapes(o: Options, model: Model, ranks: Ranks | None) -> bool:
    """Whether rounds have fixed shapes where they can, so that a GPU captures them. `ranks`: those that share rank 0's
    drafts, unless all of them draft. Raises ValueError for `graphs` on if rounds cannot be captured."""
    all_draft = ranks is None or ranks.draft_ranks == ranks.size
    kernels = model.dtype != torch.float64  # float64 has none, and its references read numbers on the host
    asked = f"{option('graphs', 'on')} (or {GRAPHS}=on)"
    if model.device.type == "cuda" and model.ple is not None:
        if o.graphs == "on":
            raise ValueError(
                f"{asked} cannot capture rounds of a model with per-layer embeddings, whose table is on the host"
            )
        return False
    if o.graphs != "on":
        return o.graphs is None and model.device.type == "cuda" and kernels and all_draft
    if not all_draft:
        needed = f"needs all of them to draft: set {option('draft_ranks')} to {option('tp')}"
        raise ValueError(f"{asked} with several ranks {needed}")
    if model.device.type == "cuda" and not kernels:
        raise ValueError(f"{asked} needs kernels, and float64 has none: use another {option('dtype')}")
    return True


def huge_pages(o: Options, model: Model, cache: KVCache, drafters: Sequence[Drafter]) -> HugePages:
    """What moves the matrices that compiled kernels read to huge pages. Copies take at most half of the memory that the
    K/V leave, and the processes of a job share that."""
    if o.huge_pages == "off":
        return HugePages()
    models = {model, *(drafter.model for drafter in drafters if drafter.model is not None)}
    heads = {drafter.head.weight for drafter in drafters if drafter.head is not None}
    own = [place for head in heads if isinstance(head, Packed) for place in head.places]
    places = {place.address: place for place in (*own, *(place for each in models for place in each.places))}
    caches = {cache, *(drafter.cache for drafter in drafters if drafter.cache is not None)}
    kept = sum(x.nbytes for each in caches for x in each.kv)
    available = free(model.device) if places else None
    most = None if available is None else max(0, allowed(available) - kept) // (2 * processes_here())
    return HugePages([*places.values()], most)


def draft_cost(
    budget: Budget, target: Checkpoint, draft: Checkpoint | None, head_bytes: int, head_cost: float
) -> float:
    """The cost of a draft of this shape, in steps of plain decoding, by the weights it reads: `head_bytes` of the
    draft's LM head. `head_cost`: the LM head's cost in a self-drafting step, in layers of the target."""
    steps = min(budget.nodes, budget.depth)
    if budget.exit:
        return steps * (budget.exit + head_cost) / target.config.num_layers
    if draft is None or budget.part:
        return COPYING
    own = draft.layer_bytes + head_bytes
    one_pass = not draft.config.causal or draft.config.pard_token is not None
    passes = 1 if one_pass else steps
    head, c = target.weights.head, target.config  # empty if another engine runs the target
    bytes_each = head.nbytes / head.numel() if head.numel() else target.weights.norm.element_size()
    whole = target.layer_bytes + bytes_each * c.vocab_size * c.hidden_size
    return passes * own / whole


def pass_elements(c: ModelConfig, rows: float) -> float:
    """Elements of the weights that a pass over so many rows reads."""
    return layer_elements(c, rows) + c.vocab_size * c.hidden_size
