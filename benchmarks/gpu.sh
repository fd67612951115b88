#!/bin/sh
# Measure a GPU within fifteen minutes on a bare machine with Python, torch and triton, in three runs. Each
# prints results as soon as it has them, needs no other run, and continues after a failure; the last lines name
# what failed. Programs compile at the same time and measure one at a time.
#
#   benchmarks/gpu.sh RUN...
#
#   steps   5 minutes: plain steps and trees of 8, 16 and 60 nodes after 128 and 8,192 tokens, with profiles;
#           tests of the kernels and of captured steps
#   modes   6 minutes: int8, fp8, int4, a batch of 8, fp8 caches; compute-sanitizer on the kernels
#   real    4 minutes: CHECKPOINT with its head on QUESTIONS: text with and without drafting, acceptance
#           length and speed of three trees, transformers
#
# steps and modes run random weights of SHAPE (llama-3.1-8b), made on the GPU. real needs CHECKPOINT
# (checkpoints/smollm2-135m), or a small GGUF file of it in parts, `split -b 32M FILE runs/carry/part-`; HEAD
# (heads/smollm2-135m-eagle3), unless CHECKPOINT has a converted one; and QUESTIONS, JSON lines.
# Wheels in runs/wheels are installed first, outside the project: where they are missing pydantic (with what
# it requires) and, for a GGUF file, gguf; pytest-xdist and execnet run tests side by side.
# PYTHON is .venv/bin/python, or else python3.
# Raw figures go to benchmarks/results/gpu-*, or to OUT.

set -u
cd "$(dirname "$0")/.." || exit 1
SHAPE=${SHAPE:-llama-3.1-8b}
CHECKPOINT=${CHECKPOINT:-checkpoints/smollm2-135m}
[ -n "${PYTHON:-}" ] || { PYTHON=.venv/bin/python && [ -x "$PYTHON" ]; } || PYTHON=python3
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=2 TORCHINDUCTOR_COMPILE_THREADS=4 TURNS="$notes/turns"

# part SECONDS NAME COMMAND...: run it for so long at most, its name before each line, remember a failure.
part() {
    seconds=$1 name=$2
    shift 2
    {
        timeout -k 10 "$seconds" "$@" || { echo "failed, status $?"; echo "$name" >>"$notes/failed"; }
    } 2>&1 | sed -u "s/^/$name: /"
}

# step NAME OPTION...: complete steps of the shape
step() {
    name=$1
    shift
    part 280 "$name" "$PYTHON" benchmarks/step.py --name "gpu-$name" --shape "$SHAPE" "$@"
}

# tests SECONDS NAME PROCESSES WHICH...: tests, compiled concurrently with the others; nothing is measured until
# they end.
tests() {
    seconds=$1 name=$2 processes=$3
    shift 3
    "$PYTHON" -c 'import xdist' 2>/dev/null && set -- -n "$processes" "$@"
    part "$seconds" "$name" flock -s "$TURNS" "$PYTHON" -m pytest -o addopts= --import-mode=importlib -q "$@"
}

# sanitize CHECK: the small tests of the kernels under compute-sanitizer
sanitize() {
    # Each tensor is an allocation of its own, so that reading beyond it is an error.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 90 "$1" compute-sanitizer --tool "$1" --error-exitcode 99 \
        --target-processes application-only "$PYTHON" -m pytest -o addopts= --import-mode=importlib -q -x \
        -p no:cacheprovider -k "sizes0 or test_move or share_tiles or test_rank" tests/kernels/gpu
}

run_steps() {
    step plain --tree 1,0,0 --context 128 8192 --top 14 &
    EAGLE_DENSE=1 step dense --tree 1,0,0 --context 128 8192 --top 8 &
    EAGLE_DENSE=1 TORCHINDUCTOR_ENABLE_PDL=1 step dense-early --tree 1,0,0 16,4,5 --context 128 8192 --top 8 &
    step tree-8 --tree 8,2,4 --context 128 8192 --top 8 &
    step tree-16 --tree 16,4,5 --context 128 8192 --no-check &
    step tree-60 --tree 60,7,10 --context 128 8192 --top 20 --no-check &
    tests 120 kernels 3 tests/kernels/gpu &
    tests 120 captured 2 tests/engine/test_cuda.py -k "tiny and (eagle3 or lookup) and not fp8" &
    wait
}

run_modes() {
    step int8 --modes int8 --tree 1,0,0 8,2,4 --context 128 --top 8 &
    step fp8 --modes fp8 --tree 1,0,0 8,2,4 --context 128 &
    step int4 --modes int4 --tree 1,0,0 8,2,4 --context 128 &
    step batch-8 --batch 8 --tree 1,0,0 16,4,5 --context 1024 &
    step fp8-caches --kv fp8 --tree 1,0,0 8,2,4 --context 8192 &
    wait
    PATH=$PATH:/usr/local/cuda/bin
    command -v compute-sanitizer >/dev/null || { echo "left out: compute-sanitizer (not installed)"; return; }
    sanitize memcheck &
    sanitize racecheck
    wait
}

run_real() {
    [ -d "$CHECKPOINT" ] || {
        cat runs/carry/part-* >runs/carry/model.gguf &&
            "$PYTHON" convert_checkpoint.py --checkpoint runs/carry/model.gguf --out "$CHECKPOINT" --dtype bf16
    }
    [ -d "$CHECKPOINT" ] || { echo "left out: real (no $CHECKPOINT)"; return; }
    [ -d "$CHECKPOINT/eagle3" ] ||
        "$PYTHON" convert_checkpoint.py --checkpoint "${HEAD:-heads/smollm2-135m-eagle3}" --target "$CHECKPOINT"
    [ -f "${QUESTIONS:-}" ] || { echo "left out: real (no QUESTIONS)"; return; }
    set -- benchmarks/peers.py --checkpoint "$CHECKPOINT" --questions "$QUESTIONS" --limit 12 --max-new-tokens 200 \
        --methods eagle3
    for tree in 8,2,4 16,4,5 60,7,10; do
        part 170 "tree $tree" "$PYTHON" "$@" --name "gpu-real-${tree%%,*}" --tree "$tree" &
    done
    tests 100 text 0 tests/engine/test_cuda.py -k "smollm2 and eagle3" &
    wait  # the trees measure when all others have compiled: transformers would keep them waiting
    part 70 transformers "$PYTHON" "$@" --name gpu-real-transformers --no-ours --transformers --limit 4
}

for run in "$@"; do
    case $run in steps | modes | real) ;; *) echo "error: no run $run" >&2; set --; break ;; esac
done
if [ $# = 0 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' benchmarks/gpu.sh
    exit 2
fi
if [ -d runs/wheels ]; then
    "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --upgrade --target "$notes/site" runs/wheels/*.whl &&
        export PYTHONPATH="$notes/site${PYTHONPATH:+:$PYTHONPATH}"
fi
"$PYTHON" -c 'import sys, torch, triton
print("python", sys.version.split()[0], "torch", torch.__version__, "triton", triton.__version__)
sys.exit(not torch.cuda.is_available())' || { echo "error: torch sees no GPU here" >&2; exit 2; }
nvidia-smi --query-gpu=name,driver_version,memory.total,clocks.max.sm,clocks.max.memory --format=csv
[ -z "${OUT:-}" ] || mkdir -p "$OUT"
for run in "$@"; do
    "run_$run"
done
[ -s "$notes/failed" ] || { echo "all parts ended well"; exit 0; }
echo "failed: $(paste -sd' ' "$notes/failed")"
exit 1
