"""What `/metrics` shows, in Prometheus' format."""

from collections import Counter
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from specker.runtime.control.reasons import WORDS
from specker.runtime.control.stats import Stats
from specker.runtime.round.state import Request
from specker.runtime.session import Session
from specker.runtime.strategies import copier

SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 180, 600)


class Metrics:
    def __init__(self, session: Session):
        self.session, self.total, self.finished = session, Stats(), Counter[str]()
        self.last = Stats()  # of the request that ended last
        self.copying = copier(session.loop.drafters)
        self.registry = CollectorRegistry()
        self.registry.register(self)
        about = "Seconds from a call to its first token"
        self.first_token = Histogram("specker_first_token_seconds", about, buckets=SECONDS, registry=self.registry)

    def ended(self, request: Request) -> None:
        """Count a request that ended."""
        self.total, self.last = self.total + request.stats, request.stats
        self.finished[request.finished or "failed"] += 1

    def queue(self) -> dict[str, int | float]:
        """Requests that decode or are prefilled, and those that wait."""
        now = self.session.snapshot()
        return {"running": now.running, "waiting": now.waiting}

    def collect(self) -> Iterator[Metric]:
        total = self.total
        requests = CounterMetricFamily("specker_requests", "Requests that ended, by reason", labels=["finished"])
        stages = CounterMetricFamily("specker_stage_seconds", "Seconds of ended requests by stage", labels=["stage"])
        for reason, count in [*self.finished.items()]:
            requests.add_metric([reason], count)
        for stage, seconds in total.seconds.items():
            stages.add_metric([stage], seconds)
        yield from (requests, stages)
        for name, about, value in (
            ("prompt_tokens", "Prefilled tokens of ended requests", total.prefilled),
            ("tokens", "Emitted tokens of ended requests", total.tokens),
            ("rounds", "Rounds of ended requests", total.rounds),
            ("drafted_tokens", "Draft tokens of ended requests", total.drafted),
            ("accepted_tokens", "Accepted draft tokens of ended requests", total.accepted),
        ):
            yield CounterMetricFamily(f"specker_{name}", about, value)
        about = "Rounds of ended requests in which nothing was drafted, by the reason"
        undrafted = CounterMetricFamily("specker_undrafted_rounds", about, labels=["because"])
        for reason, count in [*total.rests.items()]:
            undrafted.add_metric([WORDS[reason]], count)
        yield undrafted
        about = "Tokens of a round, 1 + accepted / rounds, over all ended requests"
        yield GaugeMetricFamily("specker_acceptance_length", about, total.acceptance_length)
        for name, now in self.queue().items():
            yield GaugeMetricFamily(f"specker_{name}", f"Requests: {name}", now)
        held = GaugeMetricFamily("specker_kv_pages_used", "K/V pages that requests hold", labels=["model"])
        pool = GaugeMetricFamily("specker_kv_pages", "K/V pages", labels=["model"])
        for model, (used, pages) in self.session.pages().items():
            held.add_metric([model], used)
            pool.add_metric([model], pages)
        yield from (held, pool)
        if self.copying is not None:
            about = "About the memory of the texts that drafts copy from"
            yield GaugeMetricFamily("specker_lookup_bytes", about, self.copying.memory)

    def text(self) -> bytes:
        """Only between two steps: it counts pages."""
        return generate_latest(self.registry)
