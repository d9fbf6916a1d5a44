/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Preloaded into QEMU: renews the keys of each TLS 1.3 session after REKEY
 * records in place of GnuTLS's 2^24, by the call that GnuTLS makes itself.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Of gnutls/gnutls.h, which a build of the tests alone does without */
void *gnutls_session_get_ptr(void *session);
void gnutls_session_set_ptr(void *session, void *ptr);
int gnutls_session_key_update(void *session, unsigned flags);
ssize_t gnutls_record_send(void *session, const void *data, size_t size);
#pragma weak gnutls_session_get_ptr
#pragma weak gnutls_session_set_ptr
#pragma weak gnutls_session_key_update

/* GnuTLS takes no more than eight within a second */
#define PAUSE_NS 200000000

struct session {
    unsigned records;
    uint64_t renewed_ns;
};

static uint64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * UINT64_C(1000000000) + now.tv_nsec;
}

ssize_t gnutls_record_send(void *session, const void *data, size_t size)
{
    static ssize_t (*next)(void *, const void *, size_t);
    /* QEMU does not use it.  Only one thread sends at a time. */
    struct session *s = gnutls_session_get_ptr(session);

    if (!next) {
        *(void **)&next = dlsym(RTLD_NEXT, "gnutls_record_send");
    }
    if (!s) {
        s = calloc(1, sizeof(*s));
        gnutls_session_set_ptr(session, s);
    }
    if (++s->records >= (unsigned)atoi(getenv("REKEY"))
        && now_ns() - s->renewed_ns >= PAUSE_NS) {
        int ret = gnutls_session_key_update(session, 0);

        fprintf(stderr, "keys renewed: %d\n", ret);
        s->records = 0;
        s->renewed_ns = now_ns();
    }
    return next(session, data, size);
}
