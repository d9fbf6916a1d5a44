/*
 * Guest time across a migration: the policy
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#ifdef CONFIG_LINUX
#include <sys/timex.h>
#endif
#include "qemu/error-report.h"
#include "qapi/qapi-types-migration.h"
#include "migration/client-options.h"
#include "migration/guest-time.h"

int32_t guest_time_tai_offset(void)
{
#ifdef CONFIG_LINUX
    struct timex t = { 0 };

    return adjtimex(&t) < 0 ? 0 : t.tai;
#else
    return 0;
#endif
}

int64_t guest_time_to_count(GuestTimeOfDay then, GuestTimeOfDay now)
{
    const char *why;
    int64_t gap_ns;

    if (migrate_guest_time() == GUEST_TIME_POLICY_STOPPED) {
        return 0;
    }
    why = guest_time_gap(then, now, migrate_guest_time_max_gap(), &gap_ns);
    if (why) {
        warn_report("guest-time: the blackout of %" PRId64 " ms by the hosts' "
                    "time of day %s: it is not counted", gap_ns / 1000000, why);
        return 0;
    }
    return gap_ns;
}
