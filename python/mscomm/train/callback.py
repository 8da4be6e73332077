"""MindSpore's import path for callbacks.

from mscomm.train.callback import CheckpointConfig, ModelCheckpoint, LossMonitor
"""

from __future__ import annotations

from mscomm.train.checkpoint import CheckpointConfig as CheckpointConfig
from mscomm.train.checkpoint import ModelCheckpoint as ModelCheckpoint
from mscomm.train.hooks import Callback as Callback
from mscomm.train.hooks import RunContext as RunContext
from mscomm.train.monitors import LossMonitor as LossMonitor
from mscomm.train.monitors import ProgressBar as ProgressBar
from mscomm.train.monitors import TimeMonitor as TimeMonitor
from mscomm.train.tracing import StepTrace as StepTrace
