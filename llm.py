"""The Python API: load a checkpoint, generate, stream, chat.

    from llm import LLM

    llm = LLM("checkpoints/smollm2-135m", speculate="eagle3")
    print(llm.generate("Why is the sky blue?").text)
    for event in llm.stream("Tell me a story.", max_new_tokens=200, temperature=0.8, seed=1):
        print(event.text, end="", flush=True)
    for result in llm.generate(["One prompt.", "Another one."], max_new_tokens=64):
        print(result.text, result.finish, result.tau, result.tokens_per_second)
    print(llm.chat([{"role": "user", "content": "Hello!"}]).text)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from pydantic import InstanceOf
from typing_extensions import TypedDict

import extensions
from checkpoint.load import is_converted
from common.errors import InputError, counted
from common.schema import Schema, as_python, whole, with_options
from engine.drafting import AUTO, DraftOptions
from engine.request import Event, Prompt, Request, encode
from engine.sampling import Sampling
from engine.target import Runtime, Target, load_target

ARGUMENTS = {
    "checkpoint": str | Path, "speculate": str | InstanceOf[DraftOptions], "draft": str | Path | None,
    "tree": str | None, "batch_size": whole(1), "max_seq_len": whole(2) | None, "log": Callable,
}
ENDINGS = {"stop": "stop", "length": "--max-new-tokens reached", "cache": "--max-seq-len reached",
           "error": "failed", None: "interrupted"}
ARGUMENT_SCHEMA = Schema(TypedDict("Arguments", ARGUMENTS))
COUNT_SCHEMA = Schema(whole(1))


class LLM:
    """A target, its drafter and the engine.

    - checkpoint: a converted folder; a Hugging Face folder, hub id or .gguf file is converted first. model is
      another name for it.
    - speculate: a method such as "eagle3", or a `DraftOptions`; None is "none". "auto" joins prompt lookup
      with the head in the checkpoint's folder or a smaller model next to it.
    - draft: the head (default CHECKPOINT/KIND) or draft model: a folder, hub id or .gguf file
    - tree: a value of --tree
    - batch_size: maximum number of prompts decoded together
    - max_seq_len: maximum number of tokens of prompt and output (default: `Target.default_max_seq_len`)
    - verify: check the weights against their sha256; None: only if they have one
    - ranks: `kernels.tp.Ranks`, if torchrun started several processes
    - make_engine: a variant of `Target.engine`
    - runtime_options: fields of `Runtime`, such as device="cpu" or dtype=torch.bfloat16
    - log: called with one line when something slow starts or ends

    Raises InputError, a ValueError, on invalid options, and if a checkpoint is missing, damaged or too large.
    """

    def __init__(
        self, checkpoint: str | Path | None = None, speculate: str | DraftOptions | None = AUTO, *,
        model: str | Path | None = None,
        draft: str | Path | None = None, tree: str | None = None, batch_size: int = 8,
        max_seq_len: int | None = None, log: Callable[[str], None] = lambda line: None,
        ranks=None, verify: bool | None = False, make_engine=Target.engine, **runtime_options,
    ):
        if bool(checkpoint) == bool(model):
            raise InputError(f"checkpoint is {checkpoint}, model {model}: pass exactly one: a folder, hub id"
                             " or .gguf file")
        checkpoint, speculate = checkpoint or model, "none" if speculate is None else speculate
        ARGUMENT_SCHEMA.check(locals())
        if isinstance(speculate, DraftOptions) and (draft or tree):
            raise InputError("draft and tree are fields of DraftOptions: set them there, or pass speculate as"
                             " a string")
        drafting = speculate if isinstance(speculate, DraftOptions) else DraftOptions(speculate, draft, tree)
        runtime = with_options(Runtime, runtime_options, ARGUMENTS)
        runtime.prepare()  # raises on invalid options before a long conversion
        folder = Path(checkpoint)
        if not all(map(is_converted, filter(None, (checkpoint, drafting.draft)))):
            folder, drafting = extensions.load(extensions.CONVERT)(checkpoint, drafting, log)
        drafting = drafting.resolve(folder, log)
        if verify is not False:
            from checkpoint.folder import verify_weights

            verify_weights(folder, drafting.draft, bool(verify), log)
        if drafting.method == "none":
            extensions.load(extensions.UNUSED_HEADS)(folder, log)
        self.target: Target = load_target(folder, runtime, log, ranks)
        self.tokenizer, self.speculate = self.target.tokenizer, drafting.method
        self.engine = make_engine(self.target, drafting, batch=batch_size, max_seq_len=max_seq_len)
        self._warmed_up: set[bool] = set()  # False: for greedy requests, True: for sampled ones

    def __repr__(self) -> str:
        size = f"{self.engine.batch} x {self.engine.max_seq_len} tokens"
        return f"LLM({self.target.checkpoint}, {self.speculate}, {size})"

    def encode(self, prompt: Prompt, **options) -> list[int]:
        """Encode a prompt as token ids. options: arguments of `engine.request.encode`."""
        return encode(self.tokenizer, as_python(prompt), max_lengths=self.engine.max_lengths, **options)

    def generate(
        self, prompts: Prompt | Iterable[Prompt], *, raw: bool = False, system: str | None = None,
        variables: dict | None = None, parse_special: bool = True, n: int = 1, **sampling
    ) -> Request | list[Request]:
        """Decode one prompt, or a list of prompts `batch_size` at a time, to the end.

        A prompt is a string, which goes through the chat template unless `raw`; token ids, in a list or an
        array; or a list of chat messages. variables: for the chat template, such as {"enable_thinking":
        False}. parse_special: False encodes special tokens in raw text as plain text. sampling: fields of
        `Sampling`; output i is sampled with `seed` + i. Returns a `Request`, or a list with `n` for each
        prompt: their `text`, `ids`, `finish`, `tau` (acceptance length), `tokens_per_second` and more.
        Raises InputError, a ValueError, before anything is decoded, on an invalid prompt or option.
        """
        prompts = as_python(prompts)
        single = is_single_prompt(prompts)
        options, count = with_options(Sampling, sampling), COUNT_SCHEMA.check(n, "n")
        ids = []
        for prompt in [prompts] if single else prompts:
            ids += count * [self.encode(
                prompt, raw=raw, system=system, variables=variables, parse_special=parse_special)]
        self._warm_up(options)
        samplings = [replace(options, seed=(options.seed + i) % 2**64) for i in range(len(ids))]
        continues = (variables or {}).get("continue_final_message", False)
        requests = self.engine.generate(ids, samplings, continues=continues)
        return requests[0] if single and n == 1 else requests

    def stream(
        self, prompt: Prompt, *, raw: bool = False, system: str | None = None, variables: dict | None = None,
        parse_special: bool = True, n: int = 1, **sampling
    ) -> Iterator[Event]:
        """Decode one prompt, yielding an `Event` with text and ids as tokens are accepted. See `generate`."""
        if n != 1:
            raise InputError("n: a stream has one output; generate takes n")
        ids = self.encode(prompt, raw=raw, system=system, variables=variables, parse_special=parse_special)
        self._warm_up(options := with_options(Sampling, sampling))
        return self.engine.run([ids], [options], [])

    def chat(self, messages: list[dict], *, variables: dict | None = None,
             continue_final_message: bool = False, **options) -> Request | list[Request]:
        """Answer a conversation, a list of {"role", "content"}. Earlier turns come from the prefix cache.

        continue_final_message: continue the last message, as "prefix": True in it does. See `generate`.
        """
        if continue_final_message and isinstance(variables, dict | None):
            variables = {**(variables or {}), "continue_final_message": True}
        requests = self.generate([messages], variables=variables, **options)
        return requests[0] if len(requests) == 1 else requests

    def _warm_up(self, sampling: Sampling) -> None:
        """Warm up the engine, if idle, before the first greedy and the first sampled request."""
        sampled = sampling.temperature > 0
        if sampled not in self._warmed_up and not self.engine.busy:
            self._warmed_up.add(sampled)
            with extensions.load(extensions.ANNOUNCED)("warming up: compiling and timing steps"):
                self.engine.warm_up(Sampling(temperature=sampling.temperature))


def joint_speed(requests: list[Request]) -> tuple[float, float]:
    """Return the seconds from the first token of all requests to the last one, and tokens per second."""
    times = [(r.first, r.last) for r in requests if r.first]
    seconds = max(last for _, last in times) - min(first for first, _ in times) if times else 0.0
    return seconds, sum(max(len(r.ids) - 1, 0) for r in requests) / seconds if seconds else 0.0


def summary(requests: list[Request], drafts: bool, estimate: bool = True) -> str:
    """Summarize requests that were decoded together in one line.

    drafts: a drafter is in use. estimate: for a single request, add the speedup over its plain steps.
    """
    _, speed = joint_speed(requests)
    lengths = [n for r in requests for n in r.accept_lengths]
    times = requests[0].step_times
    plain = times["plain"] if estimate and times["drafted"] and not requests[1:] else []
    return (
        counted(sum(len(r.ids) for r in requests), "token") + (f", {speed:.1f} tok/s" if speed else "")
        + (f", about {min(speed * fmean(plain), fmean(lengths)):.2f}x plain" if plain[3:] else "")
        + (f", acceptance length {fmean(lengths):.2f}" if drafts and lengths else "")
        + f"; {', '.join(sorted({ENDINGS[r.finish] for r in requests}))}"
    )


def is_single_prompt(prompts: Prompt | Iterable[Prompt]) -> bool:
    """Return whether this is one prompt, valid or not, and not a list of prompts."""
    ids_or_messages = (isinstance(prompts, (list, tuple))
                       and isinstance(next(iter(prompts), None), (int, dict)))
    return ids_or_messages or isinstance(prompts, (str, bytes, dict)) or not isinstance(prompts, Iterable)
