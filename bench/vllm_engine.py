"""One vLLM engine in a process of its own, in vLLM's environment: `python bench/vllm_engine.py FILE`.

FILE holds JSON: "options" for vllm.LLM. Reads JSON lines {"prompts": [ids, ..], "count": new tokens, "sampling": {..}},
which are given to vLLM at once. Writes {"tokens": [ids, ..], "seconds": s, "preemptions": requests,
"drafted": tokens, "accepted": [by position]}. The first line that it writes says {"ready": vLLM's version}.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any


def counters(model: Any) -> tuple[int, int, list[int]]:
    """(preemptions, draft tokens, accepted tokens by position) so far."""
    found = {metric.name: metric for metric in model.get_metrics()}
    preemptions = found["vllm:num_preemptions"].value
    if "vllm:spec_decode_num_draft_tokens" not in found:
        return preemptions, 0, []
    accepted = found["vllm:spec_decode_num_accepted_tokens_per_pos"].values
    return preemptions, found["vllm:spec_decode_num_draft_tokens"].value, list(accepted)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")  # vLLM prints to stdout
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, __version__

    model = LLM(disable_log_stats=False, **json.loads(Path(sys.argv[1]).read_text())["options"])
    print(json.dumps({"ready": __version__}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        how = SamplingParams(
            max_tokens=request["count"], ignore_eos=True, **request.get("sampling", {"temperature": 0})
        )
        preempted, drafted, before = counters(model)
        start = time.perf_counter()
        done = model.generate([{"prompt_token_ids": ids} for ids in request["prompts"]], how, use_tqdm=False)
        seconds = time.perf_counter() - start
        so_far, now, after = counters(model)
        before += [0] * (len(after) - len(before))
        answer = {
            "tokens": [list(each.outputs[0].token_ids) for each in done],
            "seconds": seconds,
            "preemptions": so_far - preempted,
            "drafted": now - drafted,
            "accepted": [a - b for a, b in zip(after, before, strict=True)],
        }
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
