"""The targets: LLaMA, Qwen, Mistral, Mixtral, Phi-3, Gemma 3 and gpt-oss. Definitions only.

Shapes use one alphabet throughout the project:
B sequences, T rows of one pass, H hidden size, F feature width, V vocabulary, Vd draft vocabulary,
L layers, nh query heads, nkv key/value heads, hd head size, S cache slots, n live slots (n <= S).

A pass never allocates a cache. The caller hands in positions, cache slots and a mask, which windows narrow:
the same forward serves prefill (causal), plain decoding (one row) and a drafted tree.
"""
from __future__ import annotations

import contextlib
import copy
import math
import mmap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.schema import Flag, Ids, Layers, Many, Width, number, whole


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gpt-oss' (up + 1) * gate * sigmoid(1.702 * gate), of gate <= 7 and up in -7..7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * (gate * torch.sigmoid(1.702 * gate))


ACTIVATIONS = {  # of gate and up
    "silu": lambda gate, up: F.silu(gate) * up,
    "gelu_tanh": lambda gate, up: F.gelu(gate, approximate="tanh") * up,
    "clamped_swiglu": clamped_swiglu,
}


@dataclass(frozen=True)
class ModelArgs:
    """The shape of a target, as the checkpoint's own `config.json` gives it.

    The types say what a file may hold; relations between fields are in `checkpoint.folder`.
    """

    vocab_size: Ids
    hidden_size: Width
    intermediate_size: Width
    num_layers: Layers
    num_heads: Many
    num_kv_heads: Many
    head_dim: Many  # explicit: it need not be hidden_size / num_heads
    norm_eps: number(above=0, high=1) = 1e-6
    rope_base: number(above=1, high=1e15) = 10000.0
    rope_scaling: dict | None = None  # see `inverse_frequencies`
    tie_embeddings: Flag = False
    max_seq_len: whole(1) = 2048  # the longest context the model was trained for
    qkv_bias: Flag = False  # Qwen2
    qk_norm: Flag = False  # Qwen3: an RMSNorm over each query and key head, before RoPE
    num_experts: whole(0, 10_000) = 0  # E; 0: one dense MLP. With experts, intermediate_size is of one expert
    experts_per_token: whole(0, 10_000) = 0  # A
    renormalise_experts: Flag = True  # the weights of the A chosen experts are scaled to sum to 1
    windows: tuple[whole(), ...] = ()  # last tokens that a row of each layer sees, 0: all; (): all layers all
    sinks: Flag = False  # gpt-oss: each query head has a score beside those of the slots, with no value
    biases: Flag = False  # the attention's output, the router and the MLP have biases, too
    activation: Literal[tuple(ACTIVATIONS)] = "silu"
    # The rest is Gemma's.
    local_rope_base: number(above=1, high=1e15) | None = None  # of layers with a window, if it is another
    scaled_embedding: Flag = False  # embeddings are multiplied by the square root of H
    zero_centred: Flag = False  # norms multiply by 1 + weight
    output_norms: Flag = False  # outputs of attention and of the MLP are normed, too
    query_scalar: number(above=0, high=1e6) | None = None  # scores are over its square root; None: head_dim
    # For `networks.hybrid`: heads of gated delta nets (nv, and nk of q and k) and their sizes (dk, dv).
    delta_layers: tuple[whole(0, 1), ...] = ()  # 1: a delta net, 0: gated attention; (): neither
    delta_heads: whole(0, 2**16) = 0
    delta_key_heads: whole(0, 2**16) = 0
    delta_key_dim: whole(0, 2**16) = 0
    delta_value_dim: whole(0, 2**16) = 0
    delta_taps: whole(0, 64) = 0  # tokens that a short convolution reads
    rotary_dim: whole(0, 2**16) = 0  # numbers of a head that turn: the first of pairs (j, j + hd/2); 0: all
    shared_expert_size: whole(0, 2**22) = 0  # inner size of the expert that all rows use; 0: there is none

    @classmethod
    def from_config(cls, config: dict):
        """Take the fields of this class out of a config.json that was checked (`checkpoint.folder`)."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if k in names})

    @property
    def delta_width(self) -> int:
        """The width of q, k and v of a delta net side by side."""
        keys = 2 * self.delta_key_heads * self.delta_key_dim
        return keys + self.delta_heads * self.delta_value_dim

    @property
    def short_length(self) -> float:
        """The longest text that longrope's short divisors are for; infinity without longrope."""
        scaling = self.rope_scaling or {}
        return scaling["original_max_position_embeddings"] if "long_divisors" in scaling else math.inf

    def embedding_scale(self, dtype: torch.dtype) -> float:
        """The factor of embeddings, rounded to their dtype."""
        if not self.scaled_embedding:
            return 1.0
        return torch.tensor(self.hidden_size**0.5, dtype=dtype, device="cpu").item()

    @property
    def rope_factor(self) -> float:
        """The factor of cos and sin. Scores have its square: attention needs no `query_scalar`."""
        return self._scaling_factor * (self.head_dim / (self.query_scalar or self.head_dim)) ** 0.25

    @property
    def _scaling_factor(self) -> float:
        """The factor of cos and sin that belongs to yarn (arXiv 2309.00071, section 3.4) and to longrope."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type", scaling.get("type")) not in ("yarn", "divisors"):
            return 1.0
        if scaling.get("attention_factor") is not None or "divisors" in scaling:
            return float(scaling.get("attention_factor") or 1)

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
        return magnitude(1.0)


class _WithoutValues(TorchFunctionMode):
    """Leaves out what gives new weights their values."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if getattr(function, "__module__", "") == "torch.nn.init":
            return args[0] if args else kwargs["tensor"]
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def blank() -> Iterator[None]:
    """Make modules on the meta device within this context, without values and memory.

    torch would import all of torch.compile, which takes seconds, to compute there.
    """
    with torch.device("meta"), _WithoutValues():
        yield


def inverse_frequencies(args: ModelArgs, length: int = 0) -> Tensor:
    """RoPE inverse frequencies [hd/2], float32. A `local_rope_base` makes them [2, hd/2], its own second.

    length: the most tokens of a text, for longrope.

    `llama3`: Llama-3.1's wavelength-dependent rescale, applied at all lengths. `linear`: every frequency
    divided by `factor`. `yarn`: slow pairs divided by `factor`, fast ones kept, a ramp over the pairs between
    (arXiv 2309.00071); see also `ModelArgs.rope_factor`. `divisors`: one divisor per frequency, as GGUF
    stores llama3 scaling (`rope_freqs.weight`), or two, of longrope.
    """
    if args.local_rope_base is not None:
        usual = replace(args, local_rope_base=None)
        local = replace(usual, rope_base=args.local_rope_base, rope_scaling=None)
        return torch.stack((inverse_frequencies(usual), inverse_frequencies(local)))
    if args.rotary_dim:  # the other pairs stand still
        turning = inverse_frequencies(replace(args, head_dim=args.rotary_dim, rotary_dim=0))
        return F.pad(turning, (0, (args.head_dim - args.rotary_dim) // 2))
    # On the CPU, whatever device modules are being made on: see `blank`.
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.int64, device="cpu").float() / args.head_dim
    freq = 1.0 / (args.rope_base ** exponents)
    scaling = args.rope_scaling
    if not scaling:
        return freq
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        return freq / float(scaling["factor"])
    if kind == "divisors":
        divisors = scaling["long_divisors" if length > args.short_length else "divisors"]
        return freq / torch.tensor(divisors, dtype=torch.float32, device="cpu")
    if kind == "llama3":
        factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
        original = float(scaling["original_max_position_embeddings"])
        turns = original * freq / (2 * math.pi)  # how often each pair turns within the original context
        blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow pair, divide; 1: fast pair, keep
        return (1 - blend) * freq / factor + blend * freq
    if kind == "yarn":
        factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

        def pair(turns: float) -> float:  # the pair with this number of turns within the original context
            return args.head_dim * math.log(
                original / (turns * 2 * math.pi)
            ) / (2 * math.log(args.rope_base))

        low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
        if scaling.get("truncate", True):
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, args.head_dim - 1)
        pairs = torch.arange(args.head_dim // 2, device="cpu")
        ramp = ((pairs - low) / max(high - low, 1e-3)).clamp(0, 1)
        return ramp * freq / factor + (1 - ramp) * freq
    return freq  # "default"; no other kind is let through when a config is read


def rope_table(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The cosines and sines of `positions` [B, T]: two of [B, T, hd/2], float32.

    They are computed once per pass and used by every layer. With two kinds of frequencies: [2, B, T, hd/2].
    """
    angles = positions[..., None].float() * (inv_freq if inv_freq.ndim == 1 else inv_freq[:, None, None])
    return angles.cos() * args.rope_factor, angles.sin() * args.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + hd/2) of x [B, T, heads, hd]: the "NeoX" halves, as Hugging Face stores LLaMA."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide each row by its root mean square and scale by a weight (arXiv 1910.07467).

    zero_centred: scale by 1 + weight, in float32.
    """

    def __init__(self, size: int, eps: float, zero_centred: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))
        self.eps, self.zero_centred = eps, zero_centred

    @property
    def scale(self) -> Tensor:
        """The factor of each number of a row [size]."""
        return 1 + self.weight.float() if self.zero_centred else self.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.zero_centred:
            return F.rms_norm(x.float(), (x.shape[-1],), self.scale, self.eps).to(x.dtype)
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
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.k.index_put_((rows, slots), k)
        self.v.index_put_((rows, slots), v)

    def live(self, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return keys and values of the first `count` slots, [B, nkv, count, hd] each, in the model's dtype.

        They are stored in it here; a subclass may store another.
        """
        return self.k[:, :count].transpose(1, 2), self.v[:, :count].transpose(1, 2)

    def attend(self, block: Block, qkv: Tensor, shared: Pass) -> Tensor:
        """Store a layer's keys and values, then attend over the live prefix.

        qkv [B, T, (nh + 2*nkv)*hd] as `wqkv` gives it -> [B, T, nh*hd]. The G query heads that share a
        key/value head become G*T rows of it: keys and values are never repeated in memory.
        """
        q, k, v = block.split(_rotated(block, qkv, *block.own(shared.angles())))
        self.write(k, v, shared.slots)
        B, T, nh, hd = q.shape
        nkv, bias = k.shape[2], shared.bias(nh // k.shape[2], q.dtype, block.window)
        q = q.transpose(1, 2).reshape(B, nkv, nh // nkv * T, hd)  # [B, nkv, G, T, hd] flattened over G and T
        k, v = self.live(bias.shape[-1], q.dtype)
        sinks = block.sinks
        if sinks is not None:
            sinks = sinks.view(nkv, -1).repeat_interleave(T, 1)
        out = attention(q, k, v, bias, sinks)
        return out.reshape(B, nh, T, hd).transpose(1, 2).reshape(B, T, nh * hd)


class KVCaches(nn.ModuleList):
    """The caches of all layers of a model, a `Layer` each.

    Every backend may have a class of its own, which fits its attention (`kernels.backend`).
    """

    Layer = KVCache
    dtype = None  # of the buffers; None: the model's

    @classmethod
    def of(
        cls, args: ModelArgs, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str, backend
    ) -> KVCaches:
        """Allocate caches for a model of this shape. backend: what the model was prepared for, or None."""
        return cls(cls.Layer(batch, slots, args, cls.dtype or dtype, device) for _ in range(args.num_layers))

    def rows(self, first: int, count: int) -> KVCaches:
        """Return the caches of the sequences first ... first + count - 1: views."""
        return type(self)(rows_of(cache, first, count) for cache in self)

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries at slots `source` [B, W] of every layer to slots `target` [B, W].

        All entries are read before any is written.
        """
        rows = torch.arange(source.shape[0], device=source.device)[:, None]
        for cache in self:
            k, v = cache.k[rows, source], cache.v[rows, source]
            cache.k.index_put_((rows, target), k)
            cache.v.index_put_((rows, target), v)

    def sequence(self, place: int, slots: int) -> list[Tensor]:
        """Return views of the first `slots` slots of one sequence."""
        entries = self.entries(slots)
        return [x[place, :entries] for x in self.buffers()]

    def reusable(self, place: int, same: int) -> int:
        """Return how many of the first `same` tokens of a sequence need not be read again."""
        return same

    def begin(self, place: int, length: int) -> None:
        """Prepare a place for a text whose first `length` tokens are there."""

    def keep(self, place: int) -> None:
        """Remember what another text needs that begins like the one in a place does up to here."""

    def entries(self, slots: int) -> int:
        """Return how many entries of a buffer's second dimension hold `slots` slots."""
        return slots


def rows_of(module: nn.Module, first: int, count: int, shared: tuple[str, ...] = ()) -> nn.Module:
    """Return the same module over views of its buffers: their rows first ... first + count - 1.

    shared: buffers that stay whole.
    """
    other = copy.copy(module)
    other._buffers = {n: x if n in shared else x.narrow(0, first, count) for n, x in module._buffers.items()}
    return other


def buffer_bytes(module: nn.Module) -> int:
    """Return the bytes of all buffers, on the meta device those that they would take elsewhere."""
    return sum(buffer.nbytes for buffer in module.buffers())


def last_seen(visible: Tensor, window: int) -> Tensor:
    """Return visible [B, T, n], bool, with the last `window` of the slots that each row sees.

    A row sees one slot for each position of its text up to its own, in ascending order. So these are the
    slots of the last positions, be they committed or its ancestors'.
    """
    rank = visible.cumsum(-1)
    return visible & (rank > rank[..., -1:] - window)


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Return softmax attention: q [B, h, R, hd], k and v [B, h, n, hd], bias that broadcasts to [B, h, R, n].

    sinks: a score [h, R or 1] of each row that takes its share of the softmax and has no value. It is the
    bias of one more slot with a key and a value of zeros.
    """
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    rows = q.shape[:-1]
    bias = torch.cat((bias.expand(*rows, -1), sinks.to(bias.dtype)[..., None].expand(*rows, 1)), dim=-1)
    k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


class Pass:
    """The inputs that all layers of one forward pass share.

    That is RoPE, the cache slots [B, T] to write, and which slots each row sees: [B, T, n] bool, or a
    `kernels.backend.Sight`, whose `dense()` gives those.
    """

    def __init__(self, args: ModelArgs, inv_freq: Tensor, positions: Tensor, slots: Tensor, visible):
        self._positions = args, inv_freq, positions
        self.slots, self.positions, self.visible = slots, positions, visible
        self._made: dict[object, object] = {("seen", 0): visible}

    def made(self, what: object, make: Callable, *arguments):
        """Return make(*arguments), made once. what: tells results apart."""
        if what not in self._made:
            self._made[what] = make(*arguments)
        return self._made[what]

    def angles(self, table: Callable = rope_table) -> tuple[Tensor, Tensor]:
        """The cosines and sines of the rows' positions by `rope_table`, or a function like it; made once.

        `Block.own` takes those of a layer.
        """
        return self.made("angles", table, *self._positions)

    def seen(self, window: int):
        """Return `visible` of layers with this window, made once."""
        within = partial(last_seen, self.visible) if isinstance(self.visible, Tensor) else self.visible.within
        return self.made(("seen", window), within, window)

    def bias(self, groups: int, dtype: torch.dtype, window: int = 0) -> Tensor:
        """Return that mask as an additive one [B, 1, groups*T, n], 0 or -inf, made once."""
        def make() -> Tensor:
            seen = self.seen(window)
            visible = seen if isinstance(seen, Tensor) else seen.dense()
            zero = torch.zeros((), dtype=dtype, device=visible.device)
            return torch.where(visible, zero, float("-inf")).repeat(1, groups, 1)[:, None]

        return self.made(("bias", window), make)


class Linear(nn.Linear):
    """A linear layer that can add what it computes to the residual stream `onto`."""

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if onto is None else onto + y

    def logits(self, x: Tensor) -> Tensor:
        """Return the same in float32, for an lm_head."""
        return products(x, self.weight, self.bias)


def products(x: Tensor, rows: Tensor, bias: Tensor | None = None) -> Tensor:
    """The products of x [..., H] with rows [V, H], plus bias [V], in float32 [..., V].

    A GPU does not round its sums: rounded to 16 bits first, many a likeliest token would be a tie.
    """
    if not (x.is_cuda and x.dtype.itemsize == 2) or torch.is_grad_enabled():
        return F.linear(x, rows, bias).float()
    y = torch.mm(x.flatten(0, -2), rows.t(), out_dtype=torch.float32).unflatten(0, x.shape[:-1])
    return y if bias is None else y + bias


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.activation = args.activation
        self.w_gate_up = Linear(args.hidden_size, 2 * args.intermediate_size, bias=args.biases)
        self.w_down = Linear(args.intermediate_size, args.hidden_size, bias=args.biases)

    def forward(self, x: Tensor, onto: Tensor | None) -> Tensor:
        """Normed x [B, T, H]; what comes out is added to the residual stream `onto` [B, T, H], if given."""
        gate, up = self.w_gate_up(x).chunk(2, dim=-1)
        return self.w_down(ACTIVATIONS[self.activation](gate, up), onto)


class Experts(nn.Module):
    """A mixture of E experts; every row uses its own A of them (Mixtral, Qwen3-MoE, gpt-oss).

    The experts are one batched product of static shapes.
    """

    def __init__(self, args: ModelArgs):
        super().__init__()
        E, H, inner = args.num_experts, args.hidden_size, args.intermediate_size
        self.used, self.renormalise = args.experts_per_token, args.renormalise_experts
        self.activation = args.activation
        self.router = Linear(H, E, bias=args.biases)
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * inner, H))
        self.w_down = nn.Parameter(torch.empty(E, H, inner))
        self.gate_up_bias = nn.Parameter(torch.empty(E, 2 * inner)) if args.biases else None
        self.down_bias = nn.Parameter(torch.empty(E, H)) if args.biases else None

    def _product(
        self, x: Tensor, stack: nn.Module | Tensor, bias: Tensor | None, chosen: Tensor | None
    ) -> Tensor:
        """Multiply x by a stack of matrices [E, N, K], which may be quantised, and add its bias [E, N].

        chosen [R, A]: x [R, K] or [R, A, K] by those of each row's experts -> [R, A, N]; None: x [R, K] or
        [E, R, K] by all -> [E, R, N].
        """
        if isinstance(stack, nn.Module):
            x, matrices = stack.rounded(x), stack(chosen, x.dtype)
        else:
            matrices = stack if chosen is None else stack[chosen]
        if chosen is None:
            y = x @ matrices.transpose(1, 2)
            return y if bias is None else y + bias[:, None]
        y = torch.einsum("rk,rank->ran" if x.ndim == 2 else "rak,rank->ran", x, matrices)
        return y if bias is None else y + bias[chosen]

    def forward(self, x: Tensor, onto: Tensor | None) -> Tensor:
        """As `MLP.forward`."""
        rows = x.flatten(0, -2)  # [R, H]
        weight, chosen = self.router(rows).float().softmax(-1).topk(self.used, dim=-1)  # [R, A]
        if self.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        out = self.mixed(rows, weight.to(x.dtype), chosen).view_as(x)
        return out if onto is None else onto + out

    def mixed(self, rows: Tensor, weight: Tensor, chosen: Tensor) -> Tensor:
        """Return the outputs [R, H] of experts `chosen` [R, A] for rows [R, H], added up by weight [R, A]."""
        # Few rows, as in plain decoding: only the weights of the experts they use are read. Many rows use
        # nearly all experts: every expert computes every row, and each row takes what it wants.
        few = chosen.numel() < self.router.out_features
        experts = chosen if few else None
        both = self._product(rows, self.w_gate_up, self.gate_up_bias, experts)
        inner = ACTIVATIONS[self.activation](*both.chunk(2, dim=-1))
        out = self._product(inner, self.w_down, self.down_bias, experts)
        if few:
            return (out * weight[..., None]).sum(1)
        share = weight.new_zeros(rows.shape[0], out.shape[0]).scatter(1, chosen, weight)
        return torch.einsum("erh,re->rh", out, share)


# The target's layers differ only in their weights. Marking their parts as regions lets torch.compile trace
# and lower each once and reuse it for all L layers: half the compile time of L unrolled copies, and the same
# speed or better. (For the few layers of a head it takes longer, not shorter.) A region must return whole
# tensors, never views: inductor (2.13) frees the buffer of a returned view and reuses it too early.
@torch.compiler.nested_compile_region
def projected(block: Block, x: Tensor) -> Tensor:
    """`Block.project` in a region."""
    return block.project(x)


@torch.compiler.nested_compile_region
def _rotated(block: Block, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return block.heads(qkv, cos, sin)


@torch.compiler.nested_compile_region
def _finish(block: Block, x: Tensor, attended: Tensor) -> Tensor:
    return block.finish(x, attended)


class Block(nn.Module):
    """One decoder layer.

    A layer of the target norms what it reads (`TargetBlock`); the first layer of a head does not. layer: its
    number, which tells its window. standard: it has this class's parts in this order, so that a kernel may
    compute it. fused: a backend's kernel for `forward`, called with this block and the arguments.
    """

    standard, fused = True, None

    def __init__(self, args: ModelArgs, input_size: int | None = None, layer: int = 0):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        self.window = args.windows[layer] if args.windows else 0
        H, width = args.hidden_size, args.num_heads * args.head_dim
        norm = partial(RMSNorm, eps=args.norm_eps, zero_centred=args.zero_centred)
        self.wqkv = Linear(input_size or H, width + 2 * args.num_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.q_norm = norm(args.head_dim) if args.qk_norm else None
        self.k_norm = norm(args.head_dim) if args.qk_norm else None
        self.sinks = nn.Parameter(torch.empty(args.num_heads)) if args.sinks else None
        self.wo = Linear(width, H, bias=args.biases)
        self.wo_norm = norm(H) if args.output_norms else None
        self.mlp_norm = norm(H)
        self.mlp = Experts(args) if args.num_experts else MLP(args)
        self.mlp_out_norm = norm(H) if args.output_norms else None

    def forward(self, x: Tensor, cache: KVCache, shared: Pass, inputs: Tensor | None = None) -> Tensor:
        """Residual stream x [B, T, H] -> the stream after this layer; keys and values go to `cache`.

        inputs: what attention reads if it is not x, [B, T, input_size].
        """
        if self.fused is not None:
            return self.fused(self, x, cache, shared, inputs)
        qkv = self.project(x if inputs is None else inputs)
        return self.finish(x, self.attend(cache, qkv, shared))

    def attend(self, cache: KVCache, qkv: Tensor, shared: Pass) -> Tensor:
        """Output of `project` -> what `wo` reads."""
        return cache.attend(self, qkv, shared)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values of what this layer reads [B, T, input_size]: [B, T, (nh + 2*nkv)*hd]."""
        return self.wqkv(x)

    @property
    def head_norms(self) -> tuple[Tensor | None, Tensor | None, float]:
        """The weights of the norms of q and k and their eps, for a kernel; None, None, 0.0 without them."""
        if self.q_norm is None:
            return None, None, 0.0
        return self.q_norm.scale, self.k_norm.scale, self.q_norm.eps

    def own(self, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """This layer's cosines and sines [B, T, hd/2], of those of `rope_table`."""
        return angles if angles[0].ndim == 3 else tuple(x[int(self.window > 0)] for x in angles)

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Output of `wqkv` -> [B, T, nh + 2*nkv, hd]: normed and rotated q and k, then v; see `split`."""
        sizes = self.num_heads + self.num_kv_heads, self.num_kv_heads
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split(sizes, dim=2)
        if self.q_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        return torch.cat((rotate(qk, cos, sin), v), dim=2)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, nh, hd] and k, v [B, T, nkv, hd] as views."""
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [B, T, H] and attention output [B, T, nh*hd] -> the stream after the layer."""
        x = self.wo(attended, x) if self.wo_norm is None else x + self.wo_norm(self.wo(attended))
        if self.mlp_out_norm is None:
            return self.mlp(self.mlp_norm(x), x)
        return x + self.mlp_out_norm(self.mlp(self.mlp_norm(x), None))


class TargetBlock(Block):
    """A layer of the target: it reads the normed residual stream."""

    def __init__(self, args: ModelArgs, layer: int = 0):
        super().__init__(args, layer=layer)
        self.attn_norm = RMSNorm(args.hidden_size, args.norm_eps, args.zero_centred)

    def project(self, x: Tensor) -> Tensor:
        return self.wqkv(self.attn_norm(x))


class Transformer(nn.Module):
    """A LLaMA-architecture target.

    backend: what it was prepared for (`kernels.backend`), None: nothing. whole: that backend computes all of
    its layers. Caches: the class of its caches. ranks: the processes that share it, if several
    (`kernels.tp`). fused: a backend's kernel for `forward`, called with this model and the arguments.
    """

    backend, whole, ranks, fused = None, False, None, None
    Caches = KVCaches
    most_rows = most_levels = None  # of a pass, and of a tree below its root; None: unlimited
    keeps_state = False  # beside keys and values: only texts that are read in order may be in a pass

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(TargetBlock(args, i) for i in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps, args.zero_centred)
        self.lm_head = None if args.tie_embeddings else Linear(args.hidden_size, args.vocab_size, bias=False)
        self.register_buffer("inv_freq", inverse_frequencies(args), persistent=False)

    def caches(self, batch: int, slots: int, device: torch.device | str | None = None) -> KVCaches:
        """Allocate a cache for every layer. device: of the weights if left out."""
        weight = self.embed.weight
        return self.Caches.of(self.args, batch, slots, weight.dtype, device or weight.device, self.backend)

    def cache_bytes(self, batch: int, slots: int) -> int:
        """Return the size of `caches`."""
        return buffer_bytes(self.caches(batch, slots, "meta"))

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible, caches: KVCaches,
        aux_layers: tuple[int, ...] = (),
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one pass over T rows per sequence.

        tokens, positions, slots [B, T] int64: what is read, its place in the text, where its keys/values go.
        visible [B, T, n] bool: the cache slots each row attends to, its own included; only the first n are
        read (see `Pass`). caches: one per layer, written in place. Returns the last residual stream [B, T, H]
        (before the final norm) and, when `aux_layers` is given, the residual streams entering those layers
        side by side [B, T, len(aux_layers)*H], else None.
        """
        if self.fused is not None:
            return self.fused(self, tokens, positions, slots, visible, caches, aux_layers)
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)

        def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:  # as `layer`, in regions
            return _finish(layer, x, layer.attend(caches[i], projected(layer, x), shared))

        return self.through(tokens, aux_layers, apply)

    def reaching(self, length: int) -> Transformer:
        """Return this target for texts of up to `length` tokens: all turn alike, see `short_length`."""
        if length <= self.args.short_length:
            return self
        turning = inverse_frequencies(self.args, length).to(self.inv_freq.device)
        other = copy.copy(self)
        other._buffers = self._buffers | {"inv_freq": turning}
        return other

    def through(
        self, tokens: Tensor, aux_layers: tuple[int, ...], apply: Callable
    ) -> tuple[Tensor, Tensor | None]:
        """Take embeddings x [B, T, H] through all layers: x = apply(i, layer, x).

        Returns the stream after them, and the streams entering `aux_layers` side by side (None without any);
        the number of layers, L, stands for the stream after the last one.
        """
        x, features = self.embed(tokens), []
        if self.args.scaled_embedding:
            x = x * self.args.embedding_scale(x.dtype)
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                features.append(x)
            x = apply(i, layer, x)
        if len(self.layers) in aux_layers:
            features.append(x)
        return x, torch.cat(features, dim=-1) if features else None

    def causal(self, tokens: Tensor, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """Compute `forward` over complete sequences [B, T] from position 0, without a cache.

        For training and for scoring.
        """
        T = tokens.shape[1]
        at = torch.arange(T, device=tokens.device)
        angles = rope_table(self.args, self.reaching(T).inv_freq, at[None])

        def apply(i: int, layer: TargetBlock, x: Tensor) -> Tensor:
            heads = layer.heads(layer.project(x), *layer.own(angles))
            q, k, v = (t.transpose(1, 2) for t in layer.split(heads))
            groups = q.shape[1] // k.shape[1]  # of this rank's heads, where the target is dealt
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            window = layer.window if 0 < layer.window < T else T
            if window == T and layer.sinks is None:
                attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            else:
                near = (at <= at[:, None]) & (at > at[:, None] - window)
                bias = torch.zeros_like(near, dtype=q.dtype).masked_fill(~near, float("-inf"))
                attended = attention(q, k, v, bias, None if layer.sinks is None else layer.sinks[:, None])
            return layer.finish(x, attended.transpose(1, 2).flatten(2))

        return self.through(tokens, aux_layers, apply)

    @property
    def lm_rows(self) -> Tensor:
        """The rows [V, H] that logits are products with: the lm_head's weight or, tied, the embedding's."""
        return (self.embed if self.lm_head is None else self.lm_head).weight

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [..., H] -> logits [..., V] in float32."""
        return project(self.embed if self.lm_head is None else self.lm_head, self.norm(x))


def project(head: nn.Module, x: Tensor) -> Tensor:
    """x [..., H] -> float32 logits [..., V].

    head: a layer with `logits`, or an embedding table that is tied to the lm_head.
    """
    return products(x, head.weight) if isinstance(head, nn.Embedding) else head.logits(x)
