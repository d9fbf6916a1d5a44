/*
 * Migration: points at which a test can hold or fail a thread
 *
 * SPDX-License-Identifier: GPL-2.0-or-later
 */

#include "qemu/osdep.h"
#include "inject.h"

#ifdef CONFIG_MIGRATION_INJECT

static char *inject_path(const char *point, const char *suffix)
{
    const char *dir = getenv("QEMU_INJECT");

    return dir ? g_strdup_printf("%s/%s%s", dir, point, suffix) : NULL;
}

void migration_inject_hold(const char *point)
{
    g_autofree char *path = inject_path(point, "");
    g_autofree char *held = inject_path(point, ".held");

    /* rename() is atomic: it succeeds in only one of several threads */
    if (path && !rename(path, held)) {
        while (!access(held, F_OK)) {
            g_usleep(1000);
        }
    }
}

bool migration_inject_fail(const char *point)
{
    g_autofree char *path = inject_path(point, "");

    return path && !unlink(path);
}

bool migration_inject_without(const char *mechanism)
{
    return !g_strcmp0(getenv("QEMU_WITHOUT"), mechanism);
}

#endif
