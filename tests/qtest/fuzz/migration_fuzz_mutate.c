/*
 * Fuzzing migration: mutations by the parts of a stream
 *
 * Data are not parsed: they are searched from the beginning for bytes that look
 * like a section's header, a command or a page.  So a stream may be incomplete
 * or wrong.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "qemu/bswap.h"
#include "qapi/qapi-builtin-types.h"
#include "migration/postcopy/fetch-wire.h"
#include "migration/ram.h"
#include "migration/savevm.h"
#include "migration_fuzz.h"

/* From migration/savevm.c and migration/migration.c */
#define CMD__MAX            12
#define RP_REQ_PAGES_ID     3
#define RP_RECV_BITMAP      5
#define RP__MAX             8
/* From migration/postcopy/fetch-wire.c */
#define FRAME_HEAD          16

typedef struct Piece {
    enum { NUMBER, NAME, ITEM } kind;
    size_t at;
    size_t size;
} Piece;

static GRand *mutate_rand;

static uint32_t below(uint32_t n)
{
    return n ? g_rand_int(mutate_rand) % n : 0;
}

/* Search for pieces */

static void piece(GArray *pieces, int kind, size_t at, size_t size)
{
    Piece p = { .kind = kind, .at = at, .size = size };

    g_array_append_val(pieces, p);
}

/* Returns @size, which the search skips */
static size_t item(GArray *pieces, size_t at, size_t size)
{
    piece(pieces, ITEM, at, size);
    return size;
}

/* Returns the size of a counted string at @p, or 0 */
static size_t name_at(const uint8_t *p, size_t size)
{
    if (size < 2 || p[0] < 2 || p[0] > 100 || (size_t)p[0] + 1 > size) {
        return 0;
    }
    for (int i = 1; i <= p[0]; i++) {
        if (!g_ascii_isprint(p[i])) {
            return 0;
        }
    }
    return p[0] + 1;
}

static void numbers(GArray *pieces, size_t at, size_t size)
{
    for (size_t i = 0; i + 4 <= MIN(size, 256); i += 4) {
        piece(pieces, NUMBER, at + i, 4);
        if (i + 8 <= size) {
            piece(pieces, NUMBER, at + i, 8);
        }
    }
}

static size_t find_page(GArray *pieces, const uint8_t *p, size_t at,
                        size_t size)
{
    uint64_t head = size < 8 ? 0 : ldq_be_p(p + at);
    int flags = head & (FUZZ_PAGE - 1), flag = flags & ~RAM_SAVE_FLAG_CONTINUE;
    size_t n = 8, name;

    if (head >> 40 || !flags ||
        (flag != RAM_SAVE_FLAG_ZERO && flag != RAM_SAVE_FLAG_MEM_SIZE &&
         flag != RAM_SAVE_FLAG_PAGE && flag != RAM_SAVE_FLAG_EOS &&
         flag != RAM_SAVE_FLAG_XBZRLE && flag != RAM_SAVE_FLAG_MULTIFD_FLUSH)) {
        return 0;
    }
    piece(pieces, NUMBER, at, 8);
    if (flags == RAM_SAVE_FLAG_ZERO || flags == RAM_SAVE_FLAG_PAGE ||
        flags == RAM_SAVE_FLAG_XBZRLE) {
        name = name_at(p + at + n, size - n);
        if (name) {
            piece(pieces, NAME, at + n, name);
        }
        n += name;
    }
    n += flag == RAM_SAVE_FLAG_PAGE ? FUZZ_PAGE : flag == RAM_SAVE_FLAG_ZERO;
    return item(pieces, at, MIN(n, size));
}

/* A fetch channel's hello or frame */
static size_t find_frame(GArray *pieces, const uint8_t *p, size_t at,
                         size_t size)
{
    uint8_t type = p[at];
    uint64_t offset;
    uint32_t length;
    size_t n;

    if (size >= sizeof(PostcopyHello) &&
        ldl_be_p(p + at) == POSTCOPY_HELLO_MAGIC) {
        piece(pieces, NUMBER, at + 4, 2);
        piece(pieces, NUMBER, at + 6, 2);
        return item(pieces, at, sizeof(PostcopyHello));
    }
    if (size < FRAME_HEAD || !type || type > POSTCOPY_FRAME_PING) {
        return 0;
    }
    length = ldl_be_p(p + at + 4);
    offset = ldq_be_p(p + at + 8);
    if (type == POSTCOPY_FRAME_END || type == POSTCOPY_FRAME_PING) {
        /* No pages, and no name */
        if (p[at + 1] || offset || (type == POSTCOPY_FRAME_END && length)) {
            return 0;
        }
    } else if (!length || length > POSTCOPY_FRAME_MAX_LENGTH ||
               length % FUZZ_PAGE || offset % FUZZ_PAGE || offset >> 32) {
        return 0;
    }
    for (int i = 0; i < 4; i++) {
        piece(pieces, NUMBER, at + i, 1);
    }
    piece(pieces, NUMBER, at + 4, 4);
    piece(pieces, NUMBER, at + 8, 8);
    n = FRAME_HEAD + p[at + 1] + (type == POSTCOPY_FRAME_PAGES ? length : 0);
    return item(pieces, at, MIN(n, size));
}

/* Finds the part of a stream at @at.  Returns its size, or 0 if unknown */
static size_t find_in_stream(GArray *pieces, const uint8_t *p, size_t at,
                             size_t size)
{
    size_t n;

    switch (p[at]) {
    case QEMU_VM_SECTION_START:
    case QEMU_VM_SECTION_FULL:
        n = size < 16 ? 0 : name_at(p + at + 5, size - 5 - 8);
        if (n) {
            piece(pieces, NUMBER, at + 1, 4);
            piece(pieces, NAME, at + 5, n);
            piece(pieces, NUMBER, at + 5 + n, 4);
            piece(pieces, NUMBER, at + 5 + n + 4, 4);
            return item(pieces, at, 5 + n + 8);
        }
        break;
    case QEMU_VM_SUBSECTION:
        n = size < 8 ? 0 : name_at(p + at + 1, size - 1 - 4);
        if (n) {
            piece(pieces, NAME, at + 1, n);
            piece(pieces, NUMBER, at + 1 + n, 4);
            numbers(pieces, at + 1 + n + 4, MIN(64, size - 1 - n - 4));
            return item(pieces, at, 1 + n + 4);
        }
        break;
    case QEMU_VM_SECTION_PART:
    case QEMU_VM_SECTION_END:
    case QEMU_VM_SECTION_FOOTER:
        if (size >= 5 && ldl_be_p(p + at + 1) < 256) {
            piece(pieces, NUMBER, at + 1, 4);
            return item(pieces, at, 5);
        }
        break;
    case QEMU_VM_COMMAND:
        n = size < 5 ? SIZE_MAX : 5 + lduw_be_p(p + at + 3);
        if (n <= size && lduw_be_p(p + at + 1) < CMD__MAX) {
            piece(pieces, NUMBER, at + 1, 2);
            piece(pieces, NUMBER, at + 3, 2);
            numbers(pieces, at + 5, n - 5);
            /* The packaged parts are found on their own */
            return item(pieces, at, n);
        }
        break;
    }
    return find_page(pieces, p, at, size);
}

static size_t find_in_return_path(GArray *pieces, const uint8_t *p, size_t at,
                                  size_t size)
{
    size_t n = size < 4 ? SIZE_MAX : 4 + lduw_be_p(p + at + 2), name;
    int type;

    if (n > size || n > 516 || lduw_be_p(p + at) > RP__MAX) {
        return 0;
    }
    type = lduw_be_p(p + at);
    piece(pieces, NUMBER, at, 2);
    piece(pieces, NUMBER, at + 2, 2);
    numbers(pieces, at + 4, n - 4);
    if (type == RP_REQ_PAGES_ID && n > 16) {
        name = name_at(p + at + 16, n - 16);
        piece(pieces, NAME, at + 16, name ?: n - 16);
    } else if (type == RP_RECV_BITMAP && n > 4) {
        piece(pieces, NAME, at + 4, n - 4);
    }
    return item(pieces, at, n);
}

static GArray *find_pieces(const uint8_t *p, size_t size)
{
    GArray *pieces = g_array_new(false, false, sizeof(Piece));
    size_t at = 0, n;

    while (at < size) {
        n = find_frame(pieces, p, at, size - at);
        if (!n) {
            n = fuzz_side == FUZZ_SOURCE ?
                find_in_return_path(pieces, p, at, size - at) :
                find_in_stream(pieces, p, at, size - at);
        }
        if (!n) {
            n = name_at(p + at, size - at);
            if (n) {
                /* RAM blocks, or their headers in a file, or a device's name */
                piece(pieces, NAME, at, n);
                numbers(pieces, at + n, MIN(36, size - at - n));
            }
        }
        at += MAX(n, 1);
    }
    return pieces;
}

/* Well-formed messages that may be put in anywhere */

#define T(bytes) { bytes, sizeof(bytes) - 1 }

typedef struct Message {
    const char *bytes;
    size_t size;
} Message;

static Message stream_messages[] = {
    { },                                                /* guest time */
    T("\0"),
    T("\x08\0\x01\0\0"),                                /* OPEN_RETURN_PATH */
    T("\x08\0\x02\0\x04\0\0\0\x2a"),                    /* PING */
    T("\x08\0\x03\0\x10\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x10\0"),
                                                        /* POSTCOPY_ADVISE */
    T("\x08\0\x03\0\0"),
    T("\x08\0\x04\0\0"),                                /* POSTCOPY_LISTEN */
    T("\x08\0\x05\0\0"),                                /* POSTCOPY_RUN */
    T("\x08\0\x06\0\x19\0\x06pc.ram\0\0\0\0\0\0\0\x10\0\0\0\0\0\0\0\x20\0"),
                                                        /* RAM_DISCARD */
    T("\x08\0\x07\0\x04\0\0\0\x05"),                    /* PACKAGED */
    T("\x08\0\x08\0\0"),                                /* ENABLE_COLO */
    T("\x08\0\x09\0\0"),                                /* POSTCOPY_RESUME */
    T("\x08\0\x0a\0\x07\x06pc.ram"),                    /* RECV_BITMAP */
    T("\x08\0\x0b\0\0"),                                /* SWITCHOVER_START */
    T("\0\0\0\0\0\0\0\x10"),                            /* end of RAM's part */
    T("\x02\0\0\0\x02"),
    T("\x7e\0\0\0\x02"),
    T("\0\0\0\0\0\0\x10\x02\x06pc.ram\0"),              /* a page of zeros */
    T("\0\0\0\0\0\0\x20\x22\0"),
    T("\0\0\0\0\0\0\x30\x40\x06pc.ram\x01\0\x04\x08\x04\x01\x02\x03\x04"),
                                                        /* XBZRLE */
    T("\0\0\0\0\0\0\x02\0"),                            /* multifd's flush */
    T("\0\0\0\0\0\x20\0\x04\x06pc.ram\0\0\0\0\0\x20\0\0"),
                                                        /* sizes of RAM */
    T("\x03\x06\0\0" "\0\0\x10\0" "\0\0\0\0\0\0\x40\0" "pc.ram"),
                                                        /* a frame of zeros */
    T("\x03\0\0\0" "\0\0\x20\0" "\0\0\0\0\0\0\x50\0"),
    T("\x04\0\0\0" "\0\0\0\0" "\0\0\0\0\0\0\0\0"),      /* the end */
    T("\x05\0\0\0" "\0\0\0\x2a" "\0\0\0\0\0\0\0\0"),    /* a ping */
};

void migration_fuzz_set_guest_time(const uint8_t *bytes, size_t size)
{
    stream_messages[0] = (Message) { g_memdup2(bytes, size), size };
}

static const Message return_path_messages[] = {
    T("\0\x01\0\x04\0\0\0\0"),                          /* SHUT */
    T("\0\x01\0\x04\0\0\0\x01"),
    T("\0\x02\0\x04\0\0\0\x01"),                        /* PONG */
    T("\0\x04\0\x0c\0\0\0\0\0\0\x10\0\0\0\x10\0"),      /* REQ_PAGES */
    T("\0\x03\0\x13\0\0\0\0\0\0\x50\0\0\0\x10\0\x06pc.ram"),
                                                        /* REQ_PAGES_ID */
    T("\0\x05\0\x07\x06pc.ram\0\0\0\0\0\0\0\x40"),      /* RECV_BITMAP */
    T("\0\x06\0\x04\0\0\0\x01"),                        /* RESUME_ACK */
    T("\0\x07\0\0"),                                    /* SWITCHOVER_ACK */
    T("\x01\x06\0\0" "\0\0\x10\0" "\0\0\0\0\0\0\x40\0" "pc.ram"),
                                                        /* a fetch request */
    T("\x01\0\0\0" "\0\0\x10\0" "\0\0\0\0\0\0\x90\0"),
};

static const char *const names[] = {
    "pc.ram", "pc.bios", "pc.rom", "shared", "plugged", "ram",
    "/rom@etc/acpi/tables", "kvmclock", "kvmclock/guest_time", "",
};

/* Mutations of the data of one FUZZ_SEND */

/*
 * Replace @old bytes by @size others.  Mostly, adapt the length of the packaged
 * device state around them.
 */
static void replace(GByteArray *a, size_t at, size_t old, const void *bytes,
                   size_t size)
{
    size_t tail = a->len - at - old;

    for (size_t i = 0; size != old && i + 9 <= at && below(8); i++) {
        uint32_t length = ldl_be_p(a->data + i + 5);

        if (!memcmp(a->data + i, "\x08\0\x07\0\x04", 5) &&
            i + 9 + length >= at + old) {
            stl_be_p(a->data + i + 5, length + size - old);
        }
    }
    g_byte_array_set_size(a, at + MAX(old, size) + tail);
    memmove(a->data + at + size, a->data + at + old, tail);
    if (size) {
        memcpy(a->data + at, bytes, size);
    }
    g_byte_array_set_size(a, at + size + tail);
}

static uint64_t chosen_number(uint64_t was, int size)
{
    uint64_t top = 1ULL << (size * 8 - 1);

    switch (below(8)) {
    case 0:
        return below(4);
    case 1:
        return was + below(33) - 16;
    case 2:
        return was ^ 1ULL << below(size * 8);
    case 3:
        return was + (below(33) - 16) * FUZZ_PAGE;
    case 4:
        return top - below(3);
    case 5:
        return -1ULL - below(FUZZ_PAGE * 2);
    case 6:
        return 1ULL << below(size * 8);
    default:
        return (uint64_t)g_rand_int(mutate_rand) << 32 |
               g_rand_int(mutate_rand);
    }
}

static void mutate_number(GByteArray *a, const Piece *p)
{
    uint8_t *at = a->data + p->at;
    uint64_t was = ldn_be_p(at, p->size), number;

    if (p->size < 4 && below(2)) {
        number = below(p->size == 1 ? 8 : CMD__MAX + 1);
    } else if (p->size == 8 && !below(4)) {
        /* Flags in the offset of a page */
        number = (was & ~0xfffULL) | 1 << below(10) | 1 << below(10);
    } else {
        number = chosen_number(was, p->size);
    }
    stn_be_p(at, p->size, number);
}

static void mutate_name(GByteArray *a, const Piece *p, GArray *pieces)
{
    const Piece *other = &g_array_index(pieces, Piece, below(pieces->len));
    const char *name = names[below(ARRAY_SIZE(names))];
    uint8_t bytes[256];

    if (!below(6)) {
        a->data[p->at] = below(256);
    } else if (other->kind == NAME && other->size <= sizeof(bytes)) {
        memcpy(bytes, a->data + other->at, other->size);
        replace(a, p->at, p->size, bytes, other->size);
    } else {
        bytes[0] = strlen(name);
        memcpy(bytes + 1, name, bytes[0]);
        replace(a, p->at, p->size, bytes, bytes[0] + 1);
    }
}

static void mutate_item(GByteArray *a, const Piece *p, GArray *pieces,
                        size_t room)
{
    const Piece *to = &g_array_index(pieces, Piece, below(pieces->len));
    g_autofree uint8_t *bytes = g_memdup2(a->data + p->at, p->size);
    size_t size = p->size;
    g_autoptr(GByteArray) many = g_byte_array_new();
    int copies;

    switch (below(4)) {
    case 0:
        replace(a, p->at, size, NULL, 0);
        break;
    case 1:
        /* One copy, or mostly a power of two of them */
        copies = 1 << (below(3) ? below(3) : below(13));
        while (copies-- && many->len + size <= room) {
            g_byte_array_append(many, bytes, size);
        }
        replace(a, p->at, 0, many->data, many->len);
        break;
    default:
        if (size <= room) {
            replace(a, to->at, 0, bytes, size);
        }
        break;
    }
}

static void mutate_any(GByteArray *a)
{
    size_t at = below(a->len);
    size_t n = MIN(1 + below(32), a->len - at);
    uint8_t bytes[64];

    memcpy(bytes, a->data + at, n);
    replace(a, at, n, bytes, LLVMFuzzerMutate(bytes, n, below(3) ? n : 64));
}

static void mutate_data(GByteArray *a, size_t room)
{
    g_autoptr(GArray) pieces = find_pieces(a->data, a->len);
    const Message *m = fuzz_side == FUZZ_SOURCE ?
        &return_path_messages[below(ARRAY_SIZE(return_path_messages))] :
        &stream_messages[below(ARRAY_SIZE(stream_messages))];
    const Piece *p;

    if (!pieces->len || !below(8)) {
        if (a->len) {
            mutate_any(a);
        }
        return;
    }
    p = &g_array_index(pieces, Piece, below(pieces->len));
    if (!below(5)) {
        if (m->size <= room) {
            replace(a, p->at, below(2) ? p->size : 0, m->bytes, m->size);
        }
    } else if (p->kind == NUMBER) {
        mutate_number(a, p);
    } else if (p->kind == NAME) {
        mutate_name(a, p, pieces);
    } else {
        mutate_item(a, p, pieces, room);
    }
}

/* Mutations of records */

typedef struct Record {
    uint8_t op;
    uint8_t arg;
    GByteArray *data;
} Record;

static void record_clear(void *opaque)
{
    Record *r = opaque;

    g_byte_array_unref(r->data);
}

static GArray *parse(const uint8_t *data, size_t size)
{
    GArray *records = g_array_new(false, false, sizeof(Record));
    FuzzRecord r;

    g_array_set_clear_func(records, record_clear);
    while (records->len < FUZZ_RECORDS && fuzz_next_record(&data, &size, &r)) {
        Record copy = { r.op, r.arg, g_byte_array_new() };

        g_byte_array_append(copy.data, r.data, r.length);
        g_array_append_val(records, copy);
    }
    return records;
}

static size_t unparse(GArray *records, uint8_t *out, size_t max)
{
    size_t n = 0;

    for (guint i = 0; i < records->len; i++) {
        Record *r = &g_array_index(records, Record, i);

        if (n + FUZZ_HEAD + r->data->len > max) {
            break;
        }
        out[n] = r->op;
        out[n + 1] = r->arg;
        stl_le_p(out + n + 2, r->data->len);
        memcpy(out + n + FUZZ_HEAD, r->data->data, r->data->len);
        n += FUZZ_HEAD + r->data->len;
    }
    return n;
}

static Record some_record(void)
{
    Record r = { below(FUZZ_OP__MAX), below(4), g_byte_array_new() };
    uint8_t page = below(256);

    switch (r.op) {
    case FUZZ_SEND:
        g_byte_array_append(r.data, (const uint8_t *)"\0", 1);
        mutate_data(r.data, FUZZ_PAGE);
        break;
    case FUZZ_WAIT:
        r.arg = below(2) ? below(16) : FUZZ_READ - below(2);
        break;
    case FUZZ_DO:
        r.arg = below(FUZZ_ACTION__MAX);
        g_byte_array_append(r.data, &page, 1);
        break;
    }
    return r;
}

static void mutate_records(GArray *records)
{
    guint i = below(records->len), j = below(records->len);
    Record r = some_record(), *at = &g_array_index(records, Record, i);

    switch (below(5)) {
    case 0:
        if (records->len > 1) {
            g_array_remove_index(records, i);
        }
        break;
    case 1:
        r.op = at->op;
        r.arg = at->arg;
        g_byte_array_set_size(r.data, 0);
        g_byte_array_append(r.data, at->data->data, at->data->len);
        g_array_insert_val(records, j, r);
        return;
    case 2:
        /* Split a FUZZ_SEND, to insert a record within its data */
        if (at->op == FUZZ_SEND && at->data->len > 1) {
            size_t n = 1 + below(at->data->len - 1);
            Record rest = { at->op, at->arg, g_byte_array_new() };

            g_byte_array_append(rest.data, at->data->data + n,
                                at->data->len - n);
            g_byte_array_set_size(at->data, n);
            g_array_insert_val(records, i + 1, rest);
            i++;
        }
        g_array_insert_val(records, i, r);
        return;
    case 3:
        at->arg = r.arg;
        break;
    default:
        g_array_insert_val(records, i, r);
        return;
    }
    record_clear(&r);
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max,
                               unsigned int seed)
{
    g_autoptr(GArray) records = NULL;

    if (fuzz_side == FUZZ_NEITHER || max < FUZZ_PAGE || size < FUZZ_OPTIONS) {
        return LLVMFuzzerMutate(data, size, max);
    }
    mutate_rand = g_rand_new_with_seed(seed);
    records = parse(data + FUZZ_OPTIONS, size - FUZZ_OPTIONS);
    if (!below(32)) {
        data[below(FUZZ_OPTIONS)] ^= 1 << below(8);
    }
    if (!records->len) {
        Record r = some_record();

        g_array_append_val(records, r);
    }
    for (int n = 1 + below(below(2) ? 2 : 6); n; n--) {
        Record *r = &g_array_index(records, Record, below(records->len));

        if (r->op == FUZZ_SEND && below(5)) {
            mutate_data(r->data, max - size);
        } else {
            mutate_records(records);
        }
    }
    g_rand_free(mutate_rand);
    return FUZZ_OPTIONS + unparse(records, data + FUZZ_OPTIONS,
                                  max - FUZZ_OPTIONS);
}

/* The first records of one input, and the last records of another one */
size_t migration_fuzz_crossover(const uint8_t *a, size_t a_size,
                                const uint8_t *b, size_t b_size,
                                uint8_t *out, size_t max, unsigned int seed)
{
    g_autoptr(GArray) first = NULL, last = NULL;

    if (a_size < FUZZ_OPTIONS || b_size < FUZZ_OPTIONS || max < FUZZ_OPTIONS) {
        return 0;
    }
    mutate_rand = g_rand_new_with_seed(seed);
    first = parse(a + FUZZ_OPTIONS, a_size - FUZZ_OPTIONS);
    last = parse(b + FUZZ_OPTIONS, b_size - FUZZ_OPTIONS);
    g_array_set_size(first, below(first->len + 1));
    g_array_remove_range(last, 0, below(last->len + 1));
    g_rand_free(mutate_rand);

    memcpy(out, a, FUZZ_OPTIONS);
    max -= FUZZ_OPTIONS;
    a_size = unparse(first, out + FUZZ_OPTIONS, max);
    return FUZZ_OPTIONS + a_size +
           unparse(last, out + FUZZ_OPTIONS + a_size, max - a_size);
}
