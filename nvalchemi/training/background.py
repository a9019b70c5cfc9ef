"""A checkpoint written while training goes on: from copies in host memory, by a thread, without a collective.

Each rank's thread writes the rank's files and, last, a note that says so. Rank 0's thread waits for the notes of all and lets the
checkpoint appear. The ranks' main threads talk to each other only before (the folder) and after (:meth:`PendingSave.settle`): a
collective of a thread beside those of the training would make ranks wait for each other in unlike orders.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
from torch import Tensor

from nvalchemi.data.address import Where
from nvalchemi.distributed import Manager
from nvalchemi.errors import CheckpointError
from nvalchemi.training.agreement import first_rank, together
from nvalchemi.training.alive import alive
from nvalchemi.training.draft import Draft, refusals_of_the_disk
from nvalchemi.training.saving import NewFiles
from nvalchemi.training.shards import PLAIN

logger = logging.getLogger("nvalchemi")

_PATIENCE = 600.0  # seconds for a folder to show what another rank has written there
_GRACE = 5.0  # the same, where the run has failed and ranks may be gone


class HostCopies:
    """Copies of tensors in host memory, whose space is used again for the next ones; page-locked for those of a GPU."""

    def __init__(self) -> None:
        self._kept: dict[str, Tensor] = {}
        self._used: dict[str, Tensor] = {}
        self._devices: set[torch.device] = set()

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, valid after :meth:`finish` and up to the next :meth:`take` of that name."""
        copy = self._kept.get(name)
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        copy.copy_(tensor.detach() if tensor.requires_grad else tensor, non_blocking=True)
        if tensor.is_cuda:
            self._devices.add(tensor.device)
        self._used[name] = copy
        return copy

    def take_all(self, state: Any, name: str) -> Any:
        """A state with a copy of each tensor."""
        if isinstance(state, Tensor):
            return self.take(name, state)
        if isinstance(state, Mapping):
            return {key: self.take_all(value, f"{name}/{key}") for key, value in state.items()}
        if isinstance(state, (list, tuple)) and not PLAIN.issuperset(map(type, state)):  # no words of a generator
            return type(state)(self.take_all(value, f"{name}/{i}") for i, value in enumerate(state))
        return state

    def finish(self) -> None:
        """Wait until all copies are there, and let go of the space of tensors that were not taken this time."""
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._kept, self._used, self._devices = self._used, {}, set()

    def taken(self, names: Collection[str]) -> list[Tensor]:
        """The latest copies, finished, of the tensors of these names, or of the blocks of them that were taken."""
        return [copy for name, copy in self._kept.items() if name[: name.rfind("]") + 1] in names]


class PendingSave:
    """A checkpoint that is being written. All ranks make one together.

    Parameters
    ----------
    directory
        The folder of the checkpoints.
    files
        What this rank writes.
    manifest
        What the checkpoint says of itself.
    manager
        Who the ranks are.
    thread
        What writes: of one thread, which stands ready, since to start one makes the loop wait.
    check
        Raises where the state is not worth keeping; called before anything is written.
    after
        Called on rank 0 when the checkpoint has appeared.
    """

    def __init__(
        self,
        directory: Where,
        files: NewFiles,
        manifest: Mapping[str, Any],
        manager: Manager,
        *,
        thread: ThreadPoolExecutor,
        check: Callable[[], None],
        after: Callable[[], None],
    ) -> None:
        self._files, self._manifest, self._manager = files, {**manifest, **files.facts}, manager
        self._check, self._after = check, after
        self._directory, self._step = directory, int(manifest["progress"]["step"])
        begun = first_rank(refusals_of_the_disk(directory)(lambda: Draft.begin(directory, self._step)), manager)
        self._draft = begun.expect(files.bytes)
        self._written, self._given_up = threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._all_done = self._there = False  # whether every rank has done with its part, and whether there is a checkpoint now
        self._future = thread.submit(self._run)

    def settle(self) -> None:
        """Wait until the checkpoint is there; all ranks must call.

        Raises
        ------
        CheckpointError, TrainingError
            On all ranks, where one could not write its part or the state is not worth keeping.
        """
        try:
            with self._alive():
                together(self._wait, self._manager)
                first_rank(self._join, self._manager)
        finally:
            self._given_up.set()
            wait([self._future])

    def close(self) -> None:
        """After an error in the run: let the save come to its end where it can, without any other rank's word."""
        with self._alive():
            self._written.wait()
        wait([self._future], _GRACE)
        self._given_up.set()
        wait([self._future])
        if self._error is not None:
            logger.warning("the checkpoint that was being written is lost: %s", self._error)

    def _alive(self) -> AbstractContextManager[None]:
        what = f"writing the checkpoint of step {self._step} to {self._directory}"
        return alive(what, self._draft.amount, here=self._manager.rank == 0)

    def _wait(self) -> None:
        self._written.wait()
        self._raise()

    def _join(self) -> None:
        wait([self._future], _PATIENCE)
        self._given_up.set()
        wait([self._future])
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        rank = self._manager.rank
        try:
            try:
                self._write(rank)
            finally:
                self._written.set()
            if rank == 0:
                self._appear()
        except Exception as error:  # noqa: BLE001 - raised where the main thread settles
            self._error = error
            if rank == 0 and not self._there:
                if not self._all_done:  # or they would go on writing to what is removed
                    self._wait_for_notes()
                self._draft.discard()

    def _write(self, rank: int) -> None:
        try:
            self._check()
            with refusals_of_the_disk(self._directory):
                entries = {name: self._draft.write(name, writer) for name, writer in self._files.writers.items()}
                self._draft.put(note_of(rank), {"files": entries})
        except Exception as error:
            self._error = error  # before the main thread hears that this is done
            with suppress(OSError):  # a disk that refuses the files may refuse the note, too: the main threads tell each other
                self._draft.put(note_of(rank), {"error": f"{type(error).__name__}: {error}"})
            raise

    def _appear(self) -> None:
        with refusals_of_the_disk(self._directory):
            self._draft.finish(self._manifest, self._notes_of_all())
            self._there = True
            self._after()

    def _notes_of_all(self) -> dict[str, Any]:
        """The entries of all ranks' files, once their notes are there; the notes are removed."""
        absent = self._wait_for_notes()
        if absent is not None:
            raise CheckpointError(
                "a rank has not written its part of the checkpoint, or rank 0 does not see it",
                needed=f"{self._draft.place / absent}, in a folder that all ranks see",
            )
        self._all_done = True
        entries: dict[str, Any] = {}
        for rank in range(self._manager.world_size):
            note = self._draft.take(note_of(rank))
            if "error" in note:
                raise CheckpointError(f"rank {rank} could not write its part of the checkpoint", found=note["error"])
            entries.update(note["files"])
        return entries

    def _wait_for_notes(self) -> str | None:
        """Wait until every rank has done with its part; the first note that is not there, where it is no use to wait any longer."""
        for name in map(note_of, range(self._manager.world_size)):
            while not self._draft.has(name):
                if self._given_up.wait(self._draft.store.poll):
                    return name
        return None


def note_of(rank: int) -> str:
    """The name of the note by which a rank says that its files are there."""
    return f"written-{rank:05d}.json"
