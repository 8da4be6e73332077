"""PyInstaller's hook for a program that imports mscomm.

mscomm imports its modules when one of their names is first used, which PyInstaller cannot see.
"""

from PyInstaller.utils.hooks import collect_data_files, collect_submodules

datas = collect_data_files("mscomm")  # the stub that `import mscomm` reads, and the helper for mpirun
hiddenimports = collect_submodules("mscomm", lambda name: not name.startswith("mscomm.bench"))
# mscomm imports these only for arrays, models and files of a program that imports them itself.
excludedimports = ["torch", "jax", "mindspore", "cupy", "mpi4py", "matplotlib", "PIL", "sklearn"]
