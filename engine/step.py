"""One step of decoding: draft, verify, accept, commit. This file is the PyTorch implementation.

`Step` defines the phases and the tensor operations that drafters call; a `Backend` defines modules, caches
and threads. The kernels of a device and tensor parallelism subclass `Step` and override whole phases. All
subclasses compute the same values, except for the last bits of noise, of log-probabilities and of the
target's forward pass.

`draft_and_verify` and `accept_and_commit` are the two halves of a step: each is one compiled graph. With a
grammar the host fills `state.processors.allowed` in between. `prefill` and `first_token` are the pass over
prompts.

B sequences, T tree nodes, W the maximum number of tokens that a step commits, S cache slots, n live slots,
V vocabulary.
"""
from __future__ import annotations

import contextlib

import torch
import torch.nn as nn
from torch import Tensor

import tree
from engine import sampling
from engine.draft import Drafter
from engine.sampling import Modes
from engine.state import State
from model import KVCaches, Transformer
from tree import CandidateTree, Tree, TreeShape, gather_tokens

MAX_GPU_TOKENS = 192  # tokens of a pass that a large GPU verifies in about the time of one
GPU_TREES = tuple(TreeShape(*sizes) for sizes in ((16, 4, 5), (12, 3, 4), (8, 2, 4), (4, 2, 2)))


class Step:
    """The phases `draft`, `verify`, `accept` and `commit` in PyTorch, and the operations that they call.

    - batch_invariant: a token's values do not depend on the other tokens of the pass, so output with drafting
      equals output without it in 16 bits too; steps run without torch.compile
    - static_shapes: no shape depends on tensor values, as graphs require
    - reads_length: attention reads sequence lengths on the device: one graph serves every context length
    """

    batch_invariant = reads_length = False
    static_shapes = True
    # Operations that are functions elsewhere. mask: in the form that the attention of this step reads.
    mask, prune = staticmethod(tree.tree_attention_mask), staticmethod(tree.prune_candidates)
    advance = staticmethod(CandidateTree.advance)

    # -- draft ----------------------------------------------------------------------------------

    def draft(self, drafter: Drafter, state: State, slots: Tensor, noise: Tensor | None, costs=None) -> Tree:
        """Draft a tree below the root. slots [n]: the live cache slots. noise, costs: `Drafter.propose`."""
        drafted = drafter.propose(self, state, slots, noise, costs)
        return drafted if costs is None or drafter.applies_costs else costs.limit(self, drafted)

    def causal_mask(self, slots: Tensor, start: Tensor, count: int):
        """Return the causal mask, in the form of `mask`, of `count` tokens in slots start [B] and up."""
        offsets = torch.arange(count, device=slots.device)
        return slots <= (start[:, None] + offsets)[..., None]

    def rank(
        self, logits: Tensor, noise: Tensor | None, k: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and ids [B, R, k] of the top k of logits [B, R, V] plus noise, if any.

        noise [B, R or 1, V]. ids [V]: the token id of each column, if that is not its index.
        """
        if noise is not None:
            logits = logits + noise
        top, index = logits.topk(k, dim=-1)
        return top - logits.logsumexp(-1, keepdim=True), index if ids is None else ids[index]

    # -- verify ---------------------------------------------------------------------------------

    def verify(
        self, target: Transformer, drafted: Tree, state: State, slots: Tensor, caches: KVCaches,
        aux_layers: tuple[int, ...],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the target on the nodes of a tree.

        Node i is written to cache slot length + i and has position length + depth. It attends to the
        committed slots and to its ancestors. Returns `logits` of all nodes, and the features [B, T, F] of
        `Transformer.forward`.
        """
        node_slots = state.length[:, None] + torch.arange(drafted.tokens.shape[1], device=slots.device)
        positions = state.length[:, None] + drafted.depth
        visible = self.mask(slots, state.length, drafted.ancestors)
        x, features = target(drafted.tokens, positions, node_slots, visible, caches, aux_layers)
        return self.logits(target, x), features

    def logits(self, target: Transformer, x: Tensor):
        """Return the target's logits of its residual stream x [..., H]; if sharded, this rank's shard."""
        return target.logits(x)

    def gather_logits(self, logits) -> Tensor:
        """Gather the shards that `logits` returned: logits of the whole vocabulary [..., V]."""
        return logits

    # -- sample and accept ----------------------------------------------------------------------

    def noise(self, state: State, count: int, vocabulary: int) -> Tensor:
        """Return temperature * Gumbel noise [B, count, V] for the `count` positions after the root."""
        positions = state.length[:, None] + state.ahead[:count]
        return self.gumbel(state.key, positions, state.temperature, vocabulary, state.noise)

    def gumbel(
        self, key: Tensor, positions: Tensor, temperature: Tensor, vocabulary: int, latest: list | None = None
    ) -> Tensor:
        """Return temperature [B] times `engine.sampling.gumbel` [B, W, V] of key [B, 2], positions [B, W].

        latest: a list in which a kernel may cache this noise for the next call.
        """
        return temperature[:, None, None] * sampling.gumbel(key, positions, vocabulary)

    def restrict(self, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
        """Apply top-k and top-p to logits [B, T, V]: `engine.sampling.restrict`."""
        return sampling.restrict(logits, temperature, top_k, top_p)

    def draw(self, logits: Tensor, noise: Tensor | None, depth: Tensor | None = None) -> Tensor:
        """Return the target's token at each node [B, T]: argmax of logits [B, T, V] plus noise [B, W, V].

        depth [B, T]: index into W for each node: nodes of one depth have the same position and share its
        noise. None: all nodes take the first position's. -1: the largest logit is not finite.
        """
        if noise is not None:
            logits = logits + (noise[:, :1] if depth is None else gather_tokens(noise, depth))
        top, chosen = logits.max(-1)
        return torch.where(top.isfinite(), chosen, -1)

    def accept(self, drafted: Tree, chosen: Tensor, max_commit: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return path and count of `tree.accept`, and the tokens chosen on the path [B, W]."""
        path, count = tree.accept(drafted, chosen, max_commit)
        return path, count, chosen.gather(1, path)

    # -- commit ---------------------------------------------------------------------------------

    def commit(
        self, state: State, tokens: Tensor, count: Tensor, path: Tensor, features: Tensor | None,
        caches: KVCaches | None = None, *, active: Tensor | None = None, append: bool = False,
    ) -> Tensor:
        """Emit the first `count` [B] of tokens [B, W] and keep the features of nodes `path` [B, W].

        caches: the target's; keys and values of the path move to the slots of committed tokens. None: they
        are in place. active [B]: sequences to change; None: those that are not done. append: keep the
        features that the head has not read yet, and append these. Returns how many tokens were emitted [B].
        """
        active = ~state.done if active is None else active
        if caches is not None:
            destination = state.length[:, None] + torch.arange(path.shape[1], device=path.device)
            caches.move(state.length[:, None] + path, destination)
        count = state.emit(tokens, count)
        state.keep_features(features, path, count, active, append)
        return count


def process_logits(
    step: Step, logits: Tensor, state: State, modes: Modes, tokens: Tensor, ancestors: Tensor | None = None
) -> Tensor:
    """Return the target's logits [B, T, V] after grammar, biases, penalties, top-k, top-p and min-p.

    tokens [B, T], ancestors [B, T, T]: of the tree; without ancestors, of its root alone.
    """
    if modes.guided or modes.adjusted:
        logits = state.processors.apply(logits, modes, tokens, ancestors)
    if modes.restricted:
        logits = step.restrict(logits, state.temperature, state.top_k, state.top_p)
    return sampling.apply_min_p(logits, state.temperature, state.min_p) if modes.has_min_p else logits


def draft_and_verify(
    step: Step, target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor,
    sampled: bool, costs=None,
) -> tuple:
    """Run the first half of a step: draft a tree and run the target on it.

    slots [n]: the live cache slots 0..n-1, n >= max(length) + the drafter's extra slots. sampled: a request
    samples. Plain decoding has a tree of one node. Returns the tree, `Step.logits` [B, T, V] and the features
    [B, T, F] of its nodes, and the noise [B, W, V] or None.
    """
    noise = step.noise(state, drafter.shape.max_commit, target.args.vocab_size) if sampled else None
    drafted = step.draft(drafter, state, slots, noise, costs)
    logits, features = step.verify(target, drafted, state, slots, caches, drafter.aux_layers)
    return drafted, logits, features, noise


def accept_and_commit(
    step: Step, target: Transformer, caches: KVCaches, drafter: Drafter, state: State, verified: tuple,
    *modes: bool,
) -> tuple[Tree, Tensor]:
    """Run the second half of a step: draw the target's tokens, accept a path, commit and emit it.

    modes: those of `engine.sampling.Modes`. Emitted tokens are in `state.out`. Returns, for traces, the tree
    and the accepted path [B, W], root first.
    """
    modes, (drafted, logits, features, noise) = Modes(*modes), verified
    raw = step.gather_logits(logits) if modes.changes_logits else logits
    shaped = process_logits(step, raw, state, modes, drafted.tokens, drafted.ancestors)
    drafter.observe(step, state, shaped)
    chosen = step.draw(shaped, noise, drafted.depth)
    path, count, tokens = step.accept(drafted, chosen, drafter.shape.max_commit)
    if modes.scored:
        state.processors.score(gather_tokens(raw, path), tokens)
    moved = caches if drafted.tokens.shape[1] > 1 else None  # the root's cache entry is in place
    count = step.commit(state, tokens, count, path, features, moved, append=drafter.defers_head)
    if modes.adjusted:
        state.processors.count(tokens, count)
    return drafted, path


def prefill(
    step: Step, target: Transformer, caches: KVCaches, drafter: Drafter, state: State, slots: Tensor,
    start: Tensor, chunk: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Run target and drafter on one chunk of every prompt: positions start [B] + chunk [C].

    Padding after a prompt's end is harmless: its slots are overwritten before any token attends to them.
    Returns the residual stream [B, C, H] and the features [B, C, F].
    """
    positions = start[:, None] + chunk
    visible = step.causal_mask(slots, start, chunk.shape[0])
    tokens = state.tokens.gather(1, positions)
    x, features = target(tokens, positions, positions, visible, caches, drafter.aux_layers)
    drafter.prefill(state, features, positions, visible)
    return x, features


def first_token(
    step: Step, target: Transformer, state: State, start: Tensor, x: Tensor, features: Tensor | None,
    modes: Modes,
) -> None:
    """Sample the first token of every request whose prompt ends in the chunk at start [B].

    x, features: what `prefill` returned. Until then `length` is the prompt's length - 1, and the prompt's
    last token is the root.
    """
    last_index = state.length - start
    ends = state.prefilling & (last_index < x.shape[1])
    index = last_index.clamp(0, x.shape[1] - 1)[:, None]
    noise = step.noise(state, 1, target.args.vocab_size) if modes.sampled else None
    logits = step.logits(target, gather_tokens(x, index))
    raw = step.gather_logits(logits) if modes.changes_logits else logits
    chosen = step.draw(process_logits(step, raw, state, modes, state.root), noise)
    state.prefilling.logical_and_(~ends)
    if modes.scored:
        state.processors.score(raw, chosen)
    count = step.commit(state, chosen, ends.long(), index, features, active=ends)
    if modes.adjusted:
        state.processors.count(chosen, count)


# -- backends ---------------------------------------------------------------------------------


class Backend:
    """How models run on a device: modules, KV caches, threads and the `Step`. This base class uses PyTorch.

    - name: for logs
    - step: what a decoding step computes, with the operations of this backend
    - caches: KV cache classes by the names of `--kv`
    - quantized_at_load: by dtype, the mode that makes a 16-bit head faster here
    - self_check: the entry (`extensions.load`) of a check that runs before the first warmup
    """

    name = "torch"
    step = Step()
    caches: dict[str, type[KVCaches]] = {"auto": KVCaches}
    quantized_at_load: dict[torch.dtype, str] = {}
    self_check: str | None = None

    def __deepcopy__(self, memo: dict) -> Backend:
        return self  # copies of a model run on the same backend

    def prepare(self, *models: nn.Module) -> bool:
        """Replace modules of the models by those of this backend, in place.

        Models may share modules, as a head shares its target's lm_head. Layers that this backend does not
        support stay unchanged. Returns whether it supports all layers of all targets in `models`.
        """
        for model in models:
            model.backend = self
        return True

    def threads(self) -> contextlib.AbstractContextManager:
        """Return a context for passes, with the number of threads that they need."""
        return contextlib.nullcontext()

    def default_tree(self, device: torch.device, quantized: bool, batch: int) -> TreeShape:
        """Return the default tree for up to `batch` requests.

        A GPU takes the largest of GPU_TREES with which all requests together verify at most MAX_GPU_TOKENS.
        On a CPU time grows with the nodes, sooner for quantized weights, and each level costs a head pass.
        """
        if device.type == "cuda":
            return next((tree for tree in GPU_TREES if batch * tree.nodes <= MAX_GPU_TOKENS), GPU_TREES[-1])
        return TreeShape(8, 2, 4) if quantized else TreeShape(12, 3, 4)


TORCH_BACKEND = Backend()


def step_of(target: Transformer) -> Step:
    """Return the step of a target's backend, PyTorch's if a layer runs only there; sharded with ranks."""
    step = backend_of(target).step
    return target.make_sharded_step(step, target) if target.make_sharded_step else step


def backend_of(target: Transformer) -> Backend:
    """Return the backend that runs all layers of a target: PyTorch if a layer runs only there."""
    return target.backend if target.runs_on_backend else TORCH_BACKEND
