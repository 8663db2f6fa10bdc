"""A classifier with Accelerate."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset


def get_dataloaders(batch_size):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, 2, generator=generator)
    y = (x[:, 0] * x[:, 1] > 0).long()
    train = DataLoader(TensorDataset(x[:384], y[:384]), batch_size=batch_size, shuffle=True)
    return train, DataLoader(TensorDataset(x[384:], y[384:]), batch_size=batch_size)


def training_function(args):
    accelerator = Accelerator(cpu=args.cpu, gradient_accumulation_steps=2)
    set_seed(42)
    train_dataloader, eval_dataloader = get_dataloaders(16)
    model = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.ReLU(), torch.nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, train_dataloader, eval_dataloader = accelerator.prepare(
        model, optimizer, train_dataloader, eval_dataloader
    )
    for epoch in range(args.num_epochs):
        model.train()
        for x, y in train_dataloader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        model.eval()
        correct = total = 0
        for x, y in eval_dataloader:
            with torch.no_grad():
                predictions = model(x).argmax(dim=-1)
            predictions, references = accelerator.gather_for_metrics((predictions, y))
            correct += (predictions == references).sum().item()
            total += len(references)
        accelerator.print(f"epoch {epoch}: accuracy {correct / total:.4f} of {total}")
    print(f"process {accelerator.process_index} of {accelerator.num_processes} saw {len(train_dataloader)} batches")
    accelerator.wait_for_everyone()
    accelerator.save_state(args.output_dir)


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--num_epochs", type=int, default=6)
    parser.add_argument("--output_dir", type=str, default=".")
    parser.add_argument("--cpu", action="store_true")
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
