"""Why rounds draft nothing: the reasons that they record (`Stats.rests`), and the sentences that say it."""

from collections.abc import Mapping

RESTS = "slower"  # plain rounds are expected to be faster
MISSING = "nothing found"  # there is no text to copy
MEASURED = "measured"  # plain decoding is timed
ENDED = "context"  # the text is longer than the draft model's context
BEHIND = "prefill"  # the drafter is prefilling a prompt
PROMPTS = "prompts"  # rows of prompts come with the verify pass
FORCED = "grammar"  # grammars leave one next token of every text
WORDS = {
    RESTS: "plain decoding was faster",
    MISSING: "there was nothing to copy",
    MEASURED: "plain decoding was timed",
    BEHIND: "the drafter read the prompt",
    PROMPTS: "other prompts were read",
    ENDED: "the draft's context was full",
    FORCED: "the grammar left one token",
}


def drafting(drafted: int, rounds: int, rests: Mapping[str, int]) -> str:
    """Whether anything is drafted and, if not, the most frequent reason. `drafted`: tokens in so many `rounds`;
    `rests`: rounds without a draft, by their reason."""
    if drafted or not rounds:
        return "yes" if drafted else "not yet"
    why = max(rests, key=lambda reason: rests[reason], default="")
    return f"no, because {WORDS.get(why, 'no round asked for a draft')}"


def counted(rounds: int, drafting: int, rests: Mapping[str, int]) -> str:
    """Why others of the `rounds` than the `drafting` ones drafted nothing. The numbers add up to all rounds."""
    counts = {f"because {words}": rests.get(reason, 0) for reason, words in WORDS.items()}
    counts["for other reasons"] = rounds - drafting - sum(counts.values())
    return ", ".join(f"{count} {words}" for words, count in counts.items() if count)
