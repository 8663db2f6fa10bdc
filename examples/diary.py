"""A hook: what happened when, in words."""

import gradus


class Diary(gradus.Hook):
    def __init__(self, file="diary.txt"):
        self.file = file

    def on_evaluate(self, run, results):
        with (run.directory / self.file).open("a") as file:
            file.write(f"after {run.step} steps the validation loss is {results['loss']:.3f}\n")
