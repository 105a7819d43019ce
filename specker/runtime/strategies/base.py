"""The interface of a strategy, and the contexts that the engine passes to it.

A strategy is one file or folder in this package. It holds the paper's equations, the options with their flags, the
drafter, its own policies and the warm-up plan. The engine uses strategies only through this interface.

The command line imports all strategies for their flags, help texts and checks, and must answer at once. So a strategy's
file, or its folder's __init__.py, imports torch, numpy and modules that need them only inside of methods. Code that
needs them lies beside it, in files of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specker.fields import option
from specker.options import Options
from specker.runtime.control.auto import AcceptanceHistory, Auto
from specker.runtime.control.policy import AUTO, CONFIDENT, LENGTHS, LONGEST, Budget, Policy, general
from specker.runtime.notes import Notes
from specker.zoo import Family

if TYPE_CHECKING:
    import torch

    from specker.checkpoints.checkpoint import Checkpoint, Opened, OpenedHead
    from specker.model.cache import KVCache
    from specker.model.config import ModelConfig
    from specker.model.decoder import Model
    from specker.model.weights import Matrix
    from specker.runtime.ranks.dist import Ranks
    from specker.runtime.round.drafter import Drafter
    from specker.runtime.round.lm_head import LMHead

# Columns of prompts whose recurrent states a cache saves, beside one for each sequence: some system prompts or
# documents that several requests begin with. Each takes about the memory of a sequence's states.
SAVED = 4
LOOKAHEAD = 256  # cache columns beyond the context: a verify pass of the largest tree
# The best of 2, 3 and 4 by the mean over temperatures 0 and 0.7 on the bundled pair (bench/results), within noise.
DRAFT_TOKENS = 4
SHAPE = ("policy", "draft_tokens", "tree")  # the options that choose how much is drafted


@dataclass(frozen=True)
class DraftContext:
    """The arguments for making a drafter."""

    options: Options
    target: Checkpoint
    model: Model | None  # the target's; None if another engine runs it
    cache: KVCache | None  # the target's KV cache
    draft: Checkpoint | None
    family: Family | None  # the bundled files for the target
    ranks: Ranks | None = None  # the ranks that share the target; None for one process
    notes: Notes = field(default_factory=Notes)  # the engine's remarks, to which a drafter may add its own

    @property
    def tokenizer_hash(self) -> str | None:
        """The hash of the target's tokenizer; None without one."""
        from specker.runtime.strategies.vocabtrim.order import tokenizer_hash

        return tokenizer_hash(self.target.tokens)

    def draft_model(self) -> Model:
        """A model of the draft checkpoint, or of this rank's part of it."""
        from specker.model.decoder import Model

        assert self.draft is not None
        if self.draft.part.size == 1:
            return Model(self.draft)
        assert self.ranks is not None
        return Model(self.draft, ranks=self.ranks.drafting)

    def head(self, model: Model, weight: Matrix | None = None) -> LMHead:
        """The drafting head: the model's norm with the model's own head, or with the rows `weight` [V, E]; trimmed if
        the options say so. A trimmed head of a split draft is whole on every rank."""
        from specker.runtime.ranks.head import SplitHead
        from specker.runtime.round.lm_head import LMHead
        from specker.runtime.strategies.vocabtrim.trim import trimmed

        rows, c, translation, ids = model.head if weight is None else weight, model.config, None, None
        about = model.norm, c.rms_norm_eps, model.activations, c.logits_cap
        if self.draft is not None and self.draft.part.size > 1:
            assert self.ranks is not None and self.ranks.drafting is not None
            if self.options.trim is None:
                return SplitHead(rows, *about, ranks=self.ranks.drafting, first=self.draft.part.vocabulary(c)[0])
            rows = self.draft.weights.head
        head = LMHead(rows, *about)
        if self.draft is not None:
            translation, ids = self.draft.translation, self.draft.head_ids
        if self.options.trim is not None:
            return trimmed(head, translation, self.target, self.options, self.family, self.notes, self.ranks)
        if translation is not None:
            ids = translation.names if translation.free else translation.ids
        if ids is not None:
            head.token_ids = ids.to(model.device)
            head.draftable = None if translation is not None and translation.free else set(ids.tolist())
        return head

    def allocate(self, model: Model, layers: int | None = None) -> KVCache:
        """A cache for a draft model, or for `layers` layers like its own."""
        return allocate(model, self.options, layers)

    def depth(self, strategy: Strategy) -> int:
        """The length of the longest draft path, in tokens."""
        context = PolicyContext(self.options, self.target.config.num_layers, self.family)
        return strategy.plan(context).largest.depth


@dataclass(frozen=True)
class PolicyContext:
    """The arguments for making policies and the warm-up plan."""

    options: Options
    layers: int  # number of the target's layers
    family: Family | None  # the bundled files for the target
    history: AcceptanceHistory | None = None  # what rounds cost and drafts achieve; None for the warm-up plan alone
    head_cost: float = 0.0  # `Strategy.head_cost`, the same on every rank
    confident: bool = False  # whether policy `auto` may end drafts by token probabilities, which the host reads
    branches: bool = False  # whether a round may have two drafts, whose tree has the bits that the promise needs


@dataclass(frozen=True)
class Plan:
    """The warm-up plan: the shapes to compile and capture before the first request."""

    largest: Budget  # the largest draft: nodes and depth
    budgets: tuple[Budget, ...]  # shapes that the policy may propose; empty without fixed-shape drafts
    verified: tuple[int, ...]  # further sizes of drafts for the verify pass
    accepted: tuple[int, ...]  # further sizes of drafts for acceptance
    exits: tuple[Budget, ...] = ()  # further drafts by the target's first layers, for the verify pass


class Strategy:
    """A way to draft. The defaults suit a model that drafts a chain token by token; override the rest."""

    name: str  # as in --strategy
    summary: str = ""  # one sentence for --help
    paper: str = ""  # for --list-strategies, with arXiv numbers in brackets
    options: type | None = None  # the strategy's own flags, a frozen dataclass whose fields are made by `opt`
    policies: tuple[str, ...] = ()  # its own policies, besides `policy.GENERAL`
    usual: str = AUTO  # the policy of those, if the user chose no length
    drafts: bool = True
    self_drafting: bool = False  # the target drafts with its own weights and cache, on every rank
    layouts: tuple[str, ...] = ("replicated",)  # of --draft-layout, the default first
    needs_draft: bool = False  # drafts with a checkpoint of its own
    may_draft: bool = False  # may draft with a checkpoint of its own, and needs none
    reads_target: bool = False  # its checkpoint is a head that reads the target's hidden states
    translates: bool = False  # the draft checkpoint may have another tokenizer than the target
    branches: bool = False  # a copy may stand beside its drafts; else both take turns
    causal: bool = True  # the draft checkpoint is causal; False: a diffusion language model
    about_draft: str = ""  # why its bundled draft is another one than that of strategy draft; empty: it is the same
    no_head: str = ""  # why there is no LM head to trim; empty if there is one

    @property
    def needs(self) -> str:
        """The model that it needs besides the target, for --list-strategies."""
        if not self.needs_draft:
            return "nothing"
        return "a draft model" if self.causal else "a diffusion model"

    @property
    def runs_model(self) -> bool:
        """Whether it drafts with a model or a head. One of the sources that are joined may."""
        return self.takes_draft or self.self_drafting or self.reads_target

    @property
    def takes_draft(self) -> bool:
        """Whether a draft checkpoint can be named."""
        return self.needs_draft or self.may_draft

    @property
    def every_rank(self) -> bool:
        """Whether all ranks that share a target draft the same: with its weights, or from its hidden rows, of which
        each rank has all."""
        return self.self_drafting or self.reads_target

    # --- options and models: raise ValueError with a sentence for the user

    def check(self, options: Options) -> None:
        """Raise ValueError for options that do not fit together. An omitted policy is still None."""

    def default_policy(self, options: Options) -> str | None:
        """The default policy. It is `fixed` if the user chose a length or a tree."""
        return self.usual if options.draft_tokens is None and options.tree is None else "fixed"

    def published(self, given: Mapping[str, Any]) -> dict[str, Any] | None:
        """The options with the values of the paper (`as_published`), beside those that the user gave: without what a
        `given` one excludes. None: no paper's setting is offered."""
        return None

    def check_target(self, options: Options, layers: int) -> None:
        """Raise ValueError if the strategy cannot use a target with this many layers."""

    def open_head(self, source: str | Path | None, target: Opened) -> OpenedHead:
        """Open the head of a strategy that `reads_target`. `source`: None if the strategy needs no draft checkpoint."""
        from specker.checkpoints.drafts import eagle

        assert source is not None
        return eagle.Layout.open(source, target.config)

    def with_draft(self, options: Options, draft: Opened) -> Options:
        """The options with the defaults that depend on the draft checkpoint."""
        return options

    def stepwise(self, draft: Checkpoint | None) -> bool:
        """Whether `draft` is run token by token, so that policy `auto` may end a chain by its tokens' probabilities."""
        return True

    def chains(self, options: Options) -> bool:
        """Whether every draft is a chain."""
        return options.tree is None

    # --- what the engine composes

    def drafter(self, context: DraftContext) -> Drafter | None:
        raise NotImplementedError

    def head_cost(self, options: Options, head_bytes: int, model: Model) -> float:
        """What a draft step, which reads `head_bytes` of an LM head, costs in addition to its layers, in units of one
        target layer, for policies that use it."""
        return 0.0

    def policy(self, context: PolicyContext) -> Policy:
        """A fresh policy for each request."""
        rule, size = context.options.policy or "fixed", self.size(context.options)
        return self.auto(context, size) if rule == AUTO else general(rule, size)

    def auto(self, context: PolicyContext, size: Budget) -> Policy:
        """Policy `auto` with drafts up to `size`."""
        assert context.history is not None
        return Auto(context.history.drafts, size, context.confident)

    def plan(self, context: PolicyContext) -> Plan:
        """A confidence policy drafts token by token, so warming up its longest draft covers the shorter ones."""
        size, rule = self.size(context.options), context.options.policy
        if rule == "plus-minus-one":
            most = max(size.depth, LONGEST)
            lengths = tuple(Budget(most, n) for n in range(1, most + 1))
            return Plan(Budget(most, most), lengths, (0,), (0,))
        if rule == AUTO and not context.confident:
            lengths = tuple(Budget(n, n) for n in (*(n for n in LENGTHS if n < size.depth), size.depth))
            return Plan(size, lengths, (0,), (0,))
        sizes = tuple(range(size.nodes + 1)) if rule == AUTO or rule in CONFIDENT else (0,)
        return Plan(size, (size,), sizes, sizes)

    def size(self, options: Options) -> Budget:
        """The budget that the general policies start from."""
        if (tree := options.tree) is not None:
            return Budget(options.draft_tokens or tree.width * tree.depth, tree.depth)
        usual = LONGEST + 1 if options.policy in CONFIDENT else LENGTHS[-1] if options.policy == AUTO else DRAFT_TOKENS
        length = options.draft_tokens or usual
        return Budget(length, length)


def shaped(given: Mapping[str, Any]) -> bool:
    """Whether the user chose how much is drafted."""
    return any(given.get(name) is not None for name in SHAPE)


def allocate(model: Model, options: Options, layers: int | None = None, rings: bool = False) -> KVCache:
    """A cache for `--batch-size` sequences, each with the model's whole context and the scratch columns, or with a pool
    of `--kv-tokens` positions. `layers`: the number of layers; None: the model's. `rings`: see `KVCache`."""
    from specker.model.cache import KVCache

    kept = kv_dtype(options, model.dtype, model.device)
    if options.kv_dtype is None:
        kept = usual_kv_dtype(model)
    elif kept != model.dtype:
        check_compiled(options, model)
    page, size, columns = options.page_size, options.batch_size, model.config.max_context + LOOKAHEAD
    pool = size * columns if options.kv_tokens is None or size == 1 else options.kv_tokens
    return KVCache(
        model.config if layers is None else replace(model.config, num_layers=layers),
        columns,
        dtype=model.dtype,
        device=model.device,
        page_size=page,
        sequences=slots(options),
        pages=size * -(-columns // page) if pool == size * columns else -(-pool // page),
        rings=rings,
        saved=saved_states(options),
        kv_dtype=kept,
    )


def kv_dtype(options: Options, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of K and V in the caches of models with activations of `dtype`. Raises ValueError for one that no model
    takes there."""
    import torch

    asked = dtype if options.kv_dtype is None else getattr(torch, options.kv_dtype)
    if asked != dtype and (device.type != "cpu" or dtype != torch.float32):
        own = str(dtype).removeprefix("torch.")
        where = "on a GPU" if device.type != "cpu" else f"in {own}"
        needed = "a CPU" if device.type != "cpu" else "a run in float32 or bfloat16"
        raise ValueError(f"{option('kv_dtype', options.kv_dtype)} needs {needed}: K/V of a run {where} is in {own}")
    return asked


def usual_kv_dtype(model: Model) -> torch.dtype:
    """The dtype of K and V by default: float16 where the CPU's compiled layers run the model and the CPU converts it,
    else the model's."""
    import torch

    from specker import cpu

    return torch.float16 if model.stack is not None and cpu.converts_halves() else model.dtype


def planned_kv_dtype(
    options: Options, config: ModelConfig, dtype: torch.dtype, device: torch.device, compiles: bool
) -> torch.dtype:
    """The dtype that `allocate` will choose for a model with activations of `dtype`, by its sizes alone. A head that
    the compiled layers refuse for other reasons has one layer, and is counted too low. `compiles`: whether compiled
    layers may run on a CPU."""
    import torch

    from specker import cpu
    from specker.checkpoints.buffers import served

    if options.kv_dtype is not None:
        return kv_dtype(options, dtype, device)
    compiled = compiles and device.type == "cpu" and dtype == torch.float32 and served(config)
    return torch.float16 if compiled and cpu.converts_halves() else dtype


def check_compiled(options: Options, model: Model) -> None:
    """Raise ValueError unless the CPU's compiled layers run the model."""
    from specker import cpu

    if model.stack is None:
        lacks = cpu.problem() or cpu.Stack.lacks(model.config.layer)
        about = f" ({lacks})" if lacks else ""
        needed = f"needs the CPU's compiled layers, which do not run this model{about}"
        raise ValueError(f"{option('kv_dtype', options.kv_dtype)} {needed}")


def saved_states(options: Options) -> int:
    """The columns whose recurrent states a cache can save: `SAVED` and one for each sequence."""
    if options.prefix_cache == "off":
        return 0
    return SAVED + options.batch_size


def slots(options: Options) -> int:
    """The sequences of a cache: in a batch, one more prefills its prompt (slots.py)."""
    return options.batch_size + (options.batch_size > 1)
