"""What training an EAGLE-3 head takes for a large target: tokens, GPU hours, memory, disk, by arithmetic.

    python -m training.budget
    python -m training.budget --conversations 100000 --tokens 1000 --epochs 2

GPUs are reckoned by their data sheet and an assumed share of it. Nothing of this was measured.
"""
from __future__ import annotations

import sys
from dataclasses import dataclass

from common.cli import Options, positive, run_command

FLOAT, HALF = 4, 2  # bytes
AUX = 3  # layers of the target that an EAGLE-3 head reads


@dataclass(frozen=True)
class Gpu:
    """flops, bandwidth: of the data sheet, dense bf16 and bytes a second. shares: of each that is assumed."""

    name: str = "H100 SXM"
    flops: float = 989e12
    bandwidth: float = 3.35e12
    share_of_flops: float = 0.4
    share_of_bandwidth: float = 0.6


@dataclass(frozen=True)
class Size:
    """A target and the head that is trained for it. ranks: GPUs that hold the target together.

    whole: its parameters that are on each of them, the embedding table.
    """

    name: str
    parameters: float
    hidden: int
    inner: int
    kv: int  # width of keys, and of values
    layers: int
    vocabulary: int
    ranks: int
    draft_vocabulary: int = 32000

    @property
    def head(self) -> int:
        """Trained parameters of the head: fc, one layer that reads two vectors, lm_head."""
        H = self.hidden
        layer = 2 * H * (H + 2 * self.kv) + H * H + 3 * H * self.inner
        return AUX * H * H + layer + self.draft_vocabulary * H


SIZES = (
    Size("Llama-3.1-8B", 8.03e9, 4096, 14336, 1024, 32, 128256, 1),
    Size("Llama-3.3-70B", 70.6e9, 8192, 28672, 1024, 80, 128256, 4),
)


@dataclass(frozen=True)
class Budget:
    """The numbers of one plan. Hours are of one GPU: so many GPUs take so many times less."""

    size: Size
    gpu: Gpu = Gpu()
    conversations: int = 532_000  # ShareGPT and UltraChat, arXiv 2503.01840
    tokens_each: int = 2180
    answered: float = 0.75  # share of the tokens that the target says
    epochs: int = 4
    steps: int = 7  # unrolled
    together: int = 128  # answers decoded at a time

    @property
    def tokens(self) -> float:
        """Of all conversations."""
        return self.conversations * self.tokens_each

    @property
    def answers(self) -> float:
        """Tokens that the target writes."""
        return self.tokens * self.answered

    @property
    def pass_bytes(self) -> float:
        """What a step of decoding reads: the weights, and the keys and values of half-written texts."""
        cached = self.together * self.tokens_each / 2 * 2 * self.size.kv * self.size.layers * HALF
        return self.size.parameters * HALF + cached

    @property
    def writing(self) -> float:
        """GPU hours: reading the weights and caches is all that counts."""
        a_second = self.gpu.bandwidth * self.gpu.share_of_bandwidth
        return self.answers / self.together * self.pass_bytes / a_second / 3600

    def _hours(self, flops: float) -> float:
        return flops / (self.gpu.flops * self.gpu.share_of_flops) / 3600

    @property
    def features(self) -> float:
        """GPU hours of the target's passes over the text, once for every epoch."""
        return self._hours(2 * self.size.parameters * self.tokens * self.epochs)

    @property
    def learning(self) -> float:
        """GPU hours of the head's passes, there and back, for every unrolled step of every answer token."""
        return self._hours(6 * self.size.head * self.steps * self.answers * self.epochs)

    @property
    def memory(self) -> float:
        """Bytes on a GPU: a part of the target, the table that is whole on each, and the head's weights,
        gradients and two averages of AdamW. What a step computes with comes on top.
        """
        table = self.size.vocabulary * self.size.hidden
        dealt = (self.size.parameters - table) / self.size.ranks + table
        whole_lm_head = table if self.size.ranks > 1 else 0
        return (dealt + whole_lm_head) * HALF + self.size.head * 4 * FLOAT

    @property
    def text(self) -> float:
        """Bytes of the shards: an id is five digits, a comma and a space."""
        return self.tokens * 7

    @property
    def state(self) -> float:
        """Bytes of state.pt: the head's weights and two averages."""
        return self.size.head * 3 * FLOAT

    @property
    def cache(self) -> float:
        """Bytes that --cache-features would take: states entering three layers, the last one, a choice."""
        return self.tokens * ((AUX + 1) * self.size.hidden * HALF + 4)

    def rows(self) -> list[tuple[str, str]]:
        """What is printed: names and numbers."""
        hours = self.writing + self.features + self.learning
        return [
            ("tokens", f"{self.tokens / 1e9:.2f} billion"),
            ("of which answers", f"{self.answers / 1e9:.2f} billion"),
            ("head, trained parameters", f"{self.size.head / 1e9:.2f} billion"),
            ("writing, GPU hours", f"{self.writing:,.0f}"),
            ("features, GPU hours", f"{self.features:,.0f}"),
            ("the head, GPU hours", f"{self.learning:,.0f}"),
            ("together, GPU hours", f"{hours:,.0f}"),
            ("days on 32 GPUs", f"{hours / 32 / 24:.1f}"),
            ("GPUs that hold a target (`--target-ranks`)", f"{self.size.ranks}"),
            ("memory of each before activations", f"{self.memory / 1e9:.0f} GB"),
            ("disk: text", f"{self.text / 1e9:.1f} GB"),
            ("disk: state", f"{self.state / 1e9:.1f} GB"),
            ("disk: features, if they were cached", f"{self.cache / 1e12:.0f} TB"),
        ]


def table(**changes) -> str:
    """Markdown: a column for each of SIZES, with these changes of the plan."""
    columns = [Budget(size, **changes).rows() for size in SIZES]
    names = " | ".join(size.name for size in SIZES)
    lines = [f"| | {names} |", "|---" * (1 + len(SIZES)) + "|"]
    lines += [f"| {row[0][0]} | " + " | ".join(value for _, value in row) + " |" for row in zip(*columns)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    p.add_argument("--conversations", type=positive, default=Budget.conversations, help="how many")
    p.add_argument("--tokens", type=positive, default=Budget.tokens_each, help="of each, the mean")
    p.add_argument("--epochs", type=positive, default=Budget.epochs, help="passes over the text")
    p.add_argument("--steps", type=positive, default=Budget.steps, help="unrolled draft steps")
    o = p.parse_args(argv)

    def say() -> None:
        p.check(o)
        changes = {"conversations": o.conversations, "tokens_each": o.tokens}
        print(table(**changes, epochs=o.epochs, steps=o.steps))

    return run_command(say)


if __name__ == "__main__":
    sys.exit(main())
