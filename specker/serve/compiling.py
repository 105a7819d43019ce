"""The child process of checker.py. It imports nothing but llguidance, so it starts in a tenth of a second.

It reads lines of JSON: first its settings, then grammars. It writes a line when it is ready, and for each grammar one
with what is wrong with it, "" for nothing. It ends itself with a signal when a grammar takes too much."""

import json
import os
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path

from llguidance import LLMatcher, LLParserLimits, LLTokenizer


def main() -> None:
    about = json.loads(sys.stdin.readline())
    tokenizer, limits = LLTokenizer(**about["tokenizer"]), LLParserLimits(**about["limits"])
    limit_memory(about["memory"])
    print(json.dumps("ready"), flush=True)
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, about["seconds"])
        try:
            error = checked(tokenizer, json.loads(line), limits)
        except MemoryError:
            os.abort()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(error), flush=True)


def checked(tokenizer: LLTokenizer, grammar: str, limits: LLParserLimits) -> str:
    """Compile a grammar and compute what the first token may be. Returns llguidance's error, or ""."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    matcher.compute_bitmask()
    matcher.compute_ff_tokens()
    return str(matcher.get_error())


def limit_memory(more: int) -> None:
    """Let the process grow by `more` bytes, where the system says how large it is."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError, ValueError):
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        limit = pages * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


if __name__ == "__main__":
    main()
