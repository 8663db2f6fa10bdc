"""A recipe is read as its author meant it, or refused with what to change."""

from pathlib import Path

import pytest

from gradus.schema.errors import EXIT_BAD_INPUT, InputError
from gradus.schema.recipe import Recipe


def refusal(path: Path, *overrides: str) -> InputError:
    with pytest.raises(InputError) as caught:
        Recipe.load(path, overrides)
    assert caught.value.exit_code == EXIT_BAD_INPUT
    return caught.value


@pytest.mark.parametrize("text", ["1e-3", "1.0e-3", "1E-3", "0.001", "+1e-3", ".1e-2"])
def test_every_way_to_write_a_number_is_a_number(recipe_file, text):
    assert Recipe.load(recipe_file("1e-3", text)).optimizer.lr == 0.001


def test_a_key_that_appears_twice_is_refused_with_its_line(recipe_file):
    error = refusal(recipe_file(add="batch: 16\n"))
    assert "line 7" in error.message
    assert "'batch' appears twice" in error.message


def test_a_mapping_as_a_key_is_refused_and_not_a_crash(recipe_file):
    assert "line 7" in refusal(recipe_file(add="{a: b}: 16\n")).message


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("batch=16", 16),
        ("optimizer.lr=1e-2", 0.01),
        ("deterministic=true", True),
        ("plan.mesh.replicate=2", 2),
        ("optimizer.betas=[0.9, 0.99]", [0.9, 0.99]),
        ("model.use=vit", "vit"),
        ("evaluate.every=5", 5),
        ("optimizer.clip=null", None),
    ],
)
def test_an_override_has_the_type_that_the_file_would_give_it(recipe_file, override, value):
    found = Recipe.load(recipe_file(), [override])
    for key in override.partition("=")[0].split("."):
        found = found.options[key] if key == "betas" else getattr(found, key)
    assert found == value
    assert type(found) is type(value)


def test_an_override_of_the_budget_replaces_the_one_in_the_file(recipe_file):
    recipe = Recipe.load(recipe_file(), ["epochs=1"])
    assert (recipe.steps, recipe.epochs, recipe.tokens) == (None, 1.0, None)


def test_two_budgets_or_none_are_refused(recipe_file):
    assert "found steps, tokens" in refusal(recipe_file(add="tokens: 100\n")).message
    none = refusal(path := recipe_file("steps: 6\n", ""))
    assert none.message == f"{path}: allowed: exactly one of steps, epochs and tokens; found none"
    assert "found steps, epochs" in refusal(recipe_file(), "steps=3", "epochs=1").message


@pytest.mark.parametrize(
    ("add", "field", "found", "nearest"),
    [
        ("bach: 3", "bach", "bach", "batch"),
        ("plan: {mesh: {tensr: 2}}", "plan.mesh.tensr", "tensr", "tensor"),
        ("plan: {precison: bf16}", "plan.precison", "precison", "precision"),
        ("evaluate: {evry: 2}", "evaluate.evry", "evry", "every"),
        ("checkpoint: {kep: 2}", "checkpoint.kep", "kep", "keep"),
        ("loss: cross-entrpy", "loss", "cross-entrpy", "cross-entropy"),
        ("metrics: [acuracy]", "metrics", "acuracy", "accuracy"),
        ("exporters: [tensorbord]", "exporters.0", "tensorbord", "tensorboard"),
        ("plan: {precision: bf61}", "plan.precision", "bf61", "bf16"),
    ],
)
def test_a_near_miss_is_refused_with_the_nearest_name(recipe_file, add, field, found, nearest):
    path = recipe_file(add=add + "\n")
    error = refusal(path)
    details = error.details
    assert (details["file"], details["field"], details["found"], details["nearest"]) == (
        str(path),
        field,
        found,
        nearest,
    )
    assert nearest in details["allowed"]
    assert error.message.startswith(f"{path}: {field}: ")
    assert f"did you mean {nearest!r}?" in error.message


@pytest.mark.parametrize(
    ("optimizer", "field", "found", "nearest"),
    [
        ("{lr: 1e-3, wamup: 3}", "optimizer.wamup", "wamup", "warmup"),
        ("{lr: 1e-3, btas: [0.9, 0.9]}", "optimizer.btas", "btas", "betas"),
        ("{use: adamv, lr: 1e-3}", "optimizer.use", "adamv", "adamw"),
        ("{lr: 1e-3, decay: cosin}", "optimizer.decay", "cosin", "cosine"),
        ("{lr: 1e-3, lr_scaling: linar}", "optimizer.lr_scaling", "linar", "linear"),
    ],
)
def test_a_near_miss_in_the_optimizer_is_refused_too(recipe_file, optimizer, field, found, nearest):
    path = recipe_file("{lr: 1e-3}", optimizer)
    details = refusal(path).details
    assert (details["file"], details["field"], details["found"], details["nearest"]) == (
        str(path),
        field,
        found,
        nearest,
    )


def test_narrow_moments_of_another_optimizer_are_refused_under_their_own_name(recipe_file):
    error = refusal(recipe_file(), "optimizer.moments=bf16", "optimizer.use=sgd")
    assert error.details["field"] == "optimizer.moments"
    assert error.message == (
        "--set optimizer.moments=bf16: optimizer.moments: found 'bf16' (text), allowed: fp32, since optimizer.use is "
        "sgd: only adamw has moments in bf16"
    )


def test_a_momentum_for_adamw_is_refused_and_for_sgd_kept(recipe_file):
    assert "momentum" in refusal(recipe_file("{lr: 1e-3}", "{lr: 1e-3, momentum: 0.9}")).message
    assert Recipe.load(recipe_file("{lr: 1e-3}", "{use: sgd, lr: 1e-3, momentum: 0.9}")).optimizer.options == {
        "momentum": 0.9
    }


@pytest.mark.parametrize(
    ("replace", "by", "field", "found", "allowed"),
    [
        ("batch: 8", "batch: eight", "batch", "eight", "a whole number"),
        ("batch: 8", "batch: 8.5", "batch", 8.5, "a whole number"),
        ("batch: 8", "batch: true", "batch", True, "a whole number"),
        ("batch: 8", "batch: 0", "batch", 0, "at least 1"),
        ("batch: 8", "batch: [8]", "batch", "list", "a whole number"),
        ("batch: 8", "batch:", "batch", "nothing", "a whole number"),
        ("lr: 1e-3", "lr: fast", "optimizer.lr", "fast", "a number"),
        ("lr: 1e-3", "lr: -1", "optimizer.lr", -1, "more than 0"),
        ("lr: 1e-3", "lr: .inf", "optimizer.lr", float("inf"), "a finite number"),
        ("{lr: 1e-3}", "1e-3", "optimizer", 0.001, "a mapping of keys to values"),
        ("{lr: 1e-3}", "{lr: 1e-3, clip: yes}", "optimizer.clip", True, "a number"),
        ("name: tiny", "name: 5", "name", 5, "text"),
        ("steps: 6", "steps: 6\nseed: -1", "seed", -1, "at least 0"),
        ("steps: 6", "steps: 6\nmetrics: accuracy", "metrics", "accuracy", "a list"),
        ("steps: 6", "steps: 6\ndeterministic: 1", "deterministic", 1, "true or false"),
        ("steps: 6", "steps: 6\ncheckpoint: {every: 0}", "checkpoint.every", 0, "a number of steps (at least 1)"),
        ("steps: 6", "steps: 6\ncheckpoint: {every: 12 min}", "checkpoint.every", "12 min", "12m"),
    ],
)
def test_a_wrong_type_is_refused_with_what_is_allowed(recipe_file, replace, by, field, found, allowed):
    path = recipe_file(replace, by)
    error = refusal(path)
    assert (error.details["file"], error.details["field"], error.details["found"]) == (str(path), field, found)
    assert allowed in error.details["allowed"]
    assert allowed in error.message


def test_a_missing_key_is_named(recipe_file):
    error = refusal(recipe_file("batch: 8\n", ""))
    assert error.message.endswith("batch: missing, and it is required")
    assert {"file", "field", "found", "allowed"} <= error.details.keys()


def test_all_that_is_wrong_is_told_at_once(recipe_file):
    error = refusal(recipe_file("batch: 8\nsteps: 6", "batch: x\nsteps: y"), "optimizr.lr=3")
    assert [problem["field"] for problem in error.details["problems"]] == ["batch", "steps", "optimizr"]
    assert len(error.message.splitlines()) == 3


def test_an_error_in_an_override_names_the_override_and_not_the_file(recipe_file):
    error = refusal(recipe_file(), "plan.mesh.tensr=2")
    assert error.details["file"] == "--set plan.mesh.tensr=2"
    assert error.details["nearest"] == "tensor"


@pytest.mark.parametrize("override", ["batch", "=3", "optimizer..lr=3", "batch.size=3", "batch=[1"])
def test_an_override_that_makes_no_sense_is_refused(recipe_file, override):
    assert "--set" in refusal(recipe_file(), override).message


def test_a_missing_file_names_its_siblings_and_the_nearest(recipe_file):
    path = recipe_file()
    error = refusal(path.with_name("recipes.yaml"))
    assert error.details["nearest"] == str(path)
    assert error.details["allowed"] == [str(path)]
    assert str(path) in (error.hint or "")


def test_broken_yaml_names_the_line(recipe_file):
    error = refusal(recipe_file("batch: 8", "batch: [8"))
    assert error.details["line"] in (4, 5)
    assert f"line {error.details['line']}" in error.message


@pytest.mark.parametrize("text", ["", "- a\n- b\n", "just text\n"])
def test_a_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    assert "allowed: a mapping of keys to values" in refusal(path).message


def test_a_folder_and_a_binary_file_are_refused(tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    assert "cannot be read" in refusal(tmp_path).message
    assert "cannot be read" in refusal(tmp_path / "binary.yaml").message


def test_a_file_py_name_is_found_beside_the_recipe_from_anywhere(recipe_file, tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def build(): ...\n")
    path = recipe_file("use: gpt, layers: 1, width: 16, heads: 2, context: 16", "use: 'mine.py:build'")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for way in (path, f"../{path.name}", f"../elsewhere/../{path.name}"):
        assert Recipe.load(way).model.use == f"{tmp_path}/mine.py:build"


def test_all_names_of_callables_become_absolute(recipe_file, tmp_path):
    (tmp_path / "mine.py").write_text("")
    path = recipe_file(
        "{lr: 1e-3}",
        "{use: 'mine.py:opt', lr: 1e-3, decay: 'mine.py:decay'}\nloss: {use: 'mine.py:loss', k: 1}\n"
        "metrics: ['mine.py:metric', accuracy]",
    )
    recipe = Recipe.load(path, ["data.use=mine.py:data"])
    mine = f"{tmp_path}/mine.py:"
    assert recipe.optimizer.use == mine + "opt"
    assert recipe.optimizer.decay == mine + "decay"
    assert recipe.loss is not None
    assert (recipe.loss.use, recipe.loss.options) == (mine + "loss", {"k": 1})
    assert [metric.use for metric in recipe.metrics] == [mine + "metric", "accuracy"]
    assert recipe.data.use == mine + "data"


def test_a_recipe_written_and_read_again_is_equal_and_fixes_the_same(recipe_file, tmp_path):
    path = recipe_file(add="plan: {mesh: {replicate: 2}, workers: 0}\nloss: mse\nevaluate: {every: 3}\n")
    recipe = Recipe.load(path, ["optimizer.betas=[0.9, 0.95]"])
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    read = Recipe.load(again)
    assert read == recipe
    assert read.plan.fixed == recipe.plan.fixed == {"mesh", "workers"}
    assert Recipe.load(again, ["batch=9"]) != recipe


@pytest.mark.parametrize("optimizer", ["{lr: 1e-3, decay: step}", "{lr: 1e-3, lr_scaling: linear}"])
def test_a_key_that_another_one_needs_is_asked_for(recipe_file, optimizer):
    error = refusal(recipe_file("{lr: 1e-3}", optimizer))
    assert "missing" in error.message
    assert {"file", "field", "found", "allowed"} <= error.details.keys()


@pytest.mark.parametrize(
    ("override", "field", "message"),
    [
        ("data.shuffle={blok: 64}", "data.shuffle.blok", "did you mean 'blocks'? Allowed: blocks, window"),
        ("data.shuffle=fulll", "data.shuffle", "did you mean 'full'?"),
        ("plan.workers=many", "plan.workers", "allowed: a whole number, or auto"),
        ("plan.workers=-1", "plan.workers", "allowed: at least 0, or auto"),
    ],
)
def test_a_value_that_may_be_of_several_kinds_is_refused_under_its_own_name(recipe_file, override, field, message):
    error = refusal(recipe_file(), override)
    assert field in [problem["field"] for problem in error.details["problems"]]
    assert message in error.message
    assert "literal[" not in error.message
    assert "BlockShuffle" not in error.message
    assert "constrained" not in error.message
