"""The command `eagle`, installed by `pip install .`: the scripts of this folder as subcommands.

    eagle generate -m checkpoints/smollm2-135m --speculate auto "Why is the sky blue?"
"""
from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path

if __package__:  # installed as a package: import its modules by the top-level names of the checkout
    sys.path.insert(0, str(Path(__file__).parent))

from common.cli import VERSION
from common.errors import did_you_mean

COMMANDS = {
    "generate": ("generate", "generate text, or chat with --interactive"),
    "serve": ("serve", "OpenAI-compatible server and chat page"),
    "convert": ("convert_checkpoint", "convert a target or a draft head"),
    "quantize": ("quantize", "quantize a converted checkpoint"), "train": ("train", "train a draft head"),
    "evaluate": ("evaluate", "measure speedup and acceptance length"),
    "export": ("checkpoint.export", "export a head for SGLang, vLLM and llama.cpp"),
    "datastore": ("drafters.ngram", "write the datastore of --speculate rest"),
}


def __getattr__(name: str):
    """Import LLM lazily, for `from eagle_decoder.eagle import LLM`."""
    if name != "LLM":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    return import_module("llm").LLM


def main(argv: list[str] | None = None) -> int:
    """Run a subcommand. Returns its exit status; 2 for an unknown one."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in COMMANDS:
        sys.argv = [f"eagle {name}", *rest]
        return import_module(COMMANDS[name][0]).main(rest)
    lines = [f"  {command:10} {what}" for command, (_, what) in COMMANDS.items()]
    if name == "--version":
        print(f"eagle {VERSION}")
        return 0
    if name in ("-h", "--help"):
        print("usage: eagle COMMAND ... (eagle COMMAND --help)", *lines, sep="\n")
        return 0
    print(f"eagle: error: {name}: no such command{did_you_mean(name, COMMANDS)}; see --help", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
