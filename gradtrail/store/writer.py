"""``BackgroundWriter``: blocks are written by a thread while their capture goes on."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from gradtrail.factors import GradientBlock, map_tensors, tensors_of
from gradtrail.options import check_positive
from gradtrail.store.fetch import AbstractFeeder
from gradtrail.store.gradient_store import GradientStore

__all__ = ["BackgroundWriter"]


@dataclass(eq=False)
class Job:
    """A block that waits to be written.

    Attributes:
        block: The block, on the host, its layers in a dict of its own; on its way there until the
            events have come.
        meta: What to record with it.
        num_bytes: Bytes that it holds.
        events: One a device that it comes from.
    """

    block: GradientBlock | None
    meta: Mapping[str, Any] | None
    num_bytes: int
    events: list[Any]


class Queue(AbstractFeeder):
    """Jobs between the two threads, bounded by bytes."""

    def __init__(self, limit: int) -> None:
        """Start empty.

        Args:
            limit: Bytes that may wait; a larger block waits alone.
        """
        self._limit = limit
        self._changed = threading.Condition()
        self._jobs: deque[Job] = deque()
        self._bytes = 0
        self._unfinished = 0
        self._ended = False
        self.error: BaseException | None = None
        self.is_told = False

    def put(self, job: Job) -> None:
        """Add a job once there is room, or drop it if the thread failed."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._bytes or self._bytes + job.num_bytes <= self._limit or self.error
            )
            if self.error is None:
                self._jobs.append(job)
                self._bytes += job.num_bytes
                self._unfinished += 1
                self._changed.notify_all()

    def take(self) -> Job | None:
        """Wait for the next job; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._jobs or self._ended)
            return self._jobs.popleft() if self._jobs else None

    def done(self, num_bytes: int) -> None:
        """Note that a job is written."""
        with self._changed:
            self._bytes -= num_bytes
            self._unfinished -= 1
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Keep what went wrong, and drop what waits."""
        with self._changed:
            self.error = error
            self._jobs.clear()
            self._bytes = self._unfinished = 0
            self._changed.notify_all()

    def wait(self) -> None:
        """Wait until all is written, or something went wrong."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unfinished or self.error)

    def drain(self) -> None:
        """Wait until all is written; what went wrong is raised, unless somebody was told."""
        self.wait()
        if not self.is_told:
            self.check()

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self.error is not None:
            self.is_told = True
            raise self.error

    def end(self) -> None:
        """Let the thread end once all is written."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()


class BackgroundWriter:
    """Appends blocks to a store in the order in which they were submitted, from a thread.

    Tensors on the CPU are not copied: nobody may write into them until they are stored. Tensors
    of a device are copied to pinned memory on a stream of their own, which the device does beside
    its other work, and are written after the copy is done.

    What goes wrong in the thread is raised by the next ``submit``, ``flush`` or ``close``, and by
    every later one: nothing that was submitted after it is written. The store stays open.
    """

    def __init__(self, store: GradientStore, *, queue_bytes: int = 256 << 20) -> None:
        """Start the thread.

        Args:
            store: A store that is open for writing.
            queue_bytes: Bytes of blocks that may wait; ``submit`` waits when they are used up. A
                larger block waits alone.
        """
        check_positive("queue_bytes", queue_bytes)
        self.store = store
        self._queue = Queue(queue_bytes)
        store.log.feed(self._queue)
        self._streams: dict[torch.device, Any] = {}
        self._closed = False
        self._thread = threading.Thread(
            target=_work, args=(self._queue, store), name="gradtrail-writer", daemon=True
        )
        self._thread.start()
        # whoever forgets to close, or ends the interpreter, loses nothing
        self._finish = weakref.finalize(self, _finish, self._queue, self._thread, os.getpid())

    def submit(self, block: GradientBlock, meta: Mapping[str, Any] | None = None) -> None:
        """Hand a block over; waits while the queue is full.

        Args:
            block: The block.
            meta: What to record with it, fit for JSON.

        Raises:
            RuntimeError: If the writer was closed.
        """
        if self._closed:
            raise RuntimeError("BackgroundWriter must be open, got one that was closed.")
        self.store.log.check_writable()
        self._queue.check()
        host, events = self._to_host(block)
        tensors = {id(t): t for g in host.layers.values() for t in tensors_of(g)}
        num_bytes = sum(tensor.nbytes for tensor in tensors.values())
        self._queue.put(Job(host, meta, num_bytes, events))
        self._queue.check()

    def flush(self) -> None:
        """Wait until all blocks are appended, and flush the store."""
        self._queue.wait()
        self._queue.check()
        self.store.flush()  # nothing where the store was closed, which flushed it

    def close(self) -> None:
        """Wait until all blocks are appended, and end the thread; the store stays open."""
        self._closed = True
        self._finish()
        self._queue.check()

    def __enter__(self) -> BackgroundWriter:
        """Enter a block at whose end the writer is closed."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close the writer; an error of the block goes before one of the thread."""
        self._closed = True
        self._finish()
        if error is None:
            self._queue.check()

    def _to_host(self, block: GradientBlock) -> tuple[GradientBlock, list[Any]]:
        """Start copies of what lies on a device, each tensor once."""
        copies: dict[int, tuple[Tensor, Tensor]] = {}
        used: dict[torch.device, Any] = {}

        def bring(tensor: Tensor) -> Tensor:
            if tensor.device.type != "cuda":
                return tensor
            if id(tensor) not in copies:
                copies[id(tensor)] = (tensor, self._copy(tensor, used))
            return copies[id(tensor)][1]

        layers = {name: map_tensors(gradient, bring) for name, gradient in block.layers.items()}
        events = [stream.record_event() for stream in used.values()]
        return GradientBlock(block.step, block.ids, layers), events

    def _copy(self, tensor: Tensor, used: dict[torch.device, Any]) -> Tensor:
        """Start a copy into pinned memory, on the device's stream for that."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        stream = self._streams[device]
        if device not in used:
            stream.wait_stream(torch.cuda.current_stream(device))  # what computes the values
            used[device] = stream
        source = tensor.detach()
        pinned = torch.empty_like(source, device="cpu", pin_memory=True)
        with torch.cuda.stream(stream):
            pinned.copy_(source, non_blocking=True)
        source.record_stream(stream)  # the memory is not given away before the copy is done
        return pinned


def _work(queue: Queue, store: GradientStore) -> None:
    """Append blocks until the end, or until something goes wrong."""
    while (job := queue.take()) is not None:
        try:
            for event in job.events:
                event.synchronize()
            # the pass wants each tensor's memory back: what it gets anew must be cleared first
            store.append(job.block, meta=job.meta, consume=True)
        except BaseException as error:  # noqa: BLE001  # raised by the thread that submitted
            queue.fail(error)
            return
        num_bytes = job.num_bytes
        job = None  # its tensors go before the next one is waited for
        queue.done(num_bytes)


def _finish(queue: Queue, thread: threading.Thread, owner: int) -> None:
    if os.getpid() != owner:
        return  # a fork has no such thread
    queue.end()
    if thread is not threading.current_thread():  # which may collect what nobody refers to
        thread.join()
