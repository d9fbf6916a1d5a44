# SPDX-License-Identifier: GPL-2.0-or-later
"""A closed network of queues: vCPUs fault, and threads serve the faults one after the other, on some processors.

A vCPU's cycle is a list of steps, each work of a thread: of the vCPU's own, as the first and the last, or of a
server that all share. A server can have several threads, as there are channels: each fault picks one channel, at
random, for all its steps, and while few faults are outstanding, one of few channels. A thread that has nothing to do
sleeps, and its next job costs more; one that goes on from one job to the next does not. Who is woken gets an idle
processor if there is one, after some time in which nobody works; otherwise that of the waker, when it has ended.
"""
import heapq
import random
from collections import deque, namedtuple

# server: a name, or None for the vCPU's own thread; its work after a sleep, and after another job;
# how many threads it has.
Step = namedtuple("Step", "server slept_us work_us threads", defaults=(1,))
Result = namedtuple("Result", "faults_per_s span_us busy_share")
SPREAD = (0.5, 1.5)     # of a job's time, evenly
WARM_UP = 0.2           # share of the faults that do not count
SHARE = 4               # outstanding faults for each channel in use, as POSTCOPY_FETCH_SHARE


def simulate(steps, vcpus, processors, wake_us, faults=6000, seed=1):
    """faults: so many; busy_share: of each server, the share of time that its threads work."""
    rng = random.Random(seed)
    waiting: dict[tuple[str, int], deque[tuple[int, int]]] = {
        (step.server, thread): deque() for step in steps if step.server for thread in range(step.threads)}
    awake = dict.fromkeys(waiting, False)
    threads = {step.server: step.threads for step in steps if step.server}
    worked = dict.fromkeys(threads, 0.0)
    channel = [0] * vcpus
    channels = max(threads.values(), default=1)
    outstanding = 0
    ready: deque[tuple[int, int, float]] = deque()  # vCPU, step, us: they want a processor
    ends: list[tuple[float, int, int, int]] = []    # time, number of the job, vCPU, step
    started = [0.0] * vcpus
    free, now, number, done, warm_at, spans = processors, 0.0, 0, 0, 0.0, 0.0
    warm = int(faults * WARM_UP)

    def thread_of(vcpu, at):
        step = steps[at]
        return (step.server, channel[vcpu] % step.threads) if step.server else None

    def arrive(vcpu, at):
        nonlocal outstanding
        if at == 1:
            outstanding += 1
            channel[vcpu] = rng.randrange(min(channels, -(-outstanding // SHARE)))
        elif at == len(steps) - 1:
            outstanding -= 1
        thread = thread_of(vcpu, at)
        if thread and awake[thread]:
            waiting[thread].append((vcpu, at))
            return
        if thread:
            awake[thread] = True
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
        thread = thread_of(vcpu, at)
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
        if thread and waiting[thread]:      # it goes on where it is
            ready.appendleft((*waiting[thread].popleft(), steps[at].work_us))
        elif thread:
            awake[thread] = False
        dispatch(0)
    span = now - warm_at
    return Result((done - warm) / span * 1e6, spans / (done - warm),
                  {server: us / span / threads[server] for server, us in worked.items()})
