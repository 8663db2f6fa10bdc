import sys

import pytest

from gradus.record.plot import plot_metrics
from gradus.record.table import Table
from gradus.schema.errors import InputError

LEFT = Table(
    [
        {"step": 1, "attempt": 1, "loss": 4.0, "lr": 0.1, "mfu": None},
        {"step": 2, "attempt": 1, "loss": 3.0, "lr": 0.2, "mfu": None, "validation_loss": 3.5},
    ]
)
RIGHT = Table([{"step": 1, "loss": 4.5}, {"step": 2, "loss": 2.5}])


def drawn(figure):
    """Panel by panel: the label of each line and its points."""
    return [
        {line.get_label(): list(zip(*map(list, line.get_data()), strict=True)) for line in axes.get_lines()}
        for axes in figure.axes
    ]


def test_without_names_it_is_the_loss_and_the_validation_loss():
    [panel] = drawn(plot_metrics({"run": LEFT}))
    assert panel == {"loss": [(1, 4.0), (2, 3.0)], "validation loss": [(2, 3.5)]}


def test_runs_are_compared_in_one_panel_each_in_its_colour():
    figure = plot_metrics({"one": LEFT, "two": RIGHT})
    [panel] = drawn(figure)
    assert panel == {
        "one · loss": [(1, 4.0), (2, 3.0)],
        "one · validation loss": [(2, 3.5)],
        "two · loss": [(1, 4.5), (2, 2.5)],
    }
    first, second, third = (line.get_color() for line in figure.axes[0].get_lines())
    assert first == second != third


def test_other_metrics_have_panels_of_their_own():
    figure = plot_metrics({"run": LEFT}, ["lr", "loss"], log=True)
    assert [axes.get_ylabel() for axes in figure.axes] == ["lr", "loss"]
    assert [next(iter(panel.values())) for panel in drawn(figure)] == [[(1, 0.1), (2, 0.2)], [(1, 4.0), (2, 3.0)]]
    assert figure.axes[0].get_yscale() == "log"


def test_the_bare_name_of_a_metric_is_that_of_its_evaluations():
    table = Table([{"step": 1, "loss": 4.0}, {"step": 2, "loss": 3.0, "validation_accuracy": 0.5}])
    [panel] = drawn(plot_metrics({"run": table}, ["accuracy"]))
    assert list(panel.values()) == [[(2, 0.5)]]
    [panel] = drawn(plot_metrics({"run": LEFT}, ["loss"]))
    assert list(panel.values()) == [[(1, 4.0), (2, 3.0)]], "what training logs is meant where there is such a column"


def test_the_picture_shows_itself_and_can_be_saved(tmp_path):
    figure = plot_metrics({"run": LEFT})
    assert figure._repr_png_().startswith(b"\x89PNG")
    figure.savefig(tmp_path / "loss.svg")
    assert "</svg>" in (tmp_path / "loss.svg").read_text()


def test_pyplot_is_not_touched():
    plot_metrics({"run": LEFT})
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()


def test_a_misspelt_metric_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'validation_loss'"):
        plot_metrics({"run": LEFT}, ["validation_los"])
    with pytest.raises(InputError, match="unknown metric 'mfu'"):  # a column in which there is nothing
        plot_metrics({"run": LEFT}, ["mfu"])


def test_a_run_that_has_logged_nothing_is_no_empty_picture():
    with pytest.raises(InputError, match="logged no step yet"):
        plot_metrics({"run": Table([])})


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InputError) as caught:
        plot_metrics({"run": LEFT})
    assert "gradus[notebook]" in caught.value.hint
