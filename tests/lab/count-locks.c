/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Preloaded into QEMU: counts the mutexes that it takes, in the file that
 * COUNT_LOCKS names.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t *count;

static void __attribute__((constructor)) begin(void)
{
    const char *name = getenv("COUNT_LOCKS");
    int fd = name ? open(name, O_RDWR | O_CREAT, 0600) : -1;

    if (fd < 0 || ftruncate(fd, sizeof(*count))) {
        abort();
    }
    count = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
}

static int counted(int ret)
{
    if (!ret && count) {
        __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
    }
    return ret;
}

int pthread_mutex_lock(pthread_mutex_t *mutex)
{
    static int (*lock)(pthread_mutex_t *);

    if (!lock) {
        lock = dlsym(RTLD_NEXT, "pthread_mutex_lock");
    }
    return counted(lock(mutex));
}

int pthread_mutex_trylock(pthread_mutex_t *mutex)
{
    static int (*try_lock)(pthread_mutex_t *);

    if (!try_lock) {
        try_lock = dlsym(RTLD_NEXT, "pthread_mutex_trylock");
    }
    return counted(try_lock(mutex));
}
