"""Origins: what can be packed. Each is cut into units that any process can read alone, the same ones every time."""

from gradus.data.shards.origins.dataset import OwnDataset
from gradus.data.shards.origins.images import ImageFolders
from gradus.data.shards.origins.origin import LABELS, TEXT, Origin, Sample, Unit
from gradus.data.shards.origins.records import Records

__all__ = ["LABELS", "TEXT", "ImageFolders", "Origin", "OwnDataset", "Records", "Sample", "Unit"]
