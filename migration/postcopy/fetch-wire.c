/*
 * Postcopy: the protocol of a fetch channel
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qemu/rcu.h"
#include "qapi/error.h"
#include "exec/ramblock.h"
#include "migration/misc.h"
#include "fetch-wire.h"

/* Header of a frame; name_length bytes of the block's name follow */
typedef struct QEMU_PACKED PostcopyFrameHeader {
    uint8_t type;
    /* 0: the same block as in the last frame */
    uint8_t name_length;
    uint16_t zero;
    uint32_t length;
    uint64_t offset;
} PostcopyFrameHeader;

QEMU_BUILD_BUG_ON(sizeof(PostcopyHello) != 24);
QEMU_BUILD_BUG_ON(sizeof(PostcopyFetchOffer) != 18);
QEMU_BUILD_BUG_ON(sizeof(PostcopyFrameHeader) != 16);

PostcopyHello postcopy_hello(const uint8_t *token, unsigned channel)
{
    PostcopyHello hello = {
        .magic = cpu_to_be32(POSTCOPY_HELLO_MAGIC),
        .version = cpu_to_be16(POSTCOPY_HELLO_VERSION),
        .channel = cpu_to_be16(channel),
    };

    memcpy(hello.token, token, POSTCOPY_TOKEN_SIZE);
    return hello;
}

unsigned postcopy_hello_channel(const PostcopyHello *hello)
{
    return be16_to_cpu(hello->channel);
}

bool postcopy_hello_check(const PostcopyHello *hello, const uint8_t *token,
                          unsigned channel, Error **errp)
{
    if (be32_to_cpu(hello->magic) != POSTCOPY_HELLO_MAGIC) {
        error_setg(errp, "postcopy: the peer of a fetch channel begins with "
                   "0x%08" PRIx32 ", not with 0x%08x",
                   be32_to_cpu(hello->magic), POSTCOPY_HELLO_MAGIC);
    } else if (be16_to_cpu(hello->version) != POSTCOPY_HELLO_VERSION) {
        error_setg(errp, "postcopy: fetch channels of version %u, known here "
                   "is %u", be16_to_cpu(hello->version),
                   POSTCOPY_HELLO_VERSION);
    } else if (postcopy_hello_channel(hello) != channel) {
        error_setg(errp, "postcopy: fetch channel %u in place of %u",
                   postcopy_hello_channel(hello), channel);
    } else if (memcmp(hello->token, token, POSTCOPY_TOKEN_SIZE)) {
        error_setg(errp, "postcopy: fetch channel %u is of another migration",
                   channel);
    } else {
        return true;
    }
    return false;
}

void postcopy_frame_put(QEMUFile *f, const PostcopyFrame *frame,
                        RAMBlock **last)
{
    const char *name = frame->rb && frame->rb != *last
                       ? qemu_ram_get_idstr(frame->rb) : "";
    PostcopyFrameHeader header = {
        .type = frame->type,
        .name_length = strlen(name),
        .length = cpu_to_be32(frame->length),
        .offset = cpu_to_be64(frame->offset),
    };

    qemu_put_buffer(f, (const uint8_t *)&header, sizeof(header));
    qemu_put_buffer(f, (const uint8_t *)name, header.name_length);
    if (frame->rb) {
        *last = frame->rb;
    }
}

/* Whether this side has the pages of @frame */
static bool postcopy_frame_check(const PostcopyFrame *frame, bool from_source,
                                 Error **errp)
{
    ram_addr_t end = from_source ? frame->rb->postcopy_length
                                 : frame->rb->used_length;
    size_t size = qemu_ram_pagesize(frame->rb);

    if (!frame->length || frame->offset >= end ||
        frame->length > end - frame->offset ||
        frame->length > MAX(size, POSTCOPY_FRAME_MAX_LENGTH) ||
        !QEMU_IS_ALIGNED(frame->offset | frame->length, size)) {
        error_setg(errp, "invalid pages: %" PRIu64 " bytes at offset 0x%" PRIx64
                   " of %s; it has %" PRIu64 " in pages of %zu",
                   (uint64_t)frame->length, (uint64_t)frame->offset,
                   frame->rb->idstr, (uint64_t)end, size);
        return false;
    }
    return true;
}

bool postcopy_frame_get(QEMUFile *f, PostcopyFrame *frame, bool from_source,
                        Error **errp)
{
    PostcopyFrameHeader header;
    char name[256];

    qemu_get_buffer(f, (uint8_t *)&header, sizeof(header));
    if (qemu_file_get_error_obj(f, errp)) {
        return false;
    }
    frame->type = header.type;
    frame->length = be32_to_cpu(header.length);
    frame->offset = be64_to_cpu(header.offset);
    if (frame->offset != be64_to_cpu(header.offset)) {
        error_setg(errp, "an offset of more than this host's addresses have");
        return false;
    }
    if (from_source ? header.type < POSTCOPY_FRAME_PAGES ||
                      header.type > POSTCOPY_FRAME_PING
                    : header.type != POSTCOPY_FRAME_REQUEST) {
        error_setg(errp, "invalid frame of type %u", header.type);
        return false;
    }
    if (header.type == POSTCOPY_FRAME_END ||
        header.type == POSTCOPY_FRAME_PING) {
        if (header.name_length || header.offset ||
            (header.type == POSTCOPY_FRAME_END && header.length)) {
            error_setg(errp, "a frame of type %u with pages", header.type);
            return false;
        }
        return true;
    }
    if (header.name_length) {
        qemu_get_buffer(f, (uint8_t *)name, header.name_length);
        if (qemu_file_get_error_obj(f, errp)) {
            return false;
        }
        name[header.name_length] = '\0';
        WITH_RCU_READ_LOCK_GUARD() {
            frame->rb = qemu_ram_block_by_name(name);
        }
    }
    if (!frame->rb || migrate_ram_is_ignored(frame->rb)) {
        error_setg(errp, "no block '%s'", header.name_length ? name : "");
        return false;
    }
    return postcopy_frame_check(frame, from_source, errp);
}

bool postcopy_frame_is_buffered(QEMUFile *f)
{
    size_t there = qemu_file_buffered(f);
    PostcopyFrameHeader *header;

    /* Does not wait: these bytes are in the buffer */
    return there >= sizeof(*header) &&
           qemu_peek_buffer(f, (uint8_t **)&header, sizeof(*header), 0) &&
           there >= sizeof(*header) + header->name_length;
}
