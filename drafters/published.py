"""Advice for a target without a head: published heads, a draft model, training a head."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from common.names import program
from drafters.estimate import ANSWER_TOKENS, CONVERSATIONS, EPOCHS, measured_flops, phases, weights
from engine.target import Runtime

# Heads on the Hugging Face hub by layers, hidden size and vocabulary of their target. Models share shapes.
HEADS = {
    (32, 4096, 128256): (
        "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B", "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B"),
    (80, 8192, 128256): ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B",),
    (40, 5120, 32000): ("yuhuili/EAGLE3-Vicuna1.3-13B", "yuhuili/EAGLE-llama2-chat-13B"),
    (32, 4096, 32000): ("yuhuili/EAGLE-Vicuna-7B-v1.3", "yuhuili/EAGLE-llama2-chat-7B"),
    (28, 3584, 152064): ("yuhuili/EAGLE-Qwen2-7B-Instruct",),
    (28, 2048, 151936): ("AngelSlim/Qwen3-1.7B_eagle3",), (36, 2560, 151936): ("AngelSlim/Qwen3-4B_eagle3",),
    (36, 4096, 151936): ("AngelSlim/Qwen3-8B_eagle3",), (40, 5120, 151936): ("AngelSlim/Qwen3-14B_eagle3",),
    (64, 5120, 151936): ("AngelSlim/Qwen3-32B_eagle3",), (48, 2048, 151936): ("AngelSlim/Qwen3-a3B_eagle3",),
    (24, 2880, 201088): ("RedHatAI/gpt-oss-20b-speculator.eagle3",),
    (36, 2880, 201088): ("lmsys/EAGLE3-gpt-oss-120b-bf16",),
    (35, 1536, 262144): ("google/gemma-4-E2B-it-assistant",),
    (48, 3840, 262144): ("google/gemma-4-12B-it-assistant", "deepseek-ai/eagle3_gemma4_12b_ttt7"),
    (30, 2816, 262144): ("google/gemma-4-26B-A4B-it-assistant",),
    (40, 5120, 131072): ("cvalgian/EAGLE3-Mistral-Small-24B-Instruct-2501",),
}


# Part of a target's name -> small model of the same family and its number of weights; first match wins.
SIBLINGS = {
    "qwen2.5-coder": ("Qwen/Qwen2.5-Coder-0.5B-Instruct", 0.5e9),
    "qwen2": ("Qwen/Qwen2.5-0.5B-Instruct", 0.5e9),
    "qwen3-": ("Qwen/Qwen3-0.6B", 0.6e9), "llama-3": ("meta-llama/Llama-3.2-1B-Instruct", 1.2e9),
    "llama-2": ("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1.1e9), "gemma-3": ("google/gemma-3-270m-it", 0.27e9),
    "smollm2": ("HuggingFaceTB/SmolLM2-135M-Instruct", 0.135e9),
    "olmo-2": ("allenai/OLMo-2-0425-1B-Instruct", 1.5e9),
}
# For `auto`: maximum bytes that a token reads of a draft model / of the target. A 0.5B with lookup made
# a 1.5B faster in w8a8 (0.32) and in w4a8 with its lm_head in 4 bits too (0.29): docs/benchmarks.md.
MAX_DRAFT_SIZE = 1 / 3
OPENINGS = Path(__file__).parents[1] / "heads" / "openings.txt"


def advice(checkpoint: Path, config: dict) -> Iterator[str]:
    """Yield a line for each way to a drafter for a target. config: its config.json."""
    if names := HEADS.get((config["num_layers"], config["hidden_size"], config["vocab_size"])):
        yield "  a published head for this shape, if it was trained for this model:"
        yield from (f"    {program('convert')} --checkpoint {head} --target {quote(str(checkpoint))}"
                    for head in names)
    else:
        yield "  a published head: none known for this shape"
    name, size = str(config.get("name", checkpoint.name)).lower(), weights(config, 0)[0]
    small = next((model for part, model in SIBLINGS.items() if part in name), None)
    if small and small[1] <= MAX_DRAFT_SIZE * size:
        yield f"  a draft model of the same family: --draft {small[0]}"
    else:
        yield ("  a draft model: none known of at most a third of its size;"
               " --draft takes any model with the same vocabulary")
    openings = OPENINGS.relative_to(Path.cwd()) if OPENINGS.is_relative_to(Path.cwd()) else OPENINGS
    flops = measured_flops(Runtime().device_name)
    hours = sum(phases(config, CONVERSATIONS, ANSWER_TOKENS, EPOCHS, flops).values())
    yield (f"  train a head, about {hours:.1f} hours on this machine: {program('train')}"
           f" --checkpoint {quote(str(checkpoint))} --synthesize {CONVERSATIONS}"
           f" --openings {quote(str(openings))} --out {quote(f'runs/{checkpoint.name}')}")
