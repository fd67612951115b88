"""The prompts that a command line names."""
from __future__ import annotations

import argparse

from common.errors import InputError
from common.files import read_text
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
            raise InputError(f"--prompt-ids {ids!r:.200}: expected numbers separated by commas") from None
        if max(map(abs, prompts[-1])) >= 1 << 31:
            raise InputError(f"--prompt-ids {ids!r:.200}: a token id is below 2^31")
    for path in o.prompt_file:
        if path.endswith(".jsonl"):
            prompts += read_prompts(path)
            continue
        # Editors end every file with a line end.
        prompts.append(read_text(path, what="--prompt-file").removesuffix("\n"))
    return prompts
