"""set_auto_parallel_context: MindSpore's names and defaults, and what it refuses."""

from __future__ import annotations

import subprocess
import sys

import pytest

import mscomm
from mscomm import context
from mscomm.context import ParallelMode


@pytest.fixture(autouse=True)
def fresh():
    mscomm.reset_auto_parallel_context()
    yield
    mscomm.reset_auto_parallel_context()


def test_the_defaults_are_mindspores():
    said = {name: mscomm.get_auto_parallel_context(name) for name in ("parallel_mode", "gradients_mean", "device_num")}
    assert said == {"parallel_mode": "stand_alone", "gradients_mean": False, "device_num": 1}
    assert mscomm.get_auto_parallel_context("parameter_broadcast") is False
    assert not context.auto_parallel_was_set("parallel_mode")


def test_what_was_set_is_given_back_until_the_reset():
    mscomm.set_auto_parallel_context(parallel_mode=ParallelMode.DATA_PARALLEL, gradients_mean=True)
    mscomm.set_auto_parallel_context(comm_fusion={"allreduce": {"mode": "size", "config": 32}})
    assert mscomm.get_auto_parallel_context("parallel_mode") == "data_parallel"
    assert mscomm.get_auto_parallel_context("gradients_mean") is True
    mscomm.reset_auto_parallel_context()
    assert mscomm.get_auto_parallel_context("gradients_mean") is False
    assert mscomm.get_auto_parallel_context("comm_fusion") is None


@pytest.mark.parametrize("name", context._AUTO_PARALLEL)
def test_each_default_can_be_set(name):
    default = mscomm.get_auto_parallel_context(name)
    if default is not None:
        mscomm.set_auto_parallel_context(**{name: default})
    assert mscomm.get_auto_parallel_context(name) == default


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"parallel_mod": "data_parallel"}, ValueError, "'parallel_mod' is not one of parallel_mode, gradients_mean"),
        ({"parallel_mode": "data"}, ValueError, "'data' is not one of stand_alone, data_parallel"),
        ({"gradients_mean": 1}, TypeError, "gradients_mean: is a int; expected True or False"),
        ({"device_num": 0}, ValueError, "device_num: 0; expected 1 to 4096"),
        ({"device_num": "8"}, TypeError, "device_num: is a str"),
        ({"global_rank": 4096}, ValueError, "expected 0 to 4095"),
        ({"comm_fusion": {"all_reduce": {}}}, ValueError, "comm_fusion"),
        ({"comm_fusion": {"allreduce": {"mode": "size"}}}, TypeError, "expected an int"),
        ({"comm_fusion": {"allreduce": {"mode": "index", "config": [2]}}}, NotImplementedError, 'use mode "size"'),
        ({"enable_parallel_optimizer": True}, NotImplementedError, "enable_parallel_optimizer: True is not in this"),
    ],
)
def test_what_is_refused_sets_nothing(options, error, says):
    with pytest.raises(error, match=says):
        mscomm.set_auto_parallel_context(gradients_mean=True, **{"device_num": 3, **options}) if (
            "gradients_mean" not in options
        ) else mscomm.set_auto_parallel_context(**options)
    assert mscomm.get_auto_parallel_context("gradients_mean") is False
    with pytest.raises(ValueError, match="get_auto_parallel_context: 'x' is not one of"):
        mscomm.get_auto_parallel_context("x")


def test_the_tutorials_import_lines():
    from mscomm import LossMonitor, Model, train
    from mscomm.context import ParallelMode, reset_auto_parallel_context, set_auto_parallel_context
    from mscomm.train.callback import CheckpointConfig, ModelCheckpoint
    from mscomm.train.model import Model as same
    from mscomm.train.serialization import load_checkpoint, load_param_into_net

    assert Model is same is train.Model is mscomm.Model and LossMonitor is train.LossMonitor
    assert ParallelMode is mscomm.ParallelMode and load_checkpoint is mscomm.load_checkpoint
    assert callable(reset_auto_parallel_context) and callable(set_auto_parallel_context)
    assert callable(load_param_into_net) and CheckpointConfig is mscomm.CheckpointConfig
    assert ModelCheckpoint is mscomm.train.ModelCheckpoint


def test_the_context_and_the_training_import_no_framework():
    code = """
import sys, mscomm
mscomm.set_auto_parallel_context(gradients_mean=True)
light = "mscomm.train" not in sys.modules
mscomm.train.Model
print(light, [name for name in ("torch", "jax", "mindspore", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("True []\n", 0), done.stderr
