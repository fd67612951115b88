"""calibration.json beside a head's weights: the acceptance of its trees. `engine.calibrate` measures it."""
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer

from checkpoint.folder import CALIBRATION
from common.errors import InputError
from common.files import read_json, write_text
from common.schema import number, schema_of, whole
from tree import TreeShape

TEMPERATURES = (0.0, 1.0)  # at which heads are measured; between them tau is interpolated
SHORT, LONG = 128, 4096  # tokens of context at which heads are measured


def _of_all_temperatures(found: dict[float, Any]) -> dict[float, Any]:
    trees = {frozenset(value) for value in found.values() if isinstance(value, dict)}
    if found.keys() != set(TEMPERATURES) or len(trees) > 1:
        raise ValueError("0 and 1, with the same trees")
    return found


def by_temperature(kind: Any) -> Any:
    """Values of a type by temperature, for each that heads are measured at."""
    temperature = Annotated[float, PlainSerializer(lambda t: f"{t:g}")]
    return Annotated[dict[temperature, kind], AfterValidator(_of_all_temperatures)]


def four_digits(kind: Any) -> Any:
    """Numbers of a type, rounded to four decimals when written."""
    return Annotated[kind, PlainSerializer(lambda x: round(x, 4))]


Shape = Annotated[TreeShape, BeforeValidator(TreeShape.parse), PlainSerializer(lambda shape: shape.name)]
Taus = Annotated[dict[Shape, four_digits(number(1, 1e6))], Field(min_length=1)]
Line = tuple[four_digits(number(above=0, high=100)), four_digits(number(-100, 100))]  # slope and shift


@dataclass(frozen=True)
class Confidence:
    """Probability that a node is accepted: exp(slope * score of its path + shift), at most 1.

    (slope, shift) at temperature 0 and at 1; between them they are interpolated.
    """

    of_greedy: Line = (1.0, 0.0)
    of_sampling: Line = (1.0, 0.0)


@dataclass(frozen=True)
class Far:
    """Accepted drafts after `context` tokens over those after SHORT, by temperature."""

    context: whole(SHORT + 1)
    kept: by_temperature(four_digits(number(above=0, high=1e6)))

    def at(self, temperature: float, context: int) -> float:
        """Interpolate the ratio at any context: linear up to `self.context`, constant after it."""
        share = (min(context, self.context) - SHORT) / (self.context - SHORT)
        return 1 + max(share, 0.0) * (self.kept[temperature] - 1)


@dataclass(frozen=True)
class Calibration:
    """Acceptance lengths of a head, as in the file.

    taus: tau of every tree after short prompts, by temperature. ease: accepted drafts of each text over those
    of the average one, sorted. far, confidence (of the head's scores): None where they were not measured.
    """

    taus: Annotated[by_temperature(Taus), Field(alias="tau")]
    ease: Annotated[tuple[four_digits(number(0, 1e6)), ...], Field(min_length=1)]
    far: Far | None = None
    confidence: Confidence | None = None
    format: Literal[1] = 1

    def tau(self, shape: TreeShape, temperature: float, context: int = SHORT) -> float:
        """Return the acceptance length of a tree, between the temperatures and contexts measured."""
        low, high = (
            1 + (self.taus[t][shape] - 1) * (self.far.at(t, context) if self.far else 1) for t in TEMPERATURES
        )
        return low + (high - low) * min(max(temperature, TEMPERATURES[0]), TEMPERATURES[1])

    def write(self, folder: Path) -> None:
        """Write FOLDER/calibration.json. Raises OSError, and ValueError on a number that cannot be."""
        adapter = schema_of(Calibration).adapter
        content = adapter.dump_json(self, indent=1, exclude_none=True, by_alias=True)
        adapter.validate_json(content)
        write_text(folder / CALIBRATION, content.decode() + "\n")

    @classmethod
    def read(cls, folder: Path) -> Calibration | None:
        """Read FOLDER/calibration.json; None if there is none. Raises InputError on a damaged file."""
        file = folder / CALIBRATION
        if not file.exists():
            return None
        try:
            return schema_of(cls).check(read_json(file))
        except (ValueError, InputError) as e:
            raise InputError(f"{file}: damaged: {e}; delete it") from None
