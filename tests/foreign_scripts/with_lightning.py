"""A LightningModule, written for torchrun or Slurm: `devices` and the strategy come from the environment."""

import argparse
import os

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset


class LitRegression(L.LightningModule):
    def __init__(self, lr=0.1):
        super().__init__()
        self.save_hyperparameters()
        self.model = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = torch.nn.functional.mse_loss(self.model(x), y)
        self.log("train_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self):
        loss = self.trainer.callback_metrics["train_loss"]
        print(f"rank {self.global_rank}/{self.trainer.world_size} epoch {self.current_epoch} train_loss {loss:.5f}")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--max_epochs", type=int, default=4)
    parser.add_argument("--out", default="lightning_out")
    args = parser.parse_args()
    L.seed_everything(7)
    x = torch.randn(256, 4)
    loader = DataLoader(TensorDataset(x, x.sum(dim=1, keepdim=True)), batch_size=16, shuffle=True)
    trainer = L.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy="ddp",
        max_epochs=args.max_epochs,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(dirpath=args.out, filename="last-{epoch}", save_top_k=1)],
    )
    trainer.fit(LitRegression(), loader)


if __name__ == "__main__":
    main()
