"""Shards of text written by actors of Ray Data, on the machines that Ray has joined, instead of torchrun's.

Ray deals the numbers of the shards that are missing; an actor that dies is started again, and goes on with
the answers that its shard has. Needs the package ray[data]. All machines have this program and all folders
at the same paths.
"""
from __future__ import annotations

import argparse
import os
from pathlib import Path

import ray
import ray.data
import torch
from tqdm import tqdm

from checkpoint.loading import identity, load_model
from common.errors import InputError
from common.threads import use_threads
from engine.runtime import Runtime
from kernels.backend import TORCH
from kernels.choose import choose_backend
from training.collect import Collector
from training.processes import Processes
from training.text import plan_text
from training.validate import decoding_copy

ROOT = Path(__file__).resolve().parent.parent
PATHS = "checkpoint", "out", "work", "prompts", "openings", "conversations", "writer"


class Writer:
    """An actor: it holds the target, and writes shards by their numbers."""

    def __init__(self, o: argparse.Namespace):
        use_threads()
        target, config = load_model(o.checkpoint, o.device, Runtime(dtype=o.dtype).torch_dtype)
        name = identity(target)
        if o.compile and torch.device(o.device).type == "cpu":
            o.compile = choose_backend("cpu", say=print) is not TORCH
        target = decoding_copy(target) if o.compile else target
        self.collector = plan_text(o, target, name, config["stop_ids"], Processes(), print)
        self.collector.quiet = True

    def __call__(self, batch: dict) -> dict:
        """Write the shards whose numbers are in a batch of Ray Data, {"id": [n]}."""
        for number in batch["id"]:
            self.collector.write_piece(int(number))
        return batch


def everywhere(o: argparse.Namespace) -> argparse.Namespace:
    """The options as an actor takes them: with full paths, on the one device that Ray gives it."""
    full = {name: os.path.abspath(path) for name in PATHS if (path := getattr(o, name))}
    return argparse.Namespace(**{**vars(o), **full, "device": torch.device(o.device).type})


def write_on_ray(o: argparse.Namespace, collector: Collector) -> None:
    """Have `--actors` of Ray write the shards that a collector has planned.

    Joins the cluster that RAY_ADDRESS names, or starts one on this machine. Raises InputError if an actor
    cannot do it.
    """
    ray.init(runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}}, log_to_driver=False, logging_level="error")
    ray.data.DataContext.get_current().enable_progress_bars = False
    numbers = [number for number, piece in enumerate(collector.pieces) if not piece.path.exists()]
    try:
        if numbers:
            _write(everywhere(o), numbers)
    except ray.exceptions.RayError as e:
        raise InputError(f"--queue ray: {str(e).strip().splitlines()[-1]}") from None
    finally:
        ray.shutdown()


def _write(o: argparse.Namespace, numbers: list[int]) -> None:
    gpus = int(o.device == "cuda")
    written = ray.data.from_items([{"id": n} for n in numbers], override_num_blocks=len(numbers)).map_batches(
        Writer, fn_constructor_args=(o,), batch_size=1, num_gpus=gpus, num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=o.actors or 1),
    )
    with tqdm(total=len(numbers), unit="shard", desc="text") as bar:
        for batch in written.iter_batches(batch_size=None):
            bar.update(len(batch["id"]))
