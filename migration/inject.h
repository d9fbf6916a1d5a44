/*
 * Migration: points at which a test can hold or fail a thread
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#ifndef MIGRATION_INJECT_H
#define MIGRATION_INJECT_H

#include "migration/inject-config.h"

/*
 * Builds for tests have CONFIG_MIGRATION_INJECT (--enable-migration-inject); in
 * all others these functions do nothing.  Tests control them by files in the
 * directory that the environment variable QEMU_INJECT names.  @point is the
 * name of a file in it.  Any thread, with any lock.
 */
#ifdef CONFIG_MIGRATION_INJECT

/*
 * If the file @point exists, rename it to @point.held, and return when that
 * file was removed.  So each file that a test makes holds exactly one thread.
 */
void migration_inject_hold(const char *point);

/* If the file @point exists, remove it and return true: act as if it failed */
bool migration_inject_fail(const char *point);

/* Whether the environment variable QEMU_WITHOUT switches @mechanism off */
bool migration_inject_without(const char *mechanism);

#else

static inline void migration_inject_hold(const char *point)
{
}

static inline bool migration_inject_fail(const char *point)
{
    return false;
}

static inline bool migration_inject_without(const char *mechanism)
{
    return false;
}

#endif

#endif
