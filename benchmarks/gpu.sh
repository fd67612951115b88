#!/bin/sh
# Everything a GPU is asked, in one call: correctness, then the sweep at the Llama-3.1-8B shape, then the peers.
#   benchmarks/gpu.sh                                  # random weights (by arithmetic, 40 GB)
#   CHECKPOINT=DIR QUESTIONS=question.jsonl GGUF=FILE GPT_FAST=DIR GPT_FAST_CHECKPOINT=FILE benchmarks/gpu.sh
# Needs what requirements-dev.txt lists. Raw figures: benchmarks/results/gpu-*.json. PYTHON names the interpreter
# (default .venv/bin/python).
set -eu
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
SHAPE=${SHAPE:-llama-3.1-8b}
CHECKPOINT=${CHECKPOINT:-}
CHECKPOINT=${CHECKPOINT%/}
if [ -n "${GPT_FAST:-}" ] && [ -z "${GPT_FAST_CHECKPOINT:-}" ]; then
    echo "error: GPT_FAST needs GPT_FAST_CHECKPOINT too" >&2
    exit 1
fi

"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "error: torch sees no GPU here")'
FP8=$("$PYTHON" -c 'import torch; print("fp8" if torch.cuda.get_device_capability() >= (8, 9) else "")')

echo "== correctness"
"$PYTHON" -m pytest tests/engine/test_cuda.py tests/kernels/test_gpu_kernels.py

echo "== the step, by precision and tree size"
"$PYTHON" benchmarks/step.py --shape "$SHAPE" --modes none int8 $FP8 --rows 1 8 16 32 60 \
    --context 128 1024 4096 --name gpu-step

echo "== by context"
"$PYTHON" benchmarks/step.py --shape "$SHAPE" --modes none int8 --rows 1 60 \
    --context 128 1024 4096 16384 32768 --name gpu-context

echo "== by batch"
"$PYTHON" benchmarks/step.py --shape "$SHAPE" --modes none int8 --rows 1 16 60 \
    --context 1024 --batch 1 2 4 8 16 32 --name gpu-batch

if [ -n "$CHECKPOINT" ]; then
    echo "== products"
    "$PYTHON" benchmarks/products.py --checkpoint "$CHECKPOINT" --name gpu-products
    echo "== start"
    "$PYTHON" benchmarks/startup.py --checkpoint "$CHECKPOINT" --name gpu-startup
    echo "== peers"
    set -- --checkpoint "$CHECKPOINT" --transformers --name gpu-peers
    [ -z "${QUESTIONS:-}" ] || set -- "$@" --questions "$QUESTIONS"
    [ ! -d "$CHECKPOINT-int8" ] || set -- "$@" --int8 "$CHECKPOINT-int8"
    [ -z "${GGUF:-}" ] || set -- "$@" --gguf "$GGUF"
    [ -z "${GPT_FAST:-}" ] || set -- "$@" --gpt-fast "$GPT_FAST" --gpt-fast-checkpoint "$GPT_FAST_CHECKPOINT"
    "$PYTHON" benchmarks/peers.py "$@"
fi
