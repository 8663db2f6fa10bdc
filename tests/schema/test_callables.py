"""What a recipe names is checked without running it, and imported once."""

import pytest

from gradus.schema.callables import check_import_path, import_callable, short_name
from gradus.schema.errors import InputError


def test_a_file_is_checked_without_being_run(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("raise SystemExit('ran')\ndef build(): ...\n")
    check_import_path(f"{path}:build", "model.use")


def test_a_name_that_the_file_lacks_is_refused_with_the_nearest(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text("if True:\n    def build_model(): ...\n")
    with pytest.raises(InputError, match="did you mean 'build_model'") as caught:
        check_import_path(f"{path}:build_modl", "model.use")
    assert caught.value.details["nearest"] == "build_model"
    assert caught.value.details["field"] == "model.use"


@pytest.mark.parametrize(
    ("text", "words"),
    [("def build(:\n", "line 1: not valid Python"), (None, "no such file")],
)
def test_a_broken_or_missing_file_is_refused(tmp_path, text, words):
    path = tmp_path / "mine.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=words):
        check_import_path(f"{path}:build", "model.use")


def test_a_missing_file_names_the_nearest_one(tmp_path):
    (tmp_path / "mine.py").write_text("")
    with pytest.raises(InputError, match=r"did you mean .*mine\.py") as caught:
        check_import_path(f"{tmp_path}/mime.py:build", "model.use")
    assert caught.value.details["nearest"] == f"{tmp_path}/mine.py"


def test_a_file_is_run_once_and_may_import_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_mine.py").write_text("VALUE = 7\n")
    path = tmp_path / "mine.py"
    path.write_text("from neighbour_of_mine import VALUE\nclass Thing: ...\ndef build(): return VALUE, Thing\n")
    first, second = (import_callable(f"{path}:build", "model.use")() for _ in range(2))
    assert first[0] == 7
    assert first[1] is second[1]


def test_a_module_that_is_not_there_is_refused_but_one_that_fails_to_import_another_shows_that(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "needs_more.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(InputError, match="no module named 'no_such_package'"):
        import_callable("no_such_package.models:build", "model.use")
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        import_callable("needs_more:build", "model.use")
    with pytest.raises(InputError, match="does not exist"):
        import_callable("json:build", "model.use")
    with pytest.raises(InputError, match="is not callable"):
        import_callable("json:__name__", "model.use")


def test_a_name_may_have_dots(tmp_path):
    path = tmp_path / "dotted.py"
    path.write_text(
        "class Models:\n    class Small:\n        @classmethod\n        def build(cls, n): return cls, n\n"
        "    size = 3\n"
    )
    kind, number = import_callable(f"{path}:Models.Small.build", "model.use")(4)
    assert (kind.__name__, number) == ("Small", 4)
    assert import_callable("json:JSONDecoder.decode", "loss").__name__ == "decode"
    with pytest.raises(InputError, match=r"'Smal' in .*dotted\.py:Models does not exist; did you mean 'Small'"):
        import_callable(f"{path}:Models.Smal.build", "model.use")
    with pytest.raises(InputError, match=r"'Models\.size' in .* is not callable"):
        import_callable(f"{path}:Models.size", "model.use")
    with pytest.raises(InputError, match=r"has no 'Model'; did you mean 'Models'"):
        check_import_path(f"{path}:Model.Small.build", "model.use")


def test_a_name_that_a_module_lacks_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="did you mean 'loads'") as caught:
        import_callable("json:laods", "loss")
    assert caught.value.details["nearest"] == "loads"


def test_a_callable_is_called_by_the_last_part_of_its_name():
    assert short_name("/some/where.py:top5") == "top5"
    assert short_name("package.module:Class.method") == "method"
    assert short_name("accuracy") == "accuracy"
