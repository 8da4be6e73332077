"""Options that are accepted and have no effect.

Each has a row in notices.WITHOUT_EFFECT. When one of them is set, one rank warns the user once.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ranks import Job, ranks
from sessions import clean_environment

import mscomm
from mscomm import context, dataset, notices, ops, train
from mscomm.communication import comm_func
from mscomm.dataset import transforms, vision

PACKAGE = Path(mscomm.__file__).parent


@functools.cache  # reading the package takes a second, and the ranks of this file do not need it
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


# Options that no code needs to read, each with the reason.
FULFILLED = {
    "output_numpy": "arrays are NumPy's in any case",
    "do_copy": "arrays are new in any case",
    "draws": "what an operation of a pipeline is given; those that are not random need none",
}


# --- each accepted option has an effect, a row, or an error ----------------------------------------------------------


@functools.cache
def strings() -> set[str]:
    """Return all strings in the package's code, except in the files with the tables of options. If an option's name is
    one of these strings, the option counts as used.
    """
    return {
        node.value
        for path, tree in trees().items()
        if path.name not in ("context.py", "notices.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def is_refused(check: Callable[[Any], None], default: Any) -> bool:
    """Return whether the check raises an error for a value other than the default."""
    other = {bool: not default, int: default + 1 if isinstance(default, int) else 0}.get(type(default), object())
    try:
        check(other)
    except (TypeError, ValueError, NotImplementedError):
        return True
    return False


@pytest.mark.parametrize("name", context._AUTO_PARALLEL)
def test_an_option_of_set_auto_parallel_context_works_is_told_or_refused(name: str) -> None:
    row = context._AUTO_PARALLEL[name]
    is_told = ("set_auto_parallel_context", name) in notices.WITHOUT_EFFECT
    is_read = name in strings()
    assert is_told or is_read or is_refused(row.check, row.default)
    assert not (is_told and row.default not in notices.WITHOUT_EFFECT["set_auto_parallel_context", name].silent)


def test_the_options_of_the_other_context_functions_work_or_are_told() -> None:
    told = {option for function, option in notices.WITHOUT_EFFECT if function == "set_context"}
    # init() reads the first two options, and Model.train the others.
    assert set(context._context) - told == {"device_target", "device_id", "save_graphs", "save_graphs_path"}
    assert {("comm_fusion", name) for name in context._FUSIONS} - notices.WITHOUT_EFFECT.keys() == {
        ("comm_fusion", "allreduce")
    }


def public() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every function of the public modules, and the methods of their classes."""
    for module in (mscomm, train, dataset, vision, transforms, ops, comm_func):
        for name in getattr(module, "__all__", None) or dir(module):
            found = getattr(module, name)
            if not getattr(found, "__module__", "").startswith("mscomm") or name.startswith("_"):
                continue
            if inspect.isfunction(found):
                yield name, found
            elif inspect.isclass(found):
                for method, function in inspect.getmembers(found, inspect.isfunction):
                    if method == "__init__" or not method.startswith("_"):
                        yield f"{name}.{method}", function


def options_without_a_use(function: Callable[..., Any]) -> set[str]:
    """Return the function's options that its body never reads, or only stores in attributes that are never read."""
    options = {name for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty}
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except OSError:  # a dataclass's __init__ has no source; it stores each option in an attribute of the same name
        return options - attributes_read()
    # For each expression that is assigned to an attribute, maps the id of its node to the attribute's name.
    kept: dict[int, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute):
            kept[id(node.value)] = node.targets[0].attr
    used = set()
    for node in ast.walk(tree):
        is_read = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if is_read and (id(node) not in kept or kept[id(node)] in attributes_read()):
            used.add(node.id)
    return options - used


@functools.cache
def attributes_read() -> set[str]:
    return {
        node.attr
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    }


def test_no_public_function_has_an_option_that_it_does_not_read() -> None:
    functions = dict(public())
    assert {"Model.train", "CheckpointConfig.__init__", "save_checkpoint", "Cifar10Dataset.__init__"} <= set(functions)
    del functions["Status.__init__"]  # its fields are results, which the user reads
    told = {(f"{operator}.__init__", option) for operator, option in notices.WITHOUT_EFFECT}
    silent = {
        name: {option for option in options_without_a_use(function) - set(FULFILLED) if (name, option) not in told}
        for name, function in functions.items()
    }
    assert {name: options for name, options in silent.items() if options} == {}


def test_that_walk_finds_what_it_looks_for() -> None:
    def accepts(used: int = 1, unused: int = 2, deleted: int = 3) -> int:
        del deleted
        return used

    class Keeps:
        def __init__(self, kept: int = 1) -> None:
            self.nobody_ever_reads_this = kept

    @dataclasses.dataclass
    class Fields:
        size: int = 1
        nobody_ever_reads_this_either: int = 2

    assert options_without_a_use(accepts) == {"unused", "deleted"}
    assert options_without_a_use(Keeps.__init__) == {"kept"}
    assert options_without_a_use(Fields.__init__) == {"nobody_ever_reads_this_either"}


def test_whoever_tells_of_an_option_by_name_has_a_row_for_it() -> None:
    told = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "tell_without_effect":
                function = node.args[0].value if isinstance(node.args[0], ast.Constant) else ""
                told |= {(function, keyword.arg) for keyword in node.keywords if keyword.arg}
    assert ("save_checkpoint", "async_save") in told
    assert told - notices.WITHOUT_EFFECT.keys() == set()


# --- which warnings are printed --------------------------------------------------------------------------------------

CALLS: dict[str, Callable[..., Any]] = {
    "set_context": mscomm.set_context,
    "set_auto_parallel_context": mscomm.set_auto_parallel_context,
    "comm_fusion": lambda **keys: mscomm.set_auto_parallel_context(comm_fusion=keys),
    "CheckpointConfig": mscomm.CheckpointConfig,
    "save_checkpoint": lambda **options: mscomm.save_checkpoint({"x": np.ones(1)}, "file", **options),
    "Model.train": lambda **options: tiny_model().train(1, [np.ones(1)], **options),
    "TimeMonitor": mscomm.TimeMonitor,
    "Send": lambda **options: ops.Send(0, 0, **options),
    "Receive": lambda **options: ops.Receive(0, 0, [1], np.float32, **options),
}
VALUES: dict[Any, Any] = {"dataset_strategy": "full_batch", "mode": 1, "sink_size": 2, "group_back": "pair"}


class Constant:
    def __init__(self) -> None:
        self.parameters = {"x": np.ones(1)}

    def loss_and_gradients(self, x: Any) -> Any:
        return 0.0, {"x": np.zeros(1)}


def tiny_model() -> mscomm.Model:
    net = Constant()
    return mscomm.Model(net, optimizer=train.SGD(net.parameters))


@pytest.mark.parametrize(("function", "option"), [key for key in notices.WITHOUT_EFFECT if key[0] != "environment"])
def test_an_option_without_effect_is_told_once(function, option, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(notices, "_said", set())
    monkeypatch.setattr(notices, "_rank", None)
    row = notices.WITHOUT_EFFECT[function, option]
    value = VALUES.get(option, not row.silent[0] if isinstance(row.silent[0], bool) else "other")
    try:
        for quiet in (one for one in row.silent if one is not None and one != ()):
            CALLS[function](**{option: quiet})
        assert capfd.readouterr().err == ""
        for _ in range(2):
            CALLS[function](**{option: value})
    finally:
        mscomm.reset_auto_parallel_context()
        mscomm.set_context(mode=0)
    shown = repr(value)
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 1 and f"WARN {function}: {option}={shown} has no effect here: {row.instead}" in told[0]


SETS_BEFORE_INIT = """
import mscomm
mscomm.set_context(mode=mscomm.PYNATIVE_MODE)
mscomm.set_auto_parallel_context(search_mode="dynamic_programming")
mscomm.init()
mscomm.set_auto_parallel_context(search_mode="dynamic_programming", full_batch=True)
mscomm.barrier()
"""


def warned(text: str) -> list[str]:
    return [line for line in text.splitlines() if "has no effect here" in line]


@pytest.mark.parametrize("launcher", ["mscomm run", "MS_* cluster", "MS_* cluster with recovery"])
def test_one_rank_of_a_job_tells_also_what_was_set_before_init(launcher, tmp_path, port):
    enabled = "0" if launcher == "MS_* cluster" else "1"
    recovery = {"MS_RECOVERY_PATH": str(tmp_path / "recovery"), "MS_ENABLE_RECOVERY": enabled}
    if launcher == "mscomm run":
        job = Job(3, [sys.executable, "-c", SETS_BEFORE_INIT], tmp_path, recovery)
        assert job.wait(60) == [0, 0, 0], job.logs()
        told = [warned(job.output(rank)) for rank in range(3)]
        names = ["mode=1", "search_mode=", "MS_RECOVERY_PATH", "MS_ENABLE_RECOVERY", "full_batch=True"]
    else:  # the scheduler assigns the ranks, so a worker knows its rank only after init()
        env = {"MS_WORKER_NUM": "2", "MS_SCHED_HOST": "127.0.0.1", "MS_SCHED_PORT": str(port), **recovery}
        roles = ["MS_SCHED", "MS_WORKER", "MS_WORKER"]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", SETS_BEFORE_INIT],
                env={**clean_environment(), **env, "MS_ROLE": role},
                stderr=subprocess.PIPE,
                text=True,
            )
            for role in roles
        ]
        told = [warned(process.communicate(timeout=60)[1]) for process in processes]
        assert [process.returncode for process in processes] == [0, 0, 0]
        names = ["mode=1", "search_mode=", "MS_RECOVERY_PATH", "full_batch=True"]
        if enabled == "1":
            names.remove("MS_RECOVERY_PATH")
    speaking = [lines for lines in told if lines]
    assert len(speaking) == 1 and len(speaking[0]) == len(names), told
    assert all(name in line for name, line in zip(names, speaking[0], strict=True))


# --- ranks that train separate models by mistake ---------------------------------------------------------------------


@ranks(2, init=None)
def train_a_model(init: bool, explicit: bool) -> None:
    if init:
        mscomm.init()
    if explicit:
        mscomm.set_auto_parallel_context(parallel_mode="stand_alone")
    model = tiny_model()
    model.resume("nowhere")
    for _ in range(2):
        model.train(1, [np.ones(1)])


THE_LINE = "mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)"


@pytest.mark.parametrize(
    ("init", "explicit", "says"),
    [
        (True, False, "Model: each of the 2 ranks trains a model of its own. For one model: "),
        (
            False,
            False,
            r"Model: mscomm run has started 2 processes, but mscomm\.init\(\) was not called: each trains a",
        ),
        (True, True, None),
        (False, True, None),
    ],
)
def test_ranks_that_train_a_model_each_are_told_once_a_job(init, explicit, says, tmp_path):
    parameters = {"init": init, "explicit": explicit}
    order = {"file": __file__, "name": "train_a_model", "parameters": parameters, "init": None}
    job = Job(2, [], tmp_path, test=order)  # forks the ranks, because importing this file takes a second
    assert job.wait(60) == [0, 0], job.logs()
    told = [line for rank in range(2) for line in job.output(rank).splitlines() if "WARN" in line]
    assert len(told) == (says is not None)
    assert not says or (re.search(says, told[0]) and THE_LINE in told[0])
