"""A plain loop that reads the loss at every step."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

x = torch.rand(128, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=16)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for epoch in range(3):
    total = 0.0
    for features, targets in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(features), targets)
        loss.backward()
        optimizer.step()
        total += loss.item()
    print(epoch, total)
