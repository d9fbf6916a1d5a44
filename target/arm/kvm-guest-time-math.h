/*
 * Guest time: arithmetic on the system counter
 *
 * A guest's counter is the host's minus an offset, modulo 2^64.  Nothing here
 * has state or asks KVM.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_GUEST_TIME_MATH_H
#define TARGET_ARM_KVM_GUEST_TIME_MATH_H

/* Where an offset lies: from @low to @low + @width, both included */
typedef struct GuestCounterOffset {
    uint64_t low, width;
} GuestCounterOffset;

#define GUEST_COUNTER_OFFSET_ANY \
    ((GuestCounterOffset) { .low = 0, .width = UINT64_MAX })

/**
 * guest_counter_narrow: learn of @offset from one reading
 *
 * The guest's counter was @guest when the host's was in @before ... @after.
 * If that contradicts what was known, the offset is another one now, and what
 * was known is forgotten.
 */
void guest_counter_narrow(GuestCounterOffset *offset, uint64_t before,
                          uint64_t after, uint64_t guest);

/* The middle */
uint64_t guest_counter_offset(const GuestCounterOffset *offset);

#endif
