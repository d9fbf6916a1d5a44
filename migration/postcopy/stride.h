/*
 * Postcopy: which pages a thread will miss next
 *
 * Arithmetic without locks, system calls or other files of QEMU.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_STRIDE_H
#define MIGRATION_POSTCOPY_STRIDE_H

/* Of one thread, which may copy from one place to another */
#define POSTCOPY_STREAMS 4

/* Pages that are asked for ahead of one fault: at first, and at most */
#define POSTCOPY_STREAM_FIRST_WINDOW 8
#define POSTCOPY_STREAM_WINDOW 60

/* Two faults that lie so near each other, in pages, may begin a stream */
#define POSTCOPY_STREAM_NEAR 16

/* Faults at equal steps.  All in pages. */
typedef struct PostcopyStream {
    /* Of the last fault */
    uint64_t last;
    /* From each fault to the next one; 0: not known yet */
    int64_t step;
    /* How often the step has been right since it was found */
    unsigned hits;
    /* How many are asked for at a time; 0: closed */
    unsigned window;
    /* Steps from the last fault that have been asked for */
    unsigned ahead;
    /* When it was used; the oldest one is given up for another */
    uint64_t used;
} PostcopyStream;

typedef struct PostcopyStreams {
    PostcopyStream streams[POSTCOPY_STREAMS];
    uint64_t clock;
} PostcopyStreams;

/**
 * postcopy_streams_fault: a thread has missed a page
 *
 * @s: of this thread, and used by one thread at a time; all 0 at first
 * @page: number of the page in memory
 * @most: most pages to ask for, up to POSTCOPY_STREAM_WINDOW
 * @first, @step: if the result is not 0: ask for @first, @first + @step, ...;
 *     some of them may lie outside of memory
 * @near: whether the fault belongs to a stream, or may be the first that does:
 *     pages that come behind it otherwise would hide the step
 *
 * Returns how many pages to ask for, beside @page.  The window opens with the
 * fourth fault at equal steps, doubles each time its pages have been used up,
 * and closes with a fault that fits no stream.
 */
unsigned postcopy_streams_fault(PostcopyStreams *s, uint64_t page,
                                unsigned most, uint64_t *first, int64_t *step,
                                bool *near);

#endif
