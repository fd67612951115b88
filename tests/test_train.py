"""Training on the golden target: the unrolled loss is the decoder's drafting, runs resume exactly, heads come back whole."""
import json
from pathlib import Path

import pytest
import torch

import train
from checkpoint import CheckpointError, load_head, load_target
from convert_checkpoint import convert
from dataset import read_prompts, user_header
from decoder import Decoder, Sampling
from drafters.eagle import Eagle
from export import export_eagle3
from model import KVCache
from tokenizer import Tokenizer
from tree import TreeShape


def test_unrolled_steps_are_the_drafters_chain(models):
    """Top-1 hits of every unrolled step, counted by running the head as the decoder does: caches, true features, chain."""
    target, head = models
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    rows = [{"ids": torch.randint(0, 256, (n,), generator=g).tolist(), "answer": a} for n, a in ((14, 5), (9, 2), (11, 8))]
    steps = 4
    batch = train.Batch(rows, "cpu")
    features, state, greedy = train.read_target(target, head, batch.tokens)
    teacher = torch.nn.functional.linear(state, target.lm_head.weight[head.draft_ids]).softmax(-1)
    with torch.no_grad():
        loss, accuracy = train.ttt_loss(head, batch, features, teacher, greedy, steps)

    in_draft = set(head.draft_ids.tolist())
    losses = [[] for _ in range(steps)]
    hits = [0] * steps
    valid = [0] * steps
    for b, row in enumerate(rows):
        ids, n = row["ids"], len(row["ids"])
        for j in range(row["answer"] - 1, n - 2):
            caches = [KVCache(1, 64, head.args, torch.float32, "cpu")]
            at = torch.arange(j + 1)[None]
            visible = torch.arange(64) <= at[..., None]
            with torch.no_grad():
                h = head(torch.tensor([ids[1 : j + 2]]), head.fuse(features[b : b + 1, : j + 1]), at, at, visible, caches)[:, -1:]
                for step in range(steps):
                    if step:
                        at = torch.tensor([[j + step]])
                        h = head(torch.tensor([[ids[j + 1 + step]]]), h, at, at, torch.arange(64) <= at[..., None], caches)
                    if j + 2 + step >= n:
                        break
                    valid[step] += 1
                    if ids[j + 2 + step] in in_draft:
                        logits = head.logits(h)[0, 0]
                        hits[step] += int(head.draft_ids[logits.argmax()] == greedy[b, j + 1 + step])
                        losses[step].append(-(teacher[b, j + 1 + step] * logits.log_softmax(-1)).sum())
    want = sum(train.DECAY**i * torch.stack(x).mean() for i, x in enumerate(losses))
    assert loss.item() == pytest.approx(want.item(), rel=1e-5)
    assert accuracy.tolist() == pytest.approx([h / v for h, v in zip(hits, valid)])


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"turns": [f"question {i}: what is {i} and {i * i}?"]}) + "\n" for i in range(24)))
    return file


def options(golden, prompt_file, tmp_path, **changes) -> list[str]:
    given = {
        "checkpoint": golden, "prompts": prompt_file, "out": tmp_path / "head", "work": tmp_path / "work", "max-new-tokens": 40,
        "decode-batch": 12, "draft-vocab": 64, "epochs": 2, "steps": 3, "batch-tokens": 512, "synthesize": 4, "seed": 1, **changes,
    }
    return ["--no-compile", "--dtype", "fp32", *(str(x) for k, v in given.items() for x in (f"--{k}", v))]


def weights(folder: Path) -> dict:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_trains_exports_and_decodes(golden, prompt_file, tmp_path):
    def last(folder: Path, **changes) -> dict:
        assert train.main(options(golden, prompt_file, folder, epochs=6, **changes)) == 0
        log = [json.loads(line) for line in (folder / "work" / "log.jsonl").read_text().splitlines()]
        assert sum("held_out" in row for row in log) == 6
        return [row for row in log if "loss" in row][-1]

    trained, control = last(tmp_path), last(tmp_path / "control", lr=1e-12)
    assert trained["loss"] < 0.85 * control["loss"] and trained["accuracy"][0] > control["accuracy"][0] + 0.05
    folder = convert(tmp_path / "head", tmp_path / "converted", target=golden, quiet=True)
    target, _ = load_target(golden)
    head = load_head(folder, target)
    prompt = list(b"u:question 3\na:")
    (plain,) = Decoder(target, compile=False, max_seq_len=200).generate([prompt], Sampling(60))
    (fast,) = Decoder(target, Eagle(head, TreeShape(16, 3, 4)), compile=False, max_seq_len=200).generate([prompt], Sampling(60))
    assert fast.ids == plain.ids


def test_an_interrupted_run_resumes_exactly(golden, prompt_file, tmp_path, monkeypatch):
    assert train.main(options(golden, prompt_file, tmp_path / "whole")) == 0
    original, calls = train.Trainer.loss, iter(range(1000))

    def stops(self, indices, rows, steps):
        if rows is self.rows and next(calls) == 5:
            raise KeyboardInterrupt
        return original(self, indices, rows, steps)

    monkeypatch.setattr(train.Trainer, "loss", stops)
    argv = options(golden, prompt_file, tmp_path / "broken", **{"save-seconds": 0})
    assert train.main(argv) == 130 and not (tmp_path / "broken" / "head").exists()
    assert train.main(argv) == 0
    a, b = weights(tmp_path / "whole" / "head"), weights(tmp_path / "broken" / "head")
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_short_epochs_unroll_fewer_steps(golden, prompt_file, tmp_path, monkeypatch):
    original, seen = train.Trainer.loss, []

    def watched(self, indices, rows, steps):
        seen.append((rows is self.rows, self.epoch, steps))
        return original(self, indices, rows, steps)

    monkeypatch.setattr(train.Trainer, "loss", watched)
    assert train.main(options(golden, prompt_file, tmp_path, steps=5, **{"short-epochs": 1})) == 0
    assert {(epoch, steps) for training, epoch, steps in seen if training} == {(0, train.SHORT), (1, 5)}
    assert {steps for training, _, steps in seen if not training} == {5}  # what is reported stays comparable


def test_other_settings_do_not_resume(golden, prompt_file, tmp_path, capsys):
    assert train.main(options(golden, prompt_file, tmp_path)) == 0
    assert train.main(options(golden, prompt_file, tmp_path, steps=2)) == 1
    assert "other settings" in capsys.readouterr().err
    state = tmp_path / "work" / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert train.main(options(golden, prompt_file, tmp_path)) == 1
    assert "state.pt: damaged" in capsys.readouterr().err


def test_other_prompts_and_settings_have_their_own_shards(golden, prompt_file, tmp_path, capsys):
    def collected(**changes) -> list[dict]:
        given = {"synthesize": 0, "limit": 12, **changes}
        assert train.main([*options(golden, prompt_file, tmp_path, **given), "--collect-only"]) == 0
        return {p: p.stat().st_mtime_ns for p in (tmp_path / "work" / "data").iterdir()}, capsys.readouterr().err

    first, _ = collected()
    assert len(first) == 1 and collected()[0] == first
    more, said = collected(limit=24)  # the first half is there already
    assert len(more) == 2 and first.items() < more.items() and "24 conversations" in said
    for change in ({"temperature": 0.3}, {"seed": 2}, {"max-new-tokens": 30}):
        found, said = collected(**change)
        assert len(found) == len(more) + 1 and "12 conversations" in said, change
        more = found


def test_export_is_the_layout_others_read(models, golden, tmp_path):
    """Ours -> Hugging Face -> ours rounds to bfloat16 and changes nothing else."""
    target, head = models
    export_eagle3(head, tmp_path / "hf")
    (tmp_path / "file").touch()
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == (tmp_path / "file").stat().st_mode
    again = load_head(convert(tmp_path / "hf", tmp_path / "back", target=golden, quiet=True), target)
    assert again.args == head.args
    mine, theirs = head.state_dict(), again.state_dict()
    assert mine.keys() == theirs.keys()
    for name in mine:
        if not name.startswith("embed."):
            want = mine[name].bfloat16().float() if mine[name].is_floating_point() else mine[name]
            assert torch.equal(want, theirs[name]), name


def test_prompt_files_of_every_kind(tmp_path):
    file = tmp_path / "p.jsonl"
    file.write_text(
        '{"turns": ["a", "b"]}\n{"prompt": "c\\u2028d"}\n\n'
        '{"conversations": [{"from": "human", "value": "e"}]}\n{"messages": [{"role": "user", "content": "f"}]}\n'
    )
    assert read_prompts(file) == ["a", "c\u2028d", "e", "f"]
    for bad, words in (("{}\n", "line 1"), ('{"turns": ["a"]}\n{"turns": [3]}\n', "line 2"), ("x\n", "line 1"), ("", "no prompts")):
        file.write_text(bad)
        with pytest.raises(CheckpointError, match=words):
            read_prompts(file)


def test_user_header_is_what_comes_before_the_user(golden):
    assert user_header(Tokenizer.load(golden)) == list(b"u:")


def test_bad_input_is_one_line(golden, tmp_path, capsys):
    assert train.main(["--checkpoint", str(golden), "--out", str(tmp_path / "h"), "--work", str(tmp_path / "w"), "--no-compile"]) == 1
    assert train.main(["--checkpoint", str(tmp_path), "--out", str(tmp_path / "h"), "--work", str(tmp_path / "w")]) == 1
    (tmp_path / "file").write_text("")
    assert train.main(["--checkpoint", str(golden), "--out", str(tmp_path / "file"), "--work", str(tmp_path / "w")]) == 1
    assert train.main(["--checkpoint", str(golden), "--out", str(tmp_path / "h"), "--work", str(tmp_path / "w"), "--device", "cuda:9"]) == 1
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 4 and "nothing to train on" in lines[0] and "file" in lines[2] and "cuda:9" in lines[3]


def test_nan_loss_stops_and_names_the_batch(golden, prompt_file, tmp_path, capsys, monkeypatch):
    original = train.ttt_loss
    monkeypatch.setattr(train, "ttt_loss", lambda *a: (original(*a)[0] * float("nan"), original(*a)[1]))
    assert train.main(options(golden, prompt_file, tmp_path)) == 1
    assert "loss is nan at step 0" in capsys.readouterr().err
