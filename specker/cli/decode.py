"""Decode conversations, up to --batch-size at once, and print their texts one after another."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from specker.cli.flags import Job
from specker.cli.prompts import Conversation, encode
from specker.cli.report import Result
from specker.cli.screen import Screen
from specker.command.interrupt import CtrlC
from specker.options import Params, Sampling
from specker.runtime.control.stats import Stats
from specker.view.trace import Trace

if TYPE_CHECKING:
    from specker.answers.reader import Reader

LONG = 512  # tokens; the prefill of a longer prompt shows its progress


@dataclass(eq=False)
class Sample:
    """One sampled answer to each turn of a conversation. The turns are decoded one after another."""

    conversation: Conversation
    sampling: Sampling
    first: int  # the number of its first turn among all results
    messages: list[dict[str, str]] = field(init=False)  # the chat so far
    results: list[Result] = field(default_factory=list)  # of the turns so far
    deferred: list[Callable[[], None]] = field(default_factory=list)  # prints that wait for the samples before it

    def __post_init__(self) -> None:
        self.messages = list(self.conversation.before)

    @property
    def done(self) -> bool:
        return len(self.results) == len(self.conversation.turns) and self.results[-1].finished is not None

    @property
    def number(self) -> int:
        """The number of its last turn among all results."""
        return self.first + len(self.results) - 1

    def title(self, turn: int, samples: int) -> str:
        """The name of a turn's text among several. `turn`: from 1; `samples`: of each conversation."""
        conversation = self.conversation
        title = conversation.where
        if conversation.part or len(conversation.turns) > 1:
            title += f", turn {conversation.part or turn}"
        return f"{title}, seed {self.sampling.seed}" if samples > 1 else title

    def print_deferred(self) -> None:
        for show in self.deferred:
            show()
        self.deferred.clear()


def samples_of(conversations: list[Conversation], count: int, sampling: Sampling) -> list[Sample]:
    """`count` samples of each conversation, with consecutive seeds."""
    samples: list[Sample] = []
    first = 0
    for conversation in conversations:
        for n in range(count):
            seeded = replace(sampling, seed=(sampling.seed + n) % 2**64)
            samples.append(Sample(conversation, seeded, first))
            first += len(conversation.turns)
    return samples


def several(samples: list[Sample]) -> bool:
    """Whether there is more than one text, so that each needs a title."""
    return sum(len(sample.conversation.turns) for sample in samples) > 1


class Decoding:
    """Decodes samples and prints them in their order."""

    def __init__(
        self,
        engine: Any,
        job: Job,
        screen: Screen,
        samples: list[Sample],
        *,
        echo: bool = True,
        trace: Trace | None = None,
        grammar: str | None = None,
        prediction: tuple[int, ...] | None = None,
    ):
        """`job`: its `max_new_tokens` is set. `echo`: print the prompts; a user who typed them has seen them. `trace`:
        records where requests begin and end. `grammar`, `prediction`: of every text."""
        self.engine, self.job, self.screen, self.samples = engine, job, screen, samples
        self.echo, self.trace, self.several = echo, trace, several(samples)
        self.grammar, self.prediction = grammar, prediction
        self._ar_first = False

    def run(self) -> None:
        """Decode every turn of the samples; with --check, compare with plain decoding. After Ctrl-C, raises
        KeyboardInterrupt at the end of a chunk; the samples keep their results so far."""
        size = self.engine.options.batch_size
        if size > 1 and not self.job.check:
            self._begin_turn(self.samples)
            self._decode(self.samples, to_the_end=True)
            return
        for n in range(0, len(self.samples), size):
            group = self.samples[n : n + size]
            for turn in range(max(len(sample.conversation.turns) for sample in group)):
                self.turn([sample for sample in group if turn < len(sample.conversation.turns)])

    def turn(self, samples: list[Sample]) -> None:
        """Decode the next turn of the samples in one batch. With --check, `ar` decodes the same prompts in a batch of
        its own, before the strategy in every second call: whichever goes first pays for what both need, such as new
        memory."""
        self._begin_turn(samples)
        plain = self._decode_plain(samples) if self.job.check and self._ar_first else None
        self._decode(samples)
        if self.job.check:
            self._compare(samples, plain or self._decode_plain(samples))
            self._ar_first = not self._ar_first

    def _begin_turn(self, samples: list[Sample]) -> None:
        """Begin the next turn of the samples, and print its prompt."""
        for sample in samples:
            turn = sample.conversation.turns[len(sample.results)]
            sample.messages.append({"role": "user", "content": turn})
            sample.results.append(Result([], "", Stats(), ids=self._ids(sample), sampling=sample.sampling))
            if self.echo:
                text, title = f"{turn}\n" if self.job.chat else turn, self._title(sample)
                sample.deferred.append(partial(self.screen.prompt, text, title))
        self._print_ready()

    def _ids(self, sample: Sample) -> list[int]:
        """The prompt of a sample's next turn."""
        job, conversation = self.job, sample.conversation
        if conversation.ids and not sample.results:
            return list(conversation.ids)
        return encode(self.engine, sample.messages, conversation.where, job.chat, job.max_new_tokens or 0)

    def _title(self, sample: Sample) -> str | None:
        """The name of the text of a sample's last turn; None if there is only one text."""
        return sample.title(len(sample.results), self.job.samples) if self.several else None

    def _request(self, sample: Sample) -> Any:
        """The request for a sample's last turn."""
        job, conversation, turn = self.job, sample.conversation, len(sample.results)
        # With --check, both decoders prefill every prompt, for equal bits and a fair comparison of speed. Otherwise a
        # conversation prefills only its new tokens.
        keeps = job.chat and turn > 1 and self.engine.options.prefix_cache != "off"
        prefixes = "off" if job.check else "all" if keeps else None
        params = Params(
            job.max_new_tokens or 0,
            sample.sampling,
            job.stop,
            job.stop_ids,
            prefix_cache=prefixes,
            grammar=self.grammar,
            ignore_eos=job.ignore_eos,
            min_tokens=job.min_tokens,
            prediction=self.prediction,
        )
        request = self.engine.session.request(sample.results[-1].ids, params, index=sample.number)
        if self.trace is not None:
            said = conversation.turns[turn - 1]
            self.trace.begin(request, conversation.where, conversation.part or turn, said)
        return request

    def _decode(self, samples: list[Sample], to_the_end: bool = False) -> None:
        """Decode the last turn of the samples in one batch; with `to_the_end` the turns after it, too."""
        owners = {sample.number: sample for sample in samples}
        requests = [self._request(sample) for sample in samples]
        answers = {r.index: self._answer(r) for r in requests}
        with CtrlC() as ctrl_c, self.engine.session.stream(requests) as events:
            for event in self._with_progress(events, requests, samples):
                sample = owners[event.prompt_index]
                result = sample.results[-1]
                result.tokens += event.tokens
                result.stats, result.finished = event.stats, event.finished
                self._take(event, sample, answers[event.prompt_index])
                if event.finished:
                    if self.trace is not None:
                        self.trace.end(event.prompt_index, event.finished, event.stats)
                    sample.deferred.append(self.screen.newline)
                    sample.messages.append({"role": "assistant", "content": result.text})
                    if to_the_end and not sample.done:
                        self._begin_turn([sample])
                        owners[sample.number] = sample
                        request = self._request(sample)
                        answers[request.index] = self._answer(request)
                        events.submit(request, first=True)
                self._print_ready()
                if ctrl_c.pressed:
                    break
        if ctrl_c.pressed:
            self._print_all()
            raise KeyboardInterrupt

    def _answer(self, request: Any) -> "Reader | None":
        """What reads the text of a request, if it is an answer that may have reasoning."""
        return self.engine.reader(request.token_ids, grammar=self.grammar) if self.job.chat else None

    def _take(self, event: Any, sample: Sample, answer: "Reader | None") -> None:
        """Add the text of an event to a sample's last result, and to what is printed."""
        result = sample.results[-1]
        if answer is None:
            result.text += event.text
            sample.deferred.append(partial(self.screen.pieces, event.pieces))
            return
        for part in answer.read(event):
            if part.kind == "reasoning":
                result.reasoning += part.text
                sample.deferred.append(partial(self.screen.reasoning, part.text))
            else:
                result.text += part.text
                sample.deferred.append(partial(self.screen.pieces, [(part.text, part.drafted)]))

    def _with_progress(self, events: Iterator[Any], requests: list[Any], samples: list[Sample]) -> Iterator[Any]:
        """`events`, with a progress bar during the prefill of a long conversation."""
        if self.job.chat and len(requests) == 1 and len(samples[0].results[-1].ids) > LONG:
            with self.screen.progress("prefill") as requests[0].on_progress:
                first = next(events)
            yield first
        yield from events

    def _print_ready(self) -> None:
        """Print the first unfinished sample as it grows; later samples wait for it."""
        for sample in self.samples:
            sample.print_deferred()
            if not sample.done:
                break

    def _print_all(self) -> None:
        """Print what every sample has so far."""
        for sample in self.samples:
            begun = bool(sample.results and sample.results[-1].stats.rounds)
            if sample.deferred and not begun:
                sample.deferred.pop()  # the prompt
            sample.print_deferred()
            if begun and sample.results[-1].finished is None:
                self.screen.newline()

    def _decode_plain(self, samples: list[Sample]) -> list[Any]:
        """The last turns of the samples as `ar` decodes them, in one batch: runtime.text.Generation."""
        sampling = asdict(samples[0].sampling) | {"seed": [sample.sampling.seed for sample in samples]}
        prompts = [sample.results[-1].ids for sample in samples]
        job = self.job
        ends = {"stop_ids": job.stop_ids, "ignore_eos": job.ignore_eos, "min_tokens": job.min_tokens}
        ends["grammar"] = self.grammar
        return self.engine.generate_ar(prompts, job.max_new_tokens, job.stop, **ends, **sampling)

    def _compare(self, samples: list[Sample], plain: list[Any]) -> None:
        """Compare the last turns of the samples with `plain`."""
        from specker.runtime.text import Generation

        for sample, ar in zip(samples, plain, strict=True):
            result, title = sample.results[-1], self._title(sample)
            generation = Generation(result.tokens, result.text, result.stats, result.finished or "length")
            result.check = self.engine.compare(result.ids, generation, ar, **asdict(sample.sampling))
            if not result.check.identical:
                message = result.check.message if title is None else f"{title}: {result.check.message}"
                self.screen.note(message, "yellow" if result.check.ok else "red")
