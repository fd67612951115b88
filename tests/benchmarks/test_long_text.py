"""Long texts: the arithmetic in docs/scaling.md, and the acceptance length of several windows."""
import json

import draft_window
import long_text
import torch
from helpers import ROOT
from helpers.decoding import prompts, speculative
from shapes import SHAPES

from kernels.float8 import Float8Caches
from model import KVCaches
from sampling.options import Sampling
from tree import TreeShape


def test_the_table_in_the_docs_is_what_is_computed():
    table = long_text.table(long_text.options().parse_args([]))
    assert table in (ROOT / "docs/scaling.md").read_text()


def test_what_is_computed_is_what_is_allocated():
    """A cache in bf16 and one in fp8, and a byte a value and a scale for each head in int8."""
    args = SHAPES["tiny"][0]
    for kv, cache in (("bf16", KVCaches), ("fp8", Float8Caches)):
        caches = cache.of(args, 1, 100, torch.bfloat16, "cpu", None)
        allocated = sum(b.nbytes for b in caches.buffers())
        assert long_text.kv_bytes(args, 100, kv) == allocated
    heads = 2 * args.num_layers * args.num_kv_heads * 100
    assert long_text.kv_bytes(args, 100, "int8") == allocated + 4 * heads
    # One token after another: a product of n queries with the keys before each is n * n / 2 of them.
    flops = sum(4 * args.num_layers * args.num_heads * args.head_dim * (i + 0.5) for i in range(50))
    assert long_text.attention_flops(args, 50) == flops


def test_windows_are_compared_on_one_text(golden, models, tmp_path, results):
    """What the first window's trees are accepted for is what the decoder accepted."""
    shape, texts = TreeShape(8, 2, 3), prompts(2, seed=2, shortest=50, longest=60)
    counts = draft_window.acceptance(*models, texts, (), shape, 40, 0.0, [0, 8, 400])
    accepted = []
    for output in speculative(models, shape, batch=2).generate(texts, Sampling(41)):  # no step is cut at 40
        emitted = 1  # by the pass over the prompt
        for count in output.accept_lengths:
            if emitted + shape.window - 1 <= 40:  # else what follows is not known
                accepted.append(count - 1)
            emitted += count
    assert sorted(counts[0]) == sorted(accepted) and sum(accepted)
    assert counts[0] == counts[400] != counts[8]

    file = tmp_path / "long.jsonl"
    file.write_text("".join(json.dumps({"turns": ["Say it. " * n]}) + "\n" for n in (20, 30)))
    options = ["--checkpoint", str(golden), "--questions", str(file), "--tree", "8,2,3", "--threads", "1"]
    assert draft_window.main([*options, "--max-new-tokens", "30", "--draft-window", "0", "16"]) == 0
    row = json.loads((results / "draft-window.json").read_text())["rows"][0]
    assert row["prompts"] == 2 and row["tau"].keys() == {"0", "16"} and min(row["tau"].values()) >= 1
    assert draft_window.main([*options, "--draft-window", "-1"]) == 1
    assert draft_window.main([*options, "--max-new-tokens", "5000"]) == 1
