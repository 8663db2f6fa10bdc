"""Conversations: a record of prompt and answer, or of messages, as parts of which the assistant's are learnt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from gradus.data.records import Row, broken, missing_key, type_name
from gradus.data.tokenizer import json_object, special_tokens
from gradus.schema.errors import InputError

END: Final = None  # in place of a text: the end-of-text token
ASSISTANT = "assistant"


class Segment(NamedTuple):
    text: str | None  # or END
    in_loss: bool


class Message(NamedTuple):
    role: str
    content: str


Template = Callable[[Sequence[Message]], list[Segment]]


def messages_of(row: Row, fields: Mapping[str, str]) -> list[Message]:
    """The messages of a record, whose keys may have other names: `{prompt: instruction, answer: response}`."""
    names = {name: fields.get(name, name) for name in ("prompt", "answer", "messages")}
    where, values = row
    if names["messages"] in values and names["prompt"] not in values:
        messages = _messages(where, values[names["messages"]], names["messages"])
    else:
        for name in ("prompt", "answer"):
            if names[name] not in values:
                raise missing_key(where, names[name], list(values))
            if not isinstance(values[names[name]], str):
                raise broken(where, f"{names[name]!r} is {type_name(values[names[name]])}, allowed: text")
        messages = [Message("user", values[names["prompt"]]), Message(ASSISTANT, values[names["answer"]])]
    if not any(message.role == ASSISTANT for message in messages):
        roles = ", ".join(dict.fromkeys(message.role for message in messages)) or "no message"
        raise broken(where, f"nothing to learn: no message of the role {ASSISTANT!r}, found {roles}")
    return messages


def _messages(where: str, found: Any, key: str) -> list[Message]:
    if not isinstance(found, list):
        raise broken(where, f"{key!r} is {type_name(found)}, allowed: a list of messages")
    messages = []
    for number, message in enumerate(found, 1):
        values = message if isinstance(message, dict) else {}
        role, content = values.get("role"), values.get("content")
        if not isinstance(role, str) or not isinstance(content, str):
            raise broken(where, f'message {number} of {key!r} is not {{"role": text, "content": text}}')
        messages.append(Message(role, content))
    return messages


def plain(messages: Sequence[Message]) -> list[Segment]:
    """`<|role|>`, a new line, the content and a new line; an answer ends with the end-of-text token."""
    segments = []
    for role, content in messages:
        if role == ASSISTANT:
            segments += [Segment(f"<|{role}|>\n", False), Segment(content, True), Segment(END, True)]
        else:
            segments.append(Segment(f"<|{role}|>\n{content}\n", False))
    return segments


def unmarked(messages: Sequence[Message]) -> list[Segment]:
    """Nothing but the contents; an answer ends with the end-of-text token."""
    segments = []
    for role, content in messages:
        segments.append(Segment(content, role == ASSISTANT))
        if role == ASSISTANT:
            segments.append(Segment(END, True))
    return segments


def pair(template: Template) -> Template:
    """For encoder-decoder models: all before the last answer is what the encoder reads, each side with its end."""

    def paired(messages: Sequence[Message]) -> list[Segment]:
        last = max(i for i, message in enumerate(messages) if message.role == ASSISTANT)
        before = [segment.text for segment in template(messages[:last]) if segment.text is not END]
        prompt = "".join(text for text in before if text is not None)
        answer = Segment(messages[last].content, True)
        return [Segment(prompt, False), Segment(END, False), answer, Segment(END, True)]

    return paired


def own_template(folder: Path) -> str | None:
    """The chat template that the folder of a Hugging Face tokenizer brings, if it does."""
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    found = json_object(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(found, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def jinja(source: str, name: str, folder: Path | None) -> Template:
    """A chat template as Hugging Face tokenizers have it.

    Which part of its text is the assistant's shows when it is applied to the messages before an answer, with the
    prompt for one, and to the messages with it: what the second has more is the answer.
    """
    render = _renderer(source, name, folder)

    def applied(messages: Sequence[Message]) -> list[Segment]:
        documents = [message._asdict() for message in messages]
        segments: list[Segment] = []
        done = ""
        for index, message in enumerate(messages):
            if message.role != ASSISTANT:
                continue
            before, after = render(documents[:index], True), render(documents[: index + 1], False)
            if not before.startswith(done) or not after.startswith(before):
                raise InputError(
                    f"data.template: {name} changes what it wrote before when an answer is added, so the answer's "
                    f"part of its text is not known: {before[-40:]!r} is not continued by {after[-40:]!r}",
                    hint="`template: plain` has no such problem; or make add_generation_prompt a part of the answer",
                    field="data.template",
                    found=name,
                )
            segments += [Segment(before[len(done) :], False), Segment(after[len(before) :], True)]
            done = after
        return segments

    return applied


@cache
def _renderer(source: str, name: str, folder: Path | None) -> Callable[[list[dict[str, str]], bool], str]:
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    # Sandboxed, because it comes with a model from somewhere; trimmed, as Hugging Face does it.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = raise_exception
    tokens = special_tokens(folder) if folder is not None else {}

    def failed(error: Exception) -> InputError:
        message = f"data.template: {name}: {type(error).__name__}: {error}"
        return InputError(message, field="data.template", found=name, allowed="a jinja2 chat template")

    try:
        template = environment.from_string(source)
    except TemplateError as error:
        raise failed(error) from None

    def render(messages: list[dict[str, str]], add_generation_prompt: bool) -> str:
        try:
            return template.render(messages=messages, add_generation_prompt=add_generation_prompt, **tokens)
        except (TemplateError, TypeError, ValueError) as error:
            raise failed(error) from None

    return render
