"""The decoder: static state, the one step that drafts, verifies, accepts and commits, and the loop that replays it.

Everything a step touches is allocated once and keeps its address. A step never reads a value back to the host: stopping
(stop ids, token limit) is decided on the device and cuts the text exactly, a finished sequence stays in the batch and
stops moving, and the host learns what was emitted from one small buffer, on CUDA one step late.
"""
from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from accepting import residual, typical
from compiling import Captured, Whole
from drafters.base import Drafter
from model import KVCache, Transformer, cache_bytes, run_layers
from sampling import gumbel, restrict, seed_keys
from tree import Tree, accept, deepest, pick, visible_slots

SPAN = 64  # attention reads the live prefix rounded up to this many slots


@dataclass(frozen=True)
class Sampling:
    """How one request is decoded. temperature 0 is greedy; top_k 0 and top_p 1 are off.

    top_k is applied first, then top_p on what remains, both on softmax(logits / temperature).
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self):
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 to 1,000,000, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k must be 0 (off) or more, and below 2^31, got {self.top_k}")

    @property
    def restricts(self) -> bool:
        """Whether top-k or top-p has anything to do."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class State(nn.Module):
    """Where B sequences stand. N = length [B] tokens are committed: their keys/values are in the target's cache.

    tokens [B, S']: prompt and output; tokens[b, N] is the root, emitted but not committed.
    n_new [B], features [B, W, F]: of the last n_new committed tokens, which the drafter has not read yet, the target's features.
    limit [B]: the largest N; done [B]: moves no more; reading [B]: its prompt is not read to the end.
    stop_ids [n]: any of them ends a text. key [B, 2], temperature, top_k, top_p [B]: how each request samples.
    out [B, W+3]: what the last step emitted, how many of the W are valid, how many of those were drafted (all but the
    last, unless the text was cut), and whether the sequence is done.
    """

    def __init__(self, batch: int, slots: int, window: int, feature_width: int, stop_ids, dtype, device):
        super().__init__()

        def buffer(name: str, *shape: int, dtype=torch.int64, fill: float = 0) -> None:
            self.register_buffer(name, torch.full(shape, fill, dtype=dtype, device=device), persistent=False)

        buffer("tokens", batch, slots)
        buffer("length", batch)
        buffer("limit", batch)
        buffer("done", batch, dtype=torch.bool, fill=True)
        buffer("reading", batch, dtype=torch.bool)
        buffer("features", batch, window, feature_width, dtype=dtype)
        buffer("n_new", batch)
        buffer("out", batch, window + 3)
        buffer("key", batch, 2)
        buffer("temperature", batch, dtype=torch.float32)
        buffer("top_p", batch, dtype=torch.float32, fill=1)
        buffer("top_k", batch)
        self.register_buffer("stop_ids", torch.tensor(list(stop_ids), dtype=torch.int64, device=device), persistent=False)

    def root(self) -> Tensor:
        """The root token of each sequence [B]."""
        return self.tokens.gather(1, self.length[:, None])[:, 0]

    def emit(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Append tokens [B, W], of which `count` [B] are offered: cut at the first stop id and at the limit.

        Moves `length` so that the last one kept is the new root, sets `done` and `out`. Returns how many were kept.
        """
        W, drafted = tokens.shape[1], count - 1
        at = torch.arange(W, device=tokens.device)
        count = torch.where(self.done, 0, torch.minimum(count, self.limit - self.length))
        stops = (tokens[..., None] == self.stop_ids).any(-1) & (at < count[:, None])
        first = torch.where(stops, at, W).amin(-1)
        count = torch.minimum(count, first + 1)
        where = self.length[:, None] + 1 + at
        kept = torch.where(at < count[:, None], tokens, self.tokens.gather(1, where))
        self.tokens.scatter_(1, where, kept)
        self.length.add_(count)
        self.done.logical_or_((first < W) | (self.length >= self.limit))
        counts = torch.stack((count, torch.minimum(drafted, count).clamp(min=0), self.done.long()), 1)
        self.out.copy_(torch.cat((tokens, torch.zeros_like(self.out[:, W + 3 :]), counts), 1))
        return count

    def hand_over(self, features: Tensor | None, count: Tensor, where: Tensor) -> None:
        """Tell the drafter of the `count` [B] tokens just committed, in the sequences `where` [B], and of their features [B, <=W, F]."""
        if features is not None:
            kept = self.features[:, : features.shape[1]]
            kept.copy_(torch.where(where[:, None, None], features, kept))
        self.n_new.copy_(torch.where(where, count, self.n_new))


def limit(logits: Tensor, state: State, restricted: bool) -> Tensor:
    """Logits [B, T, V], where a request restricts them to top-k or top-p the others at -inf."""
    return restrict(logits, state.temperature, state.top_k, state.top_p) if restricted else logits


def draw(logits: Tensor, noise: Tensor | None) -> Tensor:
    """The target's token at every row: argmax of logits [B, T, V] plus noise [B, T, V]."""
    return (logits if noise is None else logits + noise).argmax(-1)


def accept_otherwise(
    tree: Tree, logits: Tensor, noise: Tensor, chosen: Tensor, state: State, rule: str, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    """By another rule than equality (see `accepting`) where the temperature is above 0: (path [B, W], count [B], tokens [B, W])."""
    warm = (state.temperature > 0)[:, None]
    agrees, likely = tree.tokens == chosen.gather(1, tree.parent), None
    if rule == "typical":
        passed, likely = typical(tree, logits, state.temperature)
    else:
        passed, drawn = residual(tree, logits, noise, state.temperature, state.key, state.length)
        chosen = torch.where(warm, drawn, chosen)
    path, count = deepest(tree, torch.where(warm, passed, agrees), window, likely)
    # What was accepted is not what was drawn: the path's own tokens, and behind them what is drawn at its end.
    ahead = tree.tokens.gather(1, F.pad(path[:, 1:], (0, 1)))
    accepted = torch.arange(window, device=path.device) < count[:, None] - 1
    return path, count, torch.where(accepted, ahead, chosen.gather(1, path))


def noise_ahead(state: State, count: int, vocab_size: int) -> Tensor:
    """temperature * Gumbel noise [B, count, V] of the next `count` positions after the root's."""
    positions = state.length[:, None] + 1 + torch.arange(count, device=state.length.device)
    return state.temperature[:, None, None] * gumbel(state.key, positions, vocab_size)


def step(
    target: Transformer, caches: nn.ModuleList, drafter: Drafter, state: State, slots: Tensor, noisy: bool, restricted: bool
) -> tuple[Tree, Tensor]:
    """Draft, verify, accept, commit: the whole of decoding, one graph.

    slots [n]: the live cache slots 0..n-1, n >= max(length) + the tree's room. noisy: some sequence has temperature > 0;
    restricted: some sequence uses top-k or top-p. Plain decoding is this step with a tree of one node.
    What was emitted is in `state.out`. Returns, for traces, the tree and the path [B, W] taken through it, root first.
    """
    window = drafter.shape.window
    noise = noise_ahead(state, window, target.args.vocab_size) if noisy else None
    tree = drafter.propose(state, slots, noise)

    T = drafter.shape.nodes
    tokens, depth, sees = tree.tokens, tree.depth, tree.ancestors
    if drafter.riders:
        riders = drafter.ride(state)
        tokens, depth = torch.cat((tokens, riders.tokens), 1), torch.cat((depth, riders.depth), 1)
        sees = torch.cat((F.pad(sees, (0, drafter.riders)), riders.sees), 1)
    own = state.length[:, None] + torch.arange(T + drafter.riders, device=slots.device)
    visible = visible_slots(slots, state.length, sees)
    x, features = target(tokens, state.length[:, None] + depth, own, visible, caches, drafter.aux_layers)
    if drafter.riders:
        drafter.hear(state, target.logits(x[:, -drafter.heard :]).argmax(-1))
        x, features = x[:, :T], None if features is None else features[:, :T]
    # Nodes of one depth stand at one position and share its noise.
    logits, shift = limit(target.logits(x), state, restricted), None if noise is None else pick(noise, tree.depth)
    chosen = draw(logits, shift)

    if noisy and drafter.rule != "equal":
        path, count, tokens = accept_otherwise(tree, logits, shift, chosen, state, drafter.rule, window)
    else:
        path, count = accept(tree, chosen, window)
        tokens = chosen.gather(1, path)
    if drafter.shape.nodes > 1:  # the root, the only node of plain decoding, is where it belongs already
        source, goal = state.length[:, None] + path, own[:, :1] + torch.arange(window, device=slots.device)
        target.move(caches, source, goal)
    moving = ~state.done
    count = state.emit(tokens, count)
    state.hand_over(None if features is None else pick(features, path), count, moving)
    return tree, path


def prefill(
    target: Transformer, caches: nn.ModuleList, drafter: Drafter, state: State, slots: Tensor, start: Tensor, chunk: Tensor,
    noisy: bool, restricted: bool,
) -> None:
    """Read one chunk of every prompt: positions start [B] + chunk [C]. A prompt that ends in it gets its first token.

    Until then the prompt's last token counts as the root (`length` is the prompt's length - 1). Rows behind a prompt's
    end compute nothing anyone sees: their slots are overwritten before they become visible.
    """
    positions = start[:, None] + chunk
    visible = slots <= positions[..., None]
    x, features = target(state.tokens.gather(1, positions), positions, positions, visible, caches, drafter.aux_layers)
    drafter.read(state, features, positions, visible)

    last = state.length - start
    ends = state.reading & (last < chunk.shape[0])
    row = last.clamp(0, chunk.shape[0] - 1)[:, None]
    noise = noise_ahead(state, 1, target.args.vocab_size) if noisy else None
    chosen = draw(limit(target.logits(pick(x, row)), state, restricted), noise)
    state.reading.logical_and_(~ends)
    count = state.emit(chosen, ends.long())
    state.hand_over(None if features is None else pick(features, row), count, ends)


class Output(NamedTuple):
    """One decoded sequence. `finish` is "stop" (a stop id, which is the last of `ids`), "length" (max_new_tokens), "cache"
    (full) or "interrupted" (the run was left before its end)."""

    ids: list[int]
    finish: str
    accept_lengths: list[int]  # tokens emitted by each step; their mean is the acceptance length tau
    prefill_seconds: float
    seconds: float  # decoding after the first token


class Decoder:
    """Decodes token-id prompts with one target and one drafter. Text is the business of `generate.py`.

    batch: sequences decoded together. max_seq_len: most tokens of prompt and output. stop_ids: any of them ends a text.
    compile: run prefill and step through torch.compile; on CUDA the step is also captured as one graph.
    say: called with one line when something slow (compilation) starts and ends. chunks: prompt rows per prefill pass.
    lag: how many steps the host reads late; None is 1 on CUDA, 0 elsewhere.
    """

    def __init__(
        self, target: Transformer, drafter: Drafter | None = None, *, batch: int = 1, max_seq_len: int = 2048,
        stop_ids: Iterable[int] = (), compile: bool = True, say: Callable[[str], None] | None = None,
        chunks: tuple[int, ...] | None = None, lag: int | None = None,
    ):
        weight = target.embed.weight
        self.device, dtype = weight.device, weight.dtype
        on_cuda = self.device.type == "cuda"
        self.target, self.drafter = target, drafter or Drafter()
        self.batch, self.max_seq_len = batch, max_seq_len
        self.chunks = sorted(chunks or ((64, 512) if on_cuda else (64,)))
        self.lag = int(on_cuda) if lag is None else lag
        self.compiled = compile
        self.say = say or (lambda line: None)
        self.observer: Callable[[Tree, Tensor], None] | None = None  # called with what each step returns; see `--trace`

        shape = self.drafter.shape
        self.slots = round_up(max_seq_len + max(self.drafter.room, self.chunks[-1]) + 1, SPAN)
        self.cache_bytes = self._check_memory(dtype)
        self.caches = nn.ModuleList(
            KVCache(batch, self.slots, target.args, dtype, self.device) for _ in range(target.args.num_layers)
        )
        self.drafter.allocate(batch, self.slots, dtype, self.device)
        width = len(self.drafter.aux_layers) * target.args.hidden_size
        self.state = State(batch, self.slots + self.chunks[-1] + 1, shape.window, width, stop_ids, dtype, self.device)
        self.slot_ids = torch.arange(self.slots, device=self.device)
        self.chunk_ids = {c: torch.arange(c, device=self.device) for c in self.chunks}
        self.chunk_start = torch.zeros(batch, dtype=torch.int64, device=self.device)

        # The optimisation, in one place: without these lines everything below runs eagerly and gives the same text.
        self._step, self._prefill = step, prefill
        if compile:
            self._step = Whole(step, "step", self.say, direct=not on_cuda)
            # Where all layers are one operator of ours there is nothing left to fuse in a prompt's pass, and seconds to lose.
            if target.run_layers is run_layers:
                self._prefill = Whole(prefill, "prefill", self.say, direct=not on_cuda)
        # A drafter that may have nothing to say is asked first where that costs no synchronisation, and where rows are not free.
        self._nothing = Drafter()
        self._idle = None
        if not on_cuda and type(self.drafter).has_guess is not Drafter.has_guess:
            self._idle = Whole(step, "step without a guess", self.say, direct=True) if compile else step
        self.captured = Captured(self._still) if compile and on_cuda else None
        self._serial = 0  # of the text at hand

    def _check_memory(self, dtype: torch.dtype) -> int:
        """Bytes of all KV caches. Raises ValueError with the numbers, before anything is allocated, if they do not fit."""
        shapes = [self.target.args, *self.drafter.cached]
        need = sum(cache_bytes(self.batch, self.slots, args, dtype) * args.num_layers for args in shapes) + self.drafter.memory(self.batch)
        free = free_memory(self.device)
        if free is not None and need > free:
            raise ValueError(
                f"the caches of {self.batch} x {self.slots} slots need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free:"
                " lower --max-seq-len, the tree or the number of prompts decoded together"
            )
        return need

    # -- requests ----------------------------------------------------------------------------------------------------

    def start(self, prompts: list[list[int]], sampling: Sampling | list[Sampling], reuse: bool = False) -> None:
        """Take up to `batch` prompts (lists of token ids); `steps` then decodes them.

        reuse: keep what the caches already hold of a prompt that begins as the sequence in the same place did (chat).
        Raises ValueError, naming the prompt and the numbers, before anything is touched, if a prompt is empty, too long
        for the cache, or holds an id outside the vocabulary.
        """
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        if not 1 <= len(prompts) <= self.batch or len(sampling) != len(prompts):
            raise ValueError(f"{len(prompts)} prompts and {len(sampling)} samplings for a batch of {self.batch}")
        for i, prompt in enumerate(prompts):
            self.check(prompt, f"prompt {i + 1}" if len(prompts) > 1 else "the prompt")

        self._serial += 1
        state, held = self.state, self._held() if reuse else [[]] * self.batch
        self._prompts, self._sampling = prompts, sampling
        self._start, limits = [], []
        tokens = torch.zeros(self.batch, max(map(len, prompts)), dtype=torch.int64)
        for i, (prompt, request) in enumerate(zip(prompts, sampling)):
            tokens[i, : len(prompt)] = torch.tensor(prompt)
            limits.append(min(len(prompt) + request.max_new_tokens, self.max_seq_len) - 1)
            same = common_prefix(prompt, held[i])
            # One token back: the drafter's last row was read together with the token that followed it then.
            self._start.append(max(0, min(same, len(prompt)) - 1))

        def fill(buffer: Tensor, values: list, rest) -> None:
            buffer.copy_(torch.tensor(values + [rest] * (self.batch - len(values)), dtype=buffer.dtype))

        state.tokens[:, : tokens.shape[1]] = tokens.to(self.device)
        fill(state.length, [len(p) - 1 for p in prompts], 0)
        fill(state.limit, limits, 0)
        fill(state.done, [False] * len(prompts), True)
        fill(state.reading, [True] * len(prompts), False)
        fill(state.n_new, [0] * len(prompts), 0)
        fill(state.temperature, [s.temperature for s in sampling], 0)
        fill(state.top_p, [s.top_p for s in sampling], 1)
        fill(state.top_k, [s.top_k for s in sampling], 0)
        state.key.zero_()
        state.key[: len(prompts)] = seed_keys([s.seed for s in sampling], self.device)
        self.drafter.begin(prompts)
        self._modes = any(s.temperature > 0 for s in sampling), any(s.restricts for s in sampling)
        self._length = [len(p) - 1 for p in prompts]  # what the host knows of state.length
        self._done = [False] * len(prompts)

    def check(self, prompt: list[int], name: str = "the prompt") -> None:
        """Raise ValueError if a prompt is empty, leaves no room for one new token, or has an id out of range."""
        if not prompt:
            raise ValueError(f"{name} is empty: give at least one token")
        if len(prompt) >= self.max_seq_len:
            raise ValueError(
                f"{name} has {len(prompt)} tokens and needs room for one more, the cache holds {self.max_seq_len}:"
                " shorten it or raise --max-seq-len"
            )
        for token in prompt:
            if not 0 <= token < self.target.args.vocab_size:
                raise ValueError(f"{name} holds token id {token}, the vocabulary is 0..{self.target.args.vocab_size - 1}")

    def _held(self) -> list[list[int]]:
        """Per sequence, the tokens whose entries in all caches are valid: committed, and read by the drafter too."""
        known = (self.state.length - self.state.n_new).clamp(min=0).tolist()
        return [row[:n] for row, n in zip(self.state.tokens.tolist(), known)]

    # -- the loop ----------------------------------------------------------------------------------------------------

    def steps(self) -> Iterator[list[list[int]]]:
        """Decode what `start` took. Yields, per pass, the tokens each sequence emitted (often none during prefill); how many
        of them were drafted is in `drafted`. Raises RuntimeError if something else was started in between.
        """
        unread: deque = deque()
        serial = self._serial
        for _ in self._read_prompts():
            unread.append(self._out_to_host())
            yield from self._read(unread, 0)
        self.prefilled = time.perf_counter()
        while True:
            if serial != self._serial:
                raise RuntimeError("this decoder has started another text: one at a time, or one decoder each")
            if all(self._done):
                break
            tree, path = self._run_step(len(unread))
            if self.observer:
                self.observer(tree, path)
            unread.append(self._out_to_host())
            yield from self._read(unread, self.lag)
        yield from self._read(unread, 0)

    def _read_prompts(self) -> Iterator[None]:
        start = list(self._start)
        while remaining := max(len(p) - s for p, s in zip(self._prompts, start)):
            size = next((c for c in self.chunks if c >= remaining), self.chunks[-1])
            span = self._span(max(start) + size)
            self.chunk_start.copy_(torch.tensor(start + [0] * (self.batch - len(start))))
            with torch.no_grad():
                self._launch_prefill(span, size)
            start = [min(s + size, len(p)) for s, p in zip(start, self._prompts)]
            yield

    def _run_step(self, unread: int):
        """Launch one step; returns (tree, path). `unread` steps may each have committed up to W tokens unknown here."""
        span = self._span(max(self._length) + unread * self.drafter.shape.window + self.drafter.room)
        with torch.no_grad():
            if self._idle is not None and not self.drafter.has_guess(self.state, span):
                return self._idle(self.target, self.caches, self._nothing, self.state, span, *self._modes)
            return self._launch_step(span)

    def _launch_step(self, span: Tensor):
        call = partial(self._step, self.target, self.caches, self.drafter, self.state, span, *self._modes)
        return self._run(("step", span.shape[0]), call)

    def _launch_prefill(self, span: Tensor, rows: int) -> None:
        chunk = self.chunk_ids[rows]
        torch._dynamo.mark_static(chunk, 0)
        given = self.target, self.caches, self.drafter, self.state, span, self.chunk_start, chunk
        self._run(("prefill", rows, span.shape[0]), partial(self._prefill, *given, *self._modes))

    def _run(self, key: tuple, call: Callable):
        """A call, on CUDA as a captured graph."""
        return self.captured((*key, *self._modes), call) if self.captured else call()

    def _span(self, needed: int) -> Tensor:
        """The live slots 0..n-1, n >= needed, in few enough sizes; its length is the graph's one dynamic dimension."""
        size = round_up(needed, SPAN)
        if self.device.type == "cuda":  # a captured graph is of one size: powers of two keep them few
            size = max(256, 1 << (size - 1).bit_length())
        span = self.slot_ids[: min(size, self.slots)]
        torch._dynamo.mark_dynamic(span, 0)
        return span

    def _out_to_host(self):
        """Start copying what the step emitted; `_read` waits for it."""
        if self.device.type != "cuda":
            return self.state.out.clone(), None
        host = torch.empty(self.state.out.shape, dtype=torch.int64, pin_memory=True)
        host.copy_(self.state.out, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return host, copied

    def _read(self, unread: deque, keep: int) -> Iterator[list[list[int]]]:
        """Read finished steps, oldest first, until only `keep` are unread."""
        while len(unread) > keep:
            host, copied = unread.popleft()
            if copied is not None:
                copied.synchronize()
            emitted, self.drafted = [], []
            for i, (*tokens, count, drafted, done) in enumerate(host[: len(self._prompts)].tolist()):
                emitted.append(tokens[:count])
                self.drafted.append(drafted)
                self._length[i] += count
                self._done[i] = bool(done)
            yield emitted

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Passes in this context decode nothing: every sequence is held still."""
        state = self.state
        kept = state.done.clone(), state.reading.clone()
        state.done.fill_(True)
        state.reading.fill_(False)
        yield
        state.done.copy_(kept[0])
        state.reading.copy_(kept[1])

    # -- whole texts -------------------------------------------------------------------------------------------------

    def warm_up(self, sampling: Sampling = Sampling(), every_length: bool = False) -> None:
        """Compile (and on CUDA capture) what a request with this sampling runs, so that the request itself is fast.

        every_length: on CUDA, capture what texts of every length will need, up to `max_seq_len`.
        """
        kept = self.state.stop_ids.clone()
        self.state.stop_ids.fill_(-1)  # the first token might be one of them, and no step would run
        try:
            for prompt in ([0], [0] * 16) if self._idle else ([0],):  # without and with something to guess from
                self.generate([prompt], replace(sampling, max_new_tokens=2))
            if self.captured and every_length:
                with self._still(), torch.no_grad():
                    for size in sorted({self._span(n).shape[0] for n in range(1, self.slots + 1, SPAN)}):
                        self._launch_step(self._span(size))
                        for rows in self.chunks:
                            if rows <= size:
                                self._launch_prefill(self._span(size), rows)
        finally:
            self.state.stop_ids.copy_(kept)

    def generate(self, prompts: list[list[int]], sampling: Sampling | list[Sampling] = Sampling()) -> list[Output]:
        """Decode prompts (any number, in groups of `batch`) to the end. Raises ValueError as `start` does."""
        if isinstance(sampling, Sampling):
            sampling = [sampling] * len(prompts)
        outputs = []
        for i in range(0, len(prompts), self.batch):
            run = Run(self, prompts[i : i + self.batch], sampling[i : i + self.batch])
            for _ in run:
                pass
            outputs += run.outputs()
        return outputs


class Run:
    """One `start` and its `steps`, with the books kept: iterate it for the tokens, then ask for `outputs`.

    May be left early (Ctrl-C): `outputs` then describes what was decoded so far.
    """

    def __init__(self, decoder: Decoder, prompts: list[list[int]], sampling: Sampling | list[Sampling], reuse: bool = False):
        self.decoder = decoder
        self.began = time.perf_counter()
        decoder.start(prompts, sampling, reuse)
        self.prompts = prompts
        self.ids: list[list[int]] = [[] for _ in prompts]
        self.accept_lengths: list[list[int]] = [[] for _ in prompts]
        self.done = [False] * len(prompts)
        self.first = self.ended = None

    def __iter__(self) -> Iterator[list[list[int]]]:
        for emitted in self.decoder.steps():
            now = time.perf_counter()
            for ids, lengths, new in zip(self.ids, self.accept_lengths, emitted):
                if new and ids:  # the first token is the prefill's
                    lengths.append(len(new))
                ids += new
            if self.first is None and all(self.ids):
                self.first = now
            self.ended, self.done = now, list(self.decoder._done)
            yield emitted

    def outputs(self) -> list[Output]:
        """What each sequence has become so far."""
        decoder, stop_ids = self.decoder, set(self.decoder.state.stop_ids.tolist())
        ended = self.ended or time.perf_counter()
        first = self.first or ended
        result = []
        for ids, lengths, prompt, done in zip(self.ids, self.accept_lengths, self.prompts, self.done):
            finish = "length" if done else "interrupted"
            if ids and ids[-1] in stop_ids:
                finish = "stop"
            elif len(prompt) + len(ids) >= decoder.max_seq_len:
                finish = "cache"
            result.append(Output(ids, finish, lengths, first - self.began, ended - first))
        return result


def free_memory(device: torch.device) -> int | None:
    """Bytes that can still be allocated; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def round_up(n: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least n."""
    return -(-n // multiple) * multiple


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
