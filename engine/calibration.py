"""What is known of a head: the acceptance length tau of every tree, in calibration.json beside its weights.

`engine.calibrating` measures it, after short prompts and, by one tree, after a long text.
"""
from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from checkpoint.folder import CALIBRATION
from common.errors import InputError
from common.files import read_json, write_text
from drafters.base import Confidence
from tree import TreeShape

FORMAT = 1
WIDTHS = (1, 2, 3, 4, 6, 8, 10)
NODES = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 60, 80)
DEEPEST = 7
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
        write_text(folder / CALIBRATION, json.dumps(record, indent=0) + "\n")

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """What `write` wrote, or None if the folder has none. Raises InputError on a damaged file."""
        file = folder / CALIBRATION
        if not file.exists():
            return None
        record = read_json(file)
        try:
            if record["format"] != FORMAT:
                raise ValueError(f"format {record['format']} is not the {FORMAT} this version reads")
            taus = {
                t: {TreeShape.parse(name): float(tau) for name, tau in trees.items()}
                for t, trees in ((t, record["tau"][f"{t:g}"]) for t in TEMPERATURES)
            }
            ease = tuple(float(x) for x in record["ease"])
            if not (ease and taus[0.0]) or any(trees.keys() != taus[0.0].keys() for trees in taus.values()):
                raise ValueError("it is not complete")
            if not all(0 <= x < math.inf for x in ease):
                raise ValueError("an ease is impossible")
            if any(not 1 <= tau <= shape.window for trees in taus.values() for shape, tau in trees.items()):
                raise ValueError("an acceptance length is impossible")
            far = cls._read_far(record["far"]) if "far" in record else None
            confidence = None
            if "confidence" in record:
                confidence = cls._read_confidence(record["confidence"])
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise InputError(f"{file}: damaged ({type(e).__name__}: {e}); delete it") from None
        return cls(taus, ease, far, confidence)

    @staticmethod
    def _read_confidence(record: dict) -> Confidence:
        found = Confidence(*(tuple(map(float, record[f.name])) for f in fields(Confidence)))
        for slope, shift in (found.of_greedy, found.of_sampling):
            if not (0 < slope < 100 and -100 < shift < 100):
                raise ValueError("a confidence is impossible")
        return found

    @staticmethod
    def _read_far(record: dict) -> Far:
        far = Far(int(record["context"]), {t: float(record["kept"][f"{t:g}"]) for t in TEMPERATURES})
        if far.context <= SHORT or not all(0 < kept < math.inf for kept in far.kept.values()):
            raise ValueError("what is far is impossible")
        return far
