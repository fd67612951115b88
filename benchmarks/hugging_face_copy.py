"""Write a converted target as a Hugging Face folder, for the converters of other programs.

    python benchmarks/hugging_face_copy.py --checkpoint DIR --out DIR

For a LLaMA; the weights keep their dtype. Needs transformers.
"""
from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import bench  # noqa: F401, first: it makes the modules below importable
from hugging_face import as_llama

from checkpoint.loading import load_model
from common.cli import Options, run_command
from common.errors import InputError
from common.files import read_json
from tokens.tokenizer import copy_files


def write_folder(checkpoint: str | Path, out: str | Path) -> Path:
    """Write the target and its tokenizer to the folder `out`, which must not be there yet, and return it.

    Raises InputError if it is there, or if the target is no LLaMA with plain rotary embeddings; OSError.
    """
    checkpoint, out = Path(checkpoint), Path(out)
    if out.exists():
        raise InputError(f"--out {out}: is there already; choose another folder")
    target, config = load_model(checkpoint)
    model, stop_ids = as_llama(target), config["stop_ids"]
    model.generation_config.eos_token_id = stop_ids
    model.config.eos_token_id, model.config.bos_token_id = stop_ids[0], config["bos_id"]
    part = out.with_name(f".{out.name}.partial")
    shutil.rmtree(part, ignore_errors=True)
    try:
        model.save_pretrained(part)
        copy_files(checkpoint, part)
        if (part / "tokenizer.json").exists():
            # Else transformers takes any LLaMA's tokenizer for SentencePiece and adds tokens to it.
            file = part / "tokenizer_config.json"
            settings = read_json(file) if file.exists() else {}
            settings["tokenizer_class"] = "PreTrainedTokenizerFast"
            file.write_text(json.dumps(settings, indent=1) + "\n")
        part.rename(out)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return out


def main(argv: list[str] | None = None) -> int:
    """The command line. Returns the exit status."""
    p = Options(__doc__)
    p.add_argument("--checkpoint", required=True, help="converted target")
    p.add_argument("--out", required=True, help="folder to make")
    o = p.parse_args(argv)
    return run_command(lambda: print(f"wrote {write_folder(o.checkpoint, o.out)}"), OSError)


if __name__ == "__main__":
    sys.exit(main())
