/*
 * Guest time: arithmetic on TSC values
 *
 * A vCPU's TSC is the host's TSC, scaled, plus an offset, modulo 2^64.
 * This code has no state, and does not call KVM.
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef TARGET_I386_KVM_GUEST_TIME_MATH_H
#define TARGET_I386_KVM_GUEST_TIME_MATH_H

/* A TSC times @ratio / 2^@frac_bits; not scaled if @frac_bits is 0 */
typedef struct GuestTscScale {
    uint64_t ratio;
    uint8_t frac_bits;
} GuestTscScale;

uint64_t guest_tsc_scaled(uint64_t host_tsc, GuestTscScale scale);

/**
 * guest_tsc_find_scale: find out how KVM scales
 *
 * KVM reports neither its ratio nor, exactly, the frequency of the host's TSC
 * from which it has computed the ratio; @host_khz is the most likely one, or 0.
 * KVM has scaled a host TSC in @before ... @after to @scaled, for a guest with
 * a TSC of @guest_khz.  Returns false if no known way of scaling does that.
 */
bool guest_tsc_find_scale(uint64_t before, uint64_t after, uint64_t scaled,
                          uint32_t guest_khz, uint32_t host_khz,
                          GuestTscScale *scale);

/* The kvmclock in guest memory, as KVM writes it */
typedef struct GuestPvclock {
    uint32_t version;       /* odd while it is being written */
    uint32_t pad;
    uint64_t tsc_timestamp;
    uint64_t system_time;
    uint32_t tsc_to_system_mul;
    int8_t tsc_shift;
    uint8_t flags;
    uint8_t pad2[2];
} GuestPvclock;

#define GUEST_PVCLOCK_TSC_STABLE    1   /* in flags */

/*
 * The frequency of the TSC in @pv, in kHz; 0 if it is invalid.  KVM_GET_TSC_KHZ
 * is some ppm off if the host's kernel has measured its TSC again since KVM was
 * loaded, or if KVM scales.
 */
uint32_t guest_pvclock_khz(const GuestPvclock *pv);

/* The guest's kvmclock when its TSC is @tsc; @pv must have a valid frequency */
uint64_t guest_pvclock_ns(const GuestPvclock *pv, uint64_t tsc);

/*
 * A vCPU's TSC was @scaled_then + @offset_then.  Returns the offset with which
 * it is @advance more when the host's TSC, scaled, is @scaled_now.
 */
uint64_t guest_tsc_offset(uint64_t scaled_then, uint64_t offset_then,
                          uint64_t advance, uint64_t scaled_now);

#endif
