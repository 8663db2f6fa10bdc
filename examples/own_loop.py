# Handwritten digits, on any number of devices, with resume, stop requests, metrics and checkpoints.
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils import data

import gradus

images, labels = load_digits(return_X_y=True)
digits = data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, held_out = data.random_split(digits, [1500, 297], torch.Generator().manual_seed(0))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


run = gradus.Run.start({"name": "own-loop", "batch": 60, "epochs": 4, "evaluate": {"every": 25}})
model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
model, optimizer = run.prepare(model, optimizer)
for batch in run.batches(train):
    run.step(loss_of(model, batch))
    if run.evaluation_due:
        print(run.steps_done, run.evaluate(held_out, lambda batch: loss_of(model, batch)))
