"""Dense LLaMA and Qwen2/3 decoders, with a static KV cache.

Other families subclass `ModelArgs`, `TargetBlock` and `Transformer` (`extensions.TARGETS`).

Shapes use one alphabet throughout the project:
B sequences, T tokens of each in a pass, H hidden size, F feature width, V vocabulary, Vd draft vocabulary,
L layers, nh query heads, nkv key/value heads, hd head size, S cache slots, n live slots (n <= S).

A pass never allocates a cache. The caller passes positions, cache slots and a mask: the same forward serves
prefill (causal), plain decoding (one token) and a drafted tree.
"""
from __future__ import annotations

import contextlib
import copy
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

import extensions
from common.schema import Flag, IdCount, Layers, SmallSize, Text, Width, number, whole

Factor, Length = number(1e-3, 1e6), number(1, 2**31)
LLAMA3_ROPE_FIELDS = {
    "factor": Factor, "low_freq_factor": Factor, "high_freq_factor": Factor,
    "original_max_position_embeddings": Length,
}


@dataclass(frozen=True)
class ModelArgs:
    """The shape of a target, with the fields of its `config.json`.

    Field types give the valid ranges, `constraints` the conditions between fields.
    rope_factor: multiplies cos and sin.
    short_length: longest sequence for the default `inverse_frequencies()`; only longrope limits it.
    """

    vocab_size: IdCount
    hidden_size: Width
    intermediate_size: Width
    num_layers: Layers
    num_heads: SmallSize
    num_kv_heads: SmallSize
    head_dim: SmallSize  # explicit: it need not be hidden_size / num_heads
    norm_eps: number(above=0, high=1) = 1e-6
    rope_base: number(above=1, high=1e15) = 10000.0
    rope_scaling: dict | None = None
    tie_embeddings: Flag = False
    max_seq_len: whole(1) = 2048  # the longest context the model was trained for
    qkv_bias: Flag = False  # Qwen2
    qk_norm: Flag = False  # Qwen3: an RMSNorm over each query and key head, before RoPE
    windows: tuple[whole(), ...] = ()  # sliding window of each layer in tokens, 0: none; (): no layer has one
    activation: Text = "silu"  # or one of `extensions.ACTIVATIONS`

    def __post_init__(self):
        # Attributes, not properties: code that torch.compile traces reads them.
        rope = self._scaled_rope
        object.__setattr__(self, "rope_factor", rope.attention_factor(self) if rope else 1.0)
        object.__setattr__(self, "short_length", rope.short_length(self) if rope else math.inf)

    @classmethod
    def from_config(cls, config: dict):
        """Build from a checked config.json (`checkpoint.load`); other keys are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in names})

    def constraints(self) -> list[tuple[str, bool, str]]:
        """Return constraints between fields: (field, whether its value is valid, expected value)."""
        heads, pairs = self.num_heads, self.head_dim // 2
        divisors = [value for key, value in (self.rope_scaling or {}).items() if key.endswith("divisors")]
        known = "silu", *extensions.ACTIVATIONS
        return [
            ("activation", self.activation in known, f"one of {', '.join(known)}"),
            ("num_kv_heads", heads % self.num_kv_heads == 0, f"a divisor of num_heads, {heads}"),
            ("head_dim", self.head_dim % 2 == 0, "an even number: rotary embedding needs pairs"),
            ("rope_scaling", all(len(each) == pairs for each in divisors),
             f"{pairs} divisors, half of head_dim"),
        ]

    @property
    def rope_type(self) -> str:
        """The RoPE scaling type, "default" without scaling."""
        scaling = self.rope_scaling or {}
        return scaling.get("rope_type", scaling.get("type", "default"))

    @property
    def _scaled_rope(self):
        entry = extensions.ROPE.get(self.rope_type)
        return extensions.load(entry) if entry else None

    def inverse_frequencies(self, length: int = 0) -> Tensor:
        """Return RoPE's inverse frequencies [hd/2], float32, on the CPU.

        length: longest sequence in tokens; only longrope depends on it. `llama3` rescales by wavelength at
        all lengths.
        """
        # Explicitly on the CPU: `meta_modules` sets the meta device.
        exponents = torch.arange(0, self.head_dim, 2, dtype=torch.int64, device="cpu").float() / self.head_dim
        freq = 1.0 / (self.rope_base**exponents)
        if rope := self._scaled_rope:
            return rope.frequencies(self, freq, length)
        if self.rope_type != "llama3":
            return freq
        factor, low, high, original = (float(self.rope_scaling[key]) for key in LLAMA3_ROPE_FIELDS)
        rotations = original * freq / (2 * math.pi)  # of each pair within the original context
        blend = ((rotations - low) / (high - low)).clamp(0, 1)  # 0: slow pair, divide; 1: fast pair, keep
        return (1 - blend) * freq / factor + blend * freq

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """Return the factor by which embeddings are multiplied, rounded to `dtype`."""
        return 1.0


class _SkipInit(TorchFunctionMode):
    """Skip `torch.nn.init` functions."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def meta_modules() -> Iterator[None]:
    """Create modules on the meta device within this context: no memory, no initial values.

    Initialization is skipped: on meta tensors it imports all of torch.compile, which takes seconds.
    """
    with torch.device("meta"), _SkipInit():
        yield


def rope_table(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return cos and sin of `positions` [B, T], each [B, T, hd/2] float32.

    inv_freq [hd/2]; [2, hd/2] if the layers use two RoPEs, then the results are [2, B, T, hd/2].
    """
    angles = positions[..., None].float() * (inv_freq if inv_freq.ndim == 1 else inv_freq[:, None, None])
    return angles.cos() * args.rope_factor, angles.sin() * args.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (j, j + hd/2) of x [B, T, heads, hd] by cos, sin [B, T, hd/2] (HF's layout)."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide each token's x [..., size] by its root mean square and scale by a weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    @property
    def scale(self) -> Tensor:
        """The multipliers of the normalized x [size]."""
        return self.weight

    def forward(self, x: Tensor) -> Tensor:
        # .to(): in training the weights are float32 and x may be bfloat16; the fused kernel wants one dtype.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return zeros. On a CPU a page takes no memory until it is written: caches grow with their requests."""
    size = math.prod(shape) * dtype.itemsize
    if torch.device(device).type != "cpu" or not size or not hasattr(mmap, "MAP_PRIVATE"):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


class KVCache(nn.Module):
    """Keys and values of one layer: two buffers [B, S, nkv, hd] that keep their address.

    In memory heads come before slots, so that the live prefix of a head is contiguous.
    """

    def __init__(
        self, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype, device: torch.device | str
    ):
        super().__init__()
        shape = (batch, args.num_kv_heads, slots, args.head_dim)
        for name in ("k", "v"):
            buffer = lazy_zeros(shape, dtype, device).transpose(1, 2)
            self.register_buffer(name, buffer, persistent=False)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k, v [B, T, nkv, hd] at slots [B, T] (each sequence has its own)."""
        batch = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.k.index_put_((batch, slots), k)
        self.v.index_put_((batch, slots), v)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `count` slots, [B, nkv, count, hd] each.

        dtype: of the result, for subclasses that convert.
        """
        return self.k[:, :count].transpose(1, 2), self.v[:, :count].transpose(1, 2)

    def attend(self, block: Block, qkv: Tensor, shared: PassInputs) -> Tensor:
        """Store a layer's keys and values, then attend over the live prefix.

        Output of `wqkv` [B, T, (nh + 2*nkv)*hd] -> [B, T, nh*hd]. The G query heads of a key/value head are
        folded into the token dimension (G*T queries), so keys and values are not repeated.
        """
        q, k, v = block.split(_norm_and_rotate(block, qkv, *block.layer_cos_sin(shared.cos_sin())))
        self.write(k, v, shared.slots)
        B, T, nh, hd = q.shape
        nkv = k.shape[2]
        bias = shared.bias(nh // nkv, q.dtype, block.window)
        q = q.transpose(1, 2).reshape(B, nkv, nh // nkv * T, hd)  # [B, nkv, G, T, hd] flattened over G and T
        k, v = self.live(bias.shape[-1], q.dtype)
        out = block.attention(q, k, v, bias)
        return out.reshape(B, nh, T, hd).transpose(1, 2).reshape(B, T, nh * hd)


class KVCaches(nn.ModuleList):
    """The KV caches of a model, one `Layer` per layer. A backend may replace the class (`Backend.caches`)."""

    Layer = KVCache
    dtype = None  # of the buffers; None: the model's

    @classmethod
    def allocate(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> KVCaches:
        """Allocate caches for a model of this shape. backend: the `Backend` of the model, or None."""
        return cls(cls.Layer(batch, slots, args, cls.dtype or dtype, device) for _ in range(args.num_layers))

    def rows(self, first: int, count: int) -> KVCaches:
        """Return views of batch slots first ... first + count - 1."""
        return type(self)(view_of_slots(cache, first, count) for cache in self)

    def move(self, source: Tensor, destination: Tensor) -> None:
        """Copy the entries at slots `source` [B, W] of every layer to slots `destination` [B, W].

        All entries are read before any is written.
        """
        batch = torch.arange(source.shape[0], device=source.device)[:, None]
        for cache in self:
            k, v = cache.k[batch, source], cache.v[batch, source]
            cache.k.index_put_((batch, destination), k)
            cache.v.index_put_((batch, destination), v)

    def sequence(self, slot: int, length: int) -> list[Tensor]:
        """Return views of the first `length` cache slots of a batch slot."""
        return [x[slot, :length] for x in self.buffers()]

    def reusable_prefix(self, slot: int, length: int) -> int:
        """Return how many of the `length` cached tokens of a slot a new request can reuse."""
        return length

    def start_request(self, slot: int, length: int) -> None:
        """Prepare a batch slot for a request. length: number of its tokens already in the cache."""

    def save_prefix(self, slot: int) -> None:
        """Save the state that later requests with the same prefix need. Called at the end of prefill."""


def view_of_slots(module: nn.Module, first: int, count: int, shared: tuple[str, ...] = ()) -> nn.Module:
    """Return a copy of a module whose buffers are views of batch slots first ... first + count - 1.

    shared: buffers without a batch dimension.
    """
    other = copy.copy(module)
    other._buffers = {n: x if n in shared else x.narrow(0, first, count) for n, x in module._buffers.items()}
    return other


def buffer_bytes(module: nn.Module) -> int:
    """Return the bytes of all buffers; of meta tensors, the bytes on a real device."""
    return sum(buffer.nbytes for buffer in module.buffers())


def apply_sliding_window(visible: Tensor, window: int) -> Tensor:
    """Limit a mask [B, T, n] to the last `window` visible slots of each token.

    Visible slots are in order of position: committed tokens, then ancestors.
    """
    count = visible.cumsum(-1)
    return visible & (count > count[..., -1:] - window)


class PassInputs:
    """The inputs that all layers of one forward pass share.

    positions [B, T]: for RoPE. slots [B, T]: cache slots to write. visible [B, T, n] bool: the cache slots
    that each token attends to; a backend may pass a mask object with `dense()` and `within(window)`.
    """

    def __init__(self, args: ModelArgs, inv_freq: Tensor, positions: Tensor, slots: Tensor, visible):
        self._rope = args, inv_freq, positions
        self.slots, self.positions, self.visible = slots, positions, visible
        self._cached: dict[object, object] = {("mask", 0): visible}

    def cached(self, key: object, compute: Callable, *arguments):
        """Return compute(*arguments), computed once per key."""
        if key not in self._cached:
            self._cached[key] = compute(*arguments)
        return self._cached[key]

    def cos_sin(self, table: Callable = rope_table) -> tuple[Tensor, Tensor]:
        """Return cos and sin of all positions. table: `rope_table` or a backend's version."""
        return self.cached("cos_sin", table, *self._rope)

    def mask(self, window: int):
        """Return the mask of a layer. window: its sliding window, 0: none."""
        if isinstance(self.visible, Tensor):
            return self.cached(("mask", window), apply_sliding_window, self.visible, window)
        return self.cached(("mask", window), self.visible.within, window)

    def bias(self, groups: int, dtype: torch.dtype, window: int = 0) -> Tensor:
        """Return the additive form of `mask` [B, 1, groups*T, n]: 0 or -inf.

        groups: query heads per key/value head.
        """
        def compute() -> Tensor:
            mask = self.mask(window)
            visible = mask if isinstance(mask, Tensor) else mask.dense()
            zero = torch.zeros((), dtype=dtype, device=visible.device)
            return torch.where(visible, zero, float("-inf")).repeat(1, groups, 1)[:, None]

        return self.cached(("bias", groups, dtype, window), compute)


class Linear(nn.Linear):
    """A linear layer [..., K] -> [..., N] that can add its output to the residual stream [..., N]."""

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if residual is None else residual + y

    def logits(self, x: Tensor) -> Tensor:
        """Return the output in float32, for an lm_head."""
        return matmul_float32(x, self.weight, self.bias)


class Embedding(nn.Embedding):
    """An embedding table [V, H]. It is also the lm_head if the two are tied."""

    bias = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.weight.device

    logits = Linear.logits


def matmul_float32(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., H] @ weight [V, H]^T + bias [V] in float32 [..., V].

    On a GPU without autograd, 16-bit inputs give float32 sums: rounded to 16 bits, top logits often tie.
    """
    if not (x.is_cuda and x.dtype.itemsize == 2) or torch.is_grad_enabled():
        return F.linear(x, weight, bias).float()
    y = torch.mm(x.flatten(0, -2), weight.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """Return SwiGLU's silu(gate) * up."""
    return F.silu(gate) * up


def gated_activation(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function of gate and up that `ModelArgs.activation` names."""
    return silu_gate if name == "silu" else extensions.load(extensions.ACTIVATIONS[name])


class MLP(nn.Module):
    """A gated MLP: w_down(activation(gate, up))."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.activation, self.gate = args.activation, gated_activation(args.activation)
        self.w_gate_up = Linear(args.hidden_size, 2 * args.intermediate_size, bias=False)
        self.w_down = Linear(args.intermediate_size, args.hidden_size, bias=False)

    def forward(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """Normed x [B, T, H] -> the output [B, T, H], added to the residual stream [B, T, H] if given."""
        return self.w_down(self.gate(*self.w_gate_up(x).chunk(2, dim=-1)), residual)


# The target's layers differ only in their weights. With these nested regions torch.compile traces and lowers
# one layer and reuses it for all L: half the compile time, and the same speed or better. (A head has few
# layers: there it takes longer.) A region must return whole tensors, never views: inductor (2.13) frees the
# buffer of a returned view and reuses it too early.
@torch.compiler.nested_compile_region
def _project(block: Block, x: Tensor) -> Tensor:
    return block.project(x)


@torch.compiler.nested_compile_region
def _norm_and_rotate(block: Block, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return block.norm_and_rotate(qkv, cos, sin)


@torch.compiler.nested_compile_region
def _finish(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    return block.finish(x, attended)


class Block(nn.Module):
    """One decoder layer. A target's layer normalizes its input (`TargetBlock`); a head's first does not.

    - standard: False if a subclass changes the computation, so that no kernel may replace it
    - fused: a backend's kernel for `forward`, called with this block and the arguments
    - sinks: attention sinks, an extra softmax logit for each query head [nh], or None
    - score_cap: see `families.variants`
    """

    Norm = RMSNorm
    standard, fused, score_cap = True, None, 0.0

    def __init__(self, args: ModelArgs, layer: int = 0, input_size: int | None = None):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        self.window = args.windows[layer] if args.windows else 0
        H, width = args.hidden_size, args.num_heads * args.head_dim
        self.wqkv = Linear(input_size or H, width + 2 * args.num_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.q_norm = self.Norm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = self.Norm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.sinks = None
        self.wo = Linear(width, H, bias=False)
        self.mlp_norm = self.Norm(H, args.norm_eps)
        self.mlp = self.make_mlp(args)

    def make_mlp(self, args: ModelArgs) -> nn.Module:
        """Make the MLP, a module that is called as `MLP`."""
        return MLP(args)

    def forward(self, x: Tensor, cache: KVCache, shared: PassInputs, inputs: Tensor | None = None) -> Tensor:
        """Residual stream x [B, T, H] -> the stream after this layer; keys and values go to `cache`.

        inputs [B, T, input_size]: what attention reads, if not x.
        """
        if self.fused is not None:
            return self.fused(self, x, cache, shared, inputs)
        qkv = self.project(x if inputs is None else inputs)
        return self.finish(x, self.attend(cache, qkv, shared))

    def project(self, x: Tensor) -> Tensor:
        """Attention's input [B, T, input_size] -> queries, keys and values [B, T, (nh + 2*nkv)*hd]."""
        return self.wqkv(x)

    def attend(self, cache: KVCache, qkv: Tensor, shared: PassInputs) -> Tensor:
        """Output of `project` -> input of `wo` [B, T, nh*hd]."""
        return cache.attend(self, qkv, shared)

    def attention(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        """Softmax attention: q [B, h, R, hd], k and v [B, h, n, hd] -> [B, h, R, hd].

        bias broadcasts to [B, h, R, n].
        """
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [B, T, H] and attention's output [B, T, nh*hd] -> the stream after the layer."""
        x = self.wo(attended, x)
        return self.mlp(self.mlp_norm(x), x)

    def layer_cos_sin(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return this layer's cos and sin [B, T, hd/2], from those of `rope_table`."""
        return angles

    def norm_and_rotate(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Output of `wqkv` -> [B, T, nh + 2*nkv, hd]: normed and rotated q and k, then v; see `split`."""
        sizes = self.num_heads + self.num_kv_heads, self.num_kv_heads
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split(sizes, dim=2)
        if self.q_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        return torch.cat((rotate(qk, cos, sin), v), dim=2)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Output of `norm_and_rotate` -> q [B, T, nh, hd] and k, v [B, T, nkv, hd], as views."""
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)


class TargetBlock(Block):
    """A layer of the target: it normalizes the residual stream before attention."""

    def __init__(self, args: ModelArgs, layer: int = 0):
        super().__init__(args, layer)
        self.attn_norm = self.Norm(args.hidden_size, args.norm_eps)

    def project(self, x: Tensor) -> Tensor:
        return self.wqkv(self.attn_norm(x))


class Transformer(nn.Module):
    """A target: embedding, layers, final norm, lm_head.

    - Args, Layer, Caches: classes of its shape, layers and KV caches
    - backend: the `engine.step.Backend` that it was prepared for, or None
    - runs_on_backend: all of its layers run there
    - fused: a backend's kernel for `forward`, called with this model and the arguments
    - ranks: the tensor-parallel group, or None
    - make_sharded_step(step, model): makes the step of a sharded model; None without ranks
    - is_recurrent: its caches hold a recurrent state, so tokens must be read in order
    - cpu_only_part: the layers that GPUs do not support yet, for an error message, or None
    - can_compile: torch.compile supports its passes
    """

    Args, Layer, Caches = ModelArgs, TargetBlock, KVCaches
    backend, runs_on_backend, fused, ranks, make_sharded_step = None, False, None, None, None
    is_recurrent, can_compile, cpu_only_part = False, True, None

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.embed = Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(self.make_layer(i) for i in range(args.num_layers))
        self.norm = self.Layer.Norm(args.hidden_size, args.norm_eps)
        self.lm_head = None if args.tie_embeddings else Linear(args.hidden_size, args.vocab_size, bias=False)
        self.register_buffer("inv_freq", args.inverse_frequencies(), persistent=False)

    def make_layer(self, layer: int) -> TargetBlock:
        """Build layer number `layer`."""
        return self.Layer(self.args, layer)

    def check_tree(self, shape) -> None:
        """Raise ValueError if this target cannot verify trees of a `TreeShape`."""

    def caches(self, batch: int, slots: int, device: torch.device | str | None = None) -> KVCaches:
        """Allocate a KV cache for every layer. device: None: that of the weights."""
        device = device or self.embed.device
        return self.Caches.allocate(self.args, batch, slots, self.embed.dtype, device, self.backend)

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the bytes that `caches` would allocate."""
        return buffer_bytes(self.caches(batch, slots, "meta"))

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible, caches: KVCaches,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Run one pass over T tokens per sequence.

        tokens, positions, slots [B, T] int64: ids, positions in the sequence, cache slots to write. visible
        [B, T, n] bool: the cache slots that each token attends to, its own included; only the first n are
        read (see `PassInputs`). caches: one per layer, written in place.

        Returns the residual stream after the last layer [B, T, H], before the final norm. With `aux_layers`
        also the residual streams that enter those layers, concatenated [B, T, len(aux_layers)*H]; else None.
        """
        if self.fused is not None:
            return self.fused(self, tokens, positions, slots, visible, caches, aux_layers)
        shared = PassInputs(self.args, self.inv_freq, positions, slots, visible)

        def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:  # layer(...), as nested compile regions
            return _finish(layer, x, layer.attend(caches[i], _project(layer, x), shared))

        return self.run_layers(tokens, aux_layers, apply)

    def for_length(self, length: int) -> Transformer:
        """Return the model with RoPE for `length` tokens (longrope changes above `short_length`)."""
        if length <= self.args.short_length:
            return self
        inv_freq = self.args.inverse_frequencies(length).to(self.inv_freq.device)
        other = copy.copy(self)
        other._buffers = self._buffers | {"inv_freq": inv_freq}
        return other

    def run_layers(
        self, tokens: Tensor, aux_layers: tuple[int, ...], apply: Callable
    ) -> tuple[Tensor, Tensor | None]:
        """Embed tokens [B, T] and run x = apply(i, layer, x) over all layers; returns as `forward`."""
        x, features = self.embed(tokens), []
        if (scale := self.args.embedding_scale(x.dtype)) != 1.0:
            x = x * scale
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                features.append(x)
            x = apply(i, layer, x)
        if len(self.layers) in aux_layers:
            features.append(x)
        return x, torch.cat(features, dim=-1) if features else None

    @property
    def output_layer(self) -> Linear | Embedding:
        """The lm_head; the embedding if the two are tied."""
        return self.embed if self.lm_head is None else self.lm_head

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [..., H] -> logits [..., V] in float32."""
        return self.output_layer.logits(self.norm(x))
