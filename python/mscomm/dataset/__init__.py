"""Reads data, transforms it, and divides it among a job's ranks.

The usual import is `import mscomm.dataset as ds`, as in MindSpore.

A pipeline is a source followed by steps: `ds.Cifar10Dataset(folder, num_shards=n, shard_id=rank).map(...).batch(32)`.
It yields NumPy arrays. The order of a pass depends only on the seed (config.set_seed) and on the number of the pass.
Each random transformation depends only on its place in the pipeline, the seed, the number of the pass and the number of
the sample. So all ranks have the same order, and a pass can be resumed at any batch (state_dict).
"""

from __future__ import annotations

from mscomm.dataset import config as config
from mscomm.dataset import transforms as transforms
from mscomm.dataset import vision as vision
from mscomm.dataset.cifar10 import Cifar10Dataset as Cifar10Dataset
from mscomm.dataset.generator import GeneratorDataset as GeneratorDataset
from mscomm.dataset.pipeline import Dataset as Dataset
from mscomm.dataset.sampler import DistributedSampler as DistributedSampler
