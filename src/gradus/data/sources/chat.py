"""`chat`: prompts and answers, or conversations. Only what the assistant says is in the loss."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gradus.data.conversation import END, Template, jinja, messages_of, own_template, pair, plain, unmarked
from gradus.data.files import DataFiles
from gradus.data.order import Indices
from gradus.data.records import read_rows
from gradus.data.source import Source
from gradus.data.sources.options import Count
from gradus.data.sources.packed import packing_plan
from gradus.data.sources.text import IGNORED
from gradus.data.sources.tokenised import TokenisedOptions
from gradus.data.split import Part, Split, scattered, whole
from gradus.data.token_cache import cache_folder
from gradus.data.tokenised import (
    Conversations,
    Document,
    Files,
    open_conversations,
    split_documents,
    training_only,
    write_conversations,
)
from gradus.data.tokenizer import BYTES, Tokenizer, tokenizer_file
from gradus.schema.errors import unknown_name

PADDING, PROMPT, ANSWER = 0, 1, 2  # what a token of a sample is
FIELDS = ("prompt", "answer", "messages")

Form = Literal["tokens", "huggingface", "seq2seq"]


class ChatRecords(TokenisedOptions):
    use = "chat"

    context: Annotated[int, Field(ge=2)]
    fields: dict[str, str] = Field(default_factory=dict)  # other names for prompt, answer or messages
    template: str | None = None  # plain, none, tokenizer, or a jinja2 file; by default the tokenizer's, else plain
    too_long: Literal["cut", "drop"] = "cut"
    packing: bool = False  # several records in each sample, each of which the model sees alone
    form: Form = "tokens"
    answer_context: Count | None = None  # of seq2seq: the longest answer; by default `context`

    def check(self) -> None:
        super().check()
        for name in self.fields:
            if name not in FIELDS:
                raise unknown_name("field", name, FIELDS, field=f"data.fields.{name}")
        if self.packing and self.form != "tokens":
            message = f"found true, but form: {self.form} has one record in each sample"
            raise self.refuse("packing", message, allowed=False)
        self._template()

    def open(self, split: Split, seed: int) -> Source:
        prepared = self.prepare()
        documents = prepared.meta["documents"]
        separate = documents["validation"] > 0
        file: Split = "validation" if separate and split == "validation" else "train"
        records = open_conversations(prepared.folder, prepared.meta["dtype"], file)
        count = documents[file]
        part = whole(count) if separate else scattered(count, self.validation, split)
        chosen = np.sort(part.locate(np.arange(part.length)))
        lengths = np.diff(records.offsets.array)[chosen]
        too_long = self._too_long(lengths, records.answers.array[chosen])
        kept = chosen if self.too_long == "cut" else chosen[~too_long]
        if len(chosen) and not len(kept):
            message = f"all {len(chosen)} {split} records are longer than context {self.context} and dropped"
            raise self.refuse("too_long", message, allowed="cut", hint="a larger context, or too_long: cut")
        groups, packs = np.arange(len(kept) + 1), None
        if self.packing:
            identity = [prepared.folder.name, file, split, self.validation, self.too_long]
            fitting = np.minimum(np.diff(records.offsets.array)[kept], self.context)
            packs = packing_plan(cache_folder(self.cache), identity, lambda: fitting, self.context, seed)
            kept, groups = kept[packs.documents.array], np.asarray(packs.first.array)
        length = len(groups) - 1
        samples = self.limited(whole(length), length, split, f"{self.path} has {prepared.origin(file)}")
        source = Chat(records, kept, groups, samples, self, prepared.tokenizer)
        source.fingerprint = prepared.fingerprint
        if packs is not None:
            source.note = f"{len(kept):,} records are packed into {packs.packs:,} contexts, {packs.efficiency:.2%} full"
        if too_long.any():
            cut = "prompts are cut from the left" + (", answers from the right" if self.form == "seq2seq" else "")
            done = cut if self.too_long == "cut" else "they are dropped"
            longer = f"{too_long.sum()} of {len(chosen)} {split} records are longer than context: {done}"
            source.note = longer if source.note is None else f"{source.note}; {longer}"
        return source

    @property
    def width(self) -> int:
        """Tokens of a record that a sample can hold: the target of the last one is not seen by the model."""
        return self.context + 1 if self.form == "tokens" and not self.packing else self.context

    @property
    def answer_width(self) -> int:
        return self.answer_context or self.context

    def _too_long(self, lengths: Indices, answers: Indices) -> NDArray[np.bool_]:
        if self.form == "seq2seq":
            return (answers > self.context) | (lengths - answers > self.answer_width)
        return np.asarray(lengths > self.width)

    def _template(self) -> Template:
        template = self._named_template()
        return pair(template) if self.form == "seq2seq" else template

    def _named_template(self) -> Template:
        folder = None
        if isinstance(self.tokenizer, str) and self.tokenizer != BYTES:
            folder = tokenizer_file(self.tokenizer).parent
        own = own_template(folder) if folder is not None else None
        if self.template in ("tokenizer", None):
            if own is not None:
                return jinja(own, f"the chat template of {folder}", folder)
            if self.template == "tokenizer":
                message = f"found 'tokenizer', but {folder or self.tokenizer} brings no chat template"
                raise self.refuse("template", message, allowed="plain, none, or a jinja2 file")
            return unmarked if self.form == "seq2seq" else plain
        if self.template in ("plain", "none"):
            return plain if self.template == "plain" else unmarked
        file = Path(self.template)
        if not file.is_file():
            raise unknown_name("template or file", self.template, ["plain", "none", "tokenizer"], field="data.template")
        return jinja(file.read_text(encoding="utf-8"), str(file), folder)

    def _description(self) -> dict[str, Any]:
        named = self._template_text()
        return {"use": self.use, "fields": self.fields, "template": named, "seq2seq": self.form == "seq2seq"}

    def _template_text(self) -> str | None:
        """What identifies the template: its text, since a file's name says nothing about its content."""
        if self.template in ("plain", "none"):
            return self.template
        if self.template not in ("tokenizer", None):
            return Path(self.template).read_text(encoding="utf-8")
        files = isinstance(self.tokenizer, str) and self.tokenizer != BYTES
        return own_template(tokenizer_file(str(self.tokenizer)).parent) if files else None

    def _read(self, files: Files) -> Iterator[Document]:
        template = self._template()
        return (template(messages_of(row, self.fields)) for row in read_rows(files))

    def _write(self, folder: Path, files: DataFiles, tokenizer: Tokenizer) -> dict[str, Any]:
        return write_conversations(folder, files, self.validation, tokenizer, self._read)

    def _training_texts(self, files: DataFiles) -> Iterator[str]:
        _, held_out = split_documents(files, self.validation)
        for document in training_only(self._read(files.train), held_out):
            yield from (segment.text for segment in document if segment.text is not END)


class Chat(Source):
    """Records that are padded to one length; neither prompts nor padding are in the loss."""

    def __init__(
        self,
        records: Conversations,
        kept: Indices,
        groups: Indices,
        part: Part,
        options: ChatRecords,
        tokenizer: Tokenizer,
    ) -> None:
        super().__init__(part.length)
        self.records, self.kept, self.groups, self.part = records, kept, groups, part
        self.packing = options.packing
        self.form, self.width, self.answer_width = options.form, options.width, options.answer_width
        self.padding = tokenizer.end_of_text
        self.vocabulary = tokenizer.vocabulary
        self.tokenizer_hash = tokenizer.hash
        self.tokens_per_sample = options.context + (options.answer_width if options.form == "seq2seq" else 0)
        self.sample_shape = (options.context,)

    @cached_property
    def lengths(self) -> Indices:  # type: ignore[override]
        """Tokens of each sample, as far as they fit."""
        records = np.minimum(np.diff(self.records.offsets.array)[self.kept], self._longest)
        ends = np.concatenate([[0], np.cumsum(records)])
        return np.asarray(np.diff(ends[self.groups])[: self.length])

    @property
    def _longest(self) -> int:
        return self.width + (self.answer_width if self.form == "seq2seq" else 0)

    def fetch(self, indices: Indices) -> dict[str, NDArray[Any]]:
        if self.form == "seq2seq":
            return self._pairs(indices)
        # Two at least: one token has none to predict.
        width = max(2, int(self.lengths[indices].max())) if self.pads_to_longest else self.width
        tokens = np.full((len(indices), width), self.padding, self.records.tokens.dtype)
        kinds = np.full((len(indices), width), PADDING, np.uint8)
        documents = np.zeros((len(indices), width), np.int32)
        for row, index in enumerate(indices):
            at = 0
            for number, record in enumerate(self.kept[self.groups[index] : self.groups[index + 1]]):
                ids, in_loss = self._cut(int(record))
                tokens[row, at : at + len(ids)] = ids
                kinds[row, at : at + len(ids)] = np.where(in_loss, ANSWER, PROMPT)
                at += len(ids)
                documents[row, at:] = number + 1  # padding has a number of its own
        batch = {"tokens": tokens, "kinds": kinds}
        return batch | {"documents": documents} if self.packing else batch

    def finish(self, batch: Any, dtype: Any) -> Any:
        if self.form == "seq2seq":
            return {name: column.long() for name, column in batch.items()}
        tokens, kinds = batch["tokens"].long(), batch["kinds"]
        if self.packing:
            targets = tokens.roll(-1, 1).masked_fill(kinds.roll(-1, 1) != ANSWER, IGNORED)
            return {"tokens": tokens, "targets": targets, "documents": batch["documents"]}
        if self.form == "tokens":
            return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:].masked_fill(kinds[:, 1:] != ANSWER, IGNORED)}
        labels = tokens.masked_fill(kinds != ANSWER, IGNORED)
        return {"input_ids": tokens, "attention_mask": (kinds != PADDING).long(), "labels": labels}

    def _record(self, record: int) -> tuple[NDArray[Any], NDArray[Any]]:
        start, end = self.records.offsets.array[record : record + 2]
        return self.records.tokens.array[start:end], self.records.in_loss.array[start:end]

    def _cut(self, record: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """A record as it fits: without its beginning, but never without what the last answer is predicted from."""
        tokens, in_loss = self._record(record)
        excess = len(tokens) - self.width
        if excess <= 0:
            return tokens, in_loss
        start = min(excess, max(int(self.records.answers.array[record]) - 1, 0))
        kept = in_loss[start : start + self.width].copy()
        kept[0] = 0
        return tokens[start : start + self.width], kept

    def _pairs(self, indices: Indices) -> dict[str, NDArray[Any]]:
        count = len(indices)
        inputs = np.full((count, self.width), self.padding, self.records.tokens.dtype)
        mask = np.zeros((count, self.width), np.uint8)
        labels = np.full((count, self.answer_width), IGNORED, np.int64)
        for row, index in enumerate(indices):
            tokens, in_loss = self._record(int(self.kept[index]))
            prompt, answer = tokens[in_loss == 0][-self.width :], tokens[in_loss == 1][: self.answer_width]
            inputs[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
            labels[row, : len(answer)] = answer
        if self.pads_to_longest:
            prompts, answers = max(1, mask.sum(1).max()), max(1, (labels != IGNORED).sum(1).max())
            inputs, mask, labels = inputs[:, :prompts], mask[:, :prompts], labels[:, :answers]
        return {"input_ids": inputs, "attention_mask": mask, "labels": labels}
