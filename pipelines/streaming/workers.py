"""Several workers on one source: Ray actors that share its partitions, each with a checkpoint and outputs of its own.

    supervisor (this process)                     one set of metrics, signals, starts a lost worker again
      worker 0 (actor): partitions 0, 2, 4, ...   source -> engine -> FORECASTS.0.ndjson, committed in CHECKPOINT.workers/1-0.db
      worker 1 (actor): partitions 1, 3, 5, ...   source -> engine -> FORECASTS.1.ndjson, committed in CHECKPOINT.workers/1-1.db

A worker is the same `work` as in one process, so a lost one comes back from its checkpoint to the same bits. Which worker has which
partitions stands in `layout.json`. Where the number of workers changes, the streams move into new checkpoints beside the old ones, and
replacing the layout is the moment at which they have moved: all, or none.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from connectors.checkpoints import CheckpointStore, Progress
from connectors.errors import UserError
from connectors.streams import open_sink, open_source
from connectors.streams.base import Positions
from connectors.streams.parts import PARTS, by_broker, open_parts, part_of, place_of
from connectors.tables import sync_folder
from pipelines.streaming.dials import Dials, Step
from pipelines.streaming.engine import StreamModel
from pipelines.streaming.event_time import EventTime, Schedule
from pipelines.streaming.journal import unpack_arrivals
from pipelines.streaming.worker import LATENCIES_KEPT, Stop, StreamSummary, work

LOGGER = logging.getLogger("tethys.workers")
LAYOUT_VERSION = 1
WAIT_SECONDS = 0.1
TELL_SECONDS = 0.5
# A worker that is lost so often without having committed anything in between will not get through.
MAX_LOSSES = 3
MOVED_AT_ONCE = 256

Past = tuple[Sequence[str], Sequence[int], Any]
"""As `work` takes it: unique_ids, times of their last rows, memories that have read them."""


@dataclass(frozen=True)
class Job:
    """What all workers of a run have in common; it travels to their actors."""

    source: str
    columns: Mapping[str, str | None]
    follow: bool
    policy: EventTime
    schedule: Schedule
    outputs: Mapping[str, str]
    """`output`, `alarms`, `dead_letters`: where one worker would write them."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """More for `work`: batch_rows, snapshot_share, max_resident."""


@dataclass(frozen=True)
class Share:
    """What one of the workers does."""

    index: int
    parts: tuple[str, ...]
    start: Positions | None
    """Of virtual partitions: where the run began (`PartSource`). None: the partitions are the broker's own."""
    checkpoint: Path


@dataclass(frozen=True)
class Layout:
    """Which worker has which partitions, and with which checkpoints."""

    generation: int
    shares: list[list[str]]
    start: Positions | None
    receipts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Worker -> how far its outputs had got when this layout began; also of one that is no more, for when there is one again."""
    format: int = LAYOUT_VERSION

    def checkpoint(self, folder: Path, index: int) -> Path:
        return folder / f"{self.generation}-{index}.db"


def folder_of(checkpoint: str | Path) -> Path:
    """Where the checkpoints of several workers lie; `checkpoint` is the file that one worker would have."""
    path = Path(checkpoint)
    return path.with_name(f"{path.name}.workers")


def read_layout(checkpoint: str | Path) -> Layout | None:
    """None: the run has never had several workers."""
    path = folder_of(checkpoint) / "layout.json"
    try:
        found = Layout(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise UserError(f"'{path}' is no layout of workers ({error}): put back the file that the last run wrote") from None
    if found.format != LAYOUT_VERSION:
        raise UserError(f"'{path}' has format version {found.format}, this program reads {LAYOUT_VERSION}: use the program that wrote it")
    return found


def checkpoints(checkpoint: str | Path) -> list[Path]:
    """The files that hold the streams of a run, of one worker or of several."""
    layout = read_layout(checkpoint)
    if layout is None:
        return [Path(checkpoint)]
    files = [layout.checkpoint(folder_of(checkpoint), index) for index in range(len(layout.shares))]
    return [path for path in files if path.exists()]


def numbered(place: str, index: int) -> str:
    """The output of one of several workers: a file or folder of its own; a broker takes the rows of all."""
    path = Path(place)
    return place if "://" in place else str(path.with_name(f"{path.stem}.{index}{path.suffix}"))


def absolute(place: str) -> str:
    """A file or folder by its whole path; a broker, a bucket and standard input as they are."""
    return place if "://" in place or place.startswith("-") else str(Path(place).absolute())


class HomedStore(CheckpointStore):
    """A checkpoint that also keeps in which partition of the broker each stream comes: its memory moves with that partition."""

    def __init__(self, path: str | os.PathLike[str]):
        super().__init__(path)
        self._db.execute("CREATE TABLE IF NOT EXISTS homes (unique_id TEXT PRIMARY KEY, part TEXT NOT NULL)")
        self.homes: dict[str, str] = dict(self._db.execute("SELECT unique_id, part FROM homes").fetchall())

    def _accept(self, batch: int, arrivals: bytes, positions: Mapping[str, Any]) -> None:
        records = unpack_arrivals(arrivals).records
        met = {(name, records.partitions[place]) for name, place in zip(records.unique_id, records.partition.tolist(), strict=True)}
        new = met - self.homes.items()
        for name, part in sorted(new):
            if self.homes.setdefault(name, part) != part:
                raise UserError(
                    f"stream '{name}' comes in partitions {self.homes[name]} and {part}: several workers need all events of a stream in one "
                    "partition (key the topic's messages by the stream's name); run one worker instead"
                )
        self._db.executemany("INSERT OR IGNORE INTO homes VALUES (?, ?)", sorted(new))
        super()._accept(batch, arrivals, positions)

    def settle_in(self, homes: Mapping[str, str]) -> None:
        self._db.executemany("INSERT INTO homes VALUES (?, ?)", homes.items())


def work_share(
    job: Job,
    share: Share,
    model: StreamModel,
    *,
    past: Past | None = None,
    stop: Stop,
    report: Callable[[Step], None] | None = None,
    answer: Callable[[Callable[[list[str]], pl.DataFrame]], None] | None = None,
) -> StreamSummary:
    """One worker, from its checkpoint to the end of its partitions or to `stop`."""
    with ExitStack() as stack:
        options = {"columns": job.columns, "count_steps": job.policy.frequency.counts, "follow": job.follow}
        source = open_parts(job.source, share.parts, share.start, **options)
        stack.callback(source.close)
        sinks = []
        for place in job.outputs.values():
            sinks.append(open_sink(numbered(place, share.index)))
            stack.callback(sinks[-1].close)
        store = CheckpointStore(share.checkpoint) if share.start is not None else HomedStore(share.checkpoint)
        stack.callback(store.close)

        def tell(step: Step) -> None:
            assert report is not None
            lags = getattr(source, "lags", None)
            alone = {} if step.lag is None else {f"worker {share.index}": step.lag}
            report(replace(step, lags=alone if lags is None else lags()))

        if past is not None and share.start is not None:
            past = _of_parts(past, {int(part) for part in share.parts})
        return work(
            model, job.policy, source, store, *sinks, past=past, schedule=job.schedule, stop=stop,
            report=None if report is None else tell, answer=answer, **job.options,
        )  # fmt: skip


def _of_parts(past: Past, parts: set[int]) -> Past | None:
    import torch

    from titans_core.state import select

    names, last, state = past
    mine = [i for i, name in enumerate(names) if part_of(name) in parts]
    return ([names[i] for i in mine], [last[i] for i in mine], select(state, torch.tensor(mine))) if mine else None


# Who has which partitions.


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UserError(f"the workers of '{folder}' are running already: stop them first") from error
    finally:
        os.close(handle)


def arrange(job: Job, checkpoint: str | Path, workers: int, make: Callable[[], StreamModel]) -> list[Share]:
    """The shares of `workers` workers; where there were others before, their streams have moved when this returns.

    A worker that was killed has its last batch worked on again before its streams move: here, with the model of `make`.
    """
    folder, alone = folder_of(checkpoint), Path(checkpoint)
    folder.mkdir(parents=True, exist_ok=True)
    layout, broker = read_layout(checkpoint), by_broker(job.source)
    if layout is not None and broker != (layout.start is None):
        raise UserError(f"the checkpoint '{checkpoint}' belongs to another source than '{job.source}': use another checkpoint")
    before = _of_one(alone, broker) if layout is None and alone.exists() else None
    if layout is None or broker:
        parts, start = _partitions(job, before)
    else:
        parts, start = [str(part) for part in range(PARTS)], layout.start
    if workers > len(parts):
        raise UserError(f"{workers} workers cannot share the {len(parts)} partitions of '{job.source}': run at most {len(parts)}")
    shares = [parts[index::workers] for index in range(workers)]
    if layout is None:
        layout = Layout(1, shares, start)
        if before is not None:
            with _opened({0: alone}, layout) as stores:
                _move(stores, [parts], layout, folder)
        _write_layout(folder, layout)
    elif layout.shares != shares:
        there = {index: path for index in range(len(layout.shares)) if (path := layout.checkpoint(folder, index)).exists()}
        for index, share in enumerate(_shares(layout, folder)):
            if index in there:
                _settle(job, share, make)
        following = replace(layout, generation=layout.generation + 1, shares=shares)
        with _opened(there, layout) as stores:
            stands = {str(index): progress.receipts for index, store in stores.items() if (progress := store.progress()) is not None}
            following = replace(following, receipts={**layout.receipts, **stands})
            _move(stores, layout.shares, following, folder)
        layout = following
        _write_layout(folder, layout)
    # What was of one worker, or of another number of workers, has moved.
    left = [path for path in folder.glob("*.db*") if not path.name.startswith(f"{layout.generation}-")]
    for path in left + [alone.with_name(alone.name + end) for end in ("", "-wal", "-shm")]:
        path.unlink(missing_ok=True)
    return _shares(layout, folder)


def _of_one(path: Path, broker: bool) -> Progress | None:
    """Where one worker left off."""
    store = CheckpointStore(path)
    try:
        progress, journal = store.progress(), store.journal()
    finally:
        store.close()
    if progress is not None and broker:
        raise UserError(
            f"'{path}' is of one worker, which does not keep in which partition a stream comes: start with a new checkpoint, or run one worker"
        )
    if journal:
        raise UserError(f"'{path}' is of one worker that was killed or still runs: let it run to a graceful stop first")
    return progress


def _partitions(job: Job, before: Progress | None) -> tuple[list[str], Positions | None]:
    """The partitions of the source, and where the run begins if these are virtual ones."""
    source = open_source(job.source, columns=job.columns, count_steps=job.policy.frequency.counts, follow=job.follow)
    try:
        if by_broker(job.source):
            return list(source.positions()), None
        if before is not None and before.positions:
            source.seek(before.positions)
        return [str(part) for part in range(PARTS)], {"place": place_of(source, 0), "at": source.positions()}
    finally:
        source.close()


def _shares(layout: Layout, folder: Path) -> list[Share]:
    return [Share(i, tuple(parts), layout.start, layout.checkpoint(folder, i)) for i, parts in enumerate(layout.shares)]


def _settle(job: Job, share: Share, make: Callable[[], StreamModel]) -> None:
    """A worker that was killed: its last batch is worked on again, and its journal goes into the snapshots."""
    store = CheckpointStore(share.checkpoint)
    journal = store.journal()
    store.close()
    if journal:
        stop = Stop()
        stop.set()
        work_share(job, share, make(), stop=stop)


@contextmanager
def _opened(paths: Mapping[int, Path], layout: Layout) -> Iterator[dict[int, CheckpointStore]]:
    with ExitStack() as stack:
        stores = {}
        for index, path in paths.items():
            stores[index] = CheckpointStore(path) if layout.start is not None else HomedStore(path)
            stack.callback(stores[index].close)
        yield stores


def _move(stores: Mapping[int, CheckpointStore], owned: Sequence[Sequence[str]], layout: Layout, folder: Path) -> None:
    """Make the checkpoints of a new layout out of those of the old one. owned: the partitions of each old worker."""
    stands = {index: progress for index, store in stores.items() if (progress := store.progress()) is not None}
    if not stands:
        return
    positions = {part: where for one in stands.values() for key, where in one.positions.items() for part in key.split(",")}
    counters: Counter[str] = Counter()
    for one in stands.values():
        counters.update(one.counters)
    settings = next(iter(stands.values())).settings
    homes = _homes(stores) if layout.start is None else None
    names = {index: [name for name, _, _ in store.streams()] for index, store in stores.items()}
    # Streams that have read a history and had no event yet stand in every checkpoint, and go into every one.
    unmet = set() if homes is None else {name for there in names.values() for name in there} - set(homes)
    for index, parts in enumerate(layout.shares):
        mine = set(parts)
        path = layout.checkpoint(folder, index)
        for old in folder.glob(f"{path.name}*"):  # of a move that was cut short
            old.unlink()
        new = CheckpointStore(path) if homes is None else HomedStore(path)
        try:
            coming: dict[int, list[str]] = {}
            for old_index, there in names.items():
                had = set(owned[old_index]) & mine
                coming[old_index] = [name for name in there if (str(part_of(name)) if homes is None else homes.get(name)) in had]
            if unmet:
                coming[min(stores)] += sorted(unmet)
            progress = Progress(
                positions={part: positions[part] for part in parts if part in positions},
                receipts=layout.receipts.get(str(index), {}),
                counters=dict(counters) if index == 0 else {},
                settings=settings,
            )
            new.adopt(progress, _snapshots(stores, coming))
            if isinstance(new, HomedStore) and homes is not None:
                new.settle_in({name: part for name, part in homes.items() if part in mine})
        finally:
            new.close()


def _homes(stores: Mapping[int, CheckpointStore]) -> dict[str, str]:
    """Stream -> its partition, over all workers."""
    homes: dict[str, str] = {}
    for store in stores.values():
        assert isinstance(store, HomedStore)
        for name, part in store.homes.items():
            if homes.setdefault(name, part) != part:
                raise UserError(
                    f"stream '{name}' came in partitions {homes[name]} and {part}, and two workers hold half of it each: "
                    "key the topic's messages by the stream's name and start with a new checkpoint"
                )
    return homes


def _snapshots(stores: Mapping[int, CheckpointStore], names: Mapping[int, list[str]]) -> Iterator[tuple[str, bytes]]:
    for index, wanted in names.items():
        for at in range(0, len(wanted), MOVED_AT_ONCE):
            for name, (_, state) in stores[index].read_many(wanted[at : at + MOVED_AT_ONCE]).items():
                yield name, state


def _write_layout(folder: Path, layout: Layout) -> None:
    temporary = folder / ".layout.json"
    with open(temporary, "w") as file:
        json.dump(dataclasses.asdict(layout), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, folder / "layout.json")
    sync_folder(folder)


# The supervisor.


@dataclass
class _Running:
    """A worker as the supervisor sees it."""

    share: Share
    actor: Any = None
    run: Any = None
    """What its `run` will return."""
    again: float = 0.0
    """When a lost one is started again."""
    answers: bool = False
    """Whether it has begun: an actor waits for a node with a free core."""
    losses: int = 0
    """Since its last commit."""
    committed: float = 0.0
    step: Step | None = None
    summary: StreamSummary | None = None


class Workers:
    """The workers of a run: `with Workers(...) as workers: workers.run(...)`. Raises UserError for what a person must put right.

    make: gives the model, in each worker. past: as `work` takes it, when the checkpoint is new.
    """

    def __init__(self, job: Job, checkpoint: str | Path, workers: int, make: Callable[[], StreamModel], past: Past | None = None):
        self._job, self._checkpoint, self.count, self._make, self._past = job, checkpoint, workers, make, past
        self._stack = ExitStack()
        self.restarts = 0

    def __enter__(self) -> Workers:
        folder = folder_of(self._checkpoint)
        by_broker(self._job.source)  # refuses before anything is made
        folder.mkdir(parents=True, exist_ok=True)
        with self._stack:
            self._stack.enter_context(_only_one(folder))
            self._shares = arrange(self._job, self._checkpoint, self.count, self._make)
            if len(self._shares) > 1:
                from pipelines.windows import ray_cluster

                ray_cluster(len(self._shares))
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(
        self,
        *,
        stop: Stop,
        report: Callable[[Step], None] | None = None,
        answer: Callable[[Callable[[list[str]], pl.DataFrame]], None] | None = None,
    ) -> StreamSummary:
        """Until all partitions have ended, or `stop` is set and every worker has settled. A single worker runs in this process."""
        if len(self._shares) == 1:
            return work_share(self._job, self._shares[0], self._make(), past=self._past, stop=stop, report=report, answer=answer)
        import ray

        begun = time.monotonic()
        self._model, self._history = ray.put(self._make), ray.put(self._past)
        workers = [_Running(share, committed=begun) for share in self._shares]
        latencies: deque[float] = deque(maxlen=LATENCIES_KEPT)
        halted, told = False, begun
        try:
            for worker in workers:
                self._start(worker)
            while any(worker.run is not None or (worker.summary is None and not halted) for worker in workers):
                self._look_after(workers)
                if stop and not halted:
                    halted = True
                    for worker in workers:
                        self._halt(worker)
                for worker in workers:
                    if worker.actor is None and worker.summary is None and not halted and time.monotonic() >= worker.again:
                        self._start(worker)
                if time.monotonic() - told >= TELL_SECONDS:
                    told = time.monotonic()
                    self._gather(workers, latencies, report)
                if answer is not None:
                    answer(lambda names: self._ask(workers, names))
            self._gather(workers, latencies, report)
        finally:
            for worker in workers:
                if worker.actor is not None:
                    ray.kill(worker.actor)
        if all(worker.summary is None for worker in workers):
            raise UserError("stopped before a worker had begun; nothing was changed")
        return self._together([worker.summary for worker in workers if worker.summary is not None], latencies, time.monotonic() - begun)

    def _start(self, worker: _Running) -> None:
        import ray

        settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "POLARS_MAX_THREADS": "1"}
        # One thread works, one answers the supervisor, one waits for the answer to a question.
        kind = ray.remote(StreamWorker).options(
            num_cpus=1, max_concurrency=3, scheduling_strategy="SPREAD", runtime_env={"env_vars": settings}
        )
        worker.actor, worker.answers = kind.remote(self._job, worker.share), False
        worker.run = worker.actor.run.remote(self._model, self._history)

    @staticmethod
    def _halt(worker: _Running) -> None:
        """It settles; one that has not begun, or waits for a node, has nothing to settle: its next start takes care of its journal."""
        import ray

        if worker.answers:
            worker.actor.halt.remote()
        elif worker.actor is not None:
            ray.kill(worker.actor)
            worker.actor = worker.run = None

    def _look_after(self, workers: Sequence[_Running]) -> None:
        """Take the summaries of workers that have ended, and let lost ones go for a while."""
        import ray

        running = {worker.run: worker for worker in workers if worker.run is not None}
        if not running:
            time.sleep(WAIT_SECONDS)
            return
        ready, _ = ray.wait(list(running), timeout=WAIT_SECONDS)
        for ref in ready:
            worker, worker.run = running[ref], None
            name = f"worker {worker.share.index}"
            try:
                outcome = ray.get(ref)
            except ray.exceptions.RayActorError as error:
                ray.kill(worker.actor)  # one that only seems lost must not go on
                worker.actor, worker.losses = None, worker.losses + 1
                reason = str(error).strip().splitlines()[0]
                if worker.losses > MAX_LOSSES:
                    lost = f"{name} was lost {worker.losses} times without committing anything ({reason})"
                    raise UserError(f"{lost}; what was committed stands, and the next start goes on from there") from error
                worker.again = time.monotonic() + 0.5 * 2 ** (worker.losses - 1)
                self.restarts += 1
                LOGGER.warning("%s was lost (%s): it goes on from its checkpoint", name, reason)
                continue
            if isinstance(outcome, str):
                raise UserError(f"{name}: {outcome}")
            worker.summary = outcome

    def _gather(self, workers: Sequence[_Running], latencies: deque[float], report: Callable[[Step], None] | None) -> None:
        """What the workers did since the last time, as one step."""
        import ray

        asked = {worker.actor.tell.remote(): worker for worker in workers if worker.actor is not None}
        ready, _ = ray.wait(list(asked), num_returns=len(asked), timeout=TELL_SECONDS) if asked else ([], [])
        fresh: list[Step] = []
        for ref in ready:
            try:
                step = ray.get(ref)
            except ray.exceptions.RayActorError:
                continue  # the end of its run says so, too
            worker = asked[ref]
            worker.answers = True
            if step is not None:
                worker.step, worker.losses, worker.committed = step, 0, time.monotonic()
                fresh.append(step)
        if not fresh:
            return
        for step in fresh:
            latencies.extend(step.latencies_ms.tolist())
        if report is not None:
            report(self._merged(workers, fresh))

    def _merged(self, workers: Sequence[_Running], fresh: Sequence[Step]) -> Step:
        steps = [worker.step for worker in workers if worker.step is not None]
        counters: Counter[str] = Counter()
        for step in steps:
            counters.update(step.counters)
        lags = {part: waiting for step in steps for part, waiting in step.lags.items()}
        # Where every worker reads all lines, the one that is furthest behind tells; else each has partitions of its own.
        lag = None if not lags else max(lags.values()) if self._shares[0].start is not None else sum(lags.values())
        surprise = [step.surprise for step in fresh if step.surprise == step.surprise]
        return Step(
            counters=counters,
            streams=sum(step.streams for step in steps),
            latencies_ms=np.concatenate([step.latencies_ms for step in fresh]),
            steps_ms=np.concatenate([step.steps_ms for step in fresh]),
            surprise=float(np.mean(surprise)) if surprise else float("nan"),
            lag=lag,
            checkpoint_bytes=sum(step.checkpoint_bytes for step in steps),
            lags=lags,
            silent=time.monotonic() - min((worker.committed for worker in workers if worker.summary is None), default=time.monotonic()),
            restarts=self.restarts,
        )

    def _ask(self, workers: Sequence[_Running], names: list[str]) -> pl.DataFrame:
        """The present forecasts of streams, from whichever worker has them."""
        import ray

        frames = []
        for name in names:
            mine = [w for w in workers if w.share.start is None or str(part_of(name)) in w.share.parts]
            try:
                answers = ray.get([w.actor.ask.remote([name]) for w in mine if w.actor is not None])
            except ray.exceptions.RayActorError:
                answers = []
            found = [answer for answer in answers if not isinstance(answer, str)]
            if not found:
                raise UserError(answers[0] if answers else f"the worker of '{name}' is being started again: ask again")
            # A stream that has read a history stands with all workers until its first event comes to one.
            frames.append(max(found, key=lambda frame: frame["origin"][0]))
        return pl.concat(frames)

    def _together(self, parts: Sequence[StreamSummary], latencies: Sequence[float], seconds: float) -> StreamSummary:
        counters: Counter[str] = Counter()
        for one in parts:
            counters.update(one.counters)
        events = sum(one.events for one in parts)
        p50, p99 = np.percentile(latencies, [50, 99]).tolist() if latencies else (None, None)
        return replace(
            parts[0],
            resumed=any(one.resumed for one in parts),
            events=events,
            streams=sum(one.streams for one in parts),
            batches=sum(one.batches for one in parts),
            counters=dict(counters),
            seconds=seconds,
            events_per_s=events / seconds,
            p50_ms=p50,
            p99_ms=p99,
            checkpoint_bytes_per_s=sum(one.checkpoint_bytes_per_s for one in parts),
            restart_s=max(one.restart_s for one in parts),
            spilled=sum(one.spilled for one in parts),
            stopped="signal" if any(one.stopped == "signal" for one in parts) else parts[0].stopped,
            workers=len(parts),
            restarts=self.restarts,
        )


class StreamWorker:
    """One worker, as a Ray actor. A mistake comes back as its message: Ray would wrap it in a kind of its own."""

    def __init__(self, job: Job, share: Share):
        self._job, self._share = job, share
        self._stop, self._dials = Stop(), Dials()
        self._told: deque[Step] = deque()

    def run(self, make: Callable[[], StreamModel], past: Past | None) -> StreamSummary | str:
        import torch

        torch.set_num_threads(1)
        try:
            return work_share(
                self._job, self._share, make(), past=past, stop=self._stop, report=self._told.append, answer=self._dials.answer
            )
        except UserError as mistake:
            return str(mistake)

    def halt(self) -> None:
        self._stop.set()

    def tell(self) -> Step | None:
        """All steps since the last call, as one."""
        steps = [self._told.popleft() for _ in range(len(self._told))]
        if not steps:
            return None
        known = [step.surprise for step in steps if step.surprise == step.surprise]
        return replace(
            steps[-1],
            latencies_ms=np.concatenate([step.latencies_ms for step in steps]),
            steps_ms=np.concatenate([step.steps_ms for step in steps]),
            surprise=float(np.mean(known)) if known else float("nan"),
        )

    def ask(self, unique_ids: list[str]) -> pl.DataFrame | str:
        try:
            return self._dials.ask(unique_ids)
        except UserError as mistake:
            return str(mistake)
        except TimeoutError:
            return f"worker {self._share.index} is busy or stopped; ask again"
