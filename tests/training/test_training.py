"""The parts of training on the golden target: losses, rows, collected text, features, gradients over
processes.
"""
import dataclasses
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from checkpoint.convert import convert
from checkpoint.export import export
from checkpoint.loading import load_head, load_model
from common.errors import InputError
from drafters.eagle import Eagle
from engine.decoder import Decoder
from engine.run import Output
from model import KVCache
from sampling.options import Sampling
from tokens.tokenizer import Tokenizer
from training import corpus
from training.batches import batches
from training.collect import Collector, user_end, user_header
from training.features import Features, StoredFeatures
from training.log import chain_tau
from training.new_head import Shape, new_head
from training.objective import DECAY, TOKEN_LOSS, Eagle1Objective, Eagle3Objective
from training.processes import Processes
from training.trainer import Plan, Trainer
from training.validate import Validator
from tree import TreeShape

PROMPT = list(b"u:question 3\na:")


def random_rows(*spans: list[tuple[int, list[list[int]]]]) -> list[dict]:
    g = torch.Generator().manual_seed(1)
    return [
        {"ids": torch.randint(0, 256, (n,), generator=g).tolist(), "answers": a, "source": "test"} for n,
        a in spans
    ]


ROWS = random_rows((14, [[5, 14]]), (9, [[2, 9]]), (11, [[8, 11]]), (24, [[4, 10], [15, 24]]))


def chain_steps(head, features, row: dict, steps: int):
    """The head run as the decoder does, with caches: yields (draft step, position j, output [H]) for every
    scored chain.
    """
    ids = row["ids"]
    for begin, end in row["answers"]:
        for j in range(begin - 1, end - 2):
            caches = [KVCache(1, 64, head.args, torch.float32, "cpu")]
            at = torch.arange(j + 1)[None]
            visible, feature = torch.arange(64) <= at[..., None], head.fuse(features[None, : j + 1])
            h = head(torch.tensor([ids[1 : j + 2]]), feature, at, at, visible, caches)[:, -1:]
            for step in range(steps):
                if j + 2 + step >= end:
                    break
                if step:
                    at = torch.tensor([[j + step]])
                    h = head(
                        torch.tensor([[ids[j + 1 + step]]]), h, at, at, torch.arange(64) <= at[..., None],
                        caches
                    )
                yield step, j, h[0, 0]


@torch.no_grad()
def test_unrolled_losses_are_the_drafters_chains(models):
    target, head = models
    steps = 4
    aim = Eagle3Objective(target, head, steps, False)
    batch = aim.batch(ROWS, steps)
    said = Features(target, aim.aux_layers).read(ROWS)
    loss, hits = aim.loss(batch, said, batch.scored, [0] * len(ROWS))
    in_draft = set(head.draft_ids.tolist())
    want, right, valid, scored = [
        torch.zeros(()) for _ in range(steps)
    ], [0] * steps, [0] * steps, [0] * steps
    for features, state, greedy, row in zip(*said, ROWS):
        teacher = F.linear(state, target.lm_head.weight[head.draft_ids]).softmax(-1)
        for step, j, h in chain_steps(head, features, row, steps):
            valid[step] += 1
            if row["ids"][j + 2 + step] in in_draft:
                logits = head.logits(h)
                scored[step] += 1
                right[step] += int(head.draft_ids[logits.argmax()] == greedy[j + 1 + step])
                want[step] = want[step] - (teacher[j + 1 + step] * logits.log_softmax(-1)).sum()
    torch.testing.assert_close(
        loss, sum(DECAY**i * w / n for i, (w, n) in enumerate(zip(want, scored))), rtol=1e-5, atol=1e-5
    )
    assert hits.tolist() == right and batch.valid == valid and batch.scored == scored
    # Both answers of the last row, nothing between them.
    assert valid[0] == 8 + 6 + 2 + 5 + 8 and 0 < scored[0] < valid[0]


@torch.no_grad()
def test_regression_losses_are_the_heads_outputs(models1):
    target, head = models1
    aim = Eagle1Objective(target, head, False, 0.1)
    batch = aim.batch(ROWS, 1)
    said = _, state, greedy = Features(target, aim.aux_layers).read(ROWS)
    given, hits = aim.loss(batch, said, batch.scored, [0] * len(ROWS))  # without gradients there is no noise
    loss, right = torch.zeros(()), 0
    raw = target.causal(
        torch.nn.utils.rnn.pad_sequence([torch.tensor(r["ids"]) for r in ROWS], batch_first=True),
        head.args.aux_layers
    )[1]
    for i, row in enumerate(ROWS):
        for _, j, h in chain_steps(head, raw[i], row, 1):
            wanted, logits = state[i, j + 1], head.logits(h)
            loss = loss + F.smooth_l1_loss(h, wanted) - TOKEN_LOSS * (
                head.logits(wanted).softmax(-1) * logits.log_softmax(-1)
            ).sum()
            right += int(logits.argmax() == greedy[i, j + 1])
    torch.testing.assert_close(given, loss / batch.scored[0], rtol=1e-5, atol=1e-5)
    assert hits.tolist() == [right]


def test_noise_belongs_to_the_row(models1):
    """EAGLE-1 reads noisy features in training: the same for a row in any batch, other for another seed, of
    the stated size.
    """
    target, head = models1
    aim = Eagle1Objective(target, head, False, 0.1)
    said = Features(target, ()).read(ROWS)
    aim.learn_scale(*said[:2], torch.ones(said[1].shape[:2], dtype=torch.bool))
    seen, run = [], aim.run

    def watched(head, batch, feature):
        seen.append(feature - said[1] if len(batch.rows) > 1 else feature - said[1][1:2, :9])
        return run(head, batch, feature)

    aim.run = watched

    def ask(rows: list[dict], said: tuple, seeds: list[int]) -> None:
        batch = aim.batch(rows, 1)
        aim.loss(batch, said, batch.scored, seeds)

    ask(ROWS, said, [3, 4, 5, 6])
    ask(ROWS[1:2], tuple(x[1:2, :9] for x in said), [4])
    whole, alone = seen
    assert torch.equal(whole[1, :9], alone[0]) and not torch.equal(whole[0, :9], whole[1, :9])
    most = 0.1 * float(aim.scale)
    assert float(whole.abs().max()) <= most and float(
        whole[3].abs().mean()
    ) == pytest.approx(most / 2, rel=0.1)
    with torch.no_grad():
        ask(ROWS, said, [3, 4, 5, 6])
    assert not seen[-1].any()


def test_a_compiled_loss_is_the_loss(models):
    """Compiled and not, over batches of several shapes."""
    target, head = models
    head = head.twin(target, torch.float32)
    aims = [Eagle3Objective(target, head, 3, compiled) for compiled in (False, True)]
    for rows in (ROWS, ROWS[1:], ROWS[2:]):
        said = Features(target, aims[0].aux_layers).read(rows)
        (plain, _), (fast, _) = (
            aim.loss(aim.batch(rows, 3), said, [9, 9, 9], [0] * len(rows)) for aim in aims
        )
        torch.testing.assert_close(fast, plain, rtol=1e-5, atol=1e-5)


def test_features_are_scaled_and_the_scale_is_folded_back(models):
    """What is trained on scaled features is the head written for raw ones."""
    target, head = models
    head = head.twin(target, torch.float32)
    aim = Eagle3Objective(target, head, 2, False)
    said = Features(target, aim.aux_layers).read(ROWS)
    aim.learn_scale(*said[:2], torch.ones(said[0].shape[:2], dtype=torch.bool))
    scaled = (said[0] / aim.scale)[:, 1:]
    torch.testing.assert_close(
        scaled.pow(2).mean((0, 1)).sqrt(), torch.ones(scaled.shape[-1]), rtol=1e-4, atol=0
    )
    raw = Eagle3Objective(target, aim.trained(), 2, False)
    with torch.no_grad():
        a, b = (x.loss(x.batch(ROWS, 2), said, [9, 9], [0] * 4)[0] for x in (aim, raw))
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def trainer(models, tmp_path, head=None, rows=ROWS, **options) -> Trainer:
    target, given = models
    head = (head or given).twin(target, torch.float32).requires_grad_(True)
    for part in (head.embed, head.lm_head if not head.args.own_lm_head else None):
        if part is not None:
            part.requires_grad_(False)
    aim = Eagle3Objective(target, head, 3, False)
    plan = Plan(**{"epochs": 1, "batch_tokens": 64, **options.pop("plan", {})})
    return Trainer(aim, Features(target, aim.aux_layers), rows, ROWS, plan, tmp_path, **options)


def test_gradients_do_not_depend_on_how_a_batch_is_split(models, tmp_path):
    whole, split = trainer(models, tmp_path), trainer(models, tmp_path, micro_tokens=25)
    loss, accuracy = whole.gradients([0, 1, 2, 3], 3)
    assert len(split.micro_batches([0, 1, 2, 3])) > 2
    again = split.gradients([0, 1, 2, 3], 3)
    assert again[0] == pytest.approx(loss, rel=1e-5) and again[1] == pytest.approx(accuracy)
    for name, p in whole.parameters.items():
        torch.testing.assert_close(split.parameters[name].grad, p.grad, rtol=1e-4, atol=1e-6)
        assert p.grad.abs().max() > 0, name


def test_the_average_is_what_is_used(models, tmp_path):
    t = trainer(models, tmp_path, plan={"ema": 0.5, "lr": 1e-2})
    first = {name: p.detach().clone() for name, p in t.parameters.items()}
    t.gradients([0, 1, 2, 3], 3)
    t.update()
    name = "layer.wo.weight"
    now, mean = t.parameters[name].detach().clone(), t.average[name]
    # At first the average is short: (1 + 0) / (10 + 0).
    torch.testing.assert_close(mean, first[name] * 0.1 + now * 0.9)
    assert torch.equal(t.trained().state_dict()[name], mean) and torch.equal(t.parameters[name], now)


def test_rates_of_the_schedules():
    for schedule, middle in (("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)):
        plan = Plan(lr=2.0, schedule=schedule, warmup=0.1)
        assert plan.rate(0, 110) == pytest.approx(2 / 11) and plan.rate(10, 110) == pytest.approx(2.0)
        assert plan.rate(11 + 99 // 2, 110) == pytest.approx(2 * middle, rel=0.02)
        assert plan.rate(110, 110) == pytest.approx(2.0 if schedule == "constant" else 0.2, rel=0.02)
    assert chain_tau([0.5, 0.5]) == 1.75


@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_new_heads_start_from_the_target(models, kind):
    target, _ = models
    head = new_head(
        target, kind, torch.arange(0, 128, 2) if kind == "eagle3" else torch.arange(target.args.vocab_size),
        Shape(), 0
    )
    names = {name for name, p in head.named_parameters() if p.requires_grad}
    assert not any(
        name.startswith("embed") for name in names
    ) and ("lm_head.weight" in names) == (kind == "eagle3")
    if kind == "eagle3":
        assert torch.equal(head.lm_head.weight, target.lm_head.weight[0:128:2])


def test_heads_of_other_shapes(models, golden, tmp_path):
    """Narrower and wider than the target: embedding and lm_head of its own, spanned by the target's; written
    and read back.
    """
    target, _ = models
    hidden = target.args.hidden_size
    with pytest.raises(ValueError, match="EAGLE-1"):
        new_head(target, "eagle", torch.arange(target.args.vocab_size), Shape(hidden_size=hidden // 2), 0)
    with pytest.raises(ValueError, match="multiple"):
        new_head(target, "eagle3", torch.arange(64), Shape(num_heads=4, num_kv_heads=3), 0)
    for shape in (Shape(hidden // 2, 48, 2, 1, 8), Shape(hidden + 16, 40, 4, 4, 8)):
        head = new_head(target, "eagle3", torch.arange(64), shape, 0)
        assert head.embed is not target.embed and head.embed.weight.requires_grad
        for layout in ("sglang", "speculators"):
            out = tmp_path / f"{shape.hidden_size}-{layout}"
            export(head, out, layout)
            again = load_head(convert(out, out / "back", target=golden, quiet=True), target)
            assert again.args == head.args
            fast = Decoder(
                target, Eagle(again, TreeShape(8, 2, 4)), compile=False, max_seq_len=128
            ).generate([PROMPT], Sampling(30))
            assert fast[0].ids == Decoder(
                target, compile=False, max_seq_len=128
            ).generate([PROMPT], Sampling(30))[0].ids


# -- text ------------------------------------------------------------------------------------------------------------


def test_answers_of_a_conversation_are_marked(golden):
    tokenizer = Tokenizer.load(golden)
    said = (("user", "hi"), ("assistant", "hello"), ("user", "and?"), ("assistant", "bye"))
    messages = [{"role": role, "content": content} for role, content in said]
    (row,) = corpus.of_conversation(tokenizer, messages, [ord("\n")])
    assert bytes(row["ids"]) == b"u:hi\na:hello\nu:and?\na:bye\n"
    assert [bytes(row["ids"][b:e]) for b, e in row["answers"]] == [b"hello\n", b"bye\n"]
    (row,) = corpus.of_conversation(tokenizer, messages[:2], [])
    assert bytes(row["ids"][row["answers"][0][0] :]) == b"hello\n"


def test_a_template_that_rewrites_what_was_said_gives_a_row_per_answer(golden):
    tokenizer = Tokenizer.load(golden)
    tokenizer.template = (  # thoughts are kept in the last answer only, as reasoning models do
        "{% for m in messages %}{{ m.role[0] }}:{{ m.content if loop.last else m.content.split('/')[-1] }}\n{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    said = (("user", "hi"), ("assistant", "hm/hello"), ("user", "so"), ("assistant", "eh/bye"))
    messages = [{"role": role, "content": content} for role, content in said]
    first, second = corpus.of_conversation(tokenizer, messages, [ord("\n")])
    assert [bytes(r["ids"]) for r in (first, second)] == [
        b"u:hi\na:hm/hello\n", b"u:hi\na:hello\nu:so\na:eh/bye\n"
    ]
    assert [
        bytes(r["ids"][b:e]) for r in (first, second) for b, e in r["answers"]
    ] == [b"hm/hello\n", b"eh/bye\n"]
    assert first["chat"] == second["chat"]  # one conversation: held out or trained on together


def test_a_template_that_moves_the_system_message_is_refused(golden):
    """Mistral writes it into the last user turn: the prompt is then no beginning of the conversation."""
    tokenizer = Tokenizer.load(golden)
    tokenizer.template = (
        "{% set s = messages[0].content if messages[0].role == 'system' else '' %}{% for m in messages if m.role != 'system' %}"
        "{% if m.role == 'user' %}[INST] {{ s + ' ' if loop.last and s else '' }}{{ m.content }}[/INST]{% else %}"
        " {{ m.content }}</s>{% endif %}{% endfor %}"
    )
    messages = [
        {"role": "system", "content": "Be brief."}, *users("What?"), {"role": "assistant", "content": "That."}
    ]
    with pytest.raises(InputError, match="cannot be told"):
        list(corpus.of_conversation(tokenizer, messages, []))
    (row,) = corpus.of_conversation(tokenizer, messages[1:], [])
    assert bytes(row["ids"][row["answers"][0][0] :]) == b" That.</s>"


def test_a_users_turn_ends_where_the_template_goes_on(golden, tmp_path):
    """Where no stop id ends the user's turn, the text that leads to the assistant does."""
    from tokens.templates import TEMPLATES

    tokenizer = Tokenizer.load(golden)
    assert user_end(tokenizer, [ord("\n")]) == "" and user_end(tokenizer, []) == "a:"
    for name, end in (("vicuna", "ASSISTANT:"), ("llama2", "[/INST]")):
        tokenizer = Tokenizer.load(golden)
        tokenizer.template = TEMPLATES[name]
        assert user_end(tokenizer, [257]) == end

    class Says:
        batch, target, state = 2, None, torch.nn.Module()

        def generate(self, prompts, sampling):
            texts = [b" What is two? [/INST] Two." if len(p) < 700 else b" It is two." for p in prompts]
            return [Output(list(text), "length", [], 0.0, 0.0) for text in texts]

    Says.state.stop_ids = torch.tensor([257])
    turns = []
    given = {
        "target": "t", "seed": 0, "max_new_tokens": 9, "temperature": 0, "max_prompt_tokens": 10**6,
        "quiet": True
    }
    c = Collector(Says(), tokenizer, tmp_path, **given)
    original = c._converse

    def watched(source, begin, chats, next_turns):
        turns.extend(next_turns(0, [0, 1], [[], []]))
        return original(source, begin, [], lambda *a: [])

    c._converse = watched
    c.synthesized(2)
    assert turns == ["What is two?"] * 2


def test_rows_are_cut_to_what_is_usable():
    row = {"ids": list(range(20)), "answers": [[2, 4], [6, 12], [15, 20]], "source": ""}
    # Of an old shard; else what was written with it.
    assert corpus.usable(row, 100)["chat"] == corpus.digest(list(range(2)))
    assert corpus.usable({**row, "chat": "first"}, 100)["chat"] == "first"
    assert corpus.usable(row, 100)["answers"] == [[6, 12], [15, 20]]
    cut = corpus.usable(row, 17)
    assert cut["answers"] == [[6, 12]] and cut["ids"] == list(range(12))
    assert corpus.usable(row, 8) is None


def test_no_prompt_is_both_held_out_and_trained_on():
    rows = [
        {"ids": [i // 3, 0, i, 1, 2], "answers": [[2, 5]], "source": "x", "chat": corpus.digest([i // 3, 0])}
        for i in range(300)
    ]
    held, rest = corpus.hold_out(rows)
    assert len(held) == 15 and len(held) + len(rest) == 300  # a twentieth of 100 prompts, three rows each
    assert not {r["ids"][0] for r in held} & {r["ids"][0] for r in rest}
    assert corpus.hold_out(rows[::-1])[0] == held[::-1]


def test_the_report_counts(golden):
    rows = [{"ids": [1] * 10 + [7, 7, 8], "answers": [[10, 13]], "source": "prompts"}]
    rows += [{"ids": [2] * 100, "answers": [[90, 93], [95, 100]], "source": "x"}]
    d = corpus.describe(rows, 4097)
    assert (
        d["rows"], d["tokens"], d["answer_tokens"], d["answers"], d["several_answers"], d["longest"]
    ) == (2, 113, 11, 3, 1, 100)
    assert d["lengths"] == {"1-64": 1, "65-128": 1} and d["by_source"] == {"prompts": 1, "x": 1}
    ids, covered = corpus.draft_vocabulary(corpus.counts_of(rows), 2, 4097)
    assert ids.tolist() == [2, 7] and covered == pytest.approx(10 / 11) and list(d["coverage"]) == [2048, 4096]
    assert "11 of them" in corpus.report(d)
    assert corpus.draft_vocabulary(corpus.counts_of(rows), 5, 4097)[0].tolist() == [0, 1, 2, 7, 8]


def collector(golden, folder, **changes) -> Collector:
    target, config = load_model(golden)
    decoder = Decoder(target, batch=4, max_seq_len=200, compile=False, stop_ids=[ord("\n")])
    given = {
        "target": "golden", "seed": 0, "max_new_tokens": 12, "temperature": 0.0, "max_prompt_tokens": 100,
        "quiet": True
    }
    return Collector(decoder, Tokenizer.load(golden), folder, **given | changes)


def read_rows(c: Collector) -> list[dict]:
    return [
        row for path in c.shards for row in map(json.loads, path.read_text().splitlines())
        if "left_out" not in row
    ]


def users(*turns: str) -> list[dict]:
    return [{"role": "user", "content": turn} for turn in turns]


def test_several_turns_are_answered_with_what_was_said(golden, tmp_path):
    c = collector(golden, tmp_path)
    told = [{"role": "system", "content": "s"}, *users("q")]
    c.from_prompts([users("one", "two", "three"), users("four"), users("x" * 95, "dropped"), told])
    rows = read_rows(c)
    assert sorted(
        len(r["answers"]) for r in rows
    ) == [1, 1, 1, 3] and {r["target"] for r in rows} == {"golden"}
    assert any(bytes(r["ids"]).startswith(b"s:s\nu:q\na:") for r in rows)  # the system message is kept
    usable, left_out, _ = corpus.load_shards(c.shards, 200, 320, "golden")
    assert left_out == 1 and len(usable) <= 4
    with pytest.raises(InputError, match="another target"):
        corpus.load_shards(c.shards, 200, 320, "other")
    target, _ = load_model(golden)
    row = max(rows, key=lambda r: len(r["answers"]))
    plain = Decoder(target, compile=False, max_seq_len=200, stop_ids=[ord("\n")])
    for begin, end in row["answers"]:  # each answer is what the target says to all that came before
        assert plain.generate([row["ids"][:begin]], Sampling(12))[0].ids == row["ids"][begin:end]
    assert [
        bytes(row["ids"][b - len(f"u:{t}\na:") : b]) for t,
        (b, _) in zip(("one", "two", "three"), row["answers"])
    ] == [
        b"u:one\na:", b"u:two\na:", b"u:three\na:"
    ]


def test_user_turns_of_its_own(golden, tmp_path):
    assert user_header(Tokenizer.load(golden), []) == list(b"u:")
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert user_header(Tokenizer.load(golden), said) == list(b"u:a\na:b\nu:")
    c = collector(golden, tmp_path, max_new_tokens=8)
    c.synthesized(24, turns=2, openings=("Write", "Sum"))
    rows = read_rows(c)
    assert rows and any(len(r["answers"]) == 2 for r in rows)
    begins = {bytes(r["ids"]).split(b":")[1][:3] for r in rows}
    assert begins == {b"Wri", b"Sum"} and all(r["source"] == "synthesized" for r in rows)


def test_shards_resume_and_are_shared_between_processes(golden, tmp_path):
    prompts = [users(f"question {i}") for i in range(10)]
    alone = collector(golden, tmp_path / "alone")
    alone.from_prompts(prompts)
    for rank in (1, 0):  # one after the other here
        part = collector(golden, tmp_path / "shared", processes=Processes(rank, 2))
        part.from_prompts(prompts)
        written = [p for p in part.shards if p.exists()]
        assert len(written) == (1 if rank else 3)
    assert read_rows(part) == read_rows(alone)
    before = {p: p.stat().st_mtime_ns for p in part.shards}
    part.shards[1].unlink()
    again = collector(golden, tmp_path / "shared")
    again.from_prompts(prompts)
    assert read_rows(again) == read_rows(alone) and [
        p.stat().st_mtime_ns == before[p] for p in again.shards
    ] == [True, False, True]


# -- features --------------------------------------------------------------------------------------------------------


def test_stored_features_are_the_computed_ones(models, tmp_path):
    target, head = models
    online = Features(target, head.args.aux_layers).read(ROWS)
    store = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes())
    store.fill(ROWS[:2], 64)
    (file,) = tmp_path.glob("*/*.bin")
    size = file.stat().st_size
    with open(file.with_suffix(".index"), "a") as index:
        index.write("half a li")  # killed while writing
    store = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes(1, 2))
    store.processes.wait = lambda: None
    store.fill(ROWS, 1)  # one row a batch: the second process has every other one
    assert file.stat().st_size == size
    other = StoredFeatures(target, head.args.aux_layers, tmp_path, Processes())
    other.fill(ROWS, 64)
    other.compute = None  # everything is there
    for row, *want in zip(ROWS, *online):
        got = other.read([row])
        n = len(row["ids"])
        for a, b in zip(got, want):
            torch.testing.assert_close(a[0], b[:n], rtol=1e-4, atol=1e-5)  # other batches round otherwise


def test_a_full_disk_is_told_beforehand(models, tmp_path, monkeypatch, capsys):
    import shutil

    target, head = models
    monkeypatch.setattr(shutil, "disk_usage", lambda place: type("Usage", (), {"free": 2**28 + 1000})())
    with pytest.raises(InputError, match=r"needs 0\.\d+ GB"):
        StoredFeatures(target, head.args.aux_layers, tmp_path, Processes()).fill(ROWS, 64)
    assert "4 rows need" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_memory_is_bounded(models):
    target, head = models
    features = Features(target, head.args.aux_layers, room=1)
    features.read(ROWS)
    assert len(features.kept) == 1  # the one that used the room up
    assert Features(target, head.args.aux_layers).kept == {}


def test_batches_hold_every_row_once():
    rows = [{"ids": [0] * n} for n in (5, 300, 7, 9, 100, 2)]
    for generator in (None, torch.Generator().manual_seed(0)):
        found = batches(rows, 110, generator)
        assert sorted(i for batch in found for i in batch) == list(range(6))
        assert all(len(b) == 1 or len(b) * max(len(rows[i]["ids"]) for i in b) <= 110 for b in found)


# -- validation and export -------------------------------------------------------------------------------------------


def test_validation_is_the_real_decoder(models):
    target, head = models
    prompts = [PROMPT, list(b"u:what is 4?\na:"), list(b"u:abc\na:")]
    shape = TreeShape(16, 3, 4)
    outputs = Decoder(
        target, Eagle(head, shape), batch=3, compile=False, max_seq_len=200
    ).generate(prompts, Sampling(40))
    lengths = [n for o in outputs for n in o.accept_lengths]
    assert Validator(
        target, prompts, [], shape, 40, False
    ).tau(head) == pytest.approx(sum(lengths) / len(lengths))
    assert sum(lengths) / len(lengths) > 1.05


@pytest.mark.parametrize("layout", ["sglang", "speculators"])
def test_written_heads_come_back_whole(models, golden, tmp_path, layout):
    """Ours -> Hugging Face -> ours rounds to bfloat16 and changes nothing else; the trees are the same."""
    target, head = models
    export(head, tmp_path / "hf", layout, {"name": "golden"})
    (tmp_path / "file").touch()
    assert (tmp_path / "hf" / "model.safetensors").stat().st_mode == (tmp_path / "file").stat().st_mode
    again = load_head(convert(tmp_path / "hf", tmp_path / "back", target=golden, quiet=True), target)
    assert again.args == head.args
    mine, theirs = head.own_state(), again.own_state()
    assert mine.keys() == theirs.keys()
    for name in mine:
        want = mine[name].bfloat16().float() if mine[name].is_floating_point() else mine[name]
        assert torch.equal(want, theirs[name]), name
    rounded = head.twin(target, torch.bfloat16).twin(target, torch.float32)
    assert trees(target, rounded) == trees(target, again)


def test_a_written_eagle1_head_comes_back_whole(models1, golden, tmp_path):
    target, head = models1
    export(head, tmp_path / "hf")
    again = load_head(convert(tmp_path / "hf", tmp_path / "back", target=golden, quiet=True), target)
    rounded = head.twin(target, torch.bfloat16).twin(target, torch.float32)
    assert again.args.own_embedding is False and trees(target, rounded) == trees(target, again)
    with pytest.raises(InputError, match="EAGLE-3 heads only"):
        export(head, tmp_path / "no", "speculators")


def trees(target, head) -> list:
    decoder = Decoder(target, Eagle(head, TreeShape(24, 4, 5)), compile=False, max_seq_len=200)
    seen = []
    with decoder.observe(lambda tree, path: seen.append((tree.tokens.tolist(), tree.parent.tolist()))):
        decoder.generate([PROMPT], Sampling(40))
    return seen


def test_weights_without_a_place_are_refused(models, tmp_path):
    _, head = models
    other = type(head)(dataclasses.replace(head.args, feature_norm="each"))
    with pytest.raises(InputError, match="no layout"):
        export(other, tmp_path / "x")
    assert not Path(tmp_path / "x").exists()
