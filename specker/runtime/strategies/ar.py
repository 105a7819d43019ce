"""Strategy `ar`: plain decoding without a draft, the baseline. It runs the same ops and weights as other strategies."""

from specker.fields import option
from specker.options import Options
from specker.runtime.control.policy import Budget, Fixed, Policy
from specker.runtime.strategies.base import DraftContext, Plan, PolicyContext, Strategy


class PlainDecoding(Strategy):
    name = "ar"
    summary = "plain decoding, without a draft"
    drafts = False
    no_head = "ar drafts nothing, so it has no draft head"

    def check(self, options: Options) -> None:
        if any(x is not None for x in (options.tree, options.draft_tokens, options.policy)):
            others = f"{option('tree')}, {option('draft_tokens')} and {option('policy')}"
            raise ValueError(f"strategy 'ar' drafts nothing: {others} do not apply")

    def default_policy(self, options: Options) -> None:
        return None

    def drafter(self, context: DraftContext) -> None:
        return None

    def policy(self, context: PolicyContext) -> Policy:
        return Fixed(0, 0)

    def plan(self, context: PolicyContext) -> Plan:
        return Plan(Budget(0, 0), (), (0,), (0,))
