/*
 * Fuzzing migration: the format of an input
 *
 * Two bytes of options, then records, which the other side runs, or the user of
 * this side; docs/devel/testing.md describes both.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TESTS_FUZZ_MIGRATION_FUZZ_H
#define TESTS_FUZZ_MIGRATION_FUZZ_H

typedef enum FuzzOp {
    FUZZ_OPEN,      /* connect channel @arg, or wait for a source to */
    /* Write the data to channel @arg, or to the file at their first number */
    FUZZ_SEND,
    FUZZ_CLOSE,     /* shut channel @arg down, or truncate the file to @arg */
    FUZZ_WAIT,      /* wait for the status @arg, FUZZ_READ or FUZZ_RUNNING */
    FUZZ_DO,        /* let the user do FuzzAction @arg */
    FUZZ_OP__MAX
} FuzzOp;

/* All sent data have been read; a destination's guest may run */
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
/* Size of the offset before data for a file, little endian; size of the file */
#define FUZZ_OFFSET     4
#define FUZZ_FILE_SIZE  (64 << 20)
/* The unit of @arg of FUZZ_CLOSE, for a file */
#define FUZZ_FILE_UNIT  (256 << 10)

typedef struct FuzzRecord {
    uint8_t op;
    uint8_t arg;
    uint32_t length;
    const uint8_t *data;
} FuzzRecord;

typedef enum FuzzSide {
    FUZZ_NEITHER,   /* the target is another fuzzer's */
    FUZZ_SOURCE,
    FUZZ_DESTINATION,
    FUZZ_FILE,      /* the guest is resumed from a file of mapped-ram */
} FuzzSide;

extern FuzzSide fuzz_side;

/*
 * Take the record at *@data, and step over it.  The input's end also ends the
 * data of the last record.  Returns false at the end.
 */
bool fuzz_next_record(const uint8_t **data, size_t *size, FuzzRecord *record);

/* Copies a section of guest time, which mutations insert anywhere */
void migration_fuzz_set_guest_time(const uint8_t *bytes, size_t size);

/* libFuzzer's function, and the functions that it calls */
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max,
                               unsigned int seed);

size_t migration_fuzz_crossover(const uint8_t *a, size_t a_size,
                                const uint8_t *b, size_t b_size,
                                uint8_t *out, size_t max, unsigned int seed);

/* The coverage counters, by the linker's names */
extern uint8_t __start___sancov_cntrs[], __stop___sancov_cntrs[];

#endif
