"""The prompts that a command line names."""
from __future__ import annotations

import argparse
from pathlib import Path

from common.errors import InputError
from tokens.dataset import read_prompts


def gather_prompts(o: argparse.Namespace) -> list[str | list[int]]:
    """All prompts of --prompt, --prompt-ids and --prompt-file, in this order, as text or token ids.

    Raises InputError on one that cannot be read.
    """
    prompts: list[str | list[int]] = list(o.prompt)
    for ids in o.prompt_ids:
        try:
            prompts.append([int(i) for i in ids.replace(" ", "").split(",")])
        except ValueError:
            raise InputError(f"--prompt-ids {ids!r}: expected numbers separated by commas") from None
    for path in o.prompt_file:
        if path.endswith(".jsonl"):
            prompts += read_prompts(path)
            continue
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as e:
            raise InputError(f"--prompt-file {path}: cannot be read ({e})") from None
        prompts.append(text.removesuffix("\n"))  # editors end every file with one
    return prompts
