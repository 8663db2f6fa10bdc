"""A user's callable that splits its data at random must not leak validation samples into training."""

from __future__ import annotations

import user_code
from training_cases import recipe_for

from gradus.training.building import open_data


def test_a_random_split_is_the_same_for_both_halves() -> None:
    recipe = recipe_for("gpt", data={"use": f"{user_code.__file__}:points_split_at_random"})
    train, validation = open_data(recipe, "train"), open_data(recipe, "validation")
    assert train is not None
    assert validation is not None
    assert sorted([*train.dataset.indices, *validation.dataset.indices]) == list(range(100))
