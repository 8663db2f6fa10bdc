"""A loop of one's own that prints the loss now and then."""

import torch
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import gradus

x = torch.rand(128, 8, generator=torch.Generator().manual_seed(0))
points = TensorDataset(x, x.sum(1, keepdim=True))
run = gradus.Run.start({"name": "prints", "batch": 8, "steps": 30})
model = torch.nn.Linear(8, 1)
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for features, targets in run.batches(points):
    loss = F.mse_loss(model(features), targets)
    run.step(loss)
    if run.rank == 0 and run.steps_done % 10 == 0:
        print(f"step {run.steps_done}: {loss:.4f}")
