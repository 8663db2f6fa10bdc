"""`chat`: only what the assistant says is in the loss, whatever the record, the template and the length."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
import torch.nn.functional as F

from gradus.data.source import open_source, source_options
from gradus.data.sources.chat import ANSWER, PADDING, PROMPT, Chat
from gradus.data.tokenizer_training import train_bpe
from gradus.models.gpt import GPT
from gradus.models.output import LossOutput
from gradus.models.settings import GPTSettings
from gradus.schema.errors import InputError

RECORDS = [{"prompt": f"What is {n} + {n}?", "answer": f"It is {2 * n}. " * (1 + n % 4)} for n in range(20)]
TALK = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi!"},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Farewell."},
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, records: Sequence[Any] = RECORDS) -> str:
    file = folder / "chat.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def opened(path: str, split: Any = "train", **options: Any) -> Chat:
    source = open_source("chat", {"path": path, "context": 96, "validation": 0, **options}, split, 1)
    assert isinstance(source, Chat)
    return source


def finished(source: Chat, indices: Sequence[int], raw: dict[str, Any] | None = None) -> dict[str, torch.Tensor]:
    raw = raw or source.fetch(np.array(indices))
    batch = source.finish({name: torch.from_numpy(column) for name, column in raw.items()}, torch.float64)
    assert isinstance(batch, dict)
    return batch


def texts_of(source: Chat, index: int) -> list[tuple[str, int]]:
    """The sample as runs of (text, what it is), by bytes."""
    raw = source.fetch(np.array([index]))
    runs: list[tuple[str, int]] = []
    for token, kind in zip(raw["tokens"][0].tolist(), raw["kinds"][0].tolist(), strict=True):
        if runs and runs[-1][1] == kind:
            runs[-1] = (runs[-1][0] + chr(token), kind)
        else:
            runs.append((chr(token), kind))
    return [(text, kind) for text, kind in runs if kind != PADDING]


@pytest.fixture
def model() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTSettings(layers=2, width=32, context=96)).double()


def loss_of(model: GPT, batch: dict[str, torch.Tensor]) -> LossOutput:
    output = model(**batch)
    assert isinstance(output, LossOutput)
    return output


def test_the_plain_template_marks_roles_and_ends_answers(tmp_path: Path) -> None:
    source = opened(write(tmp_path))
    assert texts_of(source, 1) == [
        ("<|user|>\nWhat is 1 + 1?\n<|assistant|>\n", PROMPT),
        ("It is 2. It is 2. \0", ANSWER),
    ]


def test_the_target_of_a_prompt_token_cannot_change_the_loss(tmp_path: Path, model: GPT) -> None:
    source = opened(write(tmp_path))
    raw = source.fetch(np.arange(4))
    batch = finished(source, [], raw)
    changed = {**raw, "tokens": np.where(raw["kinds"] == ANSWER, raw["tokens"], raw["tokens"] ^ 1)}
    assert (changed["tokens"] != raw["tokens"]).sum() > 100
    targets = finished(source, [], changed)["targets"]
    before = loss_of(model, batch)
    after = loss_of(model, {**batch, "targets": targets})
    assert before.loss_sum.item() == after.loss_sum.item()
    other = loss_of(model, {**batch, "targets": torch.where(targets >= 0, targets ^ 1, targets)})
    assert before.loss_sum.item() != other.loss_sum.item()  # that of an answer does


def test_the_loss_is_that_of_the_answers_alone(tmp_path: Path, model: GPT) -> None:
    source = opened(write(tmp_path))
    output = loss_of(model, finished(source, range(8)))
    total, count = 0.0, 0
    for record in RECORDS[:8]:  # each on its own, without padding
        prompt = f"<|user|>\n{record['prompt']}\n<|assistant|>\n".encode()
        answer = record["answer"].encode() + b"\0"
        ids = torch.tensor([[*prompt, *answer]])
        logits = model(ids[:, :-1])
        assert isinstance(logits, torch.Tensor)
        losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")
        total += losses[len(prompt) - 1 :].sum().item()
        count += len(answer)
    assert output.count.item() == count
    assert output.loss_sum.item() == pytest.approx(total, rel=1e-12)


def test_all_answers_of_a_conversation_are_learnt(tmp_path: Path) -> None:
    runs = texts_of(opened(write(tmp_path, [{"messages": TALK}])), 0)
    assert [text for text, kind in runs if kind == ANSWER] == ["Hi!\0", "Farewell.\0"]
    prompts = "".join(text for text, kind in runs if kind == PROMPT)
    assert prompts == "<|system|>\nBe kind.\n<|user|>\nHello\n<|assistant|>\n<|user|>\nBye\n<|assistant|>\n"


def test_records_may_lie_in_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"id": [1], "messages": [TALK]}), tmp_path / "chat.parquet")
    expected = texts_of(opened(write(tmp_path, [{"messages": TALK}])), 0)
    assert texts_of(opened(str(tmp_path / "chat.parquet")), 0) == expected


def test_fields_may_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, [{"instruction": "Say A", "response": "A"}])
    source = opened(path, fields={"prompt": "instruction", "answer": "response"}, template="none")
    assert texts_of(source, 0) == [("Say A", PROMPT), ("A\0", ANSWER)]
    with pytest.raises(InputError, match=r"line 1: no key 'prompt'. Found: instruction, response") as caught:
        opened(path)
    assert "data.fields" in str(caught.value.hint)


@pytest.mark.parametrize("too_long", ["cut", "drop"])
def test_what_is_too_long_is_cut_from_the_left_of_its_prompt_or_dropped_and_counted(
    tmp_path: Path, too_long: str
) -> None:
    path = write(tmp_path, [{"prompt": "0123456789" * 3, "answer": "answer"}, {"prompt": "short", "answer": "yes"}])
    source = opened(path, context=15, template="none", too_long=too_long)
    assert source.note is not None
    assert source.note.startswith("1 of 2 train records are longer than context")
    if too_long == "drop":
        assert len(source) == 1
        assert texts_of(source, 0)[0] == ("short", PROMPT)
    else:
        assert texts_of(source, 0) == [("123456789", PROMPT), ("answer\0", ANSWER)]
    with pytest.raises(InputError, match=r"data.too_long: all 2 train records are longer than context 4"):
        opened(path, context=4, template="none", too_long="drop")


def test_an_answer_longer_than_the_context_keeps_its_beginning_and_a_token_before(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "prompt", "answer": "0123456789"}])
    assert texts_of(opened(path, context=5, template="none"), 0) == [("t", PROMPT), ("01234", ANSWER)]


def test_packed_records_have_the_same_targets_in_fewer_samples(tmp_path: Path) -> None:
    path = write(tmp_path)
    single, packed = opened(path, context=200), opened(path, context=200, packing=True)
    assert len(packed) <= len(single) // 2

    def answers(source: Chat) -> list[list[int]]:
        batch = finished(source, range(len(source)))
        apart = batch.get("documents", torch.zeros_like(batch["tokens"]))
        found = [
            targets[(documents == number) & (targets >= 0)].tolist()
            for targets, documents in zip(batch["targets"], apart, strict=True)
            for number in documents.unique().tolist()
        ]
        return sorted(answer for answer in found if answer)

    assert answers(packed) == answers(single)
    assert packed.fetch(np.arange(len(packed)))["tokens"].shape == (len(packed), 200)
    with pytest.raises(InputError, match=r"data.packing: found true, but form: seq2seq"):
        opened(path, packing=True, form="seq2seq")


def test_a_packed_record_is_not_predicted_from_the_one_before(tmp_path: Path) -> None:
    source = opened(write(tmp_path, [{"prompt": "", "answer": "first"}] * 3), template="none", packing=True, context=30)
    targets = finished(source, [0])["targets"][0]
    assert bytes(targets[targets >= 0].tolist()) == b"irst\0" * 3


def test_validation_records_are_other_records(tmp_path: Path) -> None:
    path = write(tmp_path)
    train, validation = opened(path, validation=0.2), opened(path, "validation", validation=0.2)
    sides = [{texts_of(source, i)[0][0] for i in range(len(source))} for source in (train, validation)]
    assert (len(sides[0]), len(sides[1])) == (16, 4)
    assert not sides[0] & sides[1]


def test_a_chat_travels_to_a_worker_as_file_names(tmp_path: Path) -> None:
    source = opened(write(tmp_path, RECORDS * 50))
    travelled = pickle.dumps(source)
    assert len(travelled) < 20_000
    again, first = pickle.loads(travelled).fetch(np.array([7, 900])), source.fetch(np.array([7, 900]))
    assert all(np.array_equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([{"messages": [{"role": "user", "content": "Hello"}]}], r"line 1: nothing to learn: no message of the role"),
        ([RECORDS[0], {"messages": "Hello"}], r"line 2: 'messages' is text, allowed: a list of messages"),
        ([{"messages": [{"role": "user"}]}], r"line 1: message 1 of 'messages' is not"),
        ([{"prompt": "x", "answer": 3}], r"line 1: 'answer' is a number, allowed: text"),
        ([{"prompt": "x", "anwser": "y"}], r"line 1: no key 'answer'; did you mean 'anwser'"),
    ],
)
def test_a_broken_record_is_named_with_its_line(tmp_path: Path, records: list[Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path, records))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"template": "plian"}, r"data.template: unknown template or file 'plian'; did you mean 'plain'"),
        ({"template": "tokenizer"}, r"data.template: found 'tokenizer', but bytes brings no chat template"),
        ({"fields": {"promt": "x"}}, r"data.fields.promt: unknown field 'promt'; did you mean 'prompt'"),
        ({"too_long": "wrap"}, r"data.too_long: found 'wrap'"),
    ],
)
def test_a_mistake_is_found_before_anything_is_read(tmp_path: Path, options: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        source_options("chat", {"path": write(tmp_path), "context": 96, **options})


# --- templates of tokenizers


@pytest.fixture
def model_folder(tmp_path: Path) -> Path:
    """A tokenizer with a chat template of its own, as Hugging Face models bring it."""
    folder = tmp_path / "model"
    folder.mkdir()
    train_bpe(["some text to learn from, a few words"] * 9, 300, folder / "tokenizer.json")
    document = json.loads((folder / "tokenizer.json").read_text())
    for number, content in enumerate(("<|im_start|>", "<|im_end|>")):
        added = {**document["added_tokens"][0], "id": len(document["model"]["vocab"]) + number, "content": content}
        document["added_tokens"].append(added)
    (folder / "tokenizer.json").write_text(json.dumps(document))
    config = {"chat_template": CHATML, "eos_token": "<|im_end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_the_tokenizers_own_template_is_applied_as_transformers_does(tmp_path: Path, model_folder: Path) -> None:
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(model_folder)
    expected = theirs.apply_chat_template(TALK, tokenize=True, return_dict=False)
    source = opened(write(tmp_path, [{"messages": TALK}]), tokenizer=str(model_folder))
    raw = source.fetch(np.array([0]))
    kinds = raw["kinds"][0]
    ours = raw["tokens"][0][kinds != PADDING].tolist()
    # What follows the last answer is not the assistant's to say, but the template writes it; it is the whole text.
    assert ours == list(expected)
    learnt = theirs.decode(raw["tokens"][0][kinds == ANSWER].tolist())
    assert learnt == "Hi!<|im_end|>\nFarewell.<|im_end|>\n"


def test_a_template_may_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.jinja").write_text(
        "{% for m in messages %}({{ m.role[0] }}){{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}(a){% endif %}"
    )
    source = opened(write(tmp_path, [{"messages": TALK}]), template=str(tmp_path / "mine.jinja"))
    assert texts_of(source, 0) == [
        ("(s)Be kind.(u)Hello(a)", PROMPT),
        ("Hi!", ANSWER),
        ("(u)Bye(a)", PROMPT),
        ("Farewell.", ANSWER),
    ]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", r"data.template: .*TemplateSyntaxError"),
        ("{{ messages[-1].content }}", r"changes what it wrote before when an answer is added"),
        ("{{ raise_exception('no system') }}", r"data.template: .*no system"),
        ("{{ ''.__class__.__mro__ }}", r"data.template: .*SecurityError"),
    ],
)
def test_a_template_that_does_not_work_is_refused(tmp_path: Path, template: str, message: str) -> None:
    (tmp_path / "bad.jinja").write_text(template)
    with pytest.raises(InputError, match=message):
        opened(write(tmp_path, [{"messages": TALK}]), template=str(tmp_path / "bad.jinja"))


# --- forms for Hugging Face models


def test_a_causal_model_of_transformers_has_the_loss_of_the_answers(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=256, n_positions=96)
    model = transformers.GPT2LMHeadModel(config).double().eval()
    source = opened(write(tmp_path), form="huggingface")
    batch = finished(source, range(6))
    assert batch.keys() == {"input_ids", "attention_mask", "labels"}
    with torch.no_grad():
        output = model(**batch)
    total = sum(len(record["answer"]) + 1 for record in RECORDS[:6])
    assert (batch["labels"] >= 0).sum().item() == total
    expected = F.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    assert output.loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_an_encoder_decoder_model_reads_the_prompt_and_learns_the_answer(tmp_path: Path) -> None:
    import transformers

    source = opened(write(tmp_path), form="seq2seq", context=24, answer_context=16)
    batch = finished(source, range(6))
    assert batch["input_ids"].shape == (6, 24)
    assert batch["labels"].shape == (6, 16)
    for row, record in enumerate(RECORDS[:6]):
        read = batch["input_ids"][row][batch["attention_mask"][row] == 1]
        assert bytes(read.tolist()) == record["prompt"].encode() + b"\0"
        learnt = batch["labels"][row][batch["labels"][row] >= 0]
        assert bytes(learnt.tolist()) == (record["answer"].encode() + b"\0")[:16]
    assert source.note is not None
    assert source.note.startswith("15 of 20 train records are longer than context: prompts are cut from the left, answ")
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=256, decoder_start_token_id=0
    )
    loss = transformers.T5ForConditionalGeneration(config)(**batch).loss
    loss.backward()
    assert loss.item() > 0
