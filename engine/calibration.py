"""What is known of a head: the acceptance length tau of every tree, in calibration.json beside its weights.

`engine.calibrating` measures it, after short prompts and, by one tree, after a long text.
"""
from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from checkpoint.folder import CALIBRATION, MEASURED
from common.errors import InputError, printable
from common.files import read_json, write_text
from common.schema import Wrong
from drafters.base import Confidence
from tree import TreeShape

FORMAT = 1
WIDTHS = (1, 2, 3, 4, 6, 8, 10)
NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80)
DEEPEST = 7
MOST_NODES = 1024  # of a tree that somebody else measured
TEMPERATURES = (0.0, 1.0)  # between them tau is interpolated
USUAL = TreeShape(8, 2, 4)  # how easy texts are is told by this tree
SHORT, LONG = 128, 4096  # tokens of context at which heads and machines are measured


@dataclass(frozen=True)
class Far:
    """kept: how many times as many drafted tokens are accepted after `context` tokens as after SHORT, by
    temperature.
    """

    context: int
    kept: dict[float, float]

    def at(self, temperature: float, context: int) -> float:
        """The same after so many tokens: linear up to `context`, and no further."""
        share = (min(context, self.context) - SHORT) / (self.context - SHORT)
        return 1 + max(share, 0.0) * (self.kept[temperature] - 1)


@dataclass(frozen=True)
class Calibration:
    """tau of every tree after short prompts, by temperature. `ease`, sorted: how many times as many drafted
    tokens were accepted in each text as on average. far, confidence (of the head's scores): None where they
    were not measured.
    """

    taus: dict[float, dict[TreeShape, float]]
    ease: tuple[float, ...]
    far: Far | None = None
    confidence: Confidence | None = None

    def tau(self, shape: TreeShape, temperature: float, context: int = SHORT) -> float:
        """The acceptance length of a tree, between the temperatures and contexts that were measured."""
        low, high = (
            1 + (self.taus[t][shape] - 1) * (self.far.at(t, context) if self.far else 1) for t in TEMPERATURES
        )
        share = min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1])
        return low + (high - low) * share

    def write(self, folder: Path) -> None:
        """Write FOLDER/calibration.json. Raises OSError if that cannot be."""
        taus = {
            f"{t:g}": {shape.name: round(tau, 4) for shape, tau in taus.items()}
            for t, taus in self.taus.items()
        }
        record = {"format": FORMAT, "ease": [round(x, 4) for x in self.ease], "tau": taus}
        if self.far:
            kept = {f"{t:g}": round(ratio, 4) for t, ratio in self.far.kept.items()}
            record["far"] = asdict(self.far) | {"kept": kept}
        if self.confidence:
            pairs = asdict(self.confidence).items()
            record["confidence"] = {name: [round(x, 4) for x in pair] for name, pair in pairs}
        self._of(record)
        write_text(folder / CALIBRATION, json.dumps(record, indent=0) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """What `write` wrote, or None if the folder has none. Raises InputError on a damaged file."""
        file = folder / CALIBRATION
        if not file.exists():
            return None
        try:
            return cls._of(read_json(file))
        except ValueError as e:
            raise InputError(f"{file}: damaged: {e}; delete it") from None
        except InputError as e:
            raise InputError(f"{e}; delete it") from None

    @classmethod
    def _of(cls, record: dict) -> Calibration:
        """A record as it is written. Raises Wrong, a ValueError."""
        MEASURED.check(record)
        if record["format"] != FORMAT:
            raise Wrong("format", record["format"], f"{FORMAT}, which this version reads")
        taus = {
            t: {_shape(t, name, tau): float(tau) for name, tau in record["tau"][f"{t:g}"].items()}
            for t in TEMPERATURES
        }
        if not taus[0.0]:
            raise Wrong("tau.0", {}, "some trees")
        if any(trees.keys() != taus[0.0].keys() for trees in taus.values()):
            raise Wrong("tau", record["tau"], "the same trees for each temperature")
        confidence = None
        if "confidence" in record:
            pairs = (record["confidence"][f.name] for f in fields(Confidence))
            confidence = Confidence(*(tuple(map(float, pair)) for pair in pairs))
            for f in fields(Confidence):
                if not 0 < getattr(confidence, f.name)[0] < 100:
                    raise Wrong(f"confidence.{f.name}", record["confidence"][f.name], "a slope above 0 first")
        far = cls._read_far(record["far"]) if "far" in record else None
        return cls(taus, tuple(map(float, record["ease"])), far, confidence)

    @staticmethod
    def _read_far(record: dict) -> Far:
        if record["context"] <= SHORT:
            raise Wrong("far.context", record["context"], f"more than {SHORT}")
        return Far(record["context"], {t: float(record["kept"][f"{t:g}"]) for t in TEMPERATURES})


def _shape(temperature: float, name: str, tau: float) -> TreeShape:
    """The tree of this name, which may be accepted for `tau` tokens a step. Raises Wrong."""
    key = f"tau.{temperature:g}.{printable(name)}"
    try:
        shape = TreeShape.parse(name)
    except ValueError as e:
        raise Wrong(key, tau, f"a name that is a tree ({e})") from None
    if shape.nodes > MOST_NODES or shape.depth > MOST_NODES or shape.width > MOST_NODES:
        raise Wrong(key, tau, f"a tree of numbers up to {MOST_NODES:,}")
    if tau > shape.window:
        raise Wrong(key, tau, f"at most {shape.window}, which is what a step of this tree emits")
    return shape
