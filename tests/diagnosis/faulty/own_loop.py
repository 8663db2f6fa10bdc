"""A loop of one's own that does something else after each step, for as long as it is told."""

import sys
import time

import torch
from parts import Perceptron, Samples

import gradus

run = gradus.Run.start({"name": "dawdles", "batch": 8, "steps": 40, "plan": {"workers": 0}})
model = Perceptron()
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4))
for x, y in run.batches(Samples()):
    run.step(((model(x) - y) ** 2).mean())
    time.sleep(float(sys.argv[1]))
