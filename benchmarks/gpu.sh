#!/bin/sh
# Measure a GPU, in stages. Each takes less than 9 minutes, needs no other one, and goes on after a failure;
# the last lines name what has failed.
#
#   benchmarks/gpu.sh STAGE...    or `all` of them
#
#   probe     versions, driver, the GPU's state
#   correct   tests on the GPU: kernels, captured steps, the text of every drafter of a tiny model, of two of
#             CHECKPOINT's; compute-sanitizer, where it is installed
#   step      plain steps and trees of 8, 32 and 60 rows; a profile of each
#   context   plain steps and the tree of 60 rows after 128 to 32,768 tokens, on our kernels and on PyTorch's
#   kv        the same steps over caches in fp8
#   batch     plain steps, trees of 16 and 60 rows of 1 to 32 texts
#   quant     int8, fp8 and int4; their products alone
#   peers     transformers and ours
#   smollm2   peers on CHECKPOINT, with QUESTIONS
#   batches   1 to 56 texts of CHECKPOINT at a time, plainly, with EAGLE-3 and by transformers; QUESTIONS
#   train     heads of KINDS (eagle3 p-eagle dflash dspark) for CHECKPOINT on the shards in TRAIN_DATA, all
#             in MINUTES (7); another call on the same machine goes on, and only a run that ends writes its head
#
# Models have random weights of SHAPE (llama-3.1-8b), made on the GPU. CHECKPOINT is checkpoints/smollm2-135m;
# without it, the files runs/carry/part-* are unpacked, which `tar c -C checkpoints smollm2-135m | split -b 38M
# - runs/carry/part-` makes. OPTIONS are more of step.py and peers.py, such as --autotune, TRAIN_OPTIONS of
# train.py. PYTHON is .venv/bin/python, or else python3. Raw figures go to benchmarks/results/gpu-*, or to OUT.

set -u
cd "$(dirname "$0")/.." || exit 1
STAGES="probe correct step context kv batch quant peers smollm2 batches train"
SHAPE=${SHAPE:-llama-3.1-8b}
CHECKPOINT=${CHECKPOINT:-checkpoints/smollm2-135m}
OPTIONS=${OPTIONS:-}
[ -n "${PYTHON:-}" ] || { PYTHON=.venv/bin/python && [ -x "$PYTHON" ]; } || PYTHON=python3
export PYTHONUNBUFFERED=1 CHECKPOINT
notes=$(mktemp -d)
trap 'rm -rf "$notes"' EXIT

# part SECONDS NAME COMMAND...: run it for so long at most, remember if it failed, go on.
part() {
    seconds=$1 name=$2
    shift 2
    echo "== $name: at most $seconds s"
    timeout -k 10 "$seconds" "$@" || { echo "== $name failed, status $?"; echo "$name" >>"$notes/failed"; }
}

# measure SECONDS NAME SCRIPT OPTION...: a benchmark, whose figures are called gpu-NAME
measure() {
    seconds=$1 name=$2 script=$3
    shift 3
    part "$seconds" "$name" "$PYTHON" "benchmarks/$script.py" --name "gpu-$name" "$@"
}

# tests SECONDS NAME WHICH...
tests() {
    seconds=$1 name=$2
    shift 2
    part "$seconds" "$name" "$PYTHON" -m pytest -o addopts= --import-mode=importlib -q -s --durations=8 "$@"
}

# beside SECONDS NAME WHICH...: tests that run beside others, as most of their time goes into compiling
beside() {
    (
        export TORCHINDUCTOR_COMPILE_THREADS=2
        tests "$@" >"${OUT:-$notes}/tests-$2.log" 2>&1
    ) &
}

left_out() {
    echo "== left out: $1"
    echo "$1" >>"$notes/left_out"
}

# have_checkpoint STAGE: whether CHECKPOINT is there, or can be joined
have_checkpoint() {
    [ -d "$CHECKPOINT" ] || [ ! -d runs/carry ] || {
        mkdir -p "$(dirname "$CHECKPOINT")" && cat runs/carry/part-* | tar x -C "$(dirname "$CHECKPOINT")"
    }
    [ -d "$CHECKPOINT" ] || { left_out "$1 (no $CHECKPOINT)"; return 1; }
}

probe() {
    part 20 versions "$PYTHON" -c 'import platform, torch, triton
print("python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)'
    part 20 nvidia-smi nvidia-smi
}

# sanitize CHECK: the small tests of the kernels under compute-sanitizer
sanitize() {
    # Each tensor is an allocation of its own, so that reading beyond it is an error.
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 part 70 "$1" compute-sanitizer --tool "$1" --error-exitcode 99 \
        --target-processes application-only "$PYTHON" -m pytest -o addopts= --import-mode=importlib -q -x \
        -p no:cacheprovider -k "sizes0 or test_move or share_tiles or test_rank" tests/kernels/gpu
}

correct() {
    rm -f "${OUT:-$notes}"/tests-*.log
    for dtype in float32 bfloat16; do
        beside 120 "fp8-$dtype" tests/engine/test_cuda.py -k "fp8-$dtype"
    done
    wait
    beside 240 kernels tests/kernels/gpu
    for dtype in float32 bfloat16; do
        beside 240 "eagle-$dtype" tests/engine/test_cuda.py -k "tiny-$dtype and eagle"
        beside 240 "$dtype" tests/engine/test_cuda.py -k "tiny-$dtype and not eagle"
    done
    have_checkpoint "text of the checkpoint" &&
        beside 240 checkpoint tests/engine/test_cuda.py -k smollm2
    wait
    cat "${OUT:-$notes}"/tests-*.log
    PATH=$PATH:/usr/local/cuda/bin
    command -v compute-sanitizer >/dev/null || { left_out "compute-sanitizer (not installed)"; return; }
    sanitize memcheck
    sanitize racecheck
}

TREES="1,0,0 60,7,10"
CONTEXTS="128 1024 4096 8192 16384 32768"

step() {
    measure 520 step step --shape "$SHAPE" --tree 1,0,0 8,2,4 32,4,8 60,7,10 --context 128 --top 12 $OPTIONS
}

context() {
    measure 270 context step --shape "$SHAPE" --tree $TREES --context $CONTEXTS $OPTIONS
    measure 250 context-pytorch step --shape "$SHAPE" --no-kernels --tree $TREES --context $CONTEXTS $OPTIONS
}

kv() {
    measure 520 kv step --shape "$SHAPE" --kv fp8 --tree $TREES --context $CONTEXTS $OPTIONS
}

batch() {
    measure 520 batch step --shape "$SHAPE" --tree $TREES 16,3,4 --batch 32 8 1 2 4 16 --context 1024 $OPTIONS
}

quant() {
    fp8=$("$PYTHON" -c 'import torch; print("fp8" * (torch.cuda.get_device_capability() >= (8, 9)))')
    measure 370 quant step --shape "$SHAPE" --modes int8 $fp8 int4 --tree $TREES --context 128 $OPTIONS
    measure 160 products products --shape "$SHAPE" --rows 1 16 60
}

peers() {
    measure 520 peers peers --shape "$SHAPE" --limit 4 --transformers $OPTIONS
}

smollm2() {
    have_checkpoint smollm2 || return
    [ -n "${QUESTIONS:-}" ] || { left_out "smollm2 (no QUESTIONS)"; return; }
    [ -d "$CHECKPOINT-int8" ] ||
        part 90 quantize "$PYTHON" quantize.py --checkpoint "$CHECKPOINT" --mode int8
    measure 400 smollm2 peers --checkpoint "$CHECKPOINT" --quantized "$CHECKPOINT-int8" --transformers \
        --questions "${QUESTIONS%% *}" --limit 12 $OPTIONS
}

batches() {
    have_checkpoint batches || return
    [ -n "${QUESTIONS:-}" ] || { left_out "batches (no QUESTIONS)"; return; }
    measure 520 batches batches --checkpoint "$CHECKPOINT" --questions $QUESTIONS --rounds 2 \
        --transformers "$CHECKPOINT"
}

train() {
    have_checkpoint train || return
    [ -n "${TRAIN_DATA:-}" ] || { left_out "train (no TRAIN_DATA)"; return; }
    set -- ${KINDS:-eagle3 p-eagle dflash dspark}
    each=$((60 * ${MINUTES:-7} / $#))
    # The last 0.3 of a kind's time is for what is not training: loading, validation, export.
    for kind in "$@"; do
        echo "== train-$kind: at most $each s"
        timeout -s INT -k 20 "$each" "$PYTHON" train.py --checkpoint "$CHECKPOINT" --kind "$kind" --states 5 \
            --shards "$TRAIN_DATA" --out "runs/gpu-$kind" \
            --minutes "$(awk "BEGIN { print $each * 0.7 / 60 }")" ${TRAIN_OPTIONS:-}
        case $? in
        0) ;;
        124) left_out "the rest of train-$kind (out of time: the next call goes on)" ;;
        *) echo "== train-$kind failed"; echo "train-$kind" >>"$notes/failed" ;;
        esac
        [ -n "${OUT:-}" ] || continue
        [ ! -f "runs/gpu-$kind-work/log.jsonl" ] ||
            part 5 "log-$kind" cp "runs/gpu-$kind-work/log.jsonl" "$OUT/gpu-train-$kind.jsonl"
        [ ! -d "runs/gpu-$kind" ] || part 5 "head-$kind" cp -r "runs/gpu-$kind" "$OUT/$kind"
    done
}

[ "$*" != all ] || set -- $STAGES
for stage in "$@"; do
    case " $STAGES " in *" $stage "*) ;; *) echo "error: no stage $stage" >&2; set --; break ;; esac
done
if [ $# = 0 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' benchmarks/gpu.sh
    exit 2
fi
"$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    { echo "error: torch sees no GPU here" >&2; exit 2; }
[ -z "${OUT:-}" ] || mkdir -p "$OUT"
for stage in "$@"; do
    "$stage"
done
[ ! -s "$notes/left_out" ] || echo "left out: $(paste -sd, "$notes/left_out")"
[ -s "$notes/failed" ] || { echo "all parts ended well"; exit 0; }
echo "failed: $(paste -sd' ' "$notes/failed")"
exit 1
