/*
 * Fuzzing migration: the format of an input
 *
 * Two bytes of options, then records.  They are what the other side does,
 * and what the user of this side does meanwhile; docs/fuzz.md describes both.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TESTS_FUZZ_MIGRATION_FUZZ_H
#define TESTS_FUZZ_MIGRATION_FUZZ_H

typedef enum FuzzOp {
    FUZZ_OPEN,      /* connect channel @arg, or wait until a source has done */
    /* Write the data to channel @arg, or to the file, at what begins them */
    FUZZ_SEND,
    FUZZ_CLOSE,     /* shut channel @arg down, or truncate the file to it */
    FUZZ_WAIT,      /* until the status is @arg, or FUZZ_READ, FUZZ_RUNNING */
    FUZZ_DO,        /* FuzzAction @arg */
    FUZZ_OP__MAX
} FuzzOp;

/* All that was sent has been read; a destination's guest may run */
#define FUZZ_READ       0xff
#define FUZZ_RUNNING    0xfe

typedef enum FuzzAction {
    FUZZ_START_POSTCOPY,
    FUZZ_PAUSE,
    FUZZ_RECOVER,
    FUZZ_CANCEL,
    FUZZ_QUERY,
    FUZZ_TOUCH,     /* one byte of data: the page of guest memory to touch */
    FUZZ_ACTION__MAX
} FuzzAction;

#define FUZZ_CHANNELS   4
#define FUZZ_RECORDS    128
#define FUZZ_OPTIONS    2
#define FUZZ_HEAD       6
#define FUZZ_PAGE       4096
/* Of data for a file: a 32-bit number, little endian.  Where the file may end */
#define FUZZ_OFFSET     4
#define FUZZ_FILE_SIZE  (64 << 20)
/* What the numbers of FUZZ_CLOSE stand for */
#define FUZZ_FILE_UNIT  (256 << 10)

typedef struct FuzzRecord {
    uint8_t op;
    uint8_t arg;
    uint32_t length;
    const uint8_t *data;
} FuzzRecord;

typedef enum FuzzSide {
    FUZZ_NEITHER,   /* another target has been chosen */
    FUZZ_SOURCE,
    FUZZ_DESTINATION,
    FUZZ_FILE,      /* a guest that is resumed from one, of mapped-ram */
} FuzzSide;

extern FuzzSide fuzz_side;

/*
 * Take the record at *@data, and step over it.  A record whose data end with
 * the input is as long as that.  Returns false at the end.
 */
bool fuzz_next_record(const uint8_t **data, size_t *size, FuzzRecord *record);

/* A section of guest time, to be put in anywhere; copied */
void migration_fuzz_set_guest_time(const uint8_t *bytes, size_t size);

/* Of libFuzzer, and for it */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max,
                               unsigned int seed);

size_t migration_fuzz_crossover(const uint8_t *a, size_t a_size,
                                const uint8_t *b, size_t b_size,
                                uint8_t *out, size_t max, unsigned int seed);

/* The counters of what is covered, as the linker finds them */
extern uint8_t __start___sancov_cntrs[], __stop___sancov_cntrs[];

#endif
