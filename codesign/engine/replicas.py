"""Replicas of an engine on one host: a process each, and this one decides where a request goes.

Every process loads the plan's engine for one replica (``replica_process``) on cores or GPUs of its
own and serves what is routed to it (``feed.Feed``). Records come back at the end and are merged.
"""

from __future__ import annotations

import contextlib
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic, perf_counter

from codesign import Progress
from codesign.calibration_log import CalibrationLog
from codesign.candidate import Candidate
from codesign.config import Serving
from codesign.engine.blocks import block_ids
from codesign.engine.feed import OVER, READY, STOP, Feed
from codesign.engine.partner import TargetLostError
from codesign.engine.refusals import served_requests
from codesign.engine.replica import SETUP_FILE, Replica, ReplicaSetup
from codesign.engine.run import EngineRun, ServeOptions
from codesign.engine.source import EngineSource
from codesign.errors import HardwareError
from codesign.models import resolve_model
from codesign.models.shape import model_shape
from codesign.policy.kv_memory import PrefixCache
from codesign.policy.routing import Router
from codesign.prompts import BoundRequest
from codesign.records import RequestRecord, RoundLog, RunRecords

START_SECONDS = 600.0  # loading a large model, and compiling, may take long
STOP_SECONDS = 30.0  # for a round or a prompt to end, after Ctrl-C


class PlanEngine:
    """A plan's engine: here for one replica, in a process each for several.

    Args:
        source: What is loaded.

    Attributes:
        here: The engine of this process.

    Raises:
        HardwareError: If this machine cannot run the plan.
        InputError: If a model is not there.
    """

    def __init__(self, source: EngineSource) -> None:
        self._source = source
        self.here = source.load()

    def check(self, candidates: Sequence[Candidate]) -> None:
        """See ``Engine.check``."""
        self.here.check(candidates)

    def serve(
        self,
        candidate: Candidate,
        requests: Sequence[BoundRequest],
        options: ServeOptions,
        *,
        progress: Progress | None = None,
        feed: Feed | None = None,
    ) -> EngineRun:
        """See ``Engine.serve``."""
        if candidate.deployment.replicas == 1:
            return self.here.serve(candidate, requests, options, progress=progress, feed=feed)
        return serve_on_replicas(self._source, candidate, requests, options, progress=progress)


def serve_on_replicas(
    source: EngineSource,
    candidate: Candidate,
    requests: Sequence[BoundRequest],
    options: ServeOptions,
    *,
    progress: Progress | None = None,
) -> EngineRun:
    """Serve ``requests`` with every replica of ``candidate``, routed as ``serving`` says.

    The loss of a replica ends the run with what is finished, as an interruption does.

    Args:
        source: What each replica loads.
        candidate: With two replicas or more.
        requests: With token ids and arrivals in seconds.
        options: Of each replica.
        progress: Called as ``progress("serve", finished, total)``.

    Raises:
        HardwareError: If a replica does not start.
        InputError: If no request can be served.
    """
    unit = replace(candidate, deployment=candidate.deployment.unit)
    shape = model_shape(resolve_model(source.plan.target))
    served = served_requests(requests, unit.speculation, shape, options.max_kv_tokens)
    setup = ReplicaSetup(source, unit, served.requests, options)
    with _started(setup, candidate.deployment.replicas) as replicas:
        run = _Run(replicas, options.serving, served.requests, progress)
        cut_by = run.serve()
        return _merged(replicas, run, requests, served.refused, cut_by)


@contextlib.contextmanager
def _started(setup: ReplicaSetup, count: int) -> Iterator[list[Replica]]:
    """Every replica's process, ready to serve; they are gone at the end."""
    keeps = setup.options.serving.prefix_cache
    size = setup.candidate.deployment.num_workers
    gpus = setup.source.gpus()
    with tempfile.TemporaryDirectory(prefix="codesign-") as folder, contextlib.ExitStack() as stack:
        (Path(folder) / SETUP_FILE).write_bytes(pickle.dumps(setup))
        replicas = []
        for number in range(count):
            replica = Replica(
                Path(folder),
                number,
                gpus=None if gpus is None else gpus[number * size : (number + 1) * size],
                cache=PrefixCache() if keeps else None,
                max_kv_tokens=setup.options.max_kv_tokens,
            )
            stack.callback(replica.close)
            replicas.append(replica)
        deadline = monotonic() + START_SECONDS
        for replica in replicas:
            _wait_until_ready(replica, deadline)
        yield replicas


def _wait_until_ready(replica: Replica, deadline: float) -> None:
    problem = "did not start in time"
    try:
        if replica.line.poll(max(deadline - monotonic(), 0.0)) and replica.hear() == READY:
            return
    except TargetLostError as lost:
        problem = f"did not start ({lost}); the reason is above"
    raise HardwareError(
        f"replica {replica.number} {problem}. Try one alone: codesign run --plan PLAN "
        "--candidate LABEL"
    )


@dataclass(slots=True)
class _Run:
    """Requests on their way to replicas.

    Attributes:
        replicas: Ready to serve.
        serving: For its routing.
        requests: That can be served.
        progress: As for ``serve_on_replicas``.
        routed: Replica by request.
        seconds: Length of the run.
    """

    replicas: Sequence[Replica]
    serving: Serving
    requests: Sequence[BoundRequest]
    progress: Progress | None
    routed: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0

    def serve(self) -> str | None:
        """Route everything and wait for the end; or what ended it before."""
        origin = perf_counter()
        try:
            self._route(origin)
            self._listen_until_over()
        except KeyboardInterrupt:
            return self._stop("interrupted")
        except TargetLostError as lost:
            return self._stop(str(lost))
        finally:
            self.seconds = perf_counter() - origin
        return None

    def _route(self, origin: float) -> None:
        router = Router(self.replicas, self.serving.routing)
        for replica in self.replicas:
            replica.tell(origin)
        for request in sorted(self.requests, key=lambda r: (r.arrival, r.request_id)):
            while (left := origin + request.arrival - perf_counter()) > 0:
                self._listen(left)
            self._listen(0.0)
            blocks = block_ids(request.prompt_ids) if self.serving.prefix_cache else ()
            chosen = router.choose(blocks)
            self.routed[request.request_id] = chosen
            self.replicas[chosen].give(request.request_id, blocks)

    def _listen_until_over(self) -> None:
        for replica in self.replicas:
            replica.tell(OVER)
        while any(replica.run is None for replica in self.replicas):
            self._listen(None)

    def _listen(self, seconds: float | None) -> None:
        """Take in what replicas say within this time, or the first news if it is None."""
        running = [replica for replica in self.replicas if replica.run is None]
        for replica in _with_news(running, seconds):
            replica.hear()
        if self.progress is not None:
            left = sum(replica.num_requests for replica in self.replicas)
            self.progress("serve", len(self.routed) - left, len(self.requests))

    def _stop(self, cause: str) -> str:
        """Ask every replica for what it has; a lost one, or one that does not answer, has none."""
        for replica in self.replicas:
            replica.tell(STOP)
        deadline = monotonic() + STOP_SECONDS
        running = [replica for replica in self.replicas if replica.run is None]
        while running and (left := deadline - monotonic()) > 0:
            for replica in _with_news(running, left):
                try:
                    replica.hear()
                    is_over = replica.run is not None
                except TargetLostError:
                    is_over = True
                if is_over:
                    running.remove(replica)
        return cause


def _with_news(replicas: Sequence[Replica], seconds: float | None) -> list[Replica]:
    lines = wait([replica.line for replica in replicas], seconds)
    return [replica for replica in replicas if replica.line in lines]


def _merged(
    replicas: Sequence[Replica],
    run: _Run,
    requests: Sequence[BoundRequest],
    refused: dict[int, str],
    cut_by: str | None,
) -> EngineRun:
    """One run's records of those of its replicas."""
    found: dict[int, RequestRecord] = {}
    outputs: dict[int, list[int]] = {r.request_id: [] for r in requests}
    refused = dict(refused)
    notes = [f"request {number} refused: {why}" for number, why in refused.items()]
    calibration = CalibrationLog()
    rounds = []
    for replica in replicas:
        if replica.run is None:
            continue
        records = replica.run.records
        found |= {record.request_id: record for record in records.requests}
        outputs |= replica.run.outputs
        refused |= records.refused
        notes += [f"replica {replica.number}: {note}" for note in records.notes if not _asked(note)]
        calibration.add_all(replica.run.calibration)
        rounds.append(records.rounds)
    merged = [
        found.get(r.request_id)
        or RequestRecord(
            r.request_id,
            r.category,
            r.arrival,
            len(r.prompt_ids),
            replica=run.routed.get(r.request_id, 0),
            slo_tpot=r.slo_tpot,
        )
        for r in requests
    ]
    if cut_by is not None:
        left = sum(r.finish is None and r.request_id not in refused for r in merged)
        total = len(merged) - len(refused)
        notes.append(f"{cut_by}: {left} of {total} requests unfinished")
    return EngineRun(
        RunRecords(
            merged,
            RoundLog.merged(rounds),
            run.seconds,
            notes,
            refused=refused,
            calibration=calibration.errors(),
        ),
        outputs,
        calibration,
    )


def _asked(note: str) -> bool:
    """Whether a replica's note only says that it was stopped on request."""
    return note.startswith("interrupted: ")
