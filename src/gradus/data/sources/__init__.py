"""The built-in data sources, one file for each family."""

from __future__ import annotations

from gradus.data.sources.chat import ChatRecords
from gradus.data.sources.cifar10 import Cifar10
from gradus.data.sources.digits import Digits
from gradus.data.sources.folder import ImageFolder
from gradus.data.sources.mixture import Mixture
from gradus.data.sources.mnist import Mnist
from gradus.data.sources.options import Options
from gradus.data.sources.shards import PackedShards
from gradus.data.sources.stdlib import StdlibText
from gradus.data.sources.synthetic import SyntheticImages, SyntheticTokens
from gradus.data.sources.text_files import TextFiles
from gradus.data.sources.tokens import TokenFile

BUILT_IN: dict[str, type[Options]] = {
    options.use: options
    for options in (
        StdlibText,
        TextFiles,
        ChatRecords,
        TokenFile,
        SyntheticTokens,
        SyntheticImages,
        Digits,
        Mnist,
        Cifar10,
        ImageFolder,
        Mixture,
        PackedShards,
    )
}
