/*
 * Guest time: arithmetic on the system counter
 *
 * A guest's counter is the host's minus an offset, modulo 2^64.  Nothing here
 * has state or calls KVM.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_ARM_KVM_GUEST_TIME_MATH_H
#define TARGET_ARM_KVM_GUEST_TIME_MATH_H

/* An offset is known to be from @low to @low + @width, both included */
typedef struct GuestCounterOffset {
    uint64_t low, width;
} GuestCounterOffset;

#define GUEST_COUNTER_OFFSET_ANY \
    ((GuestCounterOffset) { .low = 0, .width = UINT64_MAX })

/**
 * guest_counter_narrow: narrow @offset by one reading of the guest's counter
 *
 * The guest's counter was @guest when the host's was in @before ... @after.  If
 * no value in @offset agrees, the offset has changed: then @offset becomes the
 * result of this reading only.
 */
void guest_counter_narrow(GuestCounterOffset *offset, uint64_t before,
                          uint64_t after, uint64_t guest);

/* The middle of @offset */
uint64_t guest_counter_offset(const GuestCounterOffset *offset);

#endif
