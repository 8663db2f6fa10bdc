"""`gradus models` lists every reference model and preset with its exact number of parameters."""

from gradus.models.catalogue import PRESETS, REFERENCES


def test_every_model_is_listed_once_with_its_parameters(gradus):
    done = gradus("models", "--json")
    assert (done.code, done.err) == (0, "")
    names = [entry["name"] for entry in done.json]
    assert sorted(names) == sorted([*REFERENCES, *PRESETS])
    counts = {entry["name"]: entry["parameters"] for entry in done.json}
    assert counts["resnet50"] == 25_557_032
    assert counts["simple-cnn"] == 2_474_506
    assert counts["mnist-cnn"] == 1_199_882
    assert counts["bert-2.5b"] == 2_472_627_289


def test_people_get_a_table(gradus):
    done = gradus("models")
    assert done.code == 0
    assert "25,557,032" in done.out
