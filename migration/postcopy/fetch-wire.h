/*
 * Postcopy: the protocol of a fetch channel
 *
 * docs/devel/fetch.md has the format byte by byte.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_WIRE_H
#define MIGRATION_POSTCOPY_FETCH_WIRE_H

#include "qemu/units.h"
#include "exec/cpu-common.h"
#include "migration/qemu-file.h"

/* "QPFC": first bytes of a connection that is a fetch channel */
#define POSTCOPY_HELLO_MAGIC 0x51504643
#define POSTCOPY_HELLO_VERSION 6

/* Bytes of the token that ties channels to their migration */
#define POSTCOPY_TOKEN_SIZE 16

/* The first message of each side.  Big endian. */
typedef struct QEMU_PACKED PostcopyHello {
    uint32_t magic;
    uint16_t version;
    /* Counted from 0 */
    uint16_t channel;
    uint8_t token[POSTCOPY_TOKEN_SIZE];
} PostcopyHello;

/*
 * The destination's message on the return path, before the PONG that contains
 * the number of channels.  Big endian.
 */
typedef struct QEMU_PACKED PostcopyFetchOffer {
    uint16_t channels;
    uint8_t token[POSTCOPY_TOKEN_SIZE];
} PostcopyFetchOffer;

/* In bytes, of whole host pages; a single host page may be longer */
#define POSTCOPY_FRAME_MAX_LENGTH (1u << 20)

/*
 * Bytes of answers that are sent by one system call: as many as the destination
 * reads by one, which fit into a QEMUFile's buffer.  The first answer waits for
 * the last one.
 */
#define POSTCOPY_FETCH_BATCH (32 * KiB)

typedef enum PostcopyFrameType {
    /* From the destination: send these host pages, if they are still to send */
    POSTCOPY_FRAME_REQUEST = 1,
    /* From the source: the pages' content follows */
    POSTCOPY_FRAME_PAGES = 2,
    /* From the source, also unrequested: pages of zeros, nothing follows */
    POSTCOPY_FRAME_ZERO = 3,
    /* From the source: no more pages follow on this channel */
    POSTCOPY_FRAME_END = 4,
    /*
     * From the source: when everything before this was placed, answer on the
     * return path by a PONG with the value in @length
     */
    POSTCOPY_FRAME_PING = 5,
} PostcopyFrameType;

typedef struct PostcopyFrame {
    PostcopyFrameType type;
    /* If no block is named: that of the last frame in this direction */
    RAMBlock *rb;
    /* In bytes, multiples of the block's host page size; or a PING's value */
    ram_addr_t offset;
    ram_addr_t length;
} PostcopyFrame;

/* @token: POSTCOPY_TOKEN_SIZE bytes */
PostcopyHello postcopy_hello(const uint8_t *token, unsigned channel);
/* Whether @hello, from a peer, equals postcopy_hello(); if not, sets @errp */
bool postcopy_hello_check(const PostcopyHello *hello, const uint8_t *token,
                          unsigned channel, Error **errp);
/* The channel number in @hello, in this host's byte order */
unsigned postcopy_hello_channel(const PostcopyHello *hello);

/*
 * Put @frame into @f's buffer.  @last: block of the last frame, whose name is
 * not repeated; changed.  The caller holds the lock of @f.
 */
void postcopy_frame_put(QEMUFile *f, const PostcopyFrame *frame,
                        RAMBlock **last);

/**
 * postcopy_frame_get: read one frame, but not the content of pages
 *
 * @frame: the last one, whose block counts if none is named; changed
 * @from_source: frames of the source are expected, otherwise of the destination
 *
 * Waits for a frame.  Returns false and sets @errp if the connection has ended
 * or the frame is invalid: unknown blocks, pages outside of a block, parts of
 * host pages.  Blocks stay: memory is not unplugged while it is migrated.
 */
bool postcopy_frame_get(QEMUFile *f, PostcopyFrame *frame, bool from_source,
                        Error **errp);

/* Whether a frame is in @f's buffer: postcopy_frame_get() will not wait */
bool postcopy_frame_is_buffered(QEMUFile *f);

#endif
