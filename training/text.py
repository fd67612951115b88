"""The first step of training: the text that the options name, written as shards and read back."""
from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import torch

from common.cli import note
from common.errors import InputError
from engine.seats import Seats
from model import Transformer
from tokens.dataset import read_chats, read_conversations, read_openings
from tokens.tokenizer import Tokenizer
from training import corpus
from training.choices import SHORTEST
from training.collect import Collector
from training.copies import load_copy
from training.processes import Processes


def plan_text(
    o: argparse.Namespace, target: Transformer, name: str, stop_ids: list[int], processes: Processes,
    say: Callable[[str], None],
) -> Collector | None:
    """What writes the text that is asked for with `target`, whose identity is `name`.

    None if nothing is to be written. All files are read. Raises InputError on one that cannot be used.
    """
    prompts = draw_prompts(o.prompts, o.seed, o.limit, say) if o.prompts else []
    openings = read_openings(o.openings) if o.openings else ()
    conversations = read_conversations(o.conversations, say) if o.conversations else []
    if not (prompts or conversations or o.synthesize):
        return None
    collector = _collector(o, target, name, stop_ids, processes, bool(prompts or o.synthesize), say)
    collector.from_prompts(prompts)
    collector.synthesize(o.synthesize, o.turns, openings)
    collector.from_conversations(conversations)
    return collector


def collect_text(
    o: argparse.Namespace, target: Transformer, name: str, stop_ids: list[int], processes: Processes,
    write: Callable[[Collector], None] = Collector.write,
) -> list[dict]:
    """All rows of the training text. `write` has the missing shards written, see `plan_text`.

    Raises InputError on a file that cannot be used, and if there are no usable answers.
    """
    say = note if processes.first else lambda line: None
    # All files are read before anything is decoded: a mistake shows at once.
    shards, refusal = [path for folder in o.shards for path in corpus.shards_in(Path(folder))], ""
    if collector := plan_text(o, target, name, stop_ids, processes, say):
        write(collector)
        processes.wait()
        if missing := [path for path in collector.shards if not path.exists()]:
            raise InputError(
                f"{missing[0]}: was written by another process and is not here; --work must be a folder that"
                " all machines share"
            )
        shards += collector.shards
        refusal = f" ({collector.refusal})" if collector.refusal else ""
    most = min(o.max_len, target.args.max_seq_len)
    rows, left_out, cut = corpus.load_shards(shards, most, target.args.vocab_size, name)
    reasons = (f"empty, longer than --max-prompt-tokens {o.max_prompt_tokens}, refused by the chat"
               f" template{refusal}, or a user turn that did not end")
    if left_out:
        say(f"{left_out} prompts or conversations were left out: {reasons}")
    if cut:
        say(f"{cut} conversations are cut to {most} tokens (--max-len)")
    if not rows:
        raise InputError(
            f"no usable answers: {left_out} prompts or conversations were left out ({reasons}), and all"
            f" answers are shorter than {SHORTEST} tokens or after --max-len {o.max_len}"
        )
    return rows


def draw_prompts(path: str, seed: int, limit: int | None, say: Callable[[str], None]) -> list[list[dict]]:
    """The chats of a file without repeats, `limit` of them at most, in an order drawn with `seed`."""
    chats = list({json.dumps(messages): messages for messages in read_chats(path, say)}.values())
    order = torch.randperm(len(chats), generator=torch.Generator().manual_seed(seed)).tolist()
    return [chats[i] for i in order][:limit]


def _collector(
    o: argparse.Namespace, target: Transformer, name: str, stop_ids: list[int], processes: Processes,
    decodes: bool, say: Callable[[str], None],
) -> Collector:
    """What writes the shards. decodes: whether the target has anything to say."""
    writer = None
    if o.writer:
        target, writer = load_copy(o, "--writer", o.writer, target, processes.ranks)
    longest, room = target.args.max_seq_len, o.max_prompt_tokens + o.max_new_tokens
    tokenizer = Tokenizer.load(o.checkpoint)
    if tokenizer is None or not tokenizer.has_template:
        raise InputError(
            f"{o.checkpoint}: chats need a tokenizer and a chat template, this folder lacks them"
        )
    batch, room = o.decode_batch if decodes else 1, min(room, longest)
    try:
        on_gpu = target.embed.weight.device.type == "cuda"
        seats = Seats(
            target, places=batch, max_seq_len=room, stop_ids=stop_ids, compile=o.compile, say=say,
            counts=(batch,) if on_gpu else None,  # there each number of sequences would be compiled
        )
    except ValueError as e:
        raise InputError(f"--decode-batch {batch} answers of up to {room} tokens: {e}") from None
    return Collector(
        seats, tokenizer, Path(o.work) / "data", target=name, seed=o.seed, max_new_tokens=o.max_new_tokens,
        temperature=o.temperature, max_prompt_tokens=o.max_prompt_tokens, processes=processes, writer=writer,
    )
