"""The models: targets of the LLaMA/Qwen/Mixtral kind, the EAGLE-1 and EAGLE-3 draft heads. Definitions only.

Shapes use one alphabet throughout the project:
B sequences, T rows of one pass, H hidden size, F feature width, V vocabulary, Vd draft vocabulary,
L layers, nh query heads, nkv key/value heads, hd head size, S cache slots, n live slots (n <= S).

A pass never allocates a cache and never decides what is visible: the caller hands in positions, cache slots
and a mask, so the same forward serves prefill (causal), plain decoding (one row) and a drafted tree.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ModelArgs:
    """Everything about a target's shape, read from the checkpoint's own `config.json`."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int  # explicit: it need not be hidden_size / num_heads
    norm_eps: float = 1e-6
    rope_base: float = 10000.0
    rope_scaling: dict | None = None  # None | linear | llama3 | divisors, see `inverse_frequencies`
    tie_embeddings: bool = False
    max_seq_len: int = 2048  # the longest context the model was trained for
    qkv_bias: bool = False  # Qwen2
    qk_norm: bool = False  # Qwen3: an RMSNorm over each query and key head, before RoPE
    num_experts: int = 0  # E; 0: one dense MLP. With experts, intermediate_size is that of one expert
    experts_per_token: int = 0  # A
    renormalise_experts: bool = True  # whether the weights of the A chosen experts are scaled to sum to 1

    @classmethod
    def from_config(cls, config: dict):
        """Take the fields of this class out of a parsed `config.json`; keys that are not fields belong to others.

        Raises ValueError naming the first missing or inconsistent field.
        """
        names = {f.name for f in fields(cls)}
        given = {k: v for k, v in config.items() if k in names}
        try:
            args = cls(**given)
        except TypeError as e:
            raise ValueError(f"config.json is incomplete: {e}") from None
        args.check()
        return args

    def check(self) -> None:
        """Raise ValueError if the numbers contradict each other."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"config: {name} must be a positive integer, got {value!r}")
        if self.num_layers > 10_000 or self.num_experts > 10_000:
            raise ValueError(f"config: {self.num_layers} layers of {self.num_experts} experts are not plausible")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"config: num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"config: head_dim {self.head_dim} is odd, rotary embedding needs pairs")
        if self.num_experts and not 1 <= self.experts_per_token <= self.num_experts:
            raise ValueError(f"config: experts_per_token {self.experts_per_token} is not in 1..{self.num_experts}")
        inverse_frequencies(self)  # raises on an unknown scaling

    @property
    def rope_factor(self) -> float:
        """What cos and sin are multiplied by: 1 but for yarn (arXiv 2309.00071, section 3.4)."""
        scaling = self.rope_scaling or {}
        if scaling.get("rope_type", scaling.get("type")) != "yarn":
            return 1.0
        if scaling.get("attention_factor") is not None:
            return float(scaling["attention_factor"])

        def magnitude(weight: float) -> float:
            return 0.1 * weight * math.log(scaling["factor"]) + 1 if scaling["factor"] > 1 else 1.0

        if scaling.get("mscale") and scaling.get("mscale_all_dim"):
            return magnitude(scaling["mscale"]) / magnitude(scaling["mscale_all_dim"])
        return magnitude(1.0)


@dataclass(frozen=True)
class HeadArgs(ModelArgs):
    """Shape of a draft head. `vocab_size` is the target's; the RoPE is the head's own, never the target's."""

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    # Target layers whose *input* residual stream feeds the head (0-based; L means the output of the last layer).
    aux_layers: tuple[int, ...] = ()
    fc_bias: bool = False
    own_embedding: bool = False  # else the target's table is used
    own_lm_head: bool = True  # else the target's, or, where `tie_embeddings`, the head's own embedding
    feature_norm: str = ""  # EAGLE-3.1, before fc: "" none, "each" captured state has its norm, "all" share a wide one
    norm_before_residual: bool = False  # the residual stream starts from the normed feature, not from the feature
    recycle_normed: bool = False  # EAGLE-3.1 norm_output: the next step is fed norm(h), not h

    def check(self) -> None:
        """Raise ValueError if the numbers contradict each other."""
        super().check()
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"config: draft_vocab_size {self.draft_vocab_size} is not in 1..{self.vocab_size}")
        if not self.aux_layers or list(self.aux_layers) != sorted(set(self.aux_layers)):
            raise ValueError(f"config: aux_layers must be ascending layer numbers, got {list(self.aux_layers)}")
        if self.feature_norm not in ("", "each", "all"):
            raise ValueError(f"config: feature_norm {self.feature_norm!r} is none of '', 'each', 'all'")

    @property
    def feature_width(self) -> int:
        """F, the width of what the target hands to the head: one hidden state per captured layer."""
        return len(self.aux_layers) * self.target_hidden_size


def eagle3_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """The layers whose inputs feed an EAGLE-3 head unless its config says otherwise: low, middle, high.

    Inputs of layers 2, L//2 and L-3 (SafeAILab/EAGLE, modeling_llama_kv.py); SpecForge writes the same states as
    "outputs of layers 1, L//2-1, L-4".
    """
    return 2, num_layers // 2, num_layers - 3


def inverse_frequencies(args: ModelArgs) -> Tensor:
    """RoPE inverse frequencies [hd/2], float32. Raises ValueError on a scaling we do not have.

    `llama3`: Llama-3.1's wavelength-dependent rescale, applied at all lengths. `linear`: every frequency divided by
    `factor`. `yarn`: slow pairs divided by `factor`, fast ones kept, a ramp over the pairs between (arXiv 2309.00071);
    see also `ModelArgs.rope_factor`. `divisors`: one divisor per frequency, as GGUF stores llama3 scaling
    (`rope_freqs.weight`).
    """
    exponents = torch.arange(0, args.head_dim, 2, dtype=torch.int64).float() / args.head_dim
    freq = 1.0 / (args.rope_base ** exponents)
    scaling = args.rope_scaling
    if not scaling:
        return freq
    kind = scaling.get("rope_type", scaling.get("type"))
    try:
        if kind == "default":
            return freq
        if kind == "linear":
            return freq / float(scaling["factor"])
        if kind == "divisors":
            divisors = torch.tensor(scaling["divisors"], dtype=torch.float32)
            if divisors.shape != freq.shape:
                raise ValueError(f"config: rope_scaling has {divisors.numel()} divisors for {freq.numel()} frequencies")
            return freq / divisors
        if kind == "llama3":
            factor, low, high = (float(scaling[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
            original = float(scaling["original_max_position_embeddings"])
            turns = original * freq / (2 * math.pi)  # how often each pair turns within the original context
            blend = ((turns - low) / (high - low)).clamp(0, 1)  # 0: slow pair, divide; 1: fast pair, keep
            return (1 - blend) * freq / factor + blend * freq
        if kind == "yarn":
            factor, original = float(scaling["factor"]), float(scaling["original_max_position_embeddings"])

            def pair(turns: float) -> float:  # the pair that turns so often within the original context
                return args.head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(args.rope_base))

            low, high = pair(scaling.get("beta_fast") or 32), pair(scaling.get("beta_slow") or 1)
            if scaling.get("truncate", True):
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, args.head_dim - 1)
            ramp = ((torch.arange(args.head_dim // 2) - low) / max(high - low, 1e-3)).clamp(0, 1)
            return ramp * freq / factor + (1 - ramp) * freq
    except KeyError as e:
        raise ValueError(f"config: rope_scaling of type {kind} lacks {e}") from None
    if kind == "dynamic":
        raise ValueError(
            "config: rope_scaling type 'dynamic' is not supported: its frequencies change as the text grows, so that keys"
            " already in the cache would be wrong; use linear or yarn scaling"
        )
    raise ValueError(f"config: rope_scaling type {kind!r} is not supported (known: default, linear, llama3, yarn)")


def rope_table(args: ModelArgs, inv_freq: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin for `positions` [B, T] -> two of [B, T, hd/2], float32. Made once per pass, used by every layer."""
    angles = positions[..., None].float() * inv_freq
    return angles.cos() * args.rope_factor, angles.sin() * args.rope_factor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (j, j + hd/2) of x [B, T, heads, hd]: the "NeoX" halves, as Hugging Face stores LLaMA."""
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[:, :, None], sin[:, :, None]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    """Divide each row by its root mean square and scale by a weight (arXiv 1910.07467)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        # .to(): in training the weights are float32 and x may be bfloat16; the fused kernel wants one dtype.
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def cache_bytes(batch: int, slots: int, args: ModelArgs, dtype: torch.dtype) -> int:
    """What the `KVCache` of one layer takes."""
    return 2 * batch * slots * args.num_kv_heads * args.head_dim * dtype.itemsize


class KVCache(nn.Module):
    """Keys and values of one layer: two buffers [B, S, nkv, hd] that are allocated once and keep their address.

    Slots before heads, so that the live prefix and the rows of one token are both contiguous.
    """

    def __init__(self, batch: int, slots: int, args: ModelArgs, dtype: torch.dtype, device: torch.device | str):
        super().__init__()
        shape = (batch, slots, args.num_kv_heads, args.head_dim)
        self.register_buffer("k", torch.zeros(shape, dtype=dtype, device=device), persistent=False)
        self.register_buffer("v", torch.zeros(shape, dtype=dtype, device=device), persistent=False)

    def write(self, k: Tensor, v: Tensor, slots: Tensor) -> None:
        """Store k, v [B, T, nkv, hd] at slots [B, T] (each sequence has its own)."""
        rows = torch.arange(slots.shape[0], device=slots.device)[:, None]
        self.k.index_put_((rows, slots), k)
        self.v.index_put_((rows, slots), v)


def move(caches: nn.ModuleList, source: Tensor, target: Tensor) -> None:
    """Copy the entries at slots `source` [B, W] of every cache to slots `target` [B, W]; all are read before any is written."""
    rows = torch.arange(source.shape[0], device=source.device)[:, None]
    for cache in caches:
        k, v = cache.k[rows, source], cache.v[rows, source]
        cache.k.index_put_((rows, target), k)
        cache.v.index_put_((rows, target), v)


class Pass:
    """What every layer of one forward pass shares: RoPE, cache slots [B, T], which slots each row sees [B, T, n]."""

    def __init__(self, args: ModelArgs, inv_freq: Tensor, positions: Tensor, slots: Tensor, visible: Tensor):
        self.cos, self.sin = rope_table(args, inv_freq, positions)
        self.slots, self.visible = slots, visible
        self._bias: Tensor | None = None

    def bias(self, groups: int, dtype: torch.dtype) -> Tensor:
        """`visible` as an additive mask [B, 1, groups*T, n], 0 or -inf, made once."""
        if self._bias is None:
            zero = torch.zeros((), dtype=dtype, device=self.visible.device)
            self._bias = torch.where(self.visible, zero, float("-inf")).repeat(1, groups, 1)[:, None]
        return self._bias


def attention(block: Block, qkv: Tensor, cache: KVCache, shared: Pass) -> Tensor:
    """Store a layer's keys and values, then attend over the live prefix of its cache.

    qkv [B, T, (nh + 2*nkv)*hd] as `wqkv` gives it -> [B, T, nh*hd]. The G query heads that share a key/value head become G*T
    rows of it: keys and values are never repeated in memory.
    """
    q, k, v = block.split(_rotated(block, qkv, shared.cos, shared.sin))
    cache.write(k, v, shared.slots)
    B, T, nh, hd = q.shape
    nkv, n = k.shape[2], shared.visible.shape[-1]
    q = q.transpose(1, 2).reshape(B, nkv, nh // nkv * T, hd)  # [B, nkv, G, T, hd] flattened over G and T
    k, v = cache.k[:, :n].transpose(1, 2), cache.v[:, :n].transpose(1, 2)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=shared.bias(nh // nkv, q.dtype))
    return out.reshape(B, nh, T, hd).transpose(1, 2).reshape(B, T, nh * hd)


class Linear(nn.Linear):
    """A linear layer that can add what it computes to the residual stream `onto`."""

    def forward(self, x: Tensor, onto: Tensor | None = None) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return y if onto is None else onto + y


class MLP(nn.Module):
    def __init__(self, args: ModelArgs):
        super().__init__()
        self.w_gate_up = Linear(args.hidden_size, 2 * args.intermediate_size, bias=False)
        self.w_down = Linear(args.intermediate_size, args.hidden_size, bias=False)

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        """Normed x [B, T, H]; what comes out is added to the residual stream `onto` [B, T, H]."""
        gate, up = self.w_gate_up(x).chunk(2, dim=-1)
        return self.w_down(F.silu(gate) * up, onto)


class Experts(nn.Module):
    """A mixture of E experts of which every row uses its own A (Mixtral, Qwen3-MoE): one batched product, static shapes."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        E, H, inner = args.num_experts, args.hidden_size, args.intermediate_size
        self.used, self.renormalise = args.experts_per_token, args.renormalise_experts
        self.router = Linear(H, E, bias=False)
        self.w_gate_up = nn.Parameter(torch.empty(E, 2 * inner, H))
        self.w_down = nn.Parameter(torch.empty(E, H, inner))

    def matrices(self, name: str, chosen: Tensor | None, dtype: torch.dtype) -> Tensor:
        """`w_gate_up` or `w_down` of the experts `chosen` [...], or of all; the stack may be quantised."""
        stack = getattr(self, name)
        if isinstance(stack, nn.Module):
            return stack(chosen, dtype)
        return stack if chosen is None else stack[chosen]

    def forward(self, x: Tensor, onto: Tensor) -> Tensor:
        """As `MLP.forward`."""
        rows = x.flatten(0, -2)  # [R, H]
        weight, chosen = self.router(rows).float().softmax(-1).topk(self.used, dim=-1)  # [R, A]
        if self.renormalise:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = weight.to(x.dtype)
        if chosen.numel() < self.router.out_features:
            # Few rows, as in plain decoding: only the weights of the experts they use are read.
            gate, up = torch.einsum("rh,raih->rai", rows, self.matrices("w_gate_up", chosen, x.dtype)).chunk(2, dim=-1)
            out = torch.einsum("rai,rahi->rah", F.silu(gate) * up, self.matrices("w_down", chosen, x.dtype))
            out = (out * weight[..., None]).sum(1)
        else:
            # Many rows use nearly all experts: every expert computes every row, and each row takes what it wants.
            gate, up = (rows @ self.matrices("w_gate_up", None, x.dtype).transpose(1, 2)).chunk(2, dim=-1)  # [E, R, inner] each
            out = (F.silu(gate) * up) @ self.matrices("w_down", None, x.dtype).transpose(1, 2)  # [E, R, H]
            share = weight.new_zeros(rows.shape[0], out.shape[0]).scatter(1, chosen, weight)
            out = torch.einsum("erh,re->rh", out, share)
        return onto + out.view_as(x)


class Block(nn.Module):
    """One decoder layer: `wqkv` on the normed input, `attention`, `finish`."""

    def __init__(self, args: ModelArgs, input_size: int):
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = args.num_heads, args.num_kv_heads, args.head_dim
        H, width = args.hidden_size, args.num_heads * args.head_dim
        self.wqkv = Linear(input_size, width + 2 * args.num_kv_heads * args.head_dim, bias=args.qkv_bias)
        self.q_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.k_norm = RMSNorm(args.head_dim, args.norm_eps) if args.qk_norm else None
        self.attention = attention  # may be replaced by another function of the same kind
        self.wo = Linear(width, H, bias=False)
        self.mlp_norm = RMSNorm(H, args.norm_eps)
        self.mlp = Experts(args) if args.num_experts else MLP(args)

    def heads(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """What `wqkv` gave [B, T, (nh + 2*nkv)*hd] -> [B, T, nh + 2*nkv, hd]: normed and rotated q and k, then v; see `split`."""
        qk, v = qkv.unflatten(-1, (-1, self.head_dim)).split((self.num_heads + self.num_kv_heads, self.num_kv_heads), dim=2)
        if self.q_norm is not None:
            q, k = qk.split((self.num_heads, self.num_kv_heads), dim=2)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=2)
        return torch.cat((rotate(qk, cos, sin), v), dim=2)

    def split(self, heads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, T, nh, hd] and k, v [B, T, nkv, hd] as views."""
        return heads.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=2)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [B, T, H] and attention output [B, T, nh*hd] -> residual stream after the layer."""
        x = self.wo(attended, x)
        return self.mlp(self.mlp_norm(x), x)


class TargetBlock(Block):
    """A layer of the target: normalised residual stream in, attention over the cache, MLP."""

    def __init__(self, args: ModelArgs):
        super().__init__(args, args.hidden_size)
        self.attn_norm = RMSNorm(args.hidden_size, args.norm_eps)


# The layers differ only in their weights. Marking their parts as regions lets torch.compile trace and lower each once and
# reuse it for all L layers: half the compile time of L unrolled copies, and the same speed or better. A region must
# return whole tensors, never views: inductor (2.13) frees the buffer behind a returned view and reuses it too early.
@torch.compiler.nested_compile_region
def _before_attention(block: TargetBlock, x: Tensor) -> Tensor:
    return block.wqkv(block.attn_norm(x))


@torch.compiler.nested_compile_region
def _rotated(block: Block, qkv: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return block.heads(qkv, cos, sin)


@torch.compiler.nested_compile_region
def _after_attention(block: TargetBlock, x: Tensor, attended: Tensor) -> Tensor:
    return block.finish(x, attended)


def run_layers(model: Transformer, x: Tensor, caches: nn.ModuleList, shared: Pass, aux_layers: tuple[int, ...]):
    """All layers of a target on its residual stream x [B, T, H] -> the stream behind them, and those entering `aux_layers`
    side by side, or None."""
    features = []
    for i, (layer, cache) in enumerate(zip(model.layers, caches)):
        if i in aux_layers:
            features.append(x)
        x = _after_attention(layer, x, layer.attention(layer, _before_attention(layer, x), cache, shared))
    if model.args.num_layers in aux_layers:
        features.append(x)
    return x, torch.cat(features, dim=-1) if features else None


class Transformer(nn.Module):
    """A LLaMA-architecture target. `run_layers` and `move` may be replaced by functions of the same kind."""

    def __init__(self, args: ModelArgs):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size)
        self.layers = nn.ModuleList(TargetBlock(args) for _ in range(args.num_layers))
        self.norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.lm_head = None if args.tie_embeddings else Linear(args.hidden_size, args.vocab_size, bias=False)
        self.register_buffer("inv_freq", inverse_frequencies(args), persistent=False)
        self.run_layers, self.move = run_layers, move

    def forward(
        self, tokens: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches, aux_layers: tuple[int, ...] = ()
    ) -> tuple[Tensor, Tensor | None]:
        """One pass over T rows per sequence.

        tokens, positions, slots [B, T] int64: what is read, where it stands in the text, where its keys/values go.
        visible [B, T, n] bool: which cache slots each row attends to, its own slot included; only the first n are read.
        caches: one KVCache per layer, written in place.
        Returns the last residual stream [B, T, H] (before the final norm) and, when `aux_layers` is given, the
        residual streams entering those layers side by side [B, T, len(aux_layers)*H], else None.
        """
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        return self.run_layers(self, self.embed(tokens), caches, shared, aux_layers)

    def causal(self, tokens: Tensor, aux_layers: tuple[int, ...] = ()) -> tuple[Tensor, Tensor | None]:
        """`forward` over whole sequences [B, T] from position 0, without a cache: for training and for scoring."""
        B, T = tokens.shape
        x = self.embed(tokens)
        cos, sin = rope_table(self.args, self.inv_freq, torch.arange(T, device=tokens.device)[None])
        features = []
        for i, layer in enumerate(self.layers):
            if i in aux_layers:
                features.append(x)
            q, k, v = (t.transpose(1, 2) for t in layer.split(layer.heads(layer.wqkv(layer.attn_norm(x)), cos, sin)))
            groups = self.args.num_heads // self.args.num_kv_heads
            k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = layer.finish(x, attended.transpose(1, 2).flatten(2))
        if self.args.num_layers in aux_layers:
            features.append(x)
        return x, torch.cat(features, dim=-1) if features else None

    @property
    def lm_rows(self) -> Tensor:
        """What the logits are products with [V, H]: the lm_head's weight or, tied, the embedding's."""
        return (self.embed if self.lm_head is None else self.lm_head).weight

    def logits(self, x: Tensor) -> Tensor:
        """Residual stream [..., H] -> logits [..., V] in float32."""
        return project(self.embed if self.lm_head is None else self.lm_head, self.norm(x))


def project(head: nn.Module, x: Tensor) -> Tensor:
    """x [..., H] -> float32 logits by an lm_head or, tied, an embedding table. A packed head has its own way."""
    return head.logits(x) if hasattr(head, "logits") else F.linear(x, head.weight).float()


class DraftBlock(Block):
    """The first layer of an EAGLE-3 head: attention reads embedding and feature side by side (2H), the residual stream is
    the feature alone."""

    def __init__(self, args: HeadArgs):
        super().__init__(args, 2 * args.hidden_size)
        self.norm_before_residual = args.norm_before_residual
        self.embed_norm = RMSNorm(args.hidden_size, args.norm_eps)
        self.feature_norm = RMSNorm(args.hidden_size, args.norm_eps)

    def inputs(self, embedded: Tensor, feature: Tensor) -> tuple[Tensor, Tensor]:
        """Token embeddings and features, both [B, T, H] -> normalised input of `qkv` [B, T, 2H], embedding first, and the
        residual stream [B, T, H]."""
        normed = self.feature_norm(feature)
        return torch.cat((self.embed_norm(embedded), normed), dim=-1), normed if self.norm_before_residual else feature


class Head(nn.Module):
    """What the draft heads share, and the face a drafter sees: `fuse`, `forward`, `logits`, `draft_ids`, `caches`.

    Row i pairs the feature of token i with the embedding of token i+1 and predicts token i+2. Features of the target go
    through `fuse` once; from the second drafted token on the head's own output is fed back in their place.
    What a checkpoint does not carry (`HeadArgs.own_...`) is the target's: `use_target` hands it over.
    """

    Args = HeadArgs

    def __init__(self, args: HeadArgs):
        super().__init__()
        self.args = args
        self.embed = nn.Embedding(args.vocab_size, args.hidden_size) if args.own_embedding else None
        self.lm_head = Linear(args.hidden_size, args.draft_vocab_size, bias=False) if args.own_lm_head else None
        # Target id of each draft id, ascending; the identity when both vocabularies are the same.
        self.register_buffer("draft_ids", torch.arange(args.draft_vocab_size))
        self.register_buffer("inv_freq", inverse_frequencies(args), persistent=False)

    def use_target(self, target: Transformer) -> None:
        """Share the target's embedding table and lm_head where the checkpoint carries none."""
        if self.lm_head is None:
            tied = self.embed if self.args.tie_embeddings and self.embed is not None else None
            self.lm_head = tied or (target.embed if target.lm_head is None else target.lm_head)
        if self.embed is None:
            self.embed = target.embed

    def own_state(self) -> dict[str, Tensor]:
        """The state dict without what `use_target` handed over."""
        with torch.device("meta"):
            names = type(self)(self.args).state_dict()
        return {name: t for name, t in self.state_dict().items() if name in names}

    def twin(self, target: Transformer, dtype: torch.dtype) -> Head:
        """A copy with weights of its own in this dtype, on the device of the target, which lends it the rest."""
        with torch.device("meta"):
            head = type(self)(self.args)
        device = target.embed.weight.device
        cast = {name: t.detach().to(device, dtype if t.is_floating_point() else None, copy=True) for name, t in self.own_state().items()}
        head.load_state_dict(cast, assign=True)
        head.inv_freq = self.inv_freq.to(device)
        head.requires_grad_(False)
        head.use_target(target)
        return head

    def caches(self, batch: int, slots: int, dtype: torch.dtype, device: torch.device | str) -> nn.ModuleList:
        """One KVCache per layer of the head."""
        return nn.ModuleList(KVCache(batch, slots, self.args, dtype, device) for _ in range(self.args.num_layers))

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [B, T, F] -> head features [B, T, H]."""
        raise NotImplementedError

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches):
        """One pass over T rows: tokens [B, T] with their features [B, T, H] -> the feature [B, T, H] to feed back.

        The other arguments are those of `Transformer.forward`, for the head's own caches.
        """
        raise NotImplementedError

    def logits(self, feature: Tensor) -> Tensor:
        """Output of `forward` [..., H] -> draft logits [..., Vd] in float32; draft id j is target id `draft_ids[j]`."""
        raise NotImplementedError


class Eagle1Head(Head):
    """The head of EAGLE-1 and EAGLE-2 (arXiv 2401.15077, section 4.1; SafeAILab/EAGLE model/cnets1.py).

    Its features are the target's states after the final norm, which it predicts; its logits are the target's lm_head on
    them. The one layer has no input norm: `fc` of embedding and feature is its input and its residual stream.
    """

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        self.fc = Linear(2 * args.hidden_size, args.hidden_size, bias=args.fc_bias)
        self.layer = Block(args, args.hidden_size)
        self.target_norm = None

    def use_target(self, target: Transformer) -> None:
        super().use_target(target)
        self.target_norm = target.norm

    def fuse(self, features: Tensor) -> Tensor:
        return self.target_norm(features)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches):
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        x = self.fc(torch.cat((self.embed(tokens), feature), dim=-1))
        return self.layer.finish(x, self.layer.attention(self.layer, self.layer.wqkv(x), caches[0], shared))

    def logits(self, feature: Tensor) -> Tensor:
        return project(self.lm_head, feature)


class Eagle3Head(Head):
    """The head of EAGLE-3 (arXiv 2503.01840, section 3; SafeAILab/EAGLE model/cnets.py) and of its variants in SpecForge,
    SGLang and speculators: see the flags of `HeadArgs`."""

    def __init__(self, args: HeadArgs):
        super().__init__(args)
        H, Ht = args.hidden_size, args.target_hidden_size
        widths = {"": (), "each": (Ht,) * len(args.aux_layers), "all": (args.feature_width,)}[args.feature_norm]
        self.fc_norms = nn.ModuleList(RMSNorm(width, args.norm_eps) for width in widths)
        self.fc = Linear(args.feature_width, H, bias=args.fc_bias)
        self.layer = DraftBlock(args)
        self.more_layers = nn.ModuleList(TargetBlock(args) for _ in range(args.num_layers - 1))
        self.norm = RMSNorm(H, args.norm_eps)

    def fuse(self, features: Tensor) -> Tensor:
        if self.fc_norms:
            parts = features.chunk(len(self.fc_norms), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norms, parts)], dim=-1)
        return self.fc(features)

    def forward(self, tokens: Tensor, feature: Tensor, positions: Tensor, slots: Tensor, visible: Tensor, caches):
        shared = Pass(self.args, self.inv_freq, positions, slots, visible)
        inputs, x = self.layer.inputs(self.embed(tokens), feature)
        x = self.layer.finish(x, self.layer.attention(self.layer, self.layer.wqkv(inputs), caches[0], shared))
        for layer, cache in zip(self.more_layers, caches[1:]):
            x = layer.finish(x, layer.attention(layer, layer.wqkv(layer.attn_norm(x)), cache, shared))
        return self.norm(x) if self.args.recycle_normed else x

    def logits(self, feature: Tensor) -> Tensor:
        normed = feature if self.args.recycle_normed else self.norm(feature)
        return project(self.lm_head, normed)
