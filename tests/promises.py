"""Lists the test files, and the faults that only each of them finds. `python tests/promises.py quick` prints the quick
files.

A quick file is one that `make check` runs: it needs few processes and little time.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent

QUICK = {
    "dataset/test_dataset_cifar10.py": "a file of CIFAR-10 that is read wrongly, or damaged and not refused",
    "dataset/test_dataset_dealing.py": "samples that two ranks get, or no rank",
    "dataset/test_dataset_generator.py": "a sample source that is used wrongly, or whose error is not explained",
    "dataset/test_dataset_modules.py": "a module of mscomm.dataset that imports much, and untrue examples",
    "dataset/test_dataset_resuming.py": "a dataset that does not go on where the checkpoint says",
    "dataset/test_dataset_steps.py": "shuffle, batch, map or repeat in the wrong order or number",
    "test_api_job.py": "wrong arguments and results of init, get_rank and the like",
    "test_api_memory.py": "wrong shapes, dtypes and alignment of mscomm.empty and zeros",
    "test_api_out.py": "an array that a function takes as out although it does not fit, or the reverse",
    "test_api_package.py": "a public name that is missing, and an import of mscomm that costs too much",
    "test_api_record.py": "a record that names the wrong line of a call",
    "test_bench_plot.py": "a plot of mscomm bench that shows something else than its numbers",
    "test_bench_table.py": "an expected result in mscomm bench's table that is not NumPy's",
    "test_bytestream.py": "a stream of bytes that stalls, spins or mixes up its ends",
    "test_certs.py": "`mscomm certs` that makes files which do not work together",
    "test_choice.py": "an algorithm that is chosen for the wrong hosts or sizes",
    "test_context.py": "wrong values of MindSpore's set_context and get_context",
    "test_credentials.py": "configurations and certificates that are accepted or refused wrongly when they are read",
    "test_env.py": "an environment variable that is read wrongly, or differs from docs/env.md",
    "test_epochs.py": "an epoch of a training, also of a resumed one, with the rows of another epoch",
    "test_frames.py": "a control frame that is read wrongly, or accepted although it is damaged",
    "test_hello.py": "a hello that lets a wrong key, version, job or rank in",
    "test_hub.py": "a hub that admits the wrong process, tells the wrong ranks, or outlives its job",
    "test_interfaces.py": "a wrong choice of a host's address",
    "test_judge.py": "a wrong first cause by the judge's rules",
    "test_layers.py": "an include or an import of a higher layer",
    "test_links.py": "a connection that is accepted, refused or dropped wrongly, and descriptors that leak",
    "test_meetings.py": "a meeting that ends too early, too late or with the wrong error",
    "test_member.py": "a rank's side of the control link that misses a verdict or stops reading",
    "test_plan.py": "a wrong layout of ranks and groups in the plan",
    "test_planted.py": "a planted fault whose text the sources no longer have",
    "test_rank_table.py": "a rank table that is read wrongly, or accepted although it is wrong",
    "test_ranktable_cli.py": "`mscomm ranktable` that writes a table which no job accepts",
    "test_restarts.py": "a wrong decision of the hub about restarted ranks, rejoin() and the launchers of other hosts",
    "test_security.py": "a key file or a peer process that is trusted although it should not be",
    "test_tiers.py": "a tier that passes over its budget, and a test file without a row here",
    "test_times.py": "a time in the docs that is not the constant of the code",
    "test_tls.py": "an encrypted stream that blocks, loses bytes or accepts a wrong certificate",
    "test_torch_store.py": "a store of torch.distributed in which the ranks do not find each other",
    "test_verdicts.py": "a verdict that differs between ranks, or loses its fields on the way",
    "test_wheel.py": "an installed package that is incomplete, or needs libraries that older systems lack",
    "test_writing.py": "an output that nobody reads, and that holds up a thread",
}

FULL = {
    "dataset/test_dataset_prefetching.py": "a prefetching worker that loses, repeats or reorders batches",
    "dataset/test_dataset_ranks.py": "ranks of a real job whose parts of a dataset overlap or differ in length",
    "dataset/test_dataset_threads.py": "threads of a dataset that change its order, hide an error or do not end",
    "test_accelerators.py": "a job that chooses the wrong backend or devices, or does not say why it has none",
    "test_api_arguments.py": "a wrong argument that a public function accepts, or that uses up a call number",
    "test_api_async.py": "a Work with a wrong result, wait, interruption or lifetime of its arrays",
    "test_api_processes.py": "a forked child, a thread or the end of a process that harms the job",
    "test_arrays.py": "an array library whose tensors a function does not take",
    "test_bench_command.py": "an option of mscomm bench that has no effect, and wrong output",
    "test_bench_peers.py": "a peer of mscomm bench that is not found, or is measured wrongly",
    "test_bench_scripts.py": "a script in bench/ that no longer runs",
    "test_binding.py": "a rank that is bound to other cores than --bind-to says, and threads outside of them",
    "test_bits.py": "a reduction that has other bits in another way of calling it, or over several hosts",
    "test_calls.py": "an array or an argument that a call describes wrongly to the core",
    "test_checkpoint.py": "a checkpoint that is incomplete, damaged or lost, and ranks that resume at different steps",
    "test_completing.py": "a call with a head, or a function that follows a Work, that is lost or runs twice",
    "test_conformance.py": "a wrong bit of an algorithm for some function, dtype, op, shape or kind of memory",
    "test_cost.py": "a call that takes more instructions than before",
    "test_data_cli.py": "`mscomm data` that writes other images than its origin has",
    "test_ddp.py": "gradients of DistributedDataParallel that differ from those of one process",
    "test_debugging.py": "a test of ranks that cannot be debugged with the command that it prints",
    "test_device_arrays.py": "a fast way for known device arrays that changes a result or an error",
    "test_device_calls.py": "wrong elements in device arrays, and a call in the wrong order with a stream",
    "test_device_faults.py": "a failure on a device that names the wrong rank, or does not end the call on every rank",
    "test_device_reducer.py": "gradients on devices with other bits than those of all_reduce",
    "test_device_reducer_torch.py": "gradients of PyTorch on devices with other bits than those of all_reduce",
    "test_device_train.py": "training and checkpoints that fail with arrays on a device",
    "test_docs.py": "an example, a link, a variable or a message in the docs that is not true",
    "test_doctor.py": "`mscomm doctor` that does not see what is wrong with a machine",
    "test_examples_cpu.py": "an example for the CPU that does not run",
    "test_examples_frameworks.py": "an example with PyTorch, JAX or MindSpore that does not run",
    "test_examples_training.py": "an example of training that does not run, or does not learn",
    "test_fakes.py": "a stand-in for CUDA or NCCL that does not behave as the tests of devices assume",
    "test_fakes_hccl.py": "a stand-in for AscendCL or HCCL that does not behave as the tests of devices assume",
    "test_faults.py": "a surviving rank that hangs, or names the wrong rank or cause, over any carrier",
    "test_groups.py": "a group with wrong members or names, and a failed create_group that harms other ranks",
    "test_hierarchy.py": "a wrong all_reduce between hosts that have several ranks each",
    "test_hosts.py": "a job that fails over TCP between hosts: addresses, keys, a host that goes away",
    "test_huge.py": "a message of more than 2^31 bytes that is cut (only with -m huge)",
    "test_jobs.py": "several jobs of one process, at once or one after the other, that disturb each other",
    "test_launchers.py": "an mpirun, a scheduler or a set of variables that does not make one job",
    "test_launching.py": "mscomm.launch with wrong results, failures, timeouts or pickling",
    "test_log.py": "wrong lines of MSCOMM_DEBUG",
    "test_leaks.py": "descriptors, threads, processes, mappings or files that each join leaves behind",
    "test_limits.py": "a setting of a batch system or container in which a job hangs, or fails without a clear line",
    "test_managed_torch.py": "a stand-in for PyTorch on devices that does not behave as other tests assume",
    "test_memory.py": "memory of a rank that another rank reads or stages wrongly, also when one dies",
    "test_messages.py": "a message that is lost, mixed up or late, and a send or recv that nothing ends",
    "test_mismatch.py": "two calls that differ, and are not refused on all ranks by the names of both",
    "test_ms_cluster.py": "MS_* variables and key files that make no job, and a scheduler whose log nobody reads",
    "test_nn.py": "a cell, a loss, an optimizer or an operator that computes something else than MindSpore's",
    "test_nodes.py": "node 0 that does not show at once what is wrong with the other node",
    "test_notices.py": "an option without effect that nobody is told of, and a notice that every rank prints",
    "test_objects.py": "an object that arrives with other types, and hostile bytes that are accepted",
    "test_ops.py": "a name of MindSpore's operations that does something else",
    "test_own_counts.py": "all_to_all_v that takes recv_counts which do not fit",
    "test_pack.py": "kernels and copies that pack device arrays differently",
    "test_parallel.py": "a divided network whose plan, bytes, losses or gradients differ from the whole network's",
    "test_parallel_random.py": "random graphs and strategies with another result than the whole network",
    "test_porting.py": "a row of the porting page that does not run on two ranks",
    "test_ports.py": "a listener outside MSCOMM_PORTS",
    "test_recovery.py": "a scheduler that, started again, loses a rank, seats a stranger or forgets a verdict",
    "test_recovery_training.py": "a training that loses ranks, and ends with other weights than an undisturbed one",
    "test_red_team.py": "an attack on a real job that gets in, harms an honest rank, or is not explained",
    "test_reducer.py": "a bucket with wrong gradients, and uneven data that stops the other ranks",
    "test_rejoin.py": "a lost rank that is not started again, and survivors that do not go on with it",
    "test_run.py": "`mscomm run` with wrong output, status or signals, and processes that it leaves behind",
    "test_screens.py": "a screen in docs/errors.md that differs from the real one",
    "test_sealed_key.py": "a job's key that is readable in the store of PMI or PMIx",
    "test_signals.py": "a signal handler's exception between two instructions that leaves a group half usable",
    "test_soak.py": "combinations of fault, transport and moment that nobody thought of",
    "test_ssh.py": "`mscomm run --hosts` that fails with a real sshd",
    "test_stop_points.py": "a rank that is stopped at a system call, and then returns bytes that its peer has changed",
    "test_stubs.py": "a type in _core.pyi or of a public name that differs from the compiled core",
    "test_tls_jobs.py": "bytes of a job that are readable on the wire under a real launcher",
    "test_tls_links.py": "collectives and messages that fail over encrypted links",
    "test_torch_backend.py": "a function of torch.distributed with another result than gloo's",
    "test_torch_frameworks.py": "a framework over torch.distributed that trains something else than over gloo",
    "test_torch_hook.py": "ddp_hook with other gradients than DDP without it",
    "test_torch_hosts.py": "torchrun on two hosts that does not make one job",
    "test_trace.py": "a trace that shows other calls or times than those that were made",
    "test_tracebacks.py": "a failed job whose tracebacks or last line do not show the cause",
    "test_train.py": "Model.train and its callbacks with other losses, weights or files than on one process",
    "test_tutorials.py": "a script of the tutorials that needs more changes than its imports",
    "test_two_jobs.py": "two jobs at one port that mix",
    "test_vision.py": "an operation on images that gives other pixels than MindSpore's",
    "test_waiting.py": "a wait that burns CPU time, or that takes a late rank for a lost one",
    "test_wire.py": "bytes or system calls between hosts that a collective does not need",
}

# These need an NVIDIA GPU: `make test-gpu` runs them.
GPU = {
    "gpu/test_example_gpu.py": "an example that does not run on a GPU",
    "gpu/test_gpu.py": "a call that fails with the real NCCL and CUDA",
    "gpu/test_pack_gpu.py": "a kernel that packs wrongly on a real GPU",
    "gpu/test_parallel_gpu.py": "a divided network that fails on a GPU",
    "gpu/test_reducer_gpu.py": "gradients on a real GPU with other bits than those of all_reduce",
    "gpu/test_train_gpu.py": "training that fails on a GPU",
}

PROMISES = {"quick": QUICK, "full": FULL, "gpu": GPU}


def main(tier: str) -> None:
    for name in PROMISES[tier]:
        print(HERE / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
