"""The least that a simulation of serving can be: SimPy, one event a step, nothing but counting.

usage: simpy_loop.py TRACE.jsonl [REPLICAS]

No KV blocks, no prefix cache, no preemption, no speculation; prompts run whole in the step that
admits them. Step times as in ours.py. A yardstick for bench_sim.py.
"""

from __future__ import annotations

import json
import sys
import time

import simpy

ALPHA, GAMMA, DELTA, MAX_BATCH = 3.93e-8, 2.10e-5, 7.1e-3, 256


def serve(env, requests, done):  # noqa: ANN001, ANN201
    """One replica: admit, let the step's time pass, emit a token each."""
    waiting, running, context, steps = requests[::-1], [], 0, 0
    while waiting or running:
        rows = len(running)
        while waiting and waiting[-1][0] <= env.now and len(running) < MAX_BATCH:
            arrival, prompt, output = waiting.pop()
            running.append([output, prompt + output, arrival])
            context += prompt
            rows += prompt
        if not running:
            yield env.timeout(waiting[-1][0] - env.now)
            continue
        yield env.timeout(DELTA + GAMMA * rows + ALPHA * context)
        steps += 1
        context += len(running)
        finished = False
        for request in running:
            request[0] -= 1
            finished = finished or not request[0]
        if finished:
            for request in running:
                if not request[0]:
                    context -= request[1]
                    done.append(env.now - request[2])
            running = [request for request in running if request[0]]
    return steps


def main() -> None:
    """Read the trace, serve it, print JSON."""
    with open(sys.argv[1], encoding="utf-8") as file:  # noqa: PTH123
        rows = [json.loads(line) for line in file]
    replicas = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    requests = [(r["timestamp"] / 1e3, r["input_length"], r["output_length"]) for r in rows]
    started = time.perf_counter()
    env, done = simpy.Environment(), []
    runs = [env.process(serve(env, requests[i::replicas], done)) for i in range(replicas)]
    env.run(simpy.AllOf(env, runs))
    seconds = {"simulate": time.perf_counter() - started}
    steps = sum(run.value or 0 for run in runs)
    print(json.dumps({"seconds": seconds, "requests": len(done), "rounds": steps}))


if __name__ == "__main__":
    main()
