"""Store: checkpoints on disk. One exists when its COMMITTED file does, and is used only if every byte is as written.

Nothing is pickled, so nothing in a checkpoint can run. What is in one: see `manifest`.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gradus.checkpoint.commit import NotWhole, commit
from gradus.checkpoint.manifest import DamagedCheckpoint, committed_steps, stored_tensors, verify_folder
from gradus.checkpoint.owners import part_layout
from gradus.checkpoint.part import write_part, write_record
from gradus.checkpoint.patience import UnreadableCheckpoint
from gradus.checkpoint.reading import files_kept_open, read_tensor
from gradus.checkpoint.step_folder import step_name
from gradus.checkpoint.tensor_file import StoredTensor
from gradus.checkpoint.writing import one_at_a_time


@dataclass(frozen=True)
class Checkpoint:
    step: int
    path: Path
    state: dict[str, Any]
    manifest: dict[str, Any] = field(repr=False)  # files with sizes and digests, tensors, versions and hashes
    local: Path | None = None  # where copies of its files may lie

    def stored(self) -> Mapping[str, StoredTensor]:
        """What tensors there are and where their bytes lie, to be read one by one, or only in part."""
        return stored_tensors(self.path, self.manifest, self.local)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors, in host memory."""
        with files_kept_open():
            return {name: read_tensor(stored) for name, stored in self.stored().items()}


class CheckpointStore:
    """The checkpoints of one run. `local` is a folder of the node's own in which the same files may lie."""

    def __init__(self, folder: Path, local: Path | None = None) -> None:
        self.folder = folder
        self.local = local

    def path(self, step: int) -> Path:
        return self.folder / step_name(step)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, ascending."""
        return list(committed_steps(self.folder))

    def open(self, step: int, every_byte: bool = True) -> Checkpoint:
        """A checkpoint that is as it was written; anything else raises DamagedCheckpoint.

        Without `every_byte`, the bytes of a tensor are compared when it is read.
        """
        path = self.path(step)
        manifest = verify_folder(path, every_byte=every_byte)
        local = self.local / path.name if self.local is not None else None
        return Checkpoint(step, path, manifest["state"], manifest, local)

    def verify(self, step: int) -> dict[str, Any]:
        """The manifest, after every byte of every file was compared with it."""
        return verify_folder(self.path(step))

    def newest(
        self, every_byte: bool = True, passed_over: Collection[int] = ()
    ) -> tuple[Checkpoint | None, list[DamagedCheckpoint]]:
        """The newest checkpoint that can be trusted, and what was found wrong with newer ones.

        One that cannot be read at present is no reason to take an older one: that is an UnreadableCheckpoint.
        `passed_over` are steps that somebody has found to be damaged already.
        """
        damaged: list[DamagedCheckpoint] = []
        for step in reversed(self.steps()):
            if step in passed_over:
                continue
            try:
                return self.open(step, every_byte), damaged
            except DamagedCheckpoint as error:
                damaged.append(error)
        return None, damaged

    def save(self, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> Checkpoint:
        """Write a checkpoint from one process, and verify it. A failure is an OSError and leaves nothing."""
        path = self.path(step)
        layout = part_layout(tensors, rank=0, ranks=1)
        try:
            data = one_at_a_time(layout, lambda name: tensors[name])
            write_record(path, write_part(path, layout, data, abandoned=lambda: False))
            commit(path, step, 1, {"state": dict(state)}, abandoned=lambda: False)
            manifest = self.verify(step)
        except (DamagedCheckpoint, UnreadableCheckpoint, NotWhole, OSError) as error:
            shutil.rmtree(path, ignore_errors=True)
            raise error if isinstance(error, OSError) else OSError(str(error)) from error
        return Checkpoint(step, path, manifest["state"], manifest)
