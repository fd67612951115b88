"""train.py as a user runs it, on the golden target: heads learn, text is collected, folders are written."""
import json
import shutil
from pathlib import Path

import pytest
import torch
from helpers.training import log_of, options
from safetensors.torch import load_file

import quantize
import train
from checkpoint.convert import convert
from checkpoint.loading import load_head, load_model
from engine.calibration import Calibration
from engine.decoder import Decoder
from sampling.options import Sampling
from training import precision
from training.choices import BLOCK_KINDS
from training.plan import SHORT
from training.trainer import Trainer
from training.validate import drafter_of
from tree import TreeShape

TITLES = {
    "eagle3": "# EAGLE-3", "p-eagle": "# P-EAGLE", "dflash": "# DFlash", "dspark": "# DSpark",
    "eagle": "# EAGLE-1", "medusa": "# Medusa", "hydra": "# Hydra",
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", TITLES)
def test_trains_exports_and_decodes(golden, prompt_file, tmp_path, kind):
    def last(folder: Path, **changes) -> dict:
        assert train.main(options(golden, prompt_file, folder, epochs=6, kind=kind, **changes)) == 0
        log = log_of(folder / "work")
        assert sum("held_out" in row and row["tau"] >= 1 for row in log) == 6
        return [row for row in log if "loss" in row][-1]

    # Medusa heads begin with the target's own guess at the next token, and the run is short.
    more = {"drafts": 4} | ({"markov-rank": 8, "loss": "coupled"} if kind == "dspark" else {})
    more = more if kind in BLOCK_KINDS else {}
    trained = last(tmp_path, **more, **({"lr": 1e-2} if kind == "medusa" else {}))
    control = last(tmp_path / "control", lr=1e-12, **more)
    assert trained["loss"] < (0.93 if kind in ("eagle", "medusa") else 0.85) * control["loss"]
    # An EAGLE-1 head begins with the feature itself, which says much on this target.
    assert trained["accuracy"][0] >= control["accuracy"][0] + (0 if kind == "eagle" else 0.05)
    folder = convert(tmp_path / "head", tmp_path / "converted", target=golden, quiet=True)
    target, _ = load_model(golden)
    drafter = drafter_of(load_head(folder, target, kind), TreeShape(16, 3, 4))
    prompt = list(b"u:question 3\na:")
    (plain,) = Decoder(target, compile=False, max_seq_len=200).generate([prompt], Sampling(60))
    (drafted,) = Decoder(target, drafter, compile=False, max_seq_len=200).generate([prompt], Sampling(60))
    assert drafted.ids == plain.ids
    card = (tmp_path / "head" / "README.md").read_text()
    assert card.startswith(TITLES[kind])
    assert "answers" in card and "| 6 |" in card and "python train.py" in card
    assert (Calibration.read(folder) is not None) == (kind in ("eagle", "eagle3", *BLOCK_KINDS))
    assert (tmp_path / "head" / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_both_layouts_hold_the_same_head(golden, prompt_file, tmp_path):
    assert train.main(options(golden, prompt_file, tmp_path, layout="both", epochs=1)) == 0
    target, _ = load_model(golden)
    folders = tmp_path / "head", tmp_path / "head" / "speculators"
    one, other = (
        load_head(convert(f, tmp_path / f"back-{f.name}", target=golden, quiet=True), target) for f in folders
    )
    assert one.args == other.args
    assert all(torch.equal(t, other.state_dict()[name]) for name, t in one.state_dict().items())


@pytest.mark.slow
def test_a_narrow_head_with_an_average(golden, prompt_file, tmp_path):
    narrow = {
        "hidden-size": 32, "heads": 2, "kv-heads": 1, "intermediate-size": 48, "ema": 0.9,
        "schedule": "linear", "epochs": 1,
    }
    assert train.main(options(golden, prompt_file, tmp_path, **narrow)) == 0
    target, _ = load_model(golden)
    head = load_head(convert(tmp_path / "head", tmp_path / "converted", target=golden, quiet=True), target)
    assert (head.args.hidden_size, head.args.num_kv_heads, head.args.own_embedding) == (32, 1, True)


@pytest.mark.slow
def test_features_on_disk_change_nothing(golden, prompt_file, tmp_path, capsys):
    computed = options(golden, prompt_file, tmp_path / "a", **{"feature-memory": 0, "batch-tokens": 200})
    assert train.main(computed) == 0
    stored = options(golden, prompt_file, tmp_path / "b", **{"batch-tokens": 200}) + ["--cache-features"]
    assert train.main(stored) == 0
    assert "rows need 0.00 GB" in capsys.readouterr().err
    assert list((tmp_path / "b" / "work" / "features").glob("*/*.bin"))
    losses = [[row["loss"] for row in log_of(tmp_path / x / "work") if "loss" in row] for x in "ab"]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ("eagle", "p-eagle"))
def test_products_of_floats(golden, prompt_file, tmp_path, monkeypatch, kind):
    """A bfloat16 target learns in float32 where that is faster. Its text and its stored features stay."""
    losses = []
    for faster in (False, True):
        monkeypatch.setattr(precision, "float32_is_faster", lambda dtype, faster=faster: faster)
        folder, work = tmp_path / str(faster), tmp_path / str(faster) / "work"
        if faster:
            shutil.copytree(tmp_path / "False" / "work" / "data", work / "data")
        changes = {"kind": kind, "dtype": "bf16", "cache-features": tmp_path / "features"}
        assert train.main(options(golden, prompt_file, folder, **changes)) == 0
        weights = load_file(folder / "head" / "model.safetensors")
        assert {t.dtype for t in weights.values() if t.is_floating_point()} == {torch.bfloat16}
        losses.append([entry["loss"] for entry in log_of(work) if "loss" in entry])
    assert len(list(tmp_path.glob("features/*/*.bin"))) == 1  # the second run found those of the first
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


@pytest.mark.slow
def test_a_quantised_copy_writes_and_reads(golden, prompt_file, tmp_path, monkeypatch):
    copy = tmp_path / "copy"
    assert quantize.main(["--checkpoint", str(golden), "--mode", "int8", "--out", str(copy)]) == 0
    asked = {"epochs": 1, "cache-features": tmp_path / "features"}
    assert train.main(options(golden, prompt_file, tmp_path / "own", **asked)) == 0
    words = options(golden, prompt_file, tmp_path / "fast", **asked, writer=copy, reader=copy)
    assert train.main(words) == 0
    assert len(list((tmp_path / "features").iterdir())) == 2  # those of each in a folder of its own
    shards = [{path.name for path in (tmp_path / of / "work/data").iterdir()} for of in ("own", "fast")]
    assert not shards[0] & shards[1]
    card = (tmp_path / "fast/head/README.md").read_text()
    assert f"--writer {copy}" in card and f"--reader {copy}" in card


@pytest.mark.slow
def test_short_epochs_unroll_fewer_steps(golden, prompt_file, tmp_path, monkeypatch):
    original, unrolled = Trainer.gradients, set()

    def watched(self, places, steps):
        unrolled.add((self.epoch, steps))
        return original(self, places, steps)

    monkeypatch.setattr(Trainer, "gradients", watched)
    assert train.main(options(golden, prompt_file, tmp_path, steps=5, **{"short-epochs": 1})) == 0
    assert unrolled == {(0, SHORT), (1, 5)}
    # What is reported stays comparable.
    assert {len(row["held_out"]) for row in log_of(tmp_path / "work") if "held_out" in row} == {5}


@pytest.mark.slow
def test_other_prompts_and_settings_have_their_own_shards(golden, prompt_file, tmp_path, capsys):
    def collect(**changes) -> tuple[dict, str]:
        """Shards with their times, and what was printed."""
        settings = {"synthesize": 0, "limit": 12, **changes}
        assert train.main([*options(golden, prompt_file, tmp_path, **settings), "--collect-only"]) == 0
        times = {p: p.stat().st_mtime_ns for p in (tmp_path / "work" / "data").iterdir()}
        return times, capsys.readouterr().err

    first, _ = collect()
    assert len(first) == 1 and collect()[0] == first
    more, messages = collect(limit=24)  # the first half is there already, and one prompt is held out
    assert len(more) == 2 and first.items() < more.items() and "23 conversations (prompts 23)" in messages
    for change in ({"temperature": 0.3}, {"seed": 2}, {"max-new-tokens": 30}):
        shards, messages = collect(**change)
        assert len(shards) == len(more) + 1 and "11 conversations" in messages, change
        more = shards
    data = json.loads((tmp_path / "work" / "data.json").read_text())
    assert data["rows"] == 11 and data["answer_tokens"] > 11 * 3


@pytest.mark.slow
def test_all_kinds_of_text_are_mixed(golden, prompt_file, tmp_path, capsys):
    answer = {"from": "gpt", "value": "good day to you"}
    rows = [{"conversations": [{"from": "human", "value": f"hello {i}"}, answer]} for i in range(9)]
    (tmp_path / "share.json").write_text(json.dumps(rows))
    (tmp_path / "openings.txt").write_text("Write \n\nSum\n")
    target = shutil.copytree(golden, tmp_path / "target")  # one that ends its turns with a line
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"stop_ids": [ord("\n")]}))
    text = {
        "conversations": tmp_path / "share.json", "openings": tmp_path / "openings.txt", "turns": 2,
        "synthesize": 24,
    }
    assert train.main([*options(target, prompt_file, tmp_path, **text), "--collect-only"]) == 0
    text = {"shards": tmp_path / "work" / "data", "synthesize": 0}
    assert train.main([*options(target, None, tmp_path / "again", **text), "--collect-only"]) == 0
    first, again = (line for line in capsys.readouterr().err.splitlines() if " conversations (" in line)
    assert all(f"{source} " in first for source in ("prompts", "synthesized", "conversations"))
    assert first.split(" ")[0] == again.split(" ")[0]  # the same text, read back


@pytest.mark.slow
def test_the_users_words_may_be_learnt_too(golden, prompt_file, tmp_path, monkeypatch):
    """What is held out, and what the vocabulary is counted from, stay the answers."""
    seen, begin = {}, Trainer.__init__

    def watched(self, objective, features, rows, held_out, *args, **options):
        seen[learn] = rows, held_out, objective.head.draft_ids.tolist()
        begin(self, objective, features, rows, held_out, *args, **options)

    monkeypatch.setattr(Trainer, "__init__", watched)
    for learn in ("answers", "text"):
        assert train.main(options(golden, prompt_file, tmp_path / learn, learn=learn, epochs=1)) == 0
    answers, text = seen["answers"], seen["text"]
    assert [row["ids"] for row in text[0]] == [row["ids"] for row in answers[0]]
    assert all(row["answers"] == [[1, len(row["ids"])]] for row in text[0])
    assert all(row["answers"][0][0] > 1 for row in answers[0]) and text[1:] == answers[1:]


@pytest.mark.slow
def test_the_default_folders(golden, prompt_file, tmp_path, monkeypatch):
    """As in the README: --out alone; the work lies beside it. A second head of the same kind may take its
    place.
    """
    monkeypatch.chdir(tmp_path)
    argv = options(golden, prompt_file, tmp_path, out="runs/mine", work=None, epochs=1)
    assert train.main(argv) == 0
    assert sorted(p.name for p in (tmp_path / "runs").iterdir()) == ["mine", "mine-work"]
    files = sorted(p.name for p in (tmp_path / "runs" / "mine").iterdir())
    assert files == ["README.md", "calibration.json", "config.json", "curves.png", "model.safetensors"]
    assert train.main(argv) == 0
    other = options(golden, prompt_file, tmp_path, out="runs/mine", work="w", kind="eagle", epochs=1)
    assert train.main(other) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind,more", [
    ("dspark", {"drafts": 1}), ("dspark", {"drafts": 2}), ("dflash", {"drafts": 2}),
    ("dspark", {"draft-vocab": 3}),
])
def test_heads_too_small_to_measure_trees_by(golden, prompt_file, tmp_path, capsys, kind, more):
    """They are written without a calibration, which is said."""
    asked = {"kind": kind, "steps": None, "draft-vocab": 64, "validate-prompts": 2, **more}
    assert train.main(options(golden, prompt_file, tmp_path, **asked)) == 0
    said = capsys.readouterr()
    assert "wrote " in said.out and "gets no calibration.json (trees are measured by 8 nodes" in said.err
    assert not (tmp_path / "head" / "calibration.json").exists()
