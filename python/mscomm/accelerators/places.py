"""Where a vendor's library may be, in the order in which it is tried.

First what the user says; then a copy that is in the process already, because two copies do not know of each other's
handles; then the package of the Python environment, conda's, the loader's path, and the vendor's own folders.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Literal

# What messages call the place, the path or bare name, and how to try it: csrc/base/dynlib.h.
Place = tuple[str, str, Literal["usual", "loaded", "must"]]


def places(
    soname: str, said: str | None, variable: str, *, wheel: str = "", homes: Sequence[tuple[str, str]] = ()
) -> list[Place]:
    """For a library of that name. said: the path in the variable. wheel: its folder in site-packages.

    homes: (what it is called, folder), where such a folder is known.
    """
    if said:
        return [(variable, said, "must")]
    found: list[Place] = [("in this process", soname, "loaded")]
    if wheel:
        found.append(("site-packages", os.path.join(sysconfig.get_path("purelib"), wheel, soname), "usual"))
    found.append(("the loader's path", soname, "usual"))
    found += [(name, os.path.join(folder, soname), "usual") for name, folder in homes]
    return found


def homes(env: Mapping[str, str], *variables: str, below: Sequence[str] = ("lib64", "lib")) -> list[tuple[str, str]]:
    """The library folders below what these variables name."""
    return [(name, os.path.join(env[name], folder)) for name in variables if env.get(name) for folder in below]
