"""The places where a vendor's library may be, in the order in which they are tried.

If the user has specified a path, no other place is tried. Otherwise the first place is the process itself, because it
may already have loaded the library, and two copies of a library cannot use each other's handles. The next places are
the library's Python package, the search path of the dynamic loader, and known folders, such as those of conda and of
the vendor.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Mapping, Sequence
from typing import Literal

from mscomm import environment

# A place: (its name in messages, the path or the bare file name, how to try it). See csrc/base/dynlib.h.
Candidate = tuple[str, str, Literal["usual", "loaded", "must"]]


def places(
    soname: str, variable: str, env: Mapping[str, str], *, wheel: str = "", homes: Sequence[tuple[str, str]] = ()
) -> list[Candidate]:
    """Return the places where the library `soname` may be.

    variable: the environment variable in which the user can set a path. wheel: the library's folder in site-packages.
    homes: known folders, each as (its name in messages, the folder).
    """
    said = environment.read(variable, env)
    if said:
        return [(variable, said, "must")]
    found: list[Candidate] = [("in this process", soname, "loaded")]
    if wheel:
        found.append(("site-packages", os.path.join(sysconfig.get_path("purelib"), wheel, soname), "usual"))
    found.append(("the loader's path", soname, "usual"))
    found += [(name, os.path.join(folder, soname), "usual") for name, folder in homes]
    return found


def homes(env: Mapping[str, str], *variables: str, below: Sequence[str] = ("lib64", "lib")) -> list[tuple[str, str]]:
    """Return pairs (variable, folder): for each variable that is set, one pair for each subfolder in `below`."""
    return [(name, os.path.join(env[name], folder)) for name in variables if env.get(name) for folder in below]
