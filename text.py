"""The Python API: load a converted checkpoint, generate or stream text. The command line in `generate.py` is written on it.

    from text import load
    model = load("checkpoints/smollm2-135m", speculate="eagle3")
    print(model.generate("Why is the sky blue?").text)
    for piece in model.stream("Tell me a story.", max_new_tokens=200, temperature=0.8, seed=1):
        print(piece.text, end="", flush=True)
"""
from __future__ import annotations

import json
import os
import re
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from checkpoint import CheckpointError, load_target, read_config
from compiling import READ_ONLY
from compiling import prepare as prepare_compiling
from decoder import Decoder, Output, Run, Sampling
from drafters import METHODS, build, known
from drafters.base import Request
from kernels import load as load_kernels
from model import Head
from packed import pack
from quantized import quantize_linears
from tokenizer import Tokenizer
from tree import PAPER_TREE, PathTree, TreeShape

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Prompt = str | list[int] | list[dict]  # text, token ids, or chat messages


@dataclass(frozen=True)
class Piece:
    """What one sequence gained in one pass: `text` completed by token ids `ids`, the first `drafted` of which the head
    guessed. The last one is the target's own, unless the text was cut before it."""

    sequence: int
    ids: list[int]
    text: str
    drafted: int


@dataclass(frozen=True)
class Result:
    """One decoded prompt. `ids` are the new tokens, a stop id included; `text` leaves control tokens out.

    `seconds` is decoding after the first token, `prefill_seconds` the time to that token; both are those of the whole
    batch it was decoded in. `accept_lengths`: tokens emitted by each step.
    """

    prompt: str | None
    prompt_ids: list[int]
    text: str
    ids: list[int]
    finish: str
    seconds: float
    prefill_seconds: float
    accept_lengths: list[int]
    seed: int

    @property
    def tau(self) -> float:
        """Acceptance length: mean tokens emitted per step (1 for plain decoding); 0 if no step was made."""
        return sum(self.accept_lengths) / len(self.accept_lengths) if self.accept_lengths else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one over `seconds`."""
        return (len(self.ids) - 1) / self.seconds if self.seconds > 0 and len(self.ids) > 1 else 0.0


def default_tree(device: str, quantised: bool = False) -> TreeShape:
    """The tree used when none is asked for: the paper's on a GPU, a small one on a CPU, a smaller one for a quantised target.

    A GPU verifies 60 rows in the time of one. A CPU does not: time grows with the rows, and every draft level costs a pass
    of the head (README, "Which tree"), so a CPU wants few nodes and few levels. Quantised weights are read sooner, and the rows
    count for more.
    """
    if torch.device(device).type == "cuda":
        return PAPER_TREE
    return TreeShape(8, 2, 4) if quantised else TreeShape(12, 3, 4)


def read_tree(given: str | None) -> TreeShape | PathTree | str | None:
    """What --tree says: "auto" and None as they are, "paper", nodes,depth,width, or a JSON file of a static tree's paths.

    Raises CheckpointError on what is nothing of all this, ValueError on an impossible tree.
    """
    if given in (None, "auto"):
        return given
    if given == "paper":
        return PAPER_TREE
    if re.fullmatch(r"\d+,\d+,\d+", given):
        return TreeShape.parse(given)
    try:
        return PathTree(tuple(tuple(path) for path in json.loads(Path(given).read_text())))
    except (OSError, ValueError, TypeError) as e:
        known = "auto, paper, T,D,K or a JSON file of paths like [[0], [1], [0, 0]]"
        raise CheckpointError(f"--tree {given}: none of {known} ({e})") from None


def check_device(device: str) -> None:
    """Raise CheckpointError unless torch can use this device."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as e:
        raise CheckpointError(f"--device {device}: {str(e).splitlines()[0]}") from None


def check_compiler() -> None:
    """Raise CheckpointError unless what torch.compile needs on a CPU is there: a C++ compiler and Python's headers."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise CheckpointError(f"no C++ compiler: torch.compile needs {compiler}; install it, set CXX, or pass --no-compile")
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        raise CheckpointError("Python.h is missing: torch.compile needs Python's headers (python3-dev); or pass --no-compile")


def tune_kernels() -> None:
    """Have torch.compile time templates of products against the library's and search the tiles of reductions."""
    import torch._inductor.config as settings

    settings.max_autotune_gemm = settings.coordinate_descent_tuning = True


_ours: set[str] = set()  # places for compiled code that `keep_compiled` has chosen


def keep_compiled(checkpoint: Path) -> None:
    """Let torch.compile keep its results in CHECKPOINT/.compiled, so that they outlive a restart and travel with it.

    Where that cannot be written it is still read. Where a place is set (TORCHINDUCTOR_CACHE_DIR), nothing changes.
    """
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is not None and given not in _ours:
        from torch._inductor.runtime.cache_dir_utils import default_cache_dir

        if given != default_cache_dir():  # which torch sets itself when parts of it are imported
            return
    kept = checkpoint / ".compiled"
    if os.access(kept if kept.exists() else checkpoint, os.W_OK):
        place = str(kept.absolute())
        _ours.add(place)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = place
    elif kept not in READ_ONLY:
        READ_ONLY.append(kept)


def load(
    checkpoint: str | Path, speculate: str = "none", *, draft: str | Path | None = None, tree: TreeShape | PathTree | str | None = None,
    coupled: bool = True, draft_int8: bool = True, device: str | None = None, dtype: str | None = None, batch: int = 1,
    max_seq_len: int | None = None, compile: bool = True, kernels: bool = True, tune_on: list[list[int]] | None = None,
    say: Callable[[str], None] | None = None, beside: TextDecoder | None = None, flags: dict | None = None, accept: str = "equal",
    autotune: bool = False,
) -> TextDecoder:
    """Load a converted target and what drafts for it, one of `drafters.METHODS`.

    draft: the head's folder (default CHECKPOINT/eagle or CHECKPOINT/eagle3), or that of a draft model. flags: of the method's own
    (see METHODS), the defaults if None. accept: one of `accepting.RULES`; all but "typical" are lossless. tree: a `TreeShape`, drafted
    dynamically, a `PathTree`, static, or "auto", measured once (see tune.py); None takes EAGLE-1's static tree for
    "eagle", else `default_tree`. draft_int8: on our kernels, a bfloat16 head is quantised as it is loaded; it is read several
    times a step, and drafts as well. tune_on: for "auto" without a tokenizer, the prompts (ids) to measure acceptance on.
    compile, kernels: run through torch.compile, and, on a CPU, on our own compiled products (see kernels); without either
    nothing needs a C++ compiler, and 16-bit text is no longer bound to be that of plain decoding.
    autotune: torch.compile times several kernels for every product and reduction; for the whole process, and what it found is kept.
    beside: loaded from the same checkpoint with the same options, to share its target. dtype None keeps the stored one.
    max_seq_len (prompt + output) defaults to 2048 or the model's maximum if smaller.
    Raises CheckpointError, one line, if anything is missing, damaged or does not fit.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    known(speculate)
    if dtype is not None and dtype not in DTYPES:
        raise CheckpointError(f"--dtype {dtype}: unknown; choose from {', '.join(DTYPES)}")
    check_device(device)
    if compile:
        if autotune:
            tune_kernels()
        keep_compiled(Path(checkpoint))
        if torch.device(device).type == "cpu":
            check_compiler()
    if beside:
        target, config, tokenizer = beside.decoder.target, read_config(checkpoint, "target"), beside.tokenizer
    else:
        target, config = load_target(checkpoint, device, DTYPES[dtype] if dtype else None)
        tokenizer = Tokenizer.load(checkpoint)
    say = say or (lambda line: None)
    on_kernels = compile and kernels and torch.device(device).type == "cpu"

    def prepare(*models: torch.nn.Module) -> None:
        """Put models on the kernels; say it once if the target cannot be."""
        for model in models:
            if on_kernels and draft_int8 and model is not target and target.embed.weight.dtype == torch.bfloat16:
                quantize_linears(model, lm_head=not isinstance(model, Head) or model.args.own_lm_head)
        if on_kernels and not pack(*models):
            say("parts of this model do not run on our kernels (fp16, fp8, experts): speculative text may leave plain text at near ties")

    def choose_tree(head: Head, folder: Path) -> TreeShape:
        """--tree auto."""
        from tune import PROMPTS, auto_tree

        prompts = [encode(tokenizer, p) for p in PROMPTS] if tokenizer else tune_on
        if not prompts:
            raise CheckpointError("--tree auto: choosing a tree needs a tokenizer, or prompts as ids; or give its numbers")
        return auto_tree(target, head, prompts, config["stop_ids"], folder, compile, say)

    if on_kernels:
        load_kernels(say, prepare_compiling)
    if not beside:
        prepare(target)
    longest = target.args.max_seq_len
    if max_seq_len is not None and not 2 <= max_seq_len <= longest:
        raise CheckpointError(f"--max-seq-len {max_seq_len}: must be 2 to {longest}, the model's maximum")
    max_seq_len = max_seq_len or min(2048, longest)
    drafter = build(Request(
        speculate, Path(checkpoint), target, tokenizer, Path(draft) if draft else None, tree,
        default_tree(device, "quantization" in config), coupled, max_seq_len, accept,
        flags or {flag: default for flag, (default, _) in (METHODS[speculate].flags if METHODS[speculate] else {}).items()},
        prepare, choose_tree,
    ))
    decoder = Decoder(
        target, drafter, batch=batch, max_seq_len=max_seq_len, stop_ids=config["stop_ids"], compile=compile, say=say
    )
    return TextDecoder(decoder, tokenizer)


def encode(tokenizer: Tokenizer | None, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
    """A prompt as token ids: chat messages and (unless `raw`) text go through the chat template, ids stay as they are.

    Raises CheckpointError if text is given without a tokenizer, or a system message without a chat template.
    """
    if isinstance(prompt, list) and (not prompt or isinstance(prompt[0], int)):
        return prompt
    if tokenizer is None:
        raise CheckpointError("this checkpoint has no tokenizer: give token ids (--prompt-ids)")
    if system is not None and (raw or not tokenizer.has_template):
        raise CheckpointError("a system message (--system) needs the chat template, which is left out by --raw or missing here")
    if isinstance(prompt, str):
        if raw or not tokenizer.has_template:
            return tokenizer.encode(prompt)
        prompt = [{"role": "user", "content": prompt}]
    if system is not None:
        prompt = [{"role": "system", "content": system}, *prompt]
    return tokenizer.chat(prompt)


class TextDecoder:
    """A `Decoder` that speaks text. Without a tokenizer it takes and gives token ids only."""

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer | None):
        self.decoder, self.tokenizer = decoder, tokenizer

    def plain(self) -> TextDecoder:
        """The same target without drafter, for comparison: shares the weights, has its own caches."""
        d = self.decoder
        twin = Decoder(
            d.target, batch=d.batch, max_seq_len=d.max_seq_len, stop_ids=d.state.stop_ids.tolist(), compile=d.compiled, say=d.say
        )
        return TextDecoder(twin, self.tokenizer)

    def encode(self, prompt: Prompt, *, raw: bool = False, system: str | None = None) -> list[int]:
        """A prompt as token ids, as `encode` does with this checkpoint's tokenizer."""
        return encode(self.tokenizer, prompt, raw=raw, system=system)

    def warm_up(self, sampling: Sampling = Sampling(), every_length: bool = False) -> None:
        """Compile (and on CUDA capture) what a request with this sampling runs, so that the request itself is fast."""
        self.decoder.warm_up(sampling, every_length)

    def generate(self, prompt: Prompt, *, raw: bool = False, system: str | None = None, **sampling) -> Result:
        """Decode one prompt to the end. Keyword arguments of `Sampling`: max_new_tokens, temperature, top_p, top_k, seed."""
        job = self.job([prompt], [Sampling(**sampling)], raw=raw, system=system)
        for _ in job:
            pass
        return job.results()[0]

    def stream(self, prompt: Prompt, *, raw: bool = False, system: str | None = None, **sampling) -> Iterator[Piece]:
        """Decode one prompt, yielding text and token ids as they are accepted. Arguments of `generate`.

        One text at a time: after another one is started, going on with this one raises RuntimeError.
        """
        yield from self.job([prompt], [Sampling(**sampling)], raw=raw, system=system)

    def job(
        self, prompts: list[Prompt], sampling: list[Sampling], *, raw: bool = False, system: str | None = None, reuse: bool = False
    ) -> Job:
        """Up to `batch` prompts decoded together: iterate it for `Piece`s, then ask it for `results`.

        Raises ValueError (empty or too long prompts, with the numbers) and CheckpointError before anything is decoded.
        """
        ids = [self.encode(p, raw=raw, system=system) for p in prompts]
        return Job(self, prompts, Run(self.decoder, ids, sampling, reuse), sampling)


class Job:
    """One batch being decoded. May be left early: `results` then describes what there is so far."""

    def __init__(self, model: TextDecoder, prompts: list[Prompt], run: Run, sampling: list[Sampling]):
        self.model, self.prompts, self.run, self.sampling = model, prompts, run, sampling
        self.streams = [model.tokenizer.stream() if model.tokenizer else None for _ in prompts]

    def __iter__(self) -> Iterator[Piece]:
        for emitted in self.run:
            for i, ids in enumerate(emitted):
                if ids:
                    drafted = self.run.decoder.drafted[i]
                    yield Piece(i, ids, self.streams[i].push(ids) if self.streams[i] else "", drafted)
        for i, stream in enumerate(self.streams):
            if stream and (rest := stream.flush()):
                yield Piece(i, [], rest, 0)

    def results(self) -> list[Result]:
        """One `Result` per prompt, in order."""
        decode = self.model.tokenizer.decode if self.model.tokenizer else lambda ids: ""
        outputs: list[Output] = self.run.outputs()
        return [
            Result(
                prompt if isinstance(prompt, str) else None, ids, decode(o.ids), o.ids, o.finish, o.seconds, o.prefill_seconds,
                o.accept_lengths, s.seed,
            )
            for prompt, ids, o, s in zip(self.prompts, self.run.prompts, outputs, self.sampling)
        ]
