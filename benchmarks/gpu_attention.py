"""Tree attention on a GPU: our kernel, masked attention of torch over the live slots, and flex_attention.

    python benchmarks/gpu_attention.py --shape llama-3.1-8b

One layer's attention, from queries, keys and values that are rotated and in the cache already, but for ours,
which does both too. Every call is a captured graph that takes turns over the caches of 32 layers, so that
long contexts' keys come from memory; those of short ones stay in the GPU's cache. A way that does not run
here is left out, with its reason. Microseconds of one layer, and the share of the memory's bandwidth at which
ours reads keys and values; of ours over caches in fp8 too. Raw figures go to benchmarks/results/NAME.json.
"""
from __future__ import annotations

import sys
from collections.abc import Callable

import bench  # first: it makes the modules below importable
import torch
import torch.nn.functional as F
from bench import captured, describe, median_seconds, write
from shapes import shape_of

from common.cli import note, positive
from common.errors import InputError, first_line
from engine.compiling import compile_graph
from kernels.float8 import to_bytes
from kernels.gpu import here
from model import ModelArgs
from tree import visible_slots

LAYERS = 32  # whose caches take turns
WAYS = "ours", "fp8", "masked", "flex"


class Case:
    """A pass over T rows after n committed tokens, of one sequence. The tree is a random one."""

    def __init__(self, args: ModelArgs, rows: int, context: int, dtype: torch.dtype, device: str):
        nh, nkv, hd = args.num_heads, args.num_kv_heads, args.head_dim
        self.rows, self.slots = rows, context + rows
        self.groups = nh // nkv
        self.qkv = torch.randn(1, rows, (nh + 2 * nkv) * hd, device=device).to(dtype)
        self.cos = torch.randn(1, rows, hd // 2, device=device)
        self.kv = torch.randn(LAYERS, 2, 1, nkv, self.slots, hd, device=device).to(dtype)
        self.length = torch.full((1,), context, device=device)
        local = torch.rand(1, rows, rows, device=device) < 0.2
        self.local = (local | torch.eye(rows, dtype=torch.bool, device=device)).tril()
        self.q = torch.randn(1, nkv, self.groups * rows, hd, device=device).to(dtype)
        visible = visible_slots(torch.arange(self.slots, device=device), self.length, self.local)
        self.visible = visible.repeat(1, self.groups, 1)[:, None]  # [1, 1, G*T, n]

    def ours(self, fp8: bool = False) -> Callable[[], object]:
        """Our kernel in place of all that stands between a layer's two products."""
        if not here.capable(self.qkv.device):
            raise InputError("our kernels do not run here")
        from kernels.gpu.attention import attend

        kv = to_bytes(self.kv) if fp8 else self.kv
        return lambda: [
            attend(self.qkv, self.cos, self.cos, None, None, 0.0, kv, i, self.length, self.local)
            for i in range(LAYERS)
        ]

    def fp8(self) -> Callable[[], object]:
        """The same over caches in fp8."""
        return self.ours(fp8=True)

    def read(self, way: str) -> int:
        """Bytes of a layer's keys and values, as `ours` or `fp8` reads them."""
        return self.kv[0].numel() * (1 if way == "fp8" else self.kv.element_size())

    def masked(self) -> Callable[[], object]:
        """`scaled_dot_product_attention` with a mask, as `KVCache.attend` calls it."""
        bias = torch.where(self.visible, 0.0, float("-inf")).to(self.q.dtype)
        return lambda: [
            F.scaled_dot_product_attention(self.q, k, v, attn_mask=bias) for k, v in self.kv.unbind(0)
        ]

    def flex(self) -> Callable[[], object]:
        """flex_attention with the mask as its mask_mod, compiled."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        def sees(b, h, q, k):
            return self.visible[0, 0, q, k]

        shape = self.q.shape[2], self.slots
        mask = create_block_mask(sees, 1, None, *shape, device=self.q.device)
        compiled = compile_graph(lambda q, k, v: flex_attention(q, k, v, block_mask=mask))
        return lambda: [compiled(self.q, k, v) for k, v in self.kv.unbind(0)]


@torch.no_grad()
def run(o) -> None:
    """Measure, print, write. Raises InputError if nothing runs here."""
    bench.use(o.device)
    args, record = shape_of(o.shape)[0], describe(o.threads) | {"shape": o.shape, "rows": []}
    dtype = torch.bfloat16 if torch.device(o.device).type == "cuda" else torch.float32
    roof = max(bench.memory_rates(o.device).values())
    print(record["device"])
    print(
        f"| {o.shape}, {dtype}: context, rows | ours, us | ours over fp8, us | masked, us | flex, us"
        " | ours, of memory | over fp8 |"
    )
    print("|---" * 7 + "|")
    for context in o.context:
        for rows in o.rows:
            torch.compiler.reset()  # or torch gives up after a few shapes
            case, row = Case(args, rows, context, dtype, o.device), {"context": context, "tokens": rows}
            for name in WAYS:
                try:
                    call = captured(getattr(case, name)(), o.device)
                    row[name] = median_seconds(call, o.device) / LAYERS * 1e6
                except Exception as e:  # a way runs here or not, and libraries raise what they like
                    note(f"{name}, {rows} rows, context {context}: left out ({first_line(e)})")
            for share, name in (("share", "ours"), ("fp8_share", "fp8")):
                row[share] = case.read(name) / row[name] * 1e6 / roof if name in row else None
            record["rows"].append(row)
            cells = [f"{row[name]:.1f}" if name in row else "" for name in WAYS]
            cells += [f"{row[share]:.2f}" if row[share] else "" for share in ("share", "fp8_share")]
            print(f"| {context}, {rows} | {' | '.join(cells)} |", flush=True)
            write(o.name, record)
    if not any(name in row for row in record["rows"] for name in WAYS):
        raise InputError("no way runs here; see above")


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = bench.options(__doc__, "gpu-attention")
    add = p.add_argument
    add("--shape", default="llama-3.1-8b", help="whose heads they are (see benchmarks/shapes.py)")
    add("--rows", nargs="+", type=positive, default=[1, 60], metavar="T")
    add("--context", nargs="+", type=positive, default=[128, 1024, 8192, 32768], metavar="N")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return bench.run(p, run, argv)


if __name__ == "__main__":
    sys.exit(main())
