"""The installed package is complete, and runs on machines other than the one that built it.

`make wheel` and cibuildwheel run these tests from an empty directory, in an environment with only the wheel and what
the tests need.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection
from sessions import clean_environment, free_port, mscomm_run, run

import mscomm
from mscomm import _core

PACKAGE = Path(mscomm.__file__).parent
HELPER = PACKAGE / "bootstrap/pmix_helper"
GLIBC_FLOOR = (2, 28)

# The only system libraries that the package may need: the C library (in several files before glibc 2.34), the dynamic
# loader, and the compiler's runtime.
SYSTEM_LIBRARIES = r"(ld-linux-.*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so\.\d+"

# Symbols that the test for old glibc versions ignores. A build against a newer glibc needs newer versions of them, but
# a build against 2.28 does not. They are functions that moved into libc in 2.34, functions that were inline before
# 2.33, the C23 names of strtol, math functions with new versions, and symbols that libstdc++ and libgcc need.
OLD_UNDER_A_NEW_NAME = (
    r"__libc_start_main|__libc_single_threaded|_dl_find_object|pthread_\w+|sem_\w+|dl(open|sym|close|error|addr|info)"
    r"|shm_open|shm_unlink|(timer|aio|mq)_\w+|__isoc23_\w+|f?l?stat(64|at)?|mknod(at)?|exp2?f?|log2?f?|powf?|fmod"
)


def is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def elf_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*")) if path.is_file() and is_elf(path)]


each_elf_file = pytest.mark.parametrize("path", elf_files(), ids=lambda path: path.name)


def test_the_package_is_the_installed_one_of_one_version():
    assert Path(__file__).parent.parent / "python/mscomm" != PACKAGE
    assert mscomm.__version__ == importlib.metadata.version("mscomm") == _core.version


def test_what_editors_and_lawyers_ask_for_is_in():
    files = {str(path) for path in importlib.metadata.files("mscomm") or ()}
    assert {"mscomm/py.typed", "mscomm/__init__.pyi", "mscomm/_core.pyi"} <= files
    assert any(re.fullmatch(r"mscomm-[^/]*\.dist-info/licenses/LICENSE", name) for name in files)


def test_nothing_is_installed_outside_the_packages_folders():
    files = [str(path) for path in importlib.metadata.files("mscomm") or ()]
    expected = r"mscomm/.*|mscomm-[^/]*\.dist-info/.*|(\.\./)+bin/mscomm"
    assert [name for name in files if not re.fullmatch(expected, name)] == []


def test_the_compiled_files_are_there():
    assert {Path(_core.__file__), HELPER} <= set(elf_files())


def test_the_pmix_helper_can_be_executed():
    done = subprocess.run([HELPER], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "usage: pmix_helper SOCKET TIMEOUT_S LIBRARY...\n")


@each_elf_file
def test_only_the_c_library_and_the_compilers_runtime_are_needed(path):
    with path.open("rb") as file:
        tags = list(ELFFile(file).get_section_by_name(".dynamic").iter_tags())
    needed = [tag.needed for tag in tags if tag.entry.d_tag == "DT_NEEDED"]
    assert [name for name in needed if not re.fullmatch(SYSTEM_LIBRARIES, name)] == []
    assert [tag for tag in tags if tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH")] == []


@each_elf_file
def test_no_function_newer_than_the_oldest_glibc_is_needed(path):
    with path.open("rb") as file:
        elf = ELFFile(file)
        names = {
            entry.entry.vna_other: entry.name
            for section in elf.iter_sections()
            if isinstance(section, GNUVerNeedSection)
            for _, entries in section.iter_versions()
            for entry in entries
        }
        symbols = elf.get_section_by_name(".dynsym")
        versions = elf.get_section_by_name(".gnu.version")
        needed = [
            (symbol.name, names.get(versions.get_symbol(i).entry["ndx"], ""))
            for i, symbol in enumerate(symbols.iter_symbols())
            if symbol.entry.st_shndx == "SHN_UNDEF"
        ]
    of_glibc = [(name, version[len("GLIBC_") :]) for name, version in needed if version.startswith("GLIBC_")]
    assert len(of_glibc) > 5
    newer = [(n, v) for n, v in of_glibc if tuple(map(int, v.split("."))) > GLIBC_FLOOR]
    assert [(n, v) for n, v in newer if not re.fullmatch(OLD_UNDER_A_NEW_NAME, n)] == []


def test_other_modules_see_nothing_of_the_core_but_its_entry():
    with open(_core.__file__, "rb") as file:
        symbols = list(ELFFile(file).get_section_by_name(".dynsym").iter_symbols())
    offered = [s.name for s in symbols if s.entry.st_shndx != "SHN_UNDEF" and s.entry.st_info.bind != "STB_LOCAL"]
    assert offered == ["PyInit__core"]


@each_elf_file
def test_the_stack_is_not_executable(path):
    with path.open("rb") as file:
        stacks = [segment for segment in ELFFile(file).iter_segments() if segment.header.p_type == "PT_GNU_STACK"]
        flags = [segment.header.p_flags for segment in stacks]
    assert flags == [6]  # 6 means readable and writable, but not executable


def test_two_ranks_add_their_arrays(tmp_path):
    script = tmp_path / "add.py"
    script.write_text(
        "import numpy as np, mscomm\n"
        "mscomm.init()\n"
        "print(mscomm.all_reduce(np.full(7, mscomm.get_rank() + 1, np.float32)).tolist())\n"
    )
    command = [sys.executable, "-m", "mscomm", "run", "-n", "2", script]
    done = run(command, 120, clean_environment(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] {np.full(7, 3.0).tolist()}" for rank in (0, 1)]


def test_the_doctor_finds_no_fault(tmp_path):
    command = [Path(sys.executable).with_name("mscomm"), "doctor"]
    done = run(command, 120, clean_environment(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
def test_a_frozen_program_is_complete_and_has_no_framework(tmp_path):
    """PyInstaller does not see the modules that mscomm imports late. Our hook names them, but not what they import."""
    pytest.importorskip("PyInstaller")
    (tmp_path / "app.py").write_text(
        "import multiprocessing, os, mscomm, numpy as np\n"
        "if 'EXE' in os.environ: multiprocessing.set_executable(os.environ['EXE'])\n"
        "mscomm.init()\nx = mscomm.all_reduce(np.ones(1))[0]\n"
        "print(f'sum {x}', mscomm.all_gather_object({'a': 1}))\n"
    )
    freeze = ["PyInstaller", "--log-level=ERROR", "--distpath=dist", "--workpath=build", "--specpath=.", "app.py"]
    subprocess.run([sys.executable, "-m", *freeze], cwd=tmp_path, env=clean_environment(), timeout=600, check=True)
    done = mscomm_run("-n", 2, "--", tmp_path / "dist/app/app")
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] sum 2.0 [{{'a': 1}}, {{'a': 1}}]" for rank in (0, 1)], done
    # Under launchers without a hub, rank 0 starts one with an interpreter that has mscomm.
    env = clean_environment(EXE=sys.executable, WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    started = [
        subprocess.Popen([tmp_path / "dist/app/app"], stdout=subprocess.PIPE, text=True, env={**env, "RANK": rank})
        for rank in "01"
    ]
    try:
        assert [one.communicate(timeout=120)[0] for one in started] == ["sum 2.0 [{'a': 1}, {'a': 1}]\n"] * 2
    finally:
        for one in started:
            one.kill()
    bundled = {path.name for path in (tmp_path / "dist/app/_internal").iterdir()}
    assert "mscomm" in bundled and not bundled & {"torch", "jax", "matplotlib"}
