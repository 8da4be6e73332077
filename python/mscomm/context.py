"""MindSpore's context functions, so that a script can be ported by changing its imports.

Options that mscomm supports take effect. The others are accepted with a warning, or rejected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from mscomm import environment, notices
from mscomm.cluster.protection import Protection

if TYPE_CHECKING:
    from mscomm.cluster.credentials import Credentials

GRAPH_MODE = 0
PYNATIVE_MODE = 1

DEVICE_TARGETS = ("CPU", "GPU", "Ascend")

_context: dict[str, Any] = {
    "mode": GRAPH_MODE,
    "device_target": None,
    "device_id": None,
    "save_graphs": False,
    "save_graphs_path": ".",
}
_IF_UNSET = {"device_target": "CPU", "device_id": 0}


class _PsContext(NamedTuple):
    """The options of set_ps_context."""

    enable_ssl: bool | None = None
    config_file_path: str = ""
    client_password: str = ""
    server_password: str = ""


_ps = _PsContext()
_ps_is_read = False  # whether init() has used the options
_credentials: Credentials | None = None


def set_context(**options: Any) -> None:
    """Set mode, device_target, device_id, save_graphs and save_graphs_path, as the scripts of MindSpore's tutorials do.

    device_target ("CPU", "GPU" or "Ascend") determines the backend if init() is called without a backend name.
    device_id is the number of the device that this rank uses. Both must be set before init(). If save_graphs is not
    False or 0, Model.train writes its plan into the folder save_graphs_path/rank_<rank> in the modes SEMI_AUTO_PARALLEL
    and AUTO_PARALLEL. mode has no effect; mode=PYNATIVE_MODE prints a warning.

    Raise ValueError for an unknown option, mode or device_target, and TypeError or ValueError for an invalid device_id.
    If there is an error, no option is set.
    """
    for name, value in options.items():
        if name not in _context:
            raise ValueError(f"set_context: {name!r} is not one of {', '.join(_context)}")
        if name == "mode" and value not in (GRAPH_MODE, PYNATIVE_MODE):
            raise ValueError(f"set_context: mode={value!r} is neither GRAPH_MODE nor PYNATIVE_MODE")
        if name == "device_target" and value not in DEVICE_TARGETS:
            raise ValueError(f"set_context: device_target={value!r} is not one of {', '.join(DEVICE_TARGETS)}")
        if name == "device_id":
            _int(0, 4095)(value)
    _context.update(options)
    notices.tell_without_effect("set_context", **options)


def get_context(name: str) -> Any:
    """Return the value of one option of set_context, or its default if the user has not set it."""
    if name not in _context:
        raise ValueError(f"get_context: {name!r} is not one of {', '.join(_context)}")
    value = _context[name]
    return _IF_UNSET.get(name) if value is None else value


def given(name: str) -> Any:
    """Return the value of an option of set_context that the user has set, or None."""
    return _context[name]


def set_ps_context(
    *,
    enable_ssl: bool | None = None,
    config_file_path: str | os.PathLike[str] | None = None,
    client_password: str | None = None,
    server_password: str | None = None,
    **unknown: Any,
) -> None:
    """Set how the job's links are protected. Call this before init(), with the same enable_ssl in every process.

    * enable_ssl: if True, TLS with certificates protects the job. If False, the links of the job are plain, and it may
      have no job key, even if other hosts can reach its ports. Without enable_ssl, the job uses certificates if
      MSCOMM_SSL_CONFIG_FILE is set. Otherwise, TLS with the job's key protects links between hosts.
    * config_file_path: config.json, which says where the certificates are. Default: MSCOMM_SSL_CONFIG_FILE.
    * server_password, client_password: the passwords of the scheduler's and the workers' private keys. Default: the
      variables MSCOMM_SSL_SERVER_PASSWORD and MSCOMM_SSL_CLIENT_PASSWORD, or the files that the variables with _FILE at
      the end name.

    An option that is not given keeps its value. Raise ValueError for an unknown option, or for enable_ssl=True without
    a config.json; TypeError for a value of another type; and RuntimeError for a change after init(). If there is an
    error, no option is set.
    """
    global _ps
    if unknown:
        raise ValueError(f"set_ps_context: unknown option {sorted(unknown)[0]!r}")
    if not (enable_ssl is None or isinstance(enable_ssl, bool)):
        raise TypeError(f"set_ps_context: enable_ssl is a {type(enable_ssl).__name__}; expected True or False")
    for name, text in (("client_password", client_password), ("server_password", server_password)):
        if not (text is None or isinstance(text, str)):
            raise TypeError(f"set_ps_context: {name} is a {type(text).__name__}; expected a str")
    path = None if config_file_path is None else os.fsdecode(config_file_path)
    given = (enable_ssl, path, client_password, server_password)
    changed = _PsContext._make(old if new is None else new for old, new in zip(_ps, given, strict=True))
    if _credentials is not None:  # the passwords have been used, and are no longer kept
        changed = changed._replace(client_password="", server_password="")
    if changed == _ps:
        return
    if _ps_is_read:
        raise RuntimeError(
            "set_ps_context: init() has already read these settings; set them before init(). For another job of this"
            " process, call reset_ps_context() first"
        )
    path = changed.config_file_path or environment.read("MSCOMM_SSL_CONFIG_FILE", os.environ)
    if changed.enable_ssl and not path:
        raise ValueError(
            "set_ps_context(enable_ssl=True): say where the certificates are, with config_file_path= or"
            " MSCOMM_SSL_CONFIG_FILE; `mscomm certs make` makes certificates and a config.json"
        )
    _ps = changed


def get_ps_context(name: str) -> Any:
    """Return config_file_path or enable_ssl as set_ps_context has set it. Raise ValueError for another name.

    The passwords are not returned.
    """
    if name not in ("config_file_path", "enable_ssl"):
        raise ValueError(f"get_ps_context: {name!r} is not one of config_file_path, enable_ssl")
    return bool(_ps.enable_ssl) if name == "enable_ssl" else _ps.config_file_path


def reset_ps_context() -> None:
    """Forget every option of set_ps_context and the credentials that were made from them."""
    global _ps, _ps_is_read, _credentials
    _ps, _ps_is_read, _credentials = _PsContext(), False, None


def protection() -> Protection:
    """Return how the user wants the job's links to be protected.

    The code that joins a job calls this. Afterwards, set_ps_context refuses to change something. Raise what
    mscomm.cluster.credentials.configured() raises.
    """
    return Protection(_find_credentials(), permit_plain=_ps.enable_ssl is False)


def _find_credentials() -> Credentials | None:
    global _ps, _ps_is_read, _credentials
    if not _ps_is_read and _ps.enable_ssl is not False:
        if _ps.enable_ssl or environment.read("MSCOMM_SSL_CONFIG_FILE", os.environ):
            from mscomm.cluster.credentials import SCHEDULER, WORKER, configured  # slow to import: ssl

            passwords = {SCHEDULER: _ps.server_password, WORKER: _ps.client_password}
            _credentials = configured(os.environ, _ps.config_file_path, passwords, notices.warn_once)
            _ps = _ps._replace(server_password="", client_password="")
        elif _ps.config_file_path:
            notices.warn_once("set_ps_context: config_file_path has no effect without enable_ssl=True")
    _ps_is_read = True
    return _credentials


class ParallelMode:
    """The ways in which ranks can share the work of training; see set_auto_parallel_context."""

    STAND_ALONE = "stand_alone"
    DATA_PARALLEL = "data_parallel"
    HYBRID_PARALLEL = "hybrid_parallel"
    SEMI_AUTO_PARALLEL = "semi_auto_parallel"
    AUTO_PARALLEL = "auto_parallel"


def _mode(value: Any) -> None:
    modes = [mode for name, mode in vars(ParallelMode).items() if name.isupper()]
    if value not in modes:
        raise ValueError(f"{value!r} is not one of {', '.join(modes)}")


DIVIDING = (ParallelMode.SEMI_AUTO_PARALLEL, ParallelMode.AUTO_PARALLEL)  # modes that divide the network itself
_OF_DIVIDING = (
    "search_mode",
    "dataset_strategy",
    "strategy_ckpt_save_file",
    "strategy_ckpt_load_file",
)  # options that have an effect in these modes


def _bool(value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"is a {type(value).__name__}; expected True or False")


def _int(low: int, high: int) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"is a {type(value).__name__}; expected an int")
        if not low <= value <= high:
            raise ValueError(f"{value}; expected {low} to {high}")

    return check


_FUSIONS = ("allreduce", "allgather", "reducescatter", "openstate")


def _fusion(value: Any) -> None:
    """Check a value of comm_fusion, which has MindSpore's form: {"allreduce": {"mode": "size", "config": 32}}."""
    if not isinstance(value, dict) or not value.keys() <= set(_FUSIONS):
        raise ValueError(f'{value!r}; expected {{"allreduce": {{"mode": "auto" or "size", "config": MiB or None}}}}')
    said = value.get("allreduce", {"mode": "auto"})
    mode, config = said.get("mode"), said.get("config")
    if mode == "index":
        raise NotImplementedError('mode "index": buckets follow the order of the gradients here; use mode "size"')
    if mode not in ("auto", "size") or (mode == "auto" and config is not None):
        raise ValueError(f'allreduce={said!r}; expected mode "auto" and no config, or mode "size" and config in MiB')
    if mode == "size":
        _int(1, 1 << 20)(config)


def _only(*values: Any) -> Callable[[Any], None]:
    def check(value: Any) -> None:
        if value not in values:
            expected = " or ".join(repr(one) for one in values)
            raise NotImplementedError(f"{value!r} is not in this release; expected {expected}")

    return check


def _anything(value: Any) -> None:
    """Accept any value, because the option has no meaning in data-parallel training."""


class _Option(NamedTuple):
    default: Any
    check: Callable[[Any], None]


_AUTO_PARALLEL = {
    "parallel_mode": _Option(ParallelMode.STAND_ALONE, _mode),
    "gradients_mean": _Option(False, _bool),
    "parameter_broadcast": _Option(False, _bool),
    "device_num": _Option(1, _int(1, 4096)),
    "global_rank": _Option(0, _int(0, 4095)),
    "comm_fusion": _Option(None, _fusion),
    "enable_parallel_optimizer": _Option(False, _only(False)),
    "pipeline_stages": _Option(1, _only(1)),
    # In MindSpore, the options that the next entry adds are for compiled graphs, or for parallel modes other than data
    # parallel. notices.py warns about them.
    **{
        name: _Option(row.silent[0], _anything)
        for (function, name), row in notices.WITHOUT_EFFECT.items()
        if function == "set_auto_parallel_context"
    },
    "dataset_strategy": _Option("data_parallel", _only("data_parallel", "full_batch")),
}
_auto_parallel: dict[str, Any] = {}  # the options that were set; all others have their defaults


def set_auto_parallel_context(**options: Any) -> None:
    """Set how Model.train shares the work among the ranks, with MindSpore's names and defaults.

    * parallel_mode: with ParallelMode.STAND_ALONE, the default, each rank trains a model of its own. With DATA_PARALLEL
      the ranks train one model, each on its shard of the data. HYBRID_PARALLEL is the same, for networks that divide
      some parameters themselves: Parameter(..., layerwise_parallel=True) and mscomm.ops. With SEMI_AUTO_PARALLEL and
      AUTO_PARALLEL, the operators of the network are divided, too: by the strategies of shard(), and elsewhere by the
      first dimension (SEMI_AUTO_PARALLEL) or by strategies that mscomm finds (AUTO_PARALLEL). Call it before
      Model.train.
    * gradients_mean: if False, the default, the ranks' gradients are summed; if True, they are averaged.
    * parameter_broadcast: if True, all ranks begin with rank 0's weights. If False, the default, training
      raises an error if the ranks begin with different weights.
    * device_num, global_rank: if set, they must equal the group's size and this rank's number in the group.
    * search_mode: "sharding_propagation", for AUTO_PARALLEL. dataset_strategy: "data_parallel", if each rank's dataset
      has its own rows, or "full_batch", if each rank's dataset has all rows, for the modes that divide the network.
    * strategy_ckpt_save_file: where Model.train writes the strategies of all operators, in these modes;
      strategy_ckpt_load_file: a file from which it takes them.
    * comm_fusion: {"allreduce": {"mode": "size", "config": 32}} sets the size of a fusion bucket in MiB; with mode
      "auto", mscomm chooses the size.

    MindSpore's other options are accepted if they have no meaning in data-parallel training. If such an option is set
    to a value that is not the default, one rank of the job prints a warning. Raise ValueError for an unknown name,
    ValueError or TypeError for an invalid value, and NotImplementedError for a value that this release does not
    support. If there is an error, no option is set.

    >>> mscomm.set_auto_parallel_context(parallel_mode=mscomm.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    """
    for name, value in options.items():
        if name not in _AUTO_PARALLEL:
            raise ValueError(f"set_auto_parallel_context: {name!r} is not one of {', '.join(_AUTO_PARALLEL)}")
        try:
            _AUTO_PARALLEL[name].check(value)
        except (TypeError, ValueError, NotImplementedError) as error:
            raise type(error)(f"set_auto_parallel_context: {name}: {error}") from None
    _auto_parallel.update(options)
    dividing = get_auto_parallel_context("parallel_mode") in DIVIDING
    told = {name: value for name, value in options.items() if not (dividing and name in _OF_DIVIDING)}
    notices.tell_without_effect("set_auto_parallel_context", **told)
    notices.tell_without_effect("comm_fusion", **(options.get("comm_fusion") or {}))


def get_auto_parallel_context(name: str) -> Any:
    """Return the value of one option of set_auto_parallel_context. Raise ValueError for an unknown name."""
    if name not in _AUTO_PARALLEL:
        raise ValueError(f"get_auto_parallel_context: {name!r} is not one of {', '.join(_AUTO_PARALLEL)}")
    return _auto_parallel.get(name, _AUTO_PARALLEL[name].default)


def reset_auto_parallel_context() -> None:
    """Reset every option of set_auto_parallel_context to its default."""
    _auto_parallel.clear()


def auto_parallel_was_set(name: str) -> bool:
    """Return whether the user has set the option, even to its default."""
    return name in _auto_parallel
