"""Datasets that are known by name: which files they are, where they are published, and how to know them again."""

from __future__ import annotations

from dataclasses import dataclass

from gradus.data.sources.cifar10 import FILES as CIFAR10_FILES
from gradus.data.sources.cifar10 import RECORD_BYTES, RECORDS_PER_FILE


@dataclass(frozen=True)
class RemoteFile:
    name: str
    size_bytes: int | None = None
    sha256: str | None = None
    url: str | None = None  # its own address, where it is not looked for in a folder by its name


@dataclass(frozen=True)
class Published:
    name: str
    files: tuple[RemoteFile, ...]
    bases: tuple[str, ...]  # addresses of folders that have the files, tried one after the other
    members: tuple[tuple[str, int], ...] = ()  # of an archive: what is unpacked from it, with the size in bytes

    def recipe(self, folder: str) -> str:
        """The line of a recipe that uses the data."""
        return f"data: {{use: {self.name}, path: {folder}}}"


PUBLISHED = {
    data.name: data
    for data in (
        # SHA-256 of the four files as torchvision's prototype datasets list them; its MD5 values are of the same files.
        # Sizes as Keras and TensorFlow print them.
        Published(
            "mnist",
            (
                RemoteFile(
                    "train-images-idx3-ubyte.gz",
                    9_912_422,
                    "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
                ),
                RemoteFile(
                    "train-labels-idx1-ubyte.gz",
                    28_881,
                    "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
                ),
                RemoteFile(
                    "t10k-images-idx3-ubyte.gz",
                    1_648_877,
                    "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
                ),
                RemoteFile(
                    "t10k-labels-idx1-ubyte.gz",
                    4_542,
                    "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
                ),
            ),
            (
                "https://ossci-datasets.s3.amazonaws.com/mnist/",
                "https://storage.googleapis.com/cvdf-datasets/mnist/",
            ),
        ),
        # The binary version. Its MD5 on the authors' page is c32a1d4ab5d03f1284b67883e8d87530; size and SHA-256 of that
        # very file as MLDatasets.jl and several other loaders check them.
        Published(
            "cifar10",
            (
                RemoteFile(
                    "cifar-10-binary.tar.gz",
                    170_052_171,
                    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
                ),
            ),
            ("https://www.cs.toronto.edu/~kriz/",),
            tuple(
                (f"cifar-10-batches-bin/{name}", RECORDS_PER_FILE * RECORD_BYTES)
                for names in CIFAR10_FILES.values()
                for name in names
            ),
        ),
    )
}
