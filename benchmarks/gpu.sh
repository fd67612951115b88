#!/bin/sh
# What a GPU is asked, in stages. Each takes less than 9 minutes, needs no other one, and goes on after a
# failure; at the end stands what has failed.
#
#   benchmarks/gpu.sh STAGE...    or `all` of them
#
#   probe     versions, memory bandwidth, the cost of a launch, products in bf16
#   correct   tests on the GPU: kernels, captured steps, the text of every drafter, of CHECKPOINT's two;
#             compute-sanitizer
#   step      a step of 1, 8, 32 and 60 rows, and where its time goes
#   context   1 and 60 rows after 128 to 32,768 tokens; attention against torch's
#   kv        the same steps over caches in fp8
#   batch     1, 16 and 60 rows of 1 to 32 texts
#   quant     int8, fp8 and int4; their products alone
#   peers     transformers, torch.compile and, if GPT_FAST and GPT_FAST_CHECKPOINT are set, gpt-fast
#   smollm2   peers on CHECKPOINT, with the questions of QUESTIONS if that is set
#   batches   1 to 56 texts of CHECKPOINT at a time, plainly, with EAGLE-3 and by transformers; QUESTIONS
#   train     heads of KINDS (eagle3 p-eagle dflash dspark) for CHECKPOINT on the shards in TRAIN_DATA, all
#             in MINUTES (7); another call on the same machine goes on, and only a run that ends writes its head
#
# Models have random weights of SHAPE (llama-3.1-8b), made on the GPU. CHECKPOINT is checkpoints/smollm2-135m;
# what is not there is joined from runs/carry, see parts.py. OPTIONS are more of step.py and peers.py, such as
# --autotune, TRAIN_OPTIONS of train.py. PYTHON is .venv/bin/python, or else python3. Raw figures go to
# benchmarks/results/gpu-*, or into OUT.

set -u
cd "$(dirname "$0")/.." || exit 1
STAGES="probe correct step context kv batch quant peers smollm2 batches train"
SHAPE=${SHAPE:-llama-3.1-8b}
CHECKPOINT=${CHECKPOINT:-checkpoints/smollm2-135m}
OPTIONS=${OPTIONS:-}
[ -n "${PYTHON:-}" ] || { PYTHON=.venv/bin/python && [ -x "$PYTHON" ]; } || PYTHON=python3
export PYTHONUNBUFFERED=1
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

# beside NAME WHICH...: tests that run beside others, as most of their time goes into compiling
beside() {
    (
        export TORCHINDUCTOR_COMPILE_THREADS=2
        tests 350 "$@" >"${OUT:-$notes}/tests-$1.log" 2>&1
    ) &
}

left_out() {
    echo "== left out: $1"
    echo "$1" >>"$notes/left_out"
}

# have_checkpoint STAGE: whether CHECKPOINT is there, or can be joined
have_checkpoint() {
    [ -d "$CHECKPOINT" ] || [ ! -d runs/carry ] ||
        part 50 join "$PYTHON" benchmarks/parts.py join runs/carry "$(dirname "$CHECKPOINT")"
    [ -d "$CHECKPOINT" ] || { left_out "$1 (no $CHECKPOINT)"; return 1; }
}

probe() {
    measure 300 probe probe --shape "$SHAPE"
}

correct() {
    rm -f "${OUT:-$notes}"/tests-*.log
    beside kernels tests/kernels/gpu tests/kernels/test_parts.py -k gpu
    beside captured tests/engine/test_cuda.py
    for dtype in float32 bfloat16; do
        beside "eagle-$dtype" tests/engine/test_cuda_drafters.py -k "tiny and $dtype and eagle"
        beside "$dtype" tests/engine/test_cuda_drafters.py -k "tiny and $dtype and not eagle"
    done
    have_checkpoint "text of the checkpoint" &&
        beside checkpoint tests/engine/test_cuda_drafters.py -k smollm2
    wait
    cat "${OUT:-$notes}"/tests-*.log
    part 140 sanitizer "$PYTHON" benchmarks/sanitize.py
}

step() {
    measure 520 step step --shape "$SHAPE" --rows 1 8 32 60 --context 128 --top 12 --limit 430 $OPTIONS
}

context() {
    measure 130 attention gpu_attention --shape "$SHAPE"
    measure 400 context step --shape "$SHAPE" --rows 1 60 \
        --context 128 1024 4096 8192 16384 32768 --limit 310 $OPTIONS
}

kv() {
    measure 520 kv step --shape "$SHAPE" --kv fp8 --rows 1 60 \
        --context 128 1024 4096 8192 16384 32768 --limit 430 $OPTIONS
}

batch() {
    measure 520 batch step --shape "$SHAPE" --rows 60 1 16 --batch 32 8 1 2 4 16 \
        --context 1024 --limit 430 $OPTIONS
}

quant() {
    fp8=$("$PYTHON" -c 'import torch; print("fp8" * (torch.cuda.get_device_capability() >= (8, 9)))')
    measure 370 quant step --shape "$SHAPE" --modes int8 $fp8 int4 --rows 1 60 \
        --context 128 --limit 290 $OPTIONS
    measure 160 products products --shape "$SHAPE" --rows 1 16 60
}

peers() {
    measure 270 peers-ours peers --shape "$SHAPE" --limit 4 $OPTIONS
    set -- --no-ours --transformers --torch-compile
    [ -z "${GPT_FAST:-}" ] || set -- "$@" --gpt-fast "$GPT_FAST" --gpt-fast-checkpoint "$GPT_FAST_CHECKPOINT"
    measure 260 peers peers --shape "$SHAPE" --limit 4 "$@" $OPTIONS
}

smollm2() {
    have_checkpoint smollm2 || return
    [ -d "$CHECKPOINT-int8" ] ||
        part 90 quantize "$PYTHON" quantize.py --checkpoint "$CHECKPOINT" --mode int8
    set -- --checkpoint "$CHECKPOINT" --int8 "$CHECKPOINT-int8" --transformers --torch-compile
    [ -z "${QUESTIONS:-}" ] || set -- "$@" --questions "$QUESTIONS" --limit 12
    measure 400 smollm2 peers "$@" $OPTIONS
}

batches() {
    have_checkpoint batches || return
    [ -n "${QUESTIONS:-}" ] || { left_out "batches (no QUESTIONS)"; return; }
    measure 480 batches batches --checkpoint "$CHECKPOINT" --questions $QUESTIONS --minutes 6 --each 3 \
        --max-new-tokens 128
}

train() {
    have_checkpoint train || return
    [ -n "${TRAIN_DATA:-}" ] || { left_out "train (no TRAIN_DATA)"; return; }
    set -- ${KINDS:-eagle3 p-eagle dflash dspark}
    each=$((60 * ${MINUTES:-7} / $#))
    # The states of the target are the same five for all, and computed once. The last 0.3 of a kind's time is
    # for what is not training: loading, validation, export.
    for kind in "$@"; do
        echo "== train-$kind: at most $each s"
        timeout -s INT -k 20 "$each" "$PYTHON" train.py --checkpoint "$CHECKPOINT" --kind "$kind" --states 5 \
            --shards "$TRAIN_DATA" --out "runs/gpu-$kind" --save-seconds 60 --cache-features runs/gpu-features \
            --minutes "$(awk "BEGIN { print $each * 0.7 / 60 }")" ${TRAIN_OPTIONS:-}
        case $? in
        0) ;;
        124) left_out "the rest of train-$kind (out of time: the next call goes on)" ;;
        *) echo "== train-$kind failed"; echo "train-$kind" >>"$notes/failed" ;;
        esac
        [ -n "${OUT:-}" ] || continue
        [ ! -f "runs/gpu-$kind-work/log.jsonl" ] ||
            part 5 "log-$kind" cp "runs/gpu-$kind-work/log.jsonl" "$OUT/gpu-train-$kind.jsonl"
        [ ! -d "runs/gpu-$kind" ] ||
            part 5 "head-$kind" "$PYTHON" benchmarks/parts.py split "runs/gpu-$kind" "$OUT/$kind" --size 15
    done
}

[ "$*" != all ] || set -- $STAGES
for stage in "$@"; do
    case " $STAGES " in *" $stage "*) ;; *) echo "error: no stage $stage" >&2; set --; break ;; esac
done
if [ $# = 0 ]; then
    sed -n '2,/^$/s/^# \{0,1\}//p' "$0"
    exit 2
fi
if [ -n "${GPT_FAST:-}" ] && [ -z "${GPT_FAST_CHECKPOINT:-}" ]; then
    echo "error: GPT_FAST needs GPT_FAST_CHECKPOINT too" >&2
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
