# SPDX-License-Identifier: GPL-2.0-or-later
"""A closed network of queues: vCPUs fault, and threads serve the faults one after the other, on some processors.

A vCPU's cycle is a list of steps, each work of a thread: of the vCPU's own, or of a server that all
share. A thread that has nothing to do sleeps; to wake one on a processor that is idle takes some time in
which nobody works.
"""
import heapq
import random
from collections import deque, namedtuple

# server: a name, or None for the vCPU's own thread. work_us: by the number of vCPUs that wait in the kernel.
Step = namedtuple("Step", "server work_us")


def simulate(steps, vcpus, processors, wake_us, faults=4000, seed=1):
    """(faults per second, {server: share of the time that it worked}, microseconds of a fault)"""
    rng = random.Random(seed)
    queues = {step.server: deque() for step in steps if step.server}
    busy = dict.fromkeys(queues, False)     # the server has a job, runs or waits for a processor
    worked = dict.fromkeys(queues, 0.0)
    ready, events = deque(), []             # jobs that want a processor; (time, number, job that ends)
    free = processors
    now, number, done, started = 0.0, 0, 0, {}
    warm, warm_at, spans = faults // 5, 0.0, []

    def begin(vcpu, at):
        server = steps[at].server
        if server is None:
            ready.append((vcpu, at))
        elif busy[server]:
            queues[server].append((vcpu, at))
        else:
            busy[server] = True
            ready.append((vcpu, at))

    def dispatch():
        nonlocal free, number
        while free and ready:
            free -= 1
            vcpu, at = ready.popleft()
            step = steps[at]
            # How long a job takes varies; exponential times are the worst that is likely.
            work = step.work_us(vcpus) * rng.uniform(0.5, 1.5)
            if step.server:
                worked[step.server] += work
            # Another processor was idle until now: its waking is nobody's work.
            idle = wake_us if free >= 1 or vcpus == 1 else 0.0
            number += 1
            heapq.heappush(events, (now + idle + work, number, vcpu, at))

    for vcpu in range(vcpus):
        started[vcpu] = 0.0
        begin(vcpu, 0)
    dispatch()
    while done < faults:
        now, _, vcpu, at = heapq.heappop(events)
        free += 1
        server = steps[at].server
        if server:
            busy[server] = bool(queues[server])
            if busy[server]:
                ready.append(queues[server].popleft())
        if at + 1 < len(steps):
            begin(vcpu, at + 1)
        else:
            done += 1
            if done == warm:
                warm_at = now
                worked = dict.fromkeys(worked, 0.0)
            if done > warm:
                spans.append(now - started[vcpu])
            started[vcpu] = now
            begin(vcpu, 0)
        dispatch()
    span = now - warm_at
    return (done - warm) / span * 1e6, {s: w / span for s, w in worked.items()}, sum(spans) / len(spans)
