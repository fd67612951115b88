"""Figures for Prometheus, under vLLM's names where it has one."""
from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    """The figures of one server. model: its name, a label of all. places: how many requests run at once."""

    def __init__(self, model: str, places: int, window: int):
        """window: W, the most tokens of a step."""
        self.registry = CollectorRegistry()

        def made(kind, name: str, what: str, labels: tuple[str, ...] = (), **options):
            metric = kind(name, what, ("model_name", *labels), registry=self.registry, **options)
            return metric if labels else metric.labels(model)

        self._model = model
        self._running = made(Gauge, "vllm:num_requests_running", "Requests that are being decoded.")
        self._waiting = made(Gauge, "vllm:num_requests_waiting", "Requests that wait for a place.")
        made(Gauge, "eagle_places", "Requests that can be decoded at once.").set(places)
        self._prompt = made(Counter, "vllm:prompt_tokens", "Tokens of prompts.")
        self._cached = made(Counter, "vllm:prefix_cache_hits", "Of those, how many were not read again.")
        self._queries = made(Counter, "vllm:prefix_cache_queries", "Tokens of prompts that were looked for.")
        self._generated = made(Counter, "vllm:generation_tokens", "Tokens of outputs.")
        self._first = made(
            Histogram, "vllm:time_to_first_token_seconds", "From a request to its first token.",
            buckets=SECONDS,
        )
        self._per_token = made(
            Histogram, "vllm:time_per_output_token_seconds", "From token to token, steps' tokens sharing it.",
            buckets=PER_TOKEN,
        )
        self._whole = made(
            Histogram, "vllm:e2e_request_latency_seconds", "From a request to its end.", buckets=SECONDS
        )
        self._ended = made(
            Counter, "vllm:request_success", "Requests that ended, by how.", ("finished_reason",)
        )
        self._drafts = made(Counter, "vllm:spec_decode_num_drafts", "Trees that were drafted.")
        self._nodes = made(Counter, "vllm:spec_decode_num_draft_tokens", "Tokens that were drafted.")
        self._accepted = made(Counter, "vllm:spec_decode_num_accepted_tokens", "Drafted tokens accepted.")
        by_place = made(
            Counter, "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens accepted, by their place after the root.", ("position",),
        )
        self._by_place = [by_place.labels(model, str(i)) for i in range(window - 1)]
        self._steps = made(Counter, "eagle_steps", "Steps of requests; tokens over steps is tau.")

    def load(self, running: int, waiting: int) -> None:
        """How many requests there are."""
        self._running.set(running)
        self._waiting.set(waiting)

    def admitted(self, job) -> None:
        """A `server.worker.Job` has a place."""
        self._prompt.inc(len(job.prompt))
        self._queries.inc(len(job.prompt))
        self._cached.inc(job.cached)

    def emitted(self, job, tokens: int, drafted: int, nodes: int, now: float) -> None:
        """A job gained tokens in a pass, so many of them drafted, in a tree of so many nodes."""
        self._generated.inc(tokens)
        if job.first is None:
            self._first.observe(now - job.arrived)
        else:
            self._steps.inc()
            for _ in range(tokens):
                self._per_token.observe((now - job.last) / tokens)
        if nodes:
            self._drafts.inc()
            self._nodes.inc(nodes)
            self._accepted.inc(drafted)
            for place in self._by_place[:drafted]:
                place.inc()

    def ended(self, job, reason: str, now: float) -> None:
        """A job has ended: "stop", "length", "abort" or "error"."""
        self._ended.labels(self._model, reason).inc()
        self._whole.observe(now - job.arrived)

    def text(self) -> bytes:
        """All figures, as Prometheus reads them."""
        return generate_latest(self.registry)
