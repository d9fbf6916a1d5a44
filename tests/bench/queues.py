# SPDX-License-Identifier: GPL-2.0-or-later
"""A closed network of queues: vCPUs fault, and threads serve the faults one after the other, on some processors.

A vCPU's cycle is a list of steps, each work of a thread: of the vCPU's own, or of a server that all
share. A thread that has nothing to do sleeps, and its next job costs more; a server that goes on from one
job to the next does not. Who is woken gets an idle processor if there is one, after some time in which
nobody works; otherwise that of the waker, when it has ended.
"""
import heapq
import random
from collections import deque, namedtuple

# server: a name, or None for the vCPU's own thread; its work after a sleep, and after another job.
Step = namedtuple("Step", "server slept_us work_us")
Result = namedtuple("Result", "faults_per_s span_us busy_share")
SPREAD = (0.5, 1.5)     # of a job's time, evenly
WARM_UP = 0.2           # share of the faults that do not count


def simulate(steps, vcpus, processors, wake_us, faults=6000, seed=1):
    """faults: so many; busy_share: of each server, the share of time that it works."""
    rng = random.Random(seed)
    waiting: dict[str, deque[tuple[int, int]]] = {step.server: deque() for step in steps if step.server}
    awake = dict.fromkeys(waiting, False)
    worked = dict.fromkeys(waiting, 0.0)
    ready: deque[tuple[int, int, float]] = deque()  # vCPU, step, us: they want a processor
    ends: list[tuple[float, int, int, int]] = []    # time, number of the job, vCPU, step
    started = [0.0] * vcpus
    free, now, number, done, warm_at, spans = processors, 0.0, 0, 0, 0.0, 0.0
    warm = int(faults * WARM_UP)

    def arrive(vcpu, at):
        server = steps[at].server
        if server and awake[server]:
            waiting[server].append((vcpu, at))
            return
        if server:
            awake[server] = True
        ready.append((vcpu, at, steps[at].slept_us))

    def dispatch(delay_us):
        nonlocal free, number
        while free and ready:
            vcpu, at, us = ready.popleft()
            us *= rng.uniform(*SPREAD)
            if steps[at].server:
                worked[steps[at].server] += us
            free -= 1
            number += 1
            heapq.heappush(ends, (now + delay_us + us, number, vcpu, at))

    for vcpu in range(vcpus):
        arrive(vcpu, 0)
    dispatch(0)
    while done < faults:
        now, _, vcpu, at = heapq.heappop(ends)
        if at + 1 < len(steps):
            arrive(vcpu, at + 1)
        else:
            done += 1
            if done == warm:
                warm_at, spans, worked = now, 0.0, dict.fromkeys(worked, 0.0)
            spans += now - started[vcpu]
            started[vcpu] = now
            arrive(vcpu, 0)
        dispatch(wake_us)
        free += 1
        server = steps[at].server
        if server and waiting[server]:      # it goes on where it is
            ready.appendleft((*waiting[server].popleft(), steps[at].work_us))
        elif server:
            awake[server] = False
        dispatch(0)
    span = now - warm_at
    return Result((done - warm) / span * 1e6, spans / (done - warm), {s: w / span for s, w in worked.items()})
