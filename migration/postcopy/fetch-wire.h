/*
 * Postcopy: what passes a fetch channel
 *
 * docs/fetch.md has the format byte by byte.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_POSTCOPY_FETCH_WIRE_H
#define MIGRATION_POSTCOPY_FETCH_WIRE_H

#include "qemu/units.h"
#include "exec/cpu-common.h"
#include "migration/qemu-file.h"

/* "QPFC": a connection that begins so is a fetch channel */
#define POSTCOPY_HELLO_MAGIC 0x51504643
#define POSTCOPY_HELLO_VERSION 6

/* Ties channels to their migration */
#define POSTCOPY_TOKEN_SIZE 16

/* The first that each side says.  Big endian. */
typedef struct QEMU_PACKED PostcopyHello {
    uint32_t magic;
    uint16_t version;
    /* From 0 on */
    uint16_t channel;
    uint8_t token[POSTCOPY_TOKEN_SIZE];
} PostcopyHello;

/*
 * The destination's message on the return path, before the PONG that says how
 * many channels it takes.  Big endian.
 */
typedef struct QEMU_PACKED PostcopyFetchOffer {
    uint16_t channels;
    uint8_t token[POSTCOPY_TOKEN_SIZE];
} PostcopyFetchOffer;

/* In bytes, of whole host pages; one host page may be larger */
#define POSTCOPY_FRAME_MAX_LENGTH (1u << 20)

/*
 * So much of answers, in bytes, is sent by one system call: what the
 * destination reads by one, which a QEMUFile's buffer can hold.  The first of
 * them waits for the last.
 */
#define POSTCOPY_FETCH_BATCH (32 * KiB)

typedef enum PostcopyFrameType {
    /* From the destination: send these host pages, if they are to be sent */
    POSTCOPY_FRAME_REQUEST = 1,
    /* From the source: their contents follow */
    POSTCOPY_FRAME_PAGES = 2,
    /* From the source, also unasked: they are all zeros, and nothing follows */
    POSTCOPY_FRAME_ZERO = 3,
    /* From the source: no more pages will come by this channel */
    POSTCOPY_FRAME_END = 4,
    /*
     * From the source: answer on the return path by a PONG with the value that
     * is in length's place, when all before it has been placed
     */
    POSTCOPY_FRAME_PING = 5,
} PostcopyFrameType;

typedef struct PostcopyFrame {
    PostcopyFrameType type;
    /* The frame before on the same channel in the same direction had one */
    RAMBlock *rb;
    /* In bytes, multiples of the block's host page size; of a PING its value */
    ram_addr_t offset;
    ram_addr_t length;
} PostcopyFrame;

/* @token: of POSTCOPY_TOKEN_SIZE bytes */
PostcopyHello postcopy_hello(const uint8_t *token, unsigned channel);
/* Returns whether @hello, from a peer, is what postcopy_hello() would return */
bool postcopy_hello_check(const PostcopyHello *hello, const uint8_t *token,
                          unsigned channel, Error **errp);
/* Its channel number, in this host's order of bytes */
unsigned postcopy_hello_channel(const PostcopyHello *hello);

/*
 * Put @frame into @f's buffer.  @last: block of the last frame that was put,
 * whose name is not said again; changed.  The caller holds the lock of @f.
 */
void postcopy_frame_put(QEMUFile *f, const PostcopyFrame *frame,
                        RAMBlock **last);

/**
 * postcopy_frame_get: read one frame, but not the contents of pages
 *
 * @frame: the one before, whose block counts if none is named; changed
 * @from_source: frames of the source are expected, otherwise of the destination
 *
 * Waits for it.  Returns false if the connection has ended or what came makes
 * no sense: unknown blocks, pages outside of a block, parts of host pages.
 * Blocks stay: memory is not unplugged while it is migrated.
 */
bool postcopy_frame_get(QEMUFile *f, PostcopyFrame *frame, bool from_source,
                        Error **errp);

/*
 * Whether postcopy_frame_get() would not wait: another frame is in the buffer
 */
bool postcopy_frame_is_there(QEMUFile *f);

#endif
