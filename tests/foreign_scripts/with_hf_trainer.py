"""A small causal language model from a config, trained with the Hugging Face Trainer on its own source text."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, HfArgumentParser, Trainer, TrainingArguments, set_seed


@dataclass
class DataArguments:
    text_file: str = field(default=__file__, metadata={"help": "Text to learn, byte by byte."})
    block_size: int = field(default=32)


class ByteBlocks(torch.utils.data.Dataset):
    def __init__(self, path, block_size):
        data = torch.tensor(list(Path(path).read_bytes()))
        self.blocks = data[: len(data) // block_size * block_size].view(-1, block_size)

    def __len__(self):
        return len(self.blocks)

    def __getitem__(self, i):
        return {"input_ids": self.blocks[i], "labels": self.blocks[i]}


def main():
    parser = HfArgumentParser((DataArguments, TrainingArguments))
    data_args, training_args = parser.parse_args_into_dataclasses()
    set_seed(training_args.seed)
    config = GPT2Config(vocab_size=256, n_positions=data_args.block_size, n_embd=32, n_layer=1, n_head=2)
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=training_args,
        train_dataset=ByteBlocks(data_args.text_file, data_args.block_size),
    )
    result = trainer.train()
    trainer.save_model()
    trainer.save_state()
    print(f"rank {training_args.process_index}/{training_args.world_size} done at step {result.global_step}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
