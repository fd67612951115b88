"""Estimate the duration of `train.py` and the acceptance length of its head."""
from __future__ import annotations

import math
import time
from itertools import pairwise

import torch

from common.errors import counted
from common.machine import free_memory

CONVERSATIONS, EPOCHS, MAX_ANSWER_TOKENS = 4000, 4, 256  # defaults
TTT_STEPS = 7  # draft steps that EAGLE-3 unrolls
ANSWER_FRACTION = 0.7  # mean length of an answer / --max-new-tokens
PROMPT_FRACTION = 0.3  # prompt tokens per answer token
CACHE_FRACTION = 0.5  # of the free memory, for target hidden states; the rest is recomputed in each epoch
CACHED_STATES = 4  # hidden states cached per token: three layers and the last
# Answer tokens in the training data, acceptance length: EAGLE-3 heads of a 135M target (heads/README.md).
MEASURED_TAU = ((31_000, 2.05), (62_000, 2.21), (124_000, 2.39), (428_615, 3.11), (1_863_492, 3.82))
MATRIX_SIZES = {"cpu": 256, "cuda": 4096}  # for `measured_flops`; on a CPU a product fits in one time slice


def measured_flops(device: str | torch.device, seconds: float = 0.5) -> float:
    """Return the FLOP/s of float32 matrix products (on a GPU, bfloat16).

    On a CPU: the fastest product on one thread within `seconds`, times the number of threads, so that other
    processes do not distort it.
    """
    on_cpu, threads = torch.device(device).type == "cpu", torch.get_num_threads()
    size, times, start_time = MATRIX_SIZES["cpu" if on_cpu else "cuda"], [], time.perf_counter()
    a, b = torch.randn(2, size, size, device=device).to(torch.float32 if on_cpu else torch.bfloat16)
    torch.set_num_threads(1)
    while len(times) < 9 or time.perf_counter() - start_time < seconds:
        product_start = time.perf_counter()
        (a @ b).sum().item()  # waits for a GPU
        times.append(time.perf_counter() - product_start)
    torch.set_num_threads(threads)
    return 2 * size**3 / min(times) * (threads if on_cpu else 1)


def active_weights(config: dict, draft_vocab: int) -> tuple[int, int]:
    """Return the number of active weights per token of the target and of an EAGLE-3 head."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    attention = config["head_dim"] * (config["num_heads"] + config["num_kv_heads"]) * 2
    layer = hidden * (attention + 3 * inner * (config.get("experts_per_token") or 1))
    head = hidden * (3 * hidden + 2 * attention + 3 * inner + draft_vocab)  # its attention reads two states
    return config["num_layers"] * layer + hidden * config["vocab_size"], head


def state_bytes() -> int:
    """Return the maximum bytes of cached hidden states of the target during training."""
    return int((free_memory(torch.device("cpu")) or 0) * CACHE_FRACTION)


def phase_hours(
    config: dict, conversations: int, max_answer: int, epochs: int, flops: float
) -> dict[str, float]:
    """Return the hours of each phase. max_answer: maximum number of tokens of an answer. flops: FLOP/s."""
    tokens = conversations * max_answer * ANSWER_FRACTION
    read_tokens = tokens * (1 + PROMPT_FRACTION)
    target, head = active_weights(config, 8192)
    cached = min(1.0, state_bytes() / (read_tokens * CACHED_STATES * 2 * config["hidden_size"]))
    target_flops = 2 * target * read_tokens
    operations = {
        "data": target_flops, "features": target_flops * (1 + (epochs - 1) * (1 - cached)),
        "training": 6 * head * TTT_STEPS * read_tokens * epochs,
    }
    return {name: count / flops / 3600 for name, count in operations.items()}


def min_minutes(config: dict, max_answer: int, flops: float) -> int:
    """Return the minimum of --minutes: eight conversations in the first half, then one training step."""
    return math.ceil(120 * sum(phase_hours(config, 8, max_answer, 1, flops).values()))


def expected_tau(tokens: float) -> float:
    """Return the acceptance length to expect after training on this many answer tokens, interpolated."""
    points = [(math.log(n), tau) for n, tau in MEASURED_TAU]
    x = min(max(math.log(max(tokens, 1)), points[0][0]), points[-1][0])
    (x0, tau0), (x1, tau1) = next(pair for pair in pairwise(points) if x <= pair[1][0])
    return tau0 + (tau1 - tau0) * (x - x0) / (x1 - x0)


def describe(config: dict, conversations: int, max_answer: int, epochs: int, flops: float) -> str:
    """Format the hours (minutes below 1) of a run, see `phase_hours`, and its expected acceptance length."""
    hours = phase_hours(config, conversations, max_answer, epochs, flops)
    tokens = conversations * max_answer * ANSWER_FRACTION
    unit, factor = ("hours", 1) if sum(hours.values()) >= 1 else ("minutes", 60)
    parts = ", ".join(f"{name} {factor * value:.1f}" for name, value in hours.items())
    return (
        f"about {factor * sum(hours.values()):.1f} {unit} ({parts}) for"
        f" {counted(conversations, 'conversation')}, {epochs} epochs, at {flops / 1e9:,.0f} GFLOP/s;"
        f" acceptance length about {expected_tau(tokens):.1f}"
        " (extrapolated from a 135M target, tree 60/7/10)")
