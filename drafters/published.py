"""What can draft for a model without a head: published heads, a smaller model, a head of your own."""
from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from common.names import program

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
}


def advice(checkpoint: Path, config: dict) -> Iterator[str]:
    """Yield a line for each way to a drafter for a target. config: its config.json."""
    if names := HEADS.get((config["num_layers"], config["hidden_size"], config["vocab_size"])):
        others = f"; or {', '.join(names[1:])}" if names[1:] else ""
        yield (f"  a published head of this shape, if it was trained for this model: {program('convert')}"
               f" --checkpoint {names[0]} --target {checkpoint}{others}")
    yield "  a model with the same vocabulary, at most a third of the size: --draft MODEL"
    openings = " --openings heads/openings.txt" * Path("heads/openings.txt").exists()
    yield (f"  your own head, trained in hours (--estimate prints how many): {program('train')} --checkpoint"
           f" {checkpoint} --synthesize 4000{openings} --out runs/{checkpoint.name}")
