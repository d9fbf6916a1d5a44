/*
 * Postcopy: which pages a thread will miss next
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "stride.h"

/* Of two faults that lie farther apart, one says nothing about the other */
#define STREAM_STEP_MAX 256

/* A stream goes on if so many steps are left out: these pages had come */
#define STREAM_SLACK 8

/* Hits at which a window opens */
#define STREAM_HITS 2

/* Steps of @stream from its last fault to @page; 0 if it is not ahead */
static unsigned postcopy_stream_steps(const PostcopyStream *stream,
                                      uint64_t page)
{
    int64_t way = page - stream->last;

    if (!stream->step || way % stream->step || way / stream->step < 0 ||
        way / stream->step > UINT32_MAX) {
        return 0;
    }
    return way / stream->step;
}

/* Returns how many pages to ask for */
static unsigned postcopy_stream_go_on(PostcopyStream *stream, uint64_t page,
                                      unsigned steps, unsigned most,
                                      uint64_t *first)
{
    bool used_up = steps > stream->ahead;
    unsigned n;

    stream->last = page;
    stream->ahead = used_up ? 0 : stream->ahead - steps;
    if (++stream->hits < STREAM_HITS) {
        return 0;
    }
    if (!stream->window) {
        stream->window = POSTCOPY_STREAM_FIRST_WINDOW;
    } else if (used_up) {
        stream->window = MIN(2 * stream->window, POSTCOPY_STREAM_WINDOW);
    }
    n = MIN(stream->window, most);
    if (2 * stream->ahead > n) {
        /* Pages are on their way which the guest has not reached */
        return 0;
    }
    *first = page + (stream->ahead + 1) * stream->step;
    stream->ahead += n;
    return n;
}

unsigned postcopy_streams_fault(PostcopyStreams *s, uint64_t page,
                                unsigned most, uint64_t *first, int64_t *step,
                                bool *near)
{
    PostcopyStream *oldest = &s->streams[0];

    s->clock++;
    *near = true;
    for (unsigned i = 0; i < POSTCOPY_STREAMS; i++) {
        PostcopyStream *stream = &s->streams[i];
        unsigned steps = postcopy_stream_steps(stream, page);

        if (stream->used && stream->last == page) {
            /* A thread that was interrupted is back */
            return 0;
        }
        if (steps == 1 ||
            (steps && stream->hits && steps <= stream->ahead + STREAM_SLACK)) {
            stream->used = s->clock;
            *step = stream->step;
            return postcopy_stream_go_on(stream, page, steps, most, first);
        }
        if (stream->used < oldest->used) {
            oldest = stream;
        }
    }
    for (unsigned i = 0; i < POSTCOPY_STREAMS; i++) {
        PostcopyStream *stream = &s->streams[i];
        int64_t way = page - stream->last;

        if (stream->used && ABS(way) <= STREAM_STEP_MAX) {
            *stream = (PostcopyStream) {
                .last = page, .step = way, .used = s->clock
            };
            *near = ABS(way) <= POSTCOPY_STREAM_NEAR;
            return 0;
        }
    }
    *oldest = (PostcopyStream) { .last = page, .used = s->clock };
    *near = false;
    return 0;
}
