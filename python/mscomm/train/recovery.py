"""Recovery: training goes on after ranks were lost and restarted, with the same bits as without the loss.

After a loss, all ranks choose together where to go on:

1. from the state in the memory of a surviving rank, if this state is the same on all ranks. Ranks that do not have it
   receive it from a rank that has it, if possible from one on their own host;
2. otherwise from the newest checkpoint that is complete on all ranks;
3. otherwise from the beginning, with the weights of a restarted rank, which are still the initial ones.

All decisions depend only on what the ranks tell each other in one all_gather, so all ranks decide the same.

A survivor's state counts only if it is whole. After step S and all callbacks of step S, the weights, the optimizer and
the callbacks do not change until the gradients of step S + 1 are reduced. So the state is whole if the rank has reduced
no gradients since the end of step S. Meanwhile, random states, the position in the data, and arrays that a forward pass
changes may have moved on. Recovery records random states and the position at the end of each step. It does not record
arrays, so a network whose forward pass changes arrays, such as running means, goes on from a checkpoint.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from mscomm import job, log, messages, objects
from mscomm.arrays import memory_anywhere
from mscomm.arrays.device import OnDevice
from mscomm.arrays.numpy import dtype_by_name
from mscomm.cluster import plan
from mscomm.dataset.pipeline import Dataset
from mscomm.errors import Aborted, CollectiveTimeout, Error, PeerLost
from mscomm.group import Group
from mscomm.train import hooks, randomness, resuming, states
from mscomm.train.checkpoint import ModelCheckpoint
from mscomm.train.epochs import Epochs, knows_its_place
from mscomm.train.hooks import Callback, RunContext
from mscomm.train.networks import Network
from mscomm.train.reducer import GradientReducer
from mscomm.train.resuming import Resumed
from mscomm.train.serialization import Saved

FAILURES = (PeerLost, Aborted, CollectiveTimeout)
Start = tuple[Saved | None, dict[str, Any] | None]  # the checkpoint or position to go on from, and the state there
_calls = itertools.count()
_missed = False  # whether this process has left out calls of train() that are over on the other ranks


class Recovery(Callback):
    """Remembers, for one call of Model.train, the beginning and the end of the latest step.

    Model calls it like a callback, after the program's callbacks and before ModelCheckpoint. resumed: what
    Model.resume() has loaded. rejoins: whether this process waits for lost ranks; otherwise, the launcher restarts all
    processes. load: a function that loads a checkpoint into the network and the optimizer.
    """

    def __init__(
        self,
        network: Network,
        dataset: Any,
        callbacks: Sequence[Callback],
        *,
        epoch: int,
        batches: int,
        initial_epoch: int,
        resumed: Start | None,
        compressed: bool,
        rejoins: bool,
        load: Callable[[Resumed], None],
    ) -> None:
        self.call = next(_calls)  # the number of this call of train() in the script
        self._network = network
        self._dataset = dataset
        self._callbacks = callbacks
        self._epoch, self._batches, self._initial_epoch = epoch, batches, initial_epoch
        self._resumed = resumed
        self._compressed = compressed
        self._rejoins = rejoins
        self._load = load
        files = [one for one in callbacks if isinstance(one, ModelCheckpoint)]
        self._folder = files[0].directory if files else None
        self._problem = next((why for one in files if (why := one.why_no_recovery())), "")
        numbers = Epochs(dataset, initial_epoch, None, initial_epoch).numbers(ended=True)
        random = randomness.states()
        self._begin: dict[str, Any] = {
            "epochs": numbers,
            "random": random,
            "epoch_random": random,
            "dataset": dataset.state_dict() if isinstance(dataset, Dataset) else None,
            "callbacks": [],  # taken after the callbacks' begin, which may create their states
            "reducer": None,
        }
        self._reduces_elsewhere = False  # whether a step has ended without a reduction by the reducer
        self._untrained = self._sums_of_untrained()
        self._fresh = not _missed  # whether the weights and the optimizer are as they were at the beginning
        self._whole = False  # whether the state in memory is the one at the end of step _reached
        self._reached = -1
        self._timed_out: int | None = None  # the step reached when a call timed out
        self._position: dict[str, Any] = {}  # what else belongs to this state, as in a checkpoint
        self._run = ""  # the name of the training run, or "" if this process has not begun to train
        self._reducer: GradientReducer | None = None
        self._reduced = 0
        self._failure: Error | None = None
        self._rejoined = False

    # -- called during training

    def follow(self, reducer: GradientReducer | None, position: Callable[[], dict[str, Any]], start: Start) -> None:
        """Called before the callbacks' begin. position: returns the position, and what else training_state() returns
        except arrays. start: what align() has returned."""
        self._reducer = reducer
        self._position_now = position
        self._start = start

    def begin(self, run_context: RunContext) -> None:
        global _missed
        _missed = False
        now = run_context.original_args()
        self._fresh, self._run = False, now.run
        _, state = self._start
        if state is None and not now.cur_step_num:
            self._begin["callbacks"] = states.copied(hooks.states_of(self._callbacks))
        state = {**self._position_now(), **self._small(state or self._begin), "run": now.run, "part": now.part}
        self._record(now.cur_step_num, state)

    def step_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        if self._reducer is not None and self._reducer.steps == self._reduced:
            self._reduces_elsewhere = True
        if now.cur_step_num % now.batch_num and not run_context.get_stop_requested():
            self._record(now.cur_step_num, self._position_now())

    def epoch_end(self, run_context: RunContext) -> None:
        now = run_context.original_args()
        self._record(now.cur_step_num, {**self._position_now(), "stopped": run_context.get_stop_requested()})

    def _record(self, step: int, position: dict[str, Any]) -> None:
        self._reached, self._position, self._whole = step, position, True
        self._reduced = 0 if self._reducer is None else self._reducer.steps

    @staticmethod
    def _small(state: Mapping[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in state.items() if name not in ("optimizer", "callbacks")}

    # -- after a failure

    def rejoin(self, failure: Error) -> None:
        """Wait until all lost ranks are back. Raise the failure, or the error of rejoin(), if training cannot go on."""
        if self._rejoined:  # by may_end_without()
            self._rejoined = False
            return
        if self._reducer is not None and self._reducer.steps != self._reduced:
            self._whole = False
        self._reducer = None
        # If this rank has called abort(), or if a step has timed out twice, another attempt would end in the same way.
        ours = isinstance(failure, Aborted) and job.get_rank() in failure.ranks
        again = isinstance(failure, CollectiveTimeout) and self._timed_out == self._reached
        if not self._rejoins or ours or again:
            raise failure
        if isinstance(failure, CollectiveTimeout):
            self._timed_out = self._reached
        gc.collect()  # free the buckets of earlier epochs, now that this rank has to wait
        log.info(f"Model.train: waits for lost ranks, after {failure.kind}: {failure}")
        try:
            job.rejoin()
        except Error as error:
            raise error from failure
        self._failure = failure.again()  # without the traceback, which keeps the old buckets alive

    def may_end_without(self, failure: Error) -> bool:
        """Return whether this rank may end its training although other ranks were lost after the last step.

        This is so if they cannot come back, because other ranks have left the job after the last step.
        """
        try:
            self.rejoin(failure)
        except Error as error:
            if error is failure or not self._whole:  # otherwise, it is an error of job.rejoin()
                raise
            log.info(f"Model.train: ends without lost ranks: {failure}")
            return True
        self._rejoined = True
        return False

    # -- choosing where to go on

    def align(self, group: Group) -> Start | None:
        """Bring all ranks to the same state, and return where to go on. All ranks must call this together.

        Return None if the other ranks are in a later call of train(), so that this call must do nothing.
        """
        offers = self._meet(group)
        if offers is None:
            return None
        lived = [rank for rank, offer in enumerate(offers) if offer["run"]]
        speaker = lived[0] if lived else 0
        whole = [rank for rank, offer in enumerate(offers) if offer["step"] is not None]
        why = ""
        if whole:
            newest = max(offers[rank]["step"] for rank in whole)
            holders = [rank for rank in whole if offers[rank]["step"] == newest]
            why, shared = _obstacle(offers, holders)
            if not why:
                self._tell(group, speaker, f"after {self._where(newest)}, from the memory of {plan.named(holders)}")
                return self._from_memory(group, holders, newest, shared)
        why = why and f" ({why})"
        if not lived and all(offer["resumed"] for offer in offers):
            return self._resumed
        found = self._from_checkpoint(group, offers, bool(lived))
        if found is not None:
            self._tell(group, speaker, f"from checkpoint {found[0].epoch}_{found[0].step}{why}")
            return found
        fresh = [rank for rank, offer in enumerate(offers) if offer["fresh"]]
        if not lived and len(fresh) == group.size:
            return None, None
        if not fresh or any(offer["resumed"] for offer in offers) or (self._network.own() and len(fresh) < group.size):
            raise RuntimeError(
                "Model.train: training cannot go on: there is no checkpoint that all ranks have, and no rank has the"
                f" state of the beginning or a state that all ranks can take over{why}. Pass a ModelCheckpoint"
            ) from self._failure
        self._tell(group, speaker, f"at step 1, because there is no checkpoint that all ranks have{why}")
        return self._from_begin(group, fresh)

    def _meet(self, group: Group) -> list[dict[str, Any]] | None:
        """Exchange what each rank has. Wait for ranks that are still in Model.resume() or in an earlier call. Return
        None if this rank is in an earlier call."""
        global _missed
        mine = {
            "call": self.call,
            "problem": self._problem,
            "fresh": self._fresh,
            "resumed": self._resumed is not None,
            "run": self._run,
            "step": self._reached if self._whole else None,
            "why not": self._why_not() if self._whole else "",
            "begin": _sums(self._begin["random"]),
            "random": _sums(self._position["random"]) if self._whole else {},
            "untrained": states.checksum_of(self._untrained),
            "callbacks": states.checksum_of(hooks.states_of(self._callbacks)) if self._whole else 0,
            "files": self._folder is not None,
        }
        while True:
            offers = objects.all_gather_object(mine, group=group)
            if all(isinstance(offer, dict) for offer in offers):
                latest = max(offer["call"] for offer in offers)
                if self.call < latest:
                    _missed = True
                    log.warn(
                        f"Model.train: call {self.call + 1} of train() is over on the other ranks, and does nothing on"
                        " this restarted rank: its network is untrained until the next call takes over the weights"
                    )
                    return None
                if all(offer["call"] == latest for offer in offers):
                    break
            elif any(resuming.is_of_train(offer) for offer in offers):
                raise ValueError("Model.train: recovery is on for some ranks only; pass the same on every rank")
        for rank, offer in enumerate(offers):
            if offer["problem"]:
                raise ValueError(f"Model.train: rank {rank} of the group: {offer['problem']}")
        return offers

    def _why_not(self) -> str:
        """Return why the state in memory cannot be used on any rank, or ""."""
        weights = self._network.weights()
        if any(isinstance(memory_anywhere(x, name, "Model.train"), OnDevice) for name, x in weights.items()):
            return "after a failure, the last update on a device may be incomplete"
        if self._reduces_elsewhere:
            return "the steps did not reduce the gradients with step.reducer"
        if self._compressed:
            return "each rank has its own residual of compression"
        if own := self._network.own():
            return f"each rank has its own {min(own)}"
        if knows_its_place(self._dataset) and not isinstance(self._dataset, Dataset):
            return f"the position of a {type(self._dataset).__name__} belongs to its rank"
        for name, checksum in self._sums_of_untrained().items():
            if checksum != self._untrained.get(name):
                return f"training changes {name}, which is not among the trained weights"
        return ""

    def _sums_of_untrained(self) -> dict[str, int]:
        trained, weights = self._network.trained(), self._network.weights()
        return {name: states.checksum(x, name, "Model.train") for name, x in weights.items() if name not in trained}

    # -- 1. from a rank's memory

    def _from_memory(self, group: Group, holders: list[int], newest: int, shared: set[str]) -> Start:
        needy = [rank for rank in range(group.size) if rank not in holders]
        sources = _sources(group, holders, needy)
        if group.rank in holders:
            state = {**self._position, "callbacks": states.copied(hooks.states_of(self._callbacks))}
            takers = [rank for rank in needy if sources[rank] == group.rank]
            if takers:
                first = self._begin["callbacks"]
                _send([self._network.trained(), self._network.optimizer_state(), state, first], takers, group)
        else:
            self._whole = self._fresh = False
            weights, optimizer, state, self._begin["callbacks"] = _received(sources[group.rank], group)
            self._network.load(weights)
            self._network.load_optimizer_state(optimizer)
            for name in ("random", "epoch_random"):
                if state[name] is not None:
                    mine = self._begin["random"]
                    state[name] = mine | {kind: x for kind, x in state[name].items() if kind in shared}
            self._run = state["run"]
            self._set(newest, state)
        return self._place(state), state

    def _set(self, step: int, state: dict[str, Any]) -> None:
        self._fresh, self._whole = False, True
        self._reached, self._position = step, self._small(state)

    def _place(self, state: dict[str, Any]) -> Saved:
        """Return the position as the description of a checkpoint, with this rank's newest file of the training run, so
        that ModelCheckpoint continues with the prefix of this file."""
        newest = None
        if self._folder is not None:
            mine = [one for one in resuming.undamaged(self._folder) if one.run == state["run"]]
            newest = max(mine, key=lambda one: one.time, default=None)
        path, prefix = (newest.path, newest.prefix) if newest else (Path(), "")
        return Saved(path, prefix, state["epoch"], state["step"], 0.0, state["run"], state["part"], False)

    # -- 2. from a checkpoint

    def _from_checkpoint(self, group: Group, offers: list[dict[str, Any]], lived: bool) -> tuple[Saved, Any] | None:
        if not all(offer["files"] for offer in offers):
            return None
        assert self._folder is not None
        run = next((offer["run"] for offer in offers if offer["run"]), "")
        found = resuming.newest_common(self._folder, group, run)
        if found is None:
            return None
        chosen, _, state = found
        if not lived and not self._continues(chosen, state):
            return None
        self._whole = self._fresh = False
        self._load(found)
        self._set((chosen.epoch - 1) * self._batches + chosen.step, state)
        return chosen, state

    def _continues(self, chosen: Saved, state: dict[str, Any]) -> bool:
        """Return whether the training in a checkpoint is the one that this call of train() has to go on with."""
        if state.get("job") == job_id():
            return bool(state["call"] == self.call)
        # An earlier job has written the file. If it has finished the training, begin another one. Without recovery, it
        # did not number its calls.
        over = state.get("stopped") or (chosen.epoch, chosen.step) >= (self._epoch, self._batches)
        return not over and chosen.epoch > self._initial_epoch and state.get("call") in (None, self.call)

    # -- 3. from the beginning

    def _from_begin(self, group: Group, fresh: list[int]) -> Start:
        needy = [rank for rank in range(group.size) if rank not in fresh]
        self._whole = False
        if group.rank == fresh[0]:
            if needy:
                _send([self._network.weights(), self._network.optimizer_state()], needy, group)
        elif not self._fresh:
            weights, optimizer = _received(fresh[0], group)
            self._network.load(weights)
            self._network.load_optimizer_state(optimizer)
            self._fresh = True
        return None, dict(self._begin)

    # -- what the user sees

    def _where(self, step: int) -> str:
        return f"epoch {(step - 1) // self._batches + 1} step {(step - 1) % self._batches + 1}" if step else "step 0"

    def _tell(self, group: Group, speaker: int, where: str) -> None:
        if group.rank == speaker:
            cause = f"{self._failure.kind}: {self._failure}" if self._failure else "an earlier run did not end"
            log.warn(f"Model.train: {cause}. Training goes on {where}")


def job_id() -> str:
    """Return a name of this start of the job, or "" if no job was joined."""
    run = job.default().epoch.run if job.is_initialized() else b""
    return blake2b(run, digest_size=8).hexdigest() if run else ""


def _sums(random: Mapping[str, Any]) -> dict[str, int]:
    return {name: states.checksum_of(state) for name, state in random.items()}


def _obstacle(offers: list[dict[str, Any]], holders: list[int]) -> tuple[str, set[str]]:
    """Return why the other ranks cannot take over the holders' state, or "", and the random generators whose states
    they take over.

    The other ranks keep their own state of a generator that no holder has used since the beginning. They take over a
    state that was the same on all ranks at the beginning and is the same on several holders, because then it is the
    same on all ranks.
    """
    having = [offers[rank] for rank in holders]
    why = next((offer["why not"] for offer in having if offer["why not"]), "")
    shared: set[str] = set()
    if why or len(holders) == len(offers):
        return why, shared
    for name in dict.fromkeys(name for offer in having for name in offer["random"]):
        if all(offer["random"].get(name) == offer["begin"].get(name) for offer in having):
            continue
        begins = {offer["begin"].get(name) for offer in offers}
        if len(holders) == 1 or len(begins) > 1 or len({offer["random"].get(name) for offer in having}) > 1:
            return f"the state of {name}'s random numbers may differ between ranks", shared
        shared.add(name)
    if len({offer["untrained"] for offer in offers}) > 1:
        return "the weights that are not trained differ between ranks", shared
    if len({offer["callbacks"] for offer in having}) > 1:
        return "the callbacks' states differ between ranks", shared
    return "", shared


def _sources(group: Group, holders: list[int], needy: list[int]) -> dict[int, int]:
    """Return the rank that sends its state to each needy rank: one on the same host if there is one, in turn."""
    sources = {}
    for turn, rank in enumerate(needy):
        near = [one for one in holders if group.hosts[one] == group.hosts[rank]] or holders
        sources[rank] = near[turn % len(near)]
    return sources


def _send(content: Any, takers: list[int], group: Group) -> None:
    text, arrays = states.to_text(content)
    kinds = [[name, x.dtype.name, list(x.shape)] for name, x in arrays.items()]
    works = []
    for rank in takers:
        objects.send_object([text, kinds], rank, group=group)
        works += [messages.send(x, rank, group=group, async_op=True) for x in arrays.values()]
    for work in works:
        work.wait()


def _received(source: int, group: Group) -> Any:
    text, kinds = objects.recv_object(source, group=group)
    arrays = {
        name: messages.recv(np.empty(shape, dtype_by_name(dtype)), source, group=group) for name, dtype, shape in kinds
    }
    return states.from_text(text, arrays)
