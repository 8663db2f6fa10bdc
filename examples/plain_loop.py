# Handwritten digits, on one device.
import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F
from torch.utils import data

images, labels = load_digits(return_X_y=True)
digits = data.TensorDataset(torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels))
train, held_out = data.random_split(digits, [1500, 297], torch.Generator().manual_seed(0))


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(4):
    for batch in data.DataLoader(train, batch_size=60, shuffle=True):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
with torch.no_grad():
    print(sum(loss_of(model, batch) for batch in data.DataLoader(held_out, 99)) / 3)
