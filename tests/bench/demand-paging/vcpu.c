/* SPDX-License-Identifier: GPL-2.0-or-later */
#include <errno.h>
#include <sys/ioctl.h>
#include <sys/mman.h>

#include "arch.h"
#include "fail.h"
#include "kvm-abi.h"
#include "vcpu.h"

static void serve_exit(struct vcpu *v, const struct kvm_run *run, uint8_t *buffer)
{
    const struct memory *m = v->memory;
    /* Where the exits' union begins. */
    const struct abi_memory_fault *fault = (const void *)&run->mmio;
    size_t offset;

    if (fault->gpa < TEST_GPA || fault->gpa >= TEST_GPA + m->size) {
        fail("exit for memory that is not under test: %#llx", (unsigned long long)fault->gpa);
    }
    offset = (fault->gpa - TEST_GPA) & ~(m->page_size - 1);
    v->stats.counts.exits++;
    /* Nobody waits for it in userfaultfd but who will be read, and find it there. */
    if (!resolve(m, offset, buffer, false)) {
        v->stats.counts.eexist++;
        if (madvise(m->guest + offset, m->page_size, MADV_POPULATE_WRITE) && errno != EAGAIN) {
            fail("MADV_POPULATE_WRITE: %m");
        }
    }
    if (m->options->prefault) {
        struct abi_pre_fault range = { .gpa = TEST_GPA + offset, .size = m->page_size };

        if (ioctl(v->fd, ABI_PRE_FAULT_MEMORY, &range) && errno != EAGAIN && errno != EINTR) {
            fail("KVM_PRE_FAULT_MEMORY: %m");
        }
    }
}

static void *run_vcpu(void *opaque)
{
    struct vcpu *v = opaque;
    struct kvm_run *run = mmap(NULL, v->vm->run_size, PROT_READ | PROT_WRITE, MAP_SHARED, v->fd, 0);
    uint8_t *buffer = aligned_alloc(v->memory->page_size, v->memory->page_size);

    if (run == MAP_FAILED) {
        fail("mmap of a vCPU: %m");
    }
    for (size_t i = 0; i < v->memory->page_size; i++) {
        buffer[i] = 0;
    }
    pthread_barrier_wait(v->start);
    begin_thread_stats(&v->stats);
    for (;;) {
        int ret = ioctl(v->fd, KVM_RUN, 0);

        if (!ret && arch_is_done(run)) {
            break;
        }
        if (ret && errno == EFAULT && run->exit_reason == ABI_EXIT_MEMORY_FAULT) {
            serve_exit(v, run, buffer);
        } else if (!ret || errno != EINTR) {
            fail("vCPU %u left KVM: exit reason %u, %s", v->number, run->exit_reason, ret ? "with an error" : "no error");
        }
    }
    v->end_s = now_s();
    end_thread_stats(&v->stats);
    free(buffer);
    return NULL;
}

void start_vcpu(struct vcpu *vcpu)
{
    errno = pthread_create(&vcpu->thread, NULL, run_vcpu, vcpu);
    if (errno) {
        fail("thread of a vCPU: %m");
    }
}
