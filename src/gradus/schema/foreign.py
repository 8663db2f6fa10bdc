"""Classes of other libraries that are known by their names, so that nobody has to import the library to ask."""

from __future__ import annotations


def is_pretrained_model(kind: type) -> bool:
    """Whether a class is a model of Hugging Face `transformers`, or a user's class derived from one."""
    return any(base.__name__ == "PreTrainedModel" and is_of(base, "transformers") for base in kind.__mro__)


def is_of(kind: type, package: str) -> bool:
    """Whether a class is defined in a package."""
    return kind.__module__ == package or kind.__module__.startswith(f"{package}.")
