"""MindSpore's context functions, so that scripts port by changing imports.

Only what has a meaning on the CPU core does something.
"""

from __future__ import annotations

from typing import Any

from mscomm.errors import BackendUnavailable

GRAPH_MODE = 0
PYNATIVE_MODE = 1

_KNOWN = ("mode", "device_target", "device_id", "save_graphs", "save_graphs_path")
_context: dict[str, Any] = {
    "mode": GRAPH_MODE,
    "device_target": "CPU",
    "device_id": 0,
    "save_graphs": False,
    "save_graphs_path": ".",
}
_plain_links = False


def set_context(**options: Any) -> None:
    """Accepts mode, device_target, device_id, save_graphs and save_graphs_path, as the tutorials' scripts set them.
    mode has no effect.

    device_target other than "CPU" raises BackendUnavailable in this release; an unknown option or mode ValueError.
    Nothing is set then.
    """
    for name, value in options.items():
        if name not in _KNOWN:
            raise ValueError(f"set_context: {name!r} is none of {', '.join(_KNOWN)}")
        if name == "mode" and value not in (GRAPH_MODE, PYNATIVE_MODE):
            raise ValueError(f"set_context: mode={value!r} is neither GRAPH_MODE nor PYNATIVE_MODE")
        if name == "device_target" and value != "CPU":
            raise BackendUnavailable(f'set_context: device_target={value!r} is not in this release; use "CPU"')
    _context.update(options)


def get_context(name: str) -> Any:
    """The value of one option."""
    if name not in _context:
        raise ValueError(f"get_context: {name!r} is none of {', '.join(_KNOWN)}")
    return _context[name]


def set_ps_context(*, enable_ssl: bool | None = None, **options: Any) -> None:
    """How a scheduler and its workers protect their links.

    An explicit enable_ssl=False permits links off loopback without a job key; a call that does not name enable_ssl
    permits nothing. enable_ssl=True needs TLS, which is not in this release: NotImplementedError.
    """
    global _plain_links
    unknown = options.keys() - {"config_file_path", "client_password", "server_password"}
    if unknown:
        raise ValueError(f"set_ps_context: unknown option {sorted(unknown)[0]!r}")
    if enable_ssl:
        raise NotImplementedError(
            "set_ps_context(enable_ssl=True): TLS is not in this release; use MSCOMM_JOB_KEY_FILE"
        )
    if enable_ssl is not None:
        _plain_links = True


def plain_links_permitted() -> bool:
    """Whether the user has said set_ps_context(enable_ssl=False)."""
    return _plain_links
