"""Prometheus metrics, with vLLM's names where they exist."""
from __future__ import annotations

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from engine.request import Event, Request

LATENCY_BUCKETS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
TOKEN_BUCKETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1)


class Metrics:
    """Metrics of a server. model: label of all. slots: batch slots. max_commit: maximum tokens per step."""

    def __init__(self, model: str, slots: int, max_commit: int):
        self.registry = CollectorRegistry()

        def add(metric_class, name: str, help: str, labels: tuple[str, ...] = (), **options):
            metric = metric_class(name, help, ("model_name", *labels), registry=self.registry, **options)
            return metric if labels else metric.labels(model)

        def seconds(name: str, help: str, buckets=LATENCY_BUCKETS):
            return add(Histogram, f"vllm:{name}_seconds", help, buckets=buckets)

        self._model = model
        self._running = add(Gauge, "vllm:num_requests_running", "Running requests.")
        self._waiting = add(Gauge, "vllm:num_requests_waiting", "Waiting requests.")
        add(Gauge, "eagle_slots", "Batch slots.").set(slots)
        self._prompt = add(Counter, "vllm:prompt_tokens", "Prompt tokens.")
        self._queries = add(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the caches.")
        self._cached = add(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the caches.")
        self._generated = add(Counter, "vllm:generation_tokens", "Output tokens.")
        self._first = seconds("time_to_first_token", "Time to first token.")
        self._per_token = seconds(
            "time_per_output_token", "Inter-token latency: step time / tokens of the step.", TOKEN_BUCKETS
        )
        self._end_to_end = seconds("e2e_request_latency", "End-to-end latency.")
        self._ended = add(
            Counter, "vllm:request_success", "Finished requests by reason.", ("finished_reason",)
        )
        self._drafts = add(Counter, "vllm:spec_decode_num_drafts", "Drafted trees.")
        self._nodes = add(Counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = add(Counter, "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        by_depth = add(
            Counter, "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position after the root.", ("position",),
        )
        self._by_depth = [by_depth.labels(model, str(i)) for i in range(max_commit - 1)]
        self._steps = add(Counter, "eagle_steps", "Steps of requests; tokens per step is tau.")
        self._fallback = add(
            Gauge, "eagle_fallback", "GPU kernels replaced by slower code, by reason.", ("reason",)
        )
        self._fallbacks: list[str] = []

    def watch(self, worker) -> None:
        """Read the number of requests and the engine's fallbacks from a `server.worker.Worker`."""
        self._fallbacks = worker.engine.runner.fallbacks
        self._running.set_function(lambda: worker.running)
        self._waiting.set_function(lambda: worker.waiting)

    def admitted(self, request: Request) -> None:
        """Count an admitted request."""
        self._prompt.inc(len(request.prompt))
        self._queries.inc(len(request.prompt))
        self._cached.inc(request.cached)

    def emitted(self, job, event: Event) -> None:
        """Count an event of a `server.worker.Job`, before its `last` is updated."""
        self._generated.inc(len(event.ids))
        if job.last is None:
            self._first.observe(event.request.first - job.arrived)
        else:
            self._steps.inc()
            for _ in event.ids:
                self._per_token.observe((event.request.last - job.last) / len(event.ids))
        if event.nodes:
            self._drafts.inc()
            self._nodes.inc(event.nodes)
            self._accepted.inc(event.drafted)
            for counter in self._by_depth[: event.drafted]:
                counter.inc()

    def ended(self, job) -> None:
        """Count a finished job."""
        self._ended.labels(self._model, job.finish).inc()
        self._end_to_end.observe(time.perf_counter() - job.arrived)

    def text(self) -> bytes:
        """Return all metrics in the Prometheus text format."""
        for line in self._fallbacks:
            self._fallback.labels(self._model, line).set(1)
        return generate_latest(self.registry)
