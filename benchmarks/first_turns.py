"""Losslessness, tau and speed on the first turns of a FastChat question file (MT-bench, say), in one run.

    python benchmarks/first_turns.py --checkpoint checkpoints/smollm2-135m --questions question.jsonl --equality
    python benchmarks/first_turns.py --checkpoint checkpoints/smollm2-135m --questions question.jsonl --speed [--transformers]
    python benchmarks/first_turns.py ... --speed --trees 8,2,3 12,3,4 16,3,4
    python benchmarks/first_turns.py ... --coupling

--equality  float32 and the stored dtype, batches of 16: EAGLE-3 text against plain text, greedy and at temperature 1 with seeds.
--speed     the stored dtype, batch 1, compiled: every question decoded plainly and with each tree, in turns; medians and
            ratios. --transformers also times `generate` of transformers on the same weights.
--coupling  tau at temperature 1 with coupled drafting on and off.
Raw figures go to benchmarks/results/NAME.json with date, device and torch version.
"""
from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from bench import describe, write  # first: it makes the modules below importable

from checkpoint.loading import load_model
from engine.api import Drafting, load_target
from engine.runtime import Runtime
from model import Transformer
from sampling.options import Sampling
from tokens.dataset import read_prompts
from tree import TreeShape


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def decode(model, prompts: list[str], settings: list[Sampling], batch: int) -> list:
    """Decode all prompts in groups of `batch`; returns their results in order."""
    results = []
    for i in range(0, len(prompts), batch):
        job = model.job(prompts[i : i + batch], settings[i : i + batch])
        for _ in job:
            pass
        results += job.results()
        say(f"  {len(results)}/{len(prompts)}")
    return results


def tau_of(results) -> float:
    lengths = [n for r in results for n in r.accept_lengths]
    return sum(lengths) / len(lengths)


def equality(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """Text equality, compiled as users run it unless --no-compile."""
    batch, found = min(16, len(prompts)), {}
    for dtype in ("fp32", None):
        target = load_target(o.checkpoint, Runtime(dtype=dtype, compile=o.compile), say)
        plain, fast = target.decoder(batch=batch), target.decoder(Drafting("eagle3", tree=shape), batch=batch)
        for name, temperature in (("greedy", 0.0), ("temperature 1", 1.0)):
            settings = [Sampling(o.max_new_tokens, temperature, seed=i) for i in range(len(prompts))]
            a, b = decode(plain, prompts, settings, batch), decode(fast, prompts, settings, batch)
            differ = [i for i, (x, y) in enumerate(zip(a, b)) if x.ids != y.ids]
            name = f"{dtype or 'as stored'}, {name}"
            found[name] = {
                "equal": len(prompts) - len(differ), "of": len(prompts), "differ": differ, "tau": tau_of(b)
            }
            say(f"{name}: {found[name]}")
    return found


def speed(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """Tokens per second on each question of every contender, in turns; medians, and ratios to plain decoding.
    """
    trees = {f"eagle3 {spec}": TreeShape.parse(spec) for spec in o.trees} or {"eagle3": shape}
    target = load_target(o.checkpoint, Runtime(compile=o.compile), say)
    models = {"plain": target.decoder()}
    models |= {name: target.decoder(Drafting("eagle3", tree=tree)) for name, tree in trees.items()}
    for model in models.values():
        model.warm_up(Sampling(o.max_new_tokens))
        model.generate(prompts[0], max_new_tokens=16)
    peer = Transformers(*load_model(o.checkpoint, models["plain"].decoder.device)) if o.transformers else None
    rows = []
    for i, prompt in enumerate(prompts):
        first = i % len(models)  # whoever begins changes with every question
        order = [*models][first:] + [*models][:first]
        results = {name: models[name].generate(prompt, max_new_tokens=o.max_new_tokens) for name in order}
        rates = {name: results[name].tokens_per_second for name in models}
        if not all(rates.values()):  # an answer of one token has no speed
            continue
        if peer:
            rates["transformers"] = peer.tokens_per_second(models["plain"].encode(prompt), o.max_new_tokens)
        rows.append({
            "tokens_per_second": rates,
            "equal": {name: r.ids == results["plain"].ids for name, r in results.items()},
            "accept_lengths": {name: r.accept_lengths for name, r in results.items()},
        })
        say(f"  {i + 1}/{len(prompts)} " + ", ".join(f"{k} {v:.1f}" for k, v in rates.items()))
    found = {}
    for name in rows[0]["tokens_per_second"]:
        rates = [row["tokens_per_second"][name] for row in rows]
        found[name] = {"tokens_per_second": statistics.median(rates)}
        found[name] |= {
            f"times_{base}": statistics.median(
                rate / row["tokens_per_second"][base] for rate, row in zip(rates, rows)
            )
            for base in ("plain", "transformers") if base in rows[0]["tokens_per_second"] and base != name
        }
        if name in trees:
            lengths = [n for row in rows for n in row["accept_lengths"][name]]
            found[name] |= {
                "tau": sum(lengths) / len(lengths), "texts_equal": sum(row["equal"][name] for row in rows),
                "of": len(rows)
            }
    return {**found, "rows": rows}


class Transformers:
    """`generate` of transformers on our weights, handed over as a Hugging Face LLaMA (greedy, static prompt
    ids).
    """

    def __init__(self, target: Transformer, config: dict):
        from transformers import LlamaConfig, LlamaForCausalLM

        a = target.args
        if a.rope_scaling:
            raise SystemExit("error: --transformers: rope scaling is not handed over")
        weights = {"model.embed_tokens.weight": target.embed.weight, "model.norm.weight": target.norm.weight}
        weights["lm_head.weight"] = target.lm_rows
        q, kv = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        for i, layer in enumerate(target.layers):
            at = f"model.layers.{i}."
            for name, part in zip("qkv", layer.wqkv.weight.split((q, kv, kv))):
                weights[f"{at}self_attn.{name}_proj.weight"] = part
            for name, part in zip(("gate", "up"), layer.mlp.w_gate_up.weight.chunk(2)):
                weights[f"{at}mlp.{name}_proj.weight"] = part
            weights |= {
                f"{at}self_attn.o_proj.weight": layer.wo.weight,
                f"{at}mlp.down_proj.weight": layer.mlp.w_down.weight,
                f"{at}input_layernorm.weight": layer.attn_norm.weight,
                f"{at}post_attention_layernorm.weight": layer.mlp_norm.weight,
            }
        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=a.vocab_size, hidden_size=a.hidden_size, intermediate_size=a.intermediate_size,
                num_hidden_layers=a.num_layers, num_attention_heads=a.num_heads,
                num_key_value_heads=a.num_kv_heads,
                head_dim=a.head_dim, rms_norm_eps=a.norm_eps, rope_theta=a.rope_base,
                tie_word_embeddings=a.tie_embeddings,
                max_position_embeddings=a.max_seq_len,
            )
        )
        self.model.load_state_dict(weights, assign=True)  # the weights' own dtype; RoPE stays float32
        self.model.eval()
        self.stop = config["stop_ids"]

    @torch.no_grad()
    def tokens_per_second(self, ids: list[int], max_new_tokens: int) -> float:
        """Whole time of `generate`, prompt included, over the new tokens."""
        prompt = torch.tensor([ids], device=self.model.device)
        began = time.perf_counter()
        out = self.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new_tokens, do_sample=False,
            eos_token_id=self.stop,
            pad_token_id=self.stop[0],
        )
        return (out.shape[1] - prompt.shape[1]) / (time.perf_counter() - began)


def coupling(o, prompts: list[str], shape: TreeShape | None) -> dict:
    """tau at temperature 1, the same seeds, coupled drafting on and off."""
    batch, found = min(16, len(prompts)), {}
    settings = [Sampling(o.max_new_tokens, 1.0, seed=i) for i in range(len(prompts))]
    target = load_target(o.checkpoint, Runtime(compile=o.compile), say)
    for name, coupled in (("coupled", True), ("uncoupled", False)):
        model = target.decoder(Drafting("eagle3", tree=shape, coupled=coupled), batch=batch)
        found[name] = {"tau": tau_of(decode(model, prompts, settings, batch))}
        say(f"{name}: {found[name]}")
    return found


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--checkpoint", required=True)
    p.add_argument("--questions", required=True)
    p.add_argument("--limit", type=int)
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--tree", default=None, metavar="T,D,K", help="default: the device's default tree")
    p.add_argument(
        "--trees", nargs="+", default=[], metavar="T,D,K", help="with --speed: these instead of --tree"
    )
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    p.add_argument("--transformers", action="store_true", help="with --speed: time transformers too")
    for part in ("equality", "speed", "coupling"):
        p.add_argument(f"--{part}", action="store_true")
    p.add_argument("--name", default="first_turns", help="of the file under benchmarks/results")
    o = p.parse_args()
    torch.set_num_threads(o.threads)
    prompts = read_prompts(o.questions)[: o.limit]
    shape = TreeShape.parse(o.tree) if o.tree else None
    record = describe(o.threads) | {
        "questions": Path(o.questions).name, "count": len(prompts), "max_new_tokens": o.max_new_tokens,
        "tree": o.tree or "default",
    }
    for name, part in (("equality", equality), ("speed", speed), ("coupling", coupling)):
        if getattr(o, name):
            record[name] = part(o, prompts, shape)
            shown = {k: v for k, v in record[name].items() if k != "rows"}
            print(name, json.dumps(shown, indent=1))
    write(o.name, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
