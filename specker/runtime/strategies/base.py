"""What a strategy is: the interface behind the registry, and what the engine hands to it.

A strategy is one file in this package. It holds the paper's equations, the options with their flags, the drafter, the
policies of its own and the warm-up plan. The engine composes strategies through this interface alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specker.config import Options
from specker.kernels.linear import row_linear, row_linear_ref
from specker.runtime.dist import Ranks
from specker.runtime.draft import Drafter
from specker.runtime.head import Head, Kept
from specker.runtime.model.cache import KVCache
from specker.runtime.model.checkpoint import Checkpoint
from specker.runtime.model.decoder import Model
from specker.runtime.policy import GENERAL, LONGEST, Budget, Policy
from specker.runtime.vocab_scores import tokenizer_hash

SCRATCH = 256  # cache columns beyond the context: a verify pass of the largest tree
# Of 2, 3 and 4 the best mean over temperatures 0 and 0.7 on the bundled pair (bench/results), by less than the noise.
DRAFT_TOKENS = 4


@dataclass(frozen=True)
class DraftContext:
    """What a drafter is made from."""

    options: Options
    target: Checkpoint
    model: Model  # the target's
    cache: KVCache  # the target's
    draft: Checkpoint | None  # with the kept rows of the head alone where it is trimmed
    kept: Kept | None  # which rows those are; None: all
    bundled: bool  # whether the target is the bundled one
    ranks: Ranks | None = None  # the ranks that share the target, as this one sees them

    @property
    def tokenizer_hash(self) -> str | None:
        """Of the target's tokenizer, if it has one."""
        tokenizer = self.target.tokenizer_or_none
        return None if tokenizer is None else tokenizer_hash(tokenizer)

    @property
    def packable(self) -> bool:
        """Rows that follow the text are written in place, which a packed head does not allow."""
        return self.kept is None or not self.kept.text

    def draft_model(self, packed: bool = True) -> Model:
        """The draft checkpoint as a model; `packed` as in `Model`."""
        assert self.draft is not None
        return Model(self.draft, packed=packed, pack_head=self.packable, linear=linear(self.options))

    def head(self, model: Model, weight: Tensor | None = None) -> Head:
        """The head that drafts: the model's norm with the model's own head or with the rows `weight` [K, E]."""
        return Head(model.head if weight is None else weight, model.norm, model.config.rms_norm_eps, self.kept)

    def allocate(self, model: Model) -> KVCache:
        """A cache for a draft model."""
        return allocate(model, self.options)

    def depth(self, strategy: "Strategy") -> int:
        """Tokens of the longest path that is drafted."""
        context = PolicyContext(self.options, self.target.config.num_layers, self.bundled)
        return strategy.plan(context).largest.depth


@dataclass(frozen=True)
class PolicyContext:
    """What policies and the warm-up plan are made from."""

    options: Options
    layers: int  # of the target
    bundled: bool  # whether the target is the bundled one
    head_cost: float = 0.0  # `Strategy.head_cost`, the same on every rank


@dataclass(frozen=True)
class Plan:
    """What a warm-up must run, so that no request meets anything for the first time."""

    largest: Budget  # the largest draft: nodes and depth
    budgets: tuple[Budget, ...]  # that the policy may ask for; empty where nothing is drafted
    verified: tuple[int, ...]  # sizes of drafts that the target verifies, beside those of `budgets`
    accepted: tuple[int, ...]  # sizes of drafts that acceptance judges, likewise


class Strategy:
    """A way to draft. Override what differs; the defaults fit a model that drafts a chain token by token."""

    name: str  # as in --strategy
    summary: str = ""  # one sentence for --help
    options: type | None = None  # the strategy's own flags, a frozen dataclass whose fields are made by `opt`
    policies: tuple[str, ...] = ()  # policies of its own beside `policy.GENERAL`; the first one is its default
    drafts: bool = True
    self_drafting: bool = False  # the target drafts with its own weights and cache, on every rank
    divides: bool = False  # the ranks of --tp divide the work of a draft among them
    bundled_draft: str | None = None  # the bundled family's draft checkpoint; None: the strategy needs no checkpoint
    causal: bool = True  # the draft checkpoint; False: a diffusion language model
    no_head: str = ""  # why there is no LM head to trim; empty where there is one

    # --- options and models: raise ValueError with a sentence for the user

    def check(self, options: Options) -> None:
        """Refuse options that do not fit together. A policy that was left out is still None."""

    def default_policy(self, options: Options) -> str | None:
        return self.policies[0] if self.policies else "fixed"

    def check_target(self, options: Options, layers: int) -> None:
        """Refuse a target, by its number of layers."""

    def adapt(self, options: Options, draft: Checkpoint) -> Checkpoint:
        """The draft checkpoint as the options ask for it."""
        return draft

    def chains(self, options: Options) -> bool:
        """Whether every draft is a chain."""
        return options.tree is None

    # --- what the engine composes

    def drafter(self, context: DraftContext) -> Drafter | None:
        raise NotImplementedError

    def head_cost(self, options: Options, drafter: Any) -> float:
        """What a draft step costs beside the layers it runs, in layers of the target, for policies that ask."""
        return 0.0

    def policy(self, context: PolicyContext) -> Policy:
        """A request's own policy, fresh: what one learns from a prompt must not leak into the next."""
        size = self.size(context.options)
        return GENERAL[context.options.policy or "fixed"](size.nodes, size.depth)

    def plan(self, context: PolicyContext) -> Plan:
        """A confidence policy drafts token by token, so warming up its longest draft covers the shorter ones."""
        size, rule = self.size(context.options), context.options.policy
        if rule == "plus-minus-one":
            most = max(size.depth, LONGEST)
            lengths = tuple(Budget(most, n) for n in range(1, most + 1))
            return Plan(Budget(most, most), lengths, (0,), (0,))
        sizes = tuple(range(size.nodes + 1)) if rule == "draft-and-verify" else (0,)
        return Plan(size, (size,), sizes, sizes)

    def size(self, options: Options) -> Budget:
        """Nodes and depth of what the general policies start from."""
        if (tree := options.tree) is not None:
            return Budget(options.draft_tokens or tree.width * tree.depth, tree.depth)
        usual = LONGEST + 1 if options.policy == "draft-and-verify" else DRAFT_TOKENS
        length = options.draft_tokens or usual
        return Budget(length, length)


def linear(options: Options) -> Callable[..., Tensor]:
    """What a Model multiplies with: the batch-invariant kernel, or torch's own. A drafter's head uses neither: it ends
    in the fused top-k."""
    return row_linear_ref if options.linear == "cublas" else row_linear


def allocate(model: Model, options: Options) -> KVCache:
    """A cache for `--batch-size` sequences of the model's whole context and a round's scratch columns each, or with a
    pool of `--kv-tokens` positions."""
    page = options.page_size
    return KVCache(
        model.config,
        model.config.max_context + SCRATCH,
        dtype=model.dtype,
        device=model.device,
        page_size=page,
        sequences=options.batch_size,
        pages=None if options.kv_tokens is None or options.batch_size == 1 else -(-options.kv_tokens // page),
    )
