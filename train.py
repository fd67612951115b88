"""Train an EAGLE-3 head for a converted target, from nothing but the target.

    python train.py --checkpoint checkpoints/smollm2-135m --prompts prompts.jsonl --synthesize 1000 --out heads/mine

1. The target answers prompts (and, with --synthesize, its own user turns): shards in WORK/data.
2. The draft vocabulary is the most frequent answer tokens.
3. Training-time test (arXiv 2503.01840, section 3.2): the head is unrolled over its own outputs for --steps steps, so it
   learns from the features it will meet when drafting; loss is soft cross-entropy with the target over the draft
   vocabulary, step i weighted 0.8^i.
Every part resumes where it stopped; --out is a Hugging Face folder that convert_checkpoint.py reads like any published head.
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import json
import math
import os
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from checkpoint import CheckpointError, load_target
from dataset import Collector, load_shards, read_prompts
from decoder import Decoder
from export import export_eagle3
from kernels import load as load_kernels
from model import Eagle3Head, HeadArgs, Transformer, eagle3_aux_layers, rope_table
from packed import pack
from text import check_device
from tokenizer import Tokenizer
from tree import pick

SHORT = 3  # unrolled steps of the short epochs: what later steps need is mostly learnt in the first ones, at a quarter of the time
DECAY = 0.8  # weight of draft step i is DECAY**i (SafeAILab/EAGLE traineagle3)


class Batch:
    """Conversations padded to one length: tokens [B, T], and the rows [B, R] whose drafts are scored.

    Row j pairs the feature of token j with token j+1; its step-i prediction is token j+2+i. Rows run from the prompt's
    last token (whose next token, the first root, is the target's) to the third last token.
    """

    def __init__(self, rows: list[dict], device):
        B, T = len(rows), max(len(r["ids"]) for r in rows)
        tokens = torch.zeros(B, T, dtype=torch.int64)
        for i, r in enumerate(rows):
            tokens[i, : len(r["ids"])] = torch.tensor(r["ids"])
        self.tokens = tokens.to(device)
        self.length = torch.tensor([len(r["ids"]) for r in rows], device=device)
        first = torch.tensor([r["answer"] - 1 for r in rows], device=device)
        width = int((self.length - 2 - first).max())
        self.row = first[:, None] + torch.arange(width, device=device)  # [B, R]
        self.last = self.length[:, None] - 3

    def valid(self, step: int) -> Tensor:
        """Rows whose step-`step` prediction lies in the answer [B, R]."""
        return self.row + step <= self.last

    def at(self, x: Tensor, offset: int) -> Tensor:
        """x [B, T, ...] at row + offset, kept inside the text -> [B, R, ...]."""
        return pick(x, (self.row + offset).clamp(max=self.tokens.shape[1] - 1))


@torch.no_grad()
def read_target(target: Transformer, head: Eagle3Head, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the head learns from: features [B, T, F], the normed last state [B, T, H], the greedy token [B, T]."""
    x, features = target.causal(tokens, head.args.aux_layers)
    greedy = torch.cat([target.logits(rows).argmax(-1) for rows in x.split(8)])  # a few sequences at a time: V is large
    return features, target.norm(x), greedy


def ttt_loss(head: Eagle3Head, batch: Batch, features: Tensor, teacher: Tensor, greedy: Tensor, steps: int):
    """Training-time-test loss and top-1 accuracy of each unrolled step.

    teacher [B, T, Vd]: the target's probabilities over the draft vocabulary. Attention is that of a chain drafted after
    row j: the step-0 rows up to j (true features), then row j's own keys of steps 1..i, a diagonal; so no tree and no
    second sequence is ever laid out. Only scored rows are computed beyond step 0.
    Returns (loss, accuracy [steps]); accuracy counts a target token outside the draft vocabulary as a miss.
    """
    layer, args = head.layer, head.args
    B, T = batch.tokens.shape
    R, groups = batch.row.shape[1], args.num_heads // args.num_kv_heads
    positions = torch.arange(T, device=batch.tokens.device)
    in_draft = torch.zeros(args.vocab_size, dtype=torch.bool, device=batch.tokens.device).index_fill_(0, head.draft_ids, True)

    def heads(inputs: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:  # q [B, nh, T, hd], k, v [B, nkv, T, hd]
        return tuple(x.transpose(1, 2) for x in layer.split(layer.heads(layer.wqkv(inputs), cos, sin)))

    fused = head.fuse(features)
    shifted = batch.tokens.roll(-1, 1)
    cos, sin = rope_table(args, head.inv_freq, positions[None])
    inputs, residual = layer.inputs(head.embed(shifted), fused)
    q, k0, v0 = heads(inputs, cos, sin)
    k0, v0 = (x[:, :, None].transpose(3, 4) if x is k0 else x[:, :, None] for x in (k0, v0))  # [B, nkv, 1, hd, T], [.., T, hd]
    hidden = torch.where(positions <= batch.row[..., None], 0.0, float("-inf"))[:, None, None]  # [B, 1, 1, R, T]
    q = batch.at(q.transpose(1, 2), 0).transpose(1, 2)
    feature = residual = batch.at(residual, 0)  # of step 0; later steps start from the head's own output

    total, accuracy, own = 0.0, [], []  # own: keys and values of steps 1..i
    for step in range(steps):
        if step:
            cos, sin = rope_table(args, head.inv_freq, batch.row + step)
            inputs, residual = layer.inputs(head.embed(batch.at(batch.tokens, 1 + step)), feature)
            q, k, v = heads(inputs, cos, sin)
            own.append((k[:, :, None], v[:, :, None]))  # [B, nkv, 1, R, hd]
        grouped = q.reshape(B, args.num_kv_heads, groups, R, args.head_dim)
        scores = [grouped @ k0 * args.head_dim**-0.5 + hidden]
        scores += [(grouped * k).sum(-1, keepdim=True) * args.head_dim**-0.5 for k, _ in own]
        weights = torch.cat([s.float() for s in scores], dim=-1).softmax(-1).to(v0.dtype)
        attended = weights[..., :T] @ v0
        for i, (_, v) in enumerate(own):
            attended = attended + weights[..., T + i, None] * v
        attended = attended.reshape(B, args.num_heads, R, args.head_dim).transpose(1, 2).flatten(2)
        feature = layer.finish(residual, attended)

        # Position p = row + 1 + step: the target's distribution there is what the head should predict.
        wanted, nexts = batch.at(greedy, 1 + step), batch.at(batch.tokens, 2 + step)
        scored = batch.valid(step) & in_draft[nexts]
        logits = head.logits(feature[scored])
        loss = F.cross_entropy(logits, batch.at(teacher, 1 + step)[scored].float())
        total = total + DECAY**step * loss
        with torch.no_grad():
            hits = head.draft_ids[logits.argmax(-1)] == wanted[scored]
            accuracy.append(hits.sum() / batch.valid(step).sum().clamp(min=1))
    return total, torch.stack(accuracy)


def expected_tau(accuracy: list[float]) -> float:
    """Tokens per step of a greedy chain whose step i is right with probability accuracy[i]: 1 + sum of products."""
    tau, survive = 1.0, 1.0
    for a in accuracy:
        survive *= a
        tau += survive
    return tau


def batches(rows: list[dict], budget: int, generator: torch.Generator | None) -> list[list[int]]:
    """Indices grouped into batches of at most `budget` padded tokens, similar lengths together, in random order."""
    order = torch.randperm(len(rows), generator=generator).tolist() if generator else list(range(len(rows)))
    result = []
    for i in range(0, len(order), 512):  # sort within a window only, so that every epoch groups differently
        batch: list[int] = []
        for j in sorted(order[i : i + 512], key=lambda j: len(rows[j]["ids"])):
            if batch and (len(batch) + 1) * len(rows[j]["ids"]) > budget:
                result.append(batch)
                batch = []
            batch.append(j)
        result.append(batch)
    if generator:
        result = [result[i] for i in torch.randperm(len(result), generator=generator).tolist()]
    return result


class Trainer:
    """The training loop: deterministic order, periodic exact state, metrics to the terminal and WORK/log.jsonl."""

    def __init__(self, options, target: Transformer, head: Eagle3Head, rows: list[dict]):
        self.o, self.target, self.head, self.work = options, target, head, Path(options.work)
        held_out = max(1, min(64, len(rows) // 20))
        self.held_out, self.rows = rows[:held_out], rows[held_out:]
        self.device = target.embed.weight.device
        self.parameters = [p for n, p in head.named_parameters() if not n.startswith("embed.")]
        self.optimizer = torch.optim.AdamW(self.parameters, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.01)
        self.lm_rows = target.embed.weight if target.lm_head is None else target.lm_head.weight
        self.lm_rows = self.lm_rows[head.draft_ids]
        self.scale = self.feature_scale()
        self.cache: dict[int, tuple] = {}
        self.cache_room = options.feature_cache_gb * 2**30
        self.step = self.epoch = self.in_epoch = 0
        generator = torch.Generator().manual_seed(options.seed)
        self.plan = [batches(self.rows, options.batch_tokens, generator) for _ in range(options.epochs)]
        self.total = sum(map(len, self.plan))

    @torch.no_grad()
    def feature_scale(self) -> Tensor:
        """Root mean square of every target feature [F], from a few conversations.

        A target's residual stream has channels tens of times larger than the rest. Adam moves all weights at one pace,
        so `fc` learns badly from raw features; it is trained on features divided by this, and `trained` folds the
        division into its weights. The first token, an attention sink, is left out.
        """
        batch = Batch(self.rows[:16], self.device)
        features = read_target(self.target, self.head, batch.tokens)[0].float()
        real = torch.arange(features.shape[1], device=self.device) < batch.length[:, None]
        real[:, 0] = False
        return features[real].pow(2).mean(0).sqrt().clamp(min=1e-6)

    def trained(self) -> Eagle3Head:
        """The head as it reads raw features."""
        head = copy.deepcopy(self.head)
        head.fc.weight.data /= self.scale
        return head

    # -- one batch ---------------------------------------------------------------------------------------------------

    def read(self, indices: list[int], rows: list[dict]) -> tuple[Batch, Tensor, Tensor, Tensor]:
        """The batch and what the target says about it, from the cache in memory where it has been computed before."""
        batch = Batch([rows[i] for i in indices], self.device)
        if rows is self.rows and all(i in self.cache for i in indices):
            kept = [self.cache[i] for i in indices]
            read = [torch.nn.utils.rnn.pad_sequence(parts, batch_first=True) for parts in zip(*kept)]
            return batch, *read
        features, *rest = read_target(self.target, self.head, batch.tokens)
        read = ((features / self.scale).to(features.dtype), *rest)
        if rows is self.rows and self.cache_room > 0:
            for place, i in enumerate(indices):
                n = len(rows[i]["ids"])
                self.cache[i] = tuple(x[place, :n].clone() for x in read)
                self.cache_room -= sum(x.numel() * x.element_size() for x in self.cache[i])
        return batch, *read

    def loss(self, indices: list[int], rows: list[dict], steps: int):
        """((loss, accuracy [steps]), batch) of the conversations at `indices`."""
        batch, features, state, greedy = self.read(indices, rows)
        bf16 = self.lm_rows.dtype == torch.bfloat16
        autocast = torch.autocast(self.device.type, torch.bfloat16) if bf16 else nullcontext()
        with autocast:
            with torch.no_grad():
                teacher = F.linear(state, self.lm_rows).float().softmax(-1).to(self.lm_rows.dtype)
            return ttt_loss(self.head, batch, features, teacher, greedy, steps), batch

    def validate(self) -> list[float]:
        """Top-1 accuracy of each step on the held-out conversations."""
        with torch.no_grad():
            parts = [self.loss(b, self.held_out, self.o.steps)[0][1] for b in batches(self.held_out, self.o.batch_tokens, None)]
        return torch.stack(parts).mean(0).tolist()

    # -- the loop ----------------------------------------------------------------------------------------------------

    def rate(self) -> float:
        """Learning rate: linear warm-up over 3 %, then cosine to a tenth."""
        warm = max(1, self.total * 3 // 100)
        if self.step < warm:
            return self.o.lr * (self.step + 1) / warm
        done = (self.step - warm) / max(1, self.total - warm)
        return self.o.lr * (0.1 + 0.9 * (1 + math.cos(math.pi * done)) / 2)

    def run(self) -> None:
        """Train to the end of the plan. Raises CheckpointError if the loss is not finite; the last state stays."""
        log = open(self.work / "log.jsonl", "a", buffering=1)  # noqa: SIM115 - lives as long as the loop
        began, tokens, saved = time.time(), 0, time.time()
        first = self.step
        while self.epoch < len(self.plan):
            plan = self.plan[self.epoch]
            steps = min(SHORT, self.o.steps) if self.epoch < self.o.short_epochs else self.o.steps
            while self.in_epoch < len(plan):
                for group in self.optimizer.param_groups:
                    group["lr"] = self.rate()
                (loss, accuracy), batch = self.loss(plan[self.in_epoch], self.rows, steps)
                if not torch.isfinite(loss):
                    raise CheckpointError(
                        f"loss is {loss.item()} at step {self.step} (epoch {self.epoch}, batch {self.in_epoch});"
                        f" the last good state is in {self.work / 'state.pt'}: try a smaller --lr"
                    )
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step, self.in_epoch = self.step + 1, self.in_epoch + 1
                tokens += int(batch.length.sum())
                if self.step % 10 == 0 or self.step == self.total:
                    speed = tokens / (time.time() - began)
                    left = (self.total - self.step) * (time.time() - began) / (self.step - first)
                    acc = [round(a, 3) for a in accuracy.tolist()]
                    print(
                        f"step {self.step}/{self.total} loss {loss.item():.3f} accuracy "
                        + " ".join(f"{a:.2f}" for a in acc)
                        + f" chain tau {expected_tau(acc):.2f} {speed:.0f} tok/s {left / 60:.0f} min left",
                        file=sys.stderr, flush=True,
                    )
                    log.write(json.dumps({"step": self.step, "loss": loss.item(), "accuracy": acc, "lr": self.rate()}) + "\n")
                if time.time() - saved > self.o.save_seconds:
                    self.save()
                    saved = time.time()
            self.epoch, self.in_epoch = self.epoch + 1, 0
            held = self.validate()
            print(
                f"epoch {self.epoch}/{len(self.plan)} held-out accuracy " + " ".join(f"{a:.3f}" for a in held)
                + f" chain tau {expected_tau(held):.2f}", file=sys.stderr, flush=True,
            )
            log.write(json.dumps({"step": self.step, "epoch": self.epoch, "held_out": held}) + "\n")
            self.save()

    def fingerprint(self) -> dict:
        """What defines a run, settings and data; a resumed run must have the same."""
        names = ("draft_vocab", "steps", "epochs", "short_epochs", "lr", "batch_tokens", "seed", "max_len", "intermediate_size")
        data = json.dumps([row["ids"] for row in self.held_out + self.rows]).encode()
        return {name: getattr(self.o, name) for name in names} | {"data": hashlib.sha256(data).hexdigest()}

    def save(self) -> None:
        """Everything an exact resume needs, under a temporary name first."""
        state = {
            "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(),
            "scale": self.scale, "at": (self.step, self.epoch, self.in_epoch), "options": self.fingerprint(),
        }
        torch.save(state, self.work / "state.pt.partial")
        os.replace(self.work / "state.pt.partial", self.work / "state.pt")

    def resume(self) -> bool:
        """Go on from WORK/state.pt if it is there. Raises CheckpointError if it was made with other settings."""
        path = self.work / "state.pt"
        if not path.exists():
            return False
        try:
            state = torch.load(path, map_location=self.device, weights_only=True)
            options = state["options"]
        except Exception as e:  # torch raises what the damage leads to
            raise CheckpointError(f"{path}: damaged ({type(e).__name__}); delete it to start again") from None
        if options != self.fingerprint():
            raise CheckpointError(f"{path} was made with other settings or data; use another --work folder or delete it")
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scale = state["scale"]
        self.step, self.epoch, self.in_epoch = state["at"]
        return True


def new_head(target: Transformer, draft_ids: Tensor, intermediate_size: int | None, seed: int) -> Eagle3Head:
    """A head of the target's shape in float32: random but for what the target can lend.

    lm_head starts as the target's rows and the final norm as a third of the target's (the full one makes an untrained
    head overconfident); `fc` passes the highest captured layer on. Each of these was worth several points of held-out
    accuracy after the same short run.
    """
    a = target.args
    args = HeadArgs(
        a.vocab_size, a.hidden_size, intermediate_size or a.intermediate_size, 1, a.num_heads, a.num_kv_heads, a.head_dim,
        norm_eps=a.norm_eps, rope_base=a.rope_base, rope_scaling=None, max_seq_len=a.max_seq_len,
        draft_vocab_size=len(draft_ids), target_hidden_size=a.hidden_size, aux_layers=eagle3_aux_layers(a.num_layers),
    )
    torch.manual_seed(seed)
    head = Eagle3Head(args)
    for name, p in head.named_parameters():
        if p.ndim == 2:
            torch.nn.init.normal_(p, std=0.02 if not name.endswith(("wo.weight", "w_down.weight")) else 0.02 / math.sqrt(2))
    rows = target.embed.weight if target.lm_head is None else target.lm_head.weight
    head.lm_head.weight.data = rows[draft_ids].float().clone()
    head.norm.weight.data = target.norm.weight.float() * 0.3
    head.fc.weight.data *= 0.3
    head.fc.weight.data[:, -a.hidden_size :] += torch.eye(a.hidden_size)
    head.draft_ids.copy_(draft_ids)
    head.embed = target.embed  # frozen: not the head's own
    return head.to(target.embed.weight.device)


def draft_vocabulary(rows: list[dict], size: int, vocab_size: int) -> tuple[Tensor, float]:
    """The `size` most frequent answer tokens, ascending, and the share of answer tokens they cover."""
    counts = Counter(t for r in rows for t in r["ids"][r["answer"] :])
    ranked = [t for t, _ in counts.most_common(size)]
    if len(ranked) < size:  # little text: fill with the lowest unused ids, which are the tokenizer's commonest merges
        seen = set(ranked)
        ranked += [t for t in range(vocab_size) if t not in seen][: size - len(ranked)]
    covered = sum(counts[t] for t in ranked) / max(1, counts.total())
    return torch.tensor(sorted(ranked)), covered


def positive(text: str) -> int:
    """An argparse type: a whole number of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    """The options of the command line."""
    p = argparse.ArgumentParser(description="Train an EAGLE-3 head for a converted target.")
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="folder for the head, in Hugging Face layout")
    p.add_argument("--work", help="data, state and log (default: runs/NAME-OF-OUT)")
    p.add_argument("--prompts", help="JSON-lines file of prompts for the target to answer")
    p.add_argument("--limit", type=positive, help="use only the first so many prompts (after shuffling with --seed)")
    p.add_argument("--synthesize", type=int, default=0, metavar="N", help="let the target write N user turns of its own")
    p.add_argument("--temperature", type=float, default=0.7, help="of the answers (default 0.7)")
    p.add_argument("--max-new-tokens", type=positive, default=256, help="per answer")
    p.add_argument("--max-prompt-tokens", type=positive, default=256, help="longer prompts are left out")
    p.add_argument("--decode-batch", type=positive, default=48, help="answers decoded together")
    p.add_argument("--draft-vocab", type=positive, default=8192)
    p.add_argument("--intermediate-size", type=positive, help="of the head's MLP (default: the target's)")
    p.add_argument("--steps", type=positive, default=7, help="unrolled draft steps")
    p.add_argument("--epochs", type=positive, default=4)
    p.add_argument("--short-epochs", type=int, default=0, help=f"how many of them, the first, unroll {SHORT} steps only (faster)")
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--batch-tokens", type=positive, default=2048, help="padded tokens per optimizer step")
    p.add_argument("--max-len", type=positive, default=512, help="conversations are cut to this many tokens")
    p.add_argument("--feature-cache-gb", type=float, default=6, help="memory for target features kept between epochs")
    p.add_argument("--save-seconds", type=float, default=300)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the target; the head's weights are float32")
    p.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True, help="compile the decoder of the answers")
    p.add_argument("--collect-only", action="store_true", help="stop after the answers are written")
    return p


def collect(options, target: Transformer, config: dict) -> list[dict]:
    """Step 1: have the target answer, and read the shards back, cut to --max-len."""
    tokenizer = Tokenizer.load(options.checkpoint)
    if tokenizer is None or not tokenizer.has_template:
        raise CheckpointError(f"{options.checkpoint}: answers need a tokenizer and a chat template, this folder lacks them")
    prompts = read_prompts(options.prompts) if options.prompts else []
    generator = torch.Generator().manual_seed(options.seed)
    prompts = [prompts[i] for i in torch.randperm(len(prompts), generator=generator).tolist()][: options.limit]
    if not prompts and not options.synthesize:
        raise CheckpointError("nothing to train on: give --prompts FILE, --synthesize N or both")

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if options.compile and torch.device(options.device).type == "cpu":
        # Answers come more than twice as fast from the kernels; training needs the weights as they are, hence a second copy.
        target, _ = load_target(options.checkpoint, options.device, target.embed.weight.dtype)
        load_kernels(say)
        pack(target)
    decoder = Decoder(
        target, batch=options.decode_batch, max_seq_len=options.max_prompt_tokens + options.max_new_tokens,
        stop_ids=config["stop_ids"], compile=options.compile, say=say,
    )
    collector = Collector(
        decoder, tokenizer, Path(options.work) / "data", seed=options.seed, max_new_tokens=options.max_new_tokens,
        temperature=options.temperature, max_prompt_tokens=options.max_prompt_tokens,
    )
    collector.from_prompts(prompts)
    collector.synthesized(options.synthesize)
    rows = load_shards(collector.shards)
    rows = [{**r, "ids": r["ids"][: options.max_len]} for r in rows]
    rows = [r for r in rows if len(r["ids"]) - r["answer"] >= 3]
    if len(rows) < 2:
        raise CheckpointError("fewer than two usable answers: give more prompts or raise --max-prompt-tokens")
    # Shards come source by source; mix them so that the held-out head of the list is a fair sample.
    return [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit code: 0, 1 with a one-line error, 130 when interrupted."""
    options = parser().parse_args(argv)
    options.work = options.work or str(Path("runs") / Path(options.out).name)
    try:
        for folder in (options.out, options.work):  # now, not after hours
            place = Path(folder).absolute()
            while not place.exists():
                place = place.parent
            if not place.is_dir() or not os.access(place, os.W_OK):
                raise CheckpointError(f"{folder}: not a folder that can be written to")
        check_device(options.device)
        dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[options.dtype]
        target, config = load_target(options.checkpoint, options.device, dtype)
        if "quantization" in config:
            raise CheckpointError(f"{options.checkpoint}: a head is trained on the whole weights; name the checkpoint before quantisation")
        rows = collect(options, target, config)
        answers = sum(len(r["ids"]) - r["answer"] for r in rows)
        size = min(options.draft_vocab, target.args.vocab_size)
        draft_ids, covered = draft_vocabulary(rows, size, target.args.vocab_size)
        print(f"{len(rows)} conversations, {answers} answer tokens, {size} draft ids cover {covered:.2%}", file=sys.stderr)
        if options.collect_only:
            return 0
        head = new_head(target, draft_ids.to(target.embed.weight.device), options.intermediate_size, options.seed)
        trainer = Trainer(options, target, head, rows)
        if trainer.resume():
            print(f"resumed at step {trainer.step}", file=sys.stderr)
        trainer.run()
        export_eagle3(trainer.trained(), options.out)
        print(f"wrote {options.out}; next: python convert_checkpoint.py --checkpoint {options.out} --target {options.checkpoint}")
    except (CheckpointError, ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nstopped; run the same command to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
