#!/usr/bin/env bash
# The heads of the table of twelve drafters, and the table: docs/benchmarks.md#twelve-drafters.
#     benchmarks/twelve.sh TEXT QUESTIONS
# TEXT: the data folder of a run of train.py, QUESTIONS: the papers' six sets. Each head is trained for twelve minutes on one
# thread. Hydra++ and Medusa heads were trained by an earlier version, and the draft model of SpS is the target's layers
# 0, 1 and 29 (scripts in git history): put them into COPY/hydra, COPY/medusa and runs/draft.
set -euo pipefail
C=checkpoints/smollm2-135m COPY=runs/twelve-target
TRAIN="python train.py --checkpoint $C --shards $1 --max-len 1100 --batch-tokens 1024 --lr 1e-3 --epochs 20 --minutes 12
    --seed 1 --validate-prompts 0"
NEW="$TRAIN --states 3 --draft-vocab 8192 --loss lk"
cp -r $C $COPY
for kind in eagle3 dspark dflash; do
    $NEW --kind $kind $([ $kind = eagle3 ] && echo --steps 4) --out runs/$kind
done
$NEW --kind p-eagle --markov-rank 32 --out runs/p-eagle
$TRAIN --kind eagle --out runs/eagle
for kind in eagle3 dspark dflash p-eagle eagle; do
    cp -r runs/$kind $COPY
done
python -m drafters.ngram --checkpoint $C --out runs/tokens.bin "$1"/*.jsonl
echo '[[0], [1], [2], [3], [0, 0], [0, 1], [0, 2], [1, 0], [2, 0], [0, 0, 0], [0, 0, 0, 0]]' > runs/tree12.json
python evaluate.py --checkpoint $COPY --out runs/twelve --questions "$2" --limit 4 --max-new-tokens 96 --threads 2 \
    --temperature 0,1 --draft draft-model=runs/draft --tree draft-model=6,4,1 --tree eagle=runs/tree12.json \
    --speculate eagle3,lookup+eagle3,p-eagle,dspark,dflash,eagle2,eagle,hydra,medusa,draft-model,lookup,rest,lookahead \
    --datastore runs/tokens.bin --window 3 --level 3 --guess-set 3
